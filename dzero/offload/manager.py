"""Interface to the offloaded states of a sharded model, which hides their tiers from other packages."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from dzero.comm.collectives import GatherScalars
from dzero.comm.ledger import Ledger
from dzero.hardware import (
    cores_of_rank,
    format_bytes,
    give_back_freed_memory,
    host_available_bytes,
    memory_node_of,
)
from dzero.mesh import AXES
from dzero.offload.activation_pool import ActivationPool
from dzero.offload.activations import ActivationOffload
from dzero.offload.buffer_layout import BufferLayout
from dzero.offload.build_schedule import schedule_of, update_order
from dzero.offload.disk import DiskStore
from dzero.offload.disk_nodes import near_cores
from dzero.offload.disk_speed import weighed
from dzero.offload.disk_staging import DiskStaging, DiskStorage
from dzero.offload.executor import LaneUse, ScheduleExecutor
from dzero.offload.lane import Move
from dzero.offload.memory_pool import HostMemoryPool, require
from dzero.offload.param_prefetch import ParamPrefetch
from dzero.offload.param_writeback import ParamWriteback, PendingWriteback
from dzero.offload.schedule import ActionKey, ActionKind
from dzero.offload.scratch_dir import FULL
from dzero.offload.undo import Undo
from dzero.parallel.blocks import find_blocks
from dzero.utils.launched import local_rank, local_ranks
from dzero.utils.scratch_paths import DiskError
from dzero.zero.layout import RuleStates
from dzero.zero.offload_config import OffloadConfig
from dzero.zero.offloaded_param import HostStorage, OffDeviceTensor
from dzero.zero.sharded import Sharded
from dzero.zero.unit import as_module

Named = dict[str, torch.Tensor]

WAITING = {
    "step": "the step waits for all updates",
    "forward": "each unit waits for its own update when it is next gathered (the same bits, and no memory to undo)",
    "backward": "as forward, and updates start before the step is decided",
    "delayed": "weights are one step old, updates have a whole step's time",
}


class OffloadManager:
    """Offloaded states of one optimizer: views of them on the host, and the actions of a step by unit.

    No thread is started and no memory taken if the table has every state on the device. Host memory is allocated near
    `cores`, which are this rank's part of the machine's cores if it has a GPU.

    Args:
        sharded: The sharded model.
        rule_states: States of a class of `torch.optim` that lie where moments do; None for AdamW's moments.

    Raises:
        MemoryError: There is too little host memory.
        DiskError: A scratch path has too little space.
    """

    def __init__(self, sharded: Sharded, rule_states: RuleStates | None = None) -> None:
        layout, config = replace(sharded.layout, rule_states=rule_states), sharded.layout.offload
        self.buffer_layout = BufferLayout(layout, sharded.shapes)
        self.schedule = schedule_of(self.buffer_layout)
        device = torch.device(sharded.mesh.device_type)
        beside_gpu = device.type == "cuda"
        self.cores = cores_of_rank(local_rank(), local_ranks()) if beside_gpu else list[int]()
        available, told = host_available_bytes(), list[int]()
        if self.schedule.host_bytes or config.uses_disk:  # all have read the available memory before one allocates
            told = _of_all_ranks(sharded, memory_node_of(self.cores or os.sched_getaffinity(0)))
        if self.schedule.host_bytes:
            require(self.schedule.host_bytes, available + _moving_in_bytes(sharded), local_ranks())
        self.memory_pool = HostMemoryPool(self.schedule.host_bytes, pin=beside_gpu, cores=self.cores)
        self.executor = ScheduleExecutor(self.schedule, self.memory_pool, device)
        store = _store(config, self.buffer_layout.piece_bytes(), self.cores, told)
        self.staging = DiskStaging(self.buffer_layout, self.executor, store)
        self.undo = Undo(self.buffer_layout, self.executor, self.staging)
        self._outgoing = ParamWriteback(sharded, self.buffer_layout, self.executor, self.staging, self.undo)
        self._sharded, self._mode = sharded, config.mode
        self._kept: set[str] = set()
        self._unit_of = {param.name: unit.name for unit in sharded.shapes for param in unit.params}
        self.activations: ActivationOffload | None = None
        if config.activations != "device":
            store = self.staging.store if config.activations == "disk" else None
            ahead = config.prefetch_units
            pool = ActivationPool(self.executor, pin=beside_gpu, cores=self.cores, store=store, ahead=ahead)
            self.activations = ActivationOffload(pool, device.type)
            self.activations.attach(_blocks_of(sharded))

    def take_params(self) -> None:
        """Move offloaded parameters to their slots, and prefetch them from now on."""
        threads = len(self.cores) or torch.get_num_threads()
        self._outgoing.incoming = ParamPrefetch(self._sharded, self.buffer_layout, self.executor, self.staging, threads)

    def settle(self) -> None:
        """Allocate the rest of the host memory, when all states are in their slots."""
        self.memory_pool.settle()

    def describe(self) -> list[str]:
        """Return lines for the log: tiers, sizes and overlap; none without offload."""
        lines = []
        if self.schedule.slots:
            memory = "page-locked" if self.memory_pool.pinned else "pageable"
            lines.append(
                f"offload: {format_bytes(self.schedule.host_bytes)} of {memory} host memory per rank, "
                f"overlap={self._mode}: {WAITING[self._mode]}"
            )
        if (store := self.staging.store) is not None:
            states = self.schedule.disk_bytes
            what = f"{format_bytes(states)} per rank" if states else "scratch space"
            lines.append(f"offload: {what} on {store.describe()}")
        if self.activations is not None:
            tier = self._sharded.layout.offload.activations
            pool = "host memory is" if tier == "host" else "host memory and scratch space are"
            lines.append(
                f"offload: what blocks keep of their inputs for backward leaves the device, to {tier}; its {pool} "
                "taken in the first forward"
            )
        return lines

    @property
    def host_bytes(self) -> int:
        """Host memory in use in bytes: that of states, and of activations so far."""
        return self.memory_pool.high_water_bytes + (0 if self.activations is None else self.activations.pool.host_bytes)

    def view(self, name: str, key: str, elems: int | None = None) -> torch.Tensor:
        """Return a parameter's state on the host, flat; for a state on disk, the slot that it is loaded into.

        Args:
            name: Name of the parameter.
            key: As in `BufferLayout.at`.
            elems: Number of elements from the start; by default all, including the padding.
        """
        return self.executor.view(self.buffer_layout.at[name, key], elems)

    def on_disk(self, name: str, view: torch.Tensor) -> OffDeviceTensor:
        """Return a parameter's state on disk as an `OffDeviceTensor`, given its view on the host."""
        storage = DiskStorage(self.staging, "states", self._unit_of[name], view)
        return OffDeviceTensor(name, storage, view.dtype, view.numel(), view.device)

    def unit_of(self, name: str) -> str:
        """Return the name of a parameter's unit."""
        return self._unit_of[name]

    def visit(self, unit: str, work: Callable[[], Any], *, fresh: bool = False, changes: bool = True) -> None:
        """Run `work` on a unit's states between steps, on whichever tier they are.

        Args:
            unit: Name of the unit.
            work: Function that reads or writes the states.
            fresh: Whether `work` writes all states, so that they need not be loaded.
            changes: Whether states on disk must be written back afterwards.
        """
        if self.buffer_layout.pairs("states", unit):
            self.staging.visit("states", unit, work, fresh=fresh, changes=changes)
            self._kept.add(unit)
            give_back_freed_memory()
        else:
            work()

    def slot(self, name: str, key: str, like: torch.Tensor) -> torch.Tensor:
        """Return the start of the slot that holds a parameter's state, with the length and dtype of the flat `like`."""
        lease = self.executor.leases[self.buffer_layout.at[name, key].slot]
        return lease.view(like.dtype, like.numel())

    def evict(self, what: str, unit: str, moves: Sequence[Move]) -> None:
        """Start copies to the host of a unit's "landing", or of "grad" and "moments" for an update there."""
        self.executor.move(ActionKey(ActionKind.EVICT, what, unit), moves)

    def fetch(self, what: str, unit: str, moves: Sequence[Move]) -> None:
        """Start copies of a unit's "moments" back to the device."""
        self.executor.move(ActionKey(ActionKind.FETCH, what, unit), moves)

    def keep_grads(self, unit: str, moves: Sequence[Move], *, more: bool) -> None:
        """Start moving gradients of a unit to their slot, and to disk if that is their tier.

        Args:
            unit: Name of the unit.
            moves: Copies to the slot.
            more: Whether the slot already holds other gradients of this step.
        """
        if more:
            self.staging.load("grad", unit)
        self.executor.move(ActionKey(ActionKind.EVICT, "grad", unit), moves)
        self.staging.hold("grad", unit)
        self.staging.spill("grad", unit)

    def accumulate(self, unit: str, work: Callable[[], torch.Tensor]) -> Future[torch.Tensor]:
        """Start `work`, which adds to a unit's gradients on the host."""
        self.staging.load("grad", unit)
        added = self.executor.compute(ActionKey(ActionKind.COMPUTE, "accumulate", unit), work)
        self.staging.spill("grad", unit)
        return added

    def read_grads(self, unit: str, grads: Named) -> Named:
        """Return a unit's offloaded gradients once they have arrived; those on disk are copied."""
        if self.buffer_layout.pairs("grad", unit):
            copies: Named = self.staging.visit("grad", unit, partial(_copies, grads), changes=False)
            return copies
        self.executor.wait(ActionKey(ActionKind.EVICT, "grad", unit), ActionKey(ActionKind.COMPUTE, "accumulate", unit))
        return grads

    def change_grads(self, unit: str, moves: Sequence[Move]) -> None:
        """Overwrite a unit's gradients on disk by `moves`, whose sources are changed copies of them."""
        self.staging.visit("grad", unit, partial(_overwrite, moves))

    def fetch_for_update(self, what: str, unit: str, moves: Sequence[Move]) -> None:
        """Start moving a unit's "grad" or "moments" to the device, for an update there."""
        self.staging.load("grad" if what == "grad" else "states", unit)
        self.executor.move(ActionKey(ActionKind.FETCH, what, unit), moves)

    def wait_for_fetched(self, unit: str) -> None:
        """Make the current stream wait for the copies that `fetch_for_update` started."""
        self.executor.stream_wait(
            ActionKey(ActionKind.FETCH, "grad", unit), ActionKey(ActionKind.FETCH, "moments", unit)
        )

    def put_back(self, unit: str, moves: Sequence[Move]) -> None:
        """Start moving a unit's moments back after an update on the device, and keep others in the same slot."""
        self.staging.load("states", unit)
        self.executor.move(ActionKey(ActionKind.EVICT, "moments", unit), moves)
        self.staging.spill("states", unit)

    def update(self, unit: str, work: Callable[[], None]) -> None:
        """Start a unit's update on the host; readers of its parameters wait for its end."""
        self._outgoing.await_update(unit)
        self.staging.load("grad", unit)
        self.staging.load("states", unit)
        self.executor.compute(ActionKey(ActionKind.COMPUTE, "update", unit), work)
        self.staging.spill("states", unit)

    def send(self, unit: str, work: Sequence[PendingWriteback]) -> None:
        """Send new working copies to where forward reads them; with overlap=delayed, hold them back."""
        self._outgoing.send(unit, work)

    def begin_updates(self, updates: int) -> None:
        """Begin a step's updates, after `updates` earlier ones: send the working copies that the last step delayed."""
        self._outgoing.begin(updates)

    def release(self) -> None:
        """Send the working copies that overlap=delayed has held back."""
        self._outgoing.release()

    def end_step(self) -> None:
        """End a step whose updates have been started: with overlap=step wait for them; prefetch what comes next."""
        if self._mode == "step":
            self.synchronize()
        if self._outgoing.incoming is not None:
            self._outgoing.incoming.prepare()
        if self._mode != "backward":
            self._load_ahead()

    def _load_ahead(self) -> None:
        """Start loading the states that the next step updates first, as long as each unit has host slots of its own."""
        taken: set[str] = set()
        units = update_order(self.buffer_layout.units, self._mode)
        kept = [unit.name for unit in units if unit.name in self._kept]
        for unit in kept[: self.buffer_layout.turns]:
            slots = {pair.host for pair in self.buffer_layout.pairs("states", unit)}
            if slots & taken:  # it would overwrite a unit that has not been used yet
                return
            taken |= slots
            self.staging.load("states", unit)

    def take_use(self) -> dict[str, LaneUse]:
        """Return the use of each lane since the last call."""
        return self.executor.take_use()

    def held_back(self, unit: str) -> bool:
        """Return whether overlap=delayed has held back a unit's new working copy until the next step."""
        return self._outgoing.held_back(unit)

    def hold_back(self, unit: str, work: Sequence[PendingWriteback]) -> None:
        """Hold back a unit's working copies, when a state is loaded in which they were held back."""
        self._outgoing.hold_back(unit, work)

    def await_updates(self) -> None:
        """Wait until all started actions have ended, without sending what is held back; raises OffloadError."""
        self.executor.drain()
        self.undo.bring_home()

    def come_to_rest(self) -> None:
        """Roll back speculative updates, and wait for all work of an optimizer that is gone; raises OffloadError."""
        self.undo.take_all_back()
        self.synchronize()

    def synchronize(self) -> None:
        """Wait until all started actions have ended and every working copy is in its storage; raises OffloadError."""
        self._outgoing.release()
        self.await_updates()
        if self._outgoing.incoming is not None:
            self._outgoing.incoming.forget_all()


def _copies(tensors: Named) -> Named:
    return {name: tensor.clone() for name, tensor in tensors.items()}


def _overwrite(moves: Sequence[Move]) -> None:
    for there, value in moves:
        there.copy_(value)


def _of_all_ranks(sharded: Sharded, value: int) -> list[int]:
    """Return the `value` of each data-parallel rank; collective: no rank returns before all have called."""
    values = torch.tensor([value], device=sharded.mesh.device_type)
    for axis in AXES:
        values = GatherScalars(sharded.mesh.get_group(axis), axis, Ledger())(values).view(-1)
    return list[int](values.tolist())


def _store(config: OffloadConfig, sizes: dict[str, int], cores: Sequence[int], told: Sequence[int]) -> DiskStore | None:
    """Return the store of states and activations on disk, if there are any; `told` as in `near_cores`."""
    if not sizes and config.activations != "disk":
        return None
    near, selection = near_cores(config.disk, cores, told)
    try:
        return DiskStore(weighed(near), sizes, rank=dist.get_rank(), selection=selection)
    except DiskError as error:
        if not selection or error.errno not in FULL:
            raise
        what = f"{error.strerror}, or use others than {selection}: offload.disk.by_node=false"
        raise DiskError(error.errno, error.filename, what) from error


def _moving_in_bytes(sharded: Sharded) -> int:
    """Return the size of host tensors that will move into the host memory pool, and are then freed one by one."""
    placement = [memory.storage for unit in sharded.units for memory in unit.offloaded.values()]
    placement += [origin for unit in sharded.units for origin in unit.origin.values()]
    flats = [storage.flat for storage in placement if isinstance(storage, HostStorage)]
    return sum(flat.nbytes for flat in flats if flat.device.type == "cpu")


def _blocks_of(sharded: Sharded) -> list[nn.Module]:
    """Return the blocks of the model, or if it has none, the units below the root."""
    blocks = [block for _, block in find_blocks(sharded.model)]
    blocks = blocks or [as_module(module) for unit in sharded.units[:-1] for module in unit.modules]
    if not blocks:
        raise ValueError(
            f"offload.activations={sharded.layout.offload.activations} has no effect: {type(sharded.model).__name__} "
            "has no blocks (elements of an nn.ModuleList or nn.Sequential) and no units; take "
            "offload.activations=device"
        )
    return blocks
