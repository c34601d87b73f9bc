"""The doors between a sharded model and its offloaded states: everybody else asks here, and knows no tier."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import torch
from torch import nn

from dzero.comm.collectives import GatherScalars
from dzero.comm.ledger import Ledger
from dzero.hardware import cores_of_rank, format_bytes, host_available_bytes
from dzero.mesh import AXES, local_rank, local_ranks
from dzero.offload.activations import Activations
from dzero.offload.incoming import Incoming
from dzero.offload.pinned import Arena, aligned, require
from dzero.offload.places import Places, schedule_of
from dzero.offload.schedule import Key, Kind
from dzero.offload.swap import LaneUse, Move, Swap
from dzero.parallel.blocks import find_blocks
from dzero.zero.shard import Sharded
from dzero.zero.unit import as_module

WAITING = {
    "step": "the step waits for all updates",
    "forward": "each unit waits for its own update when it is next gathered (the same bits, and no memory to undo)",
    "backward": "as forward, and updates start before the step is decided",
    "delayed": "weights are one step old, updates have a whole step's time",
}


class Offload:
    """The host side of one optimizer's states: views of their places, and the actions of a step, unit by unit.

    Empty, without threads or memory, where the table has every state on the device. `cores`: this rank's share of the
    machine's, beside a GPU; its host memory lies next to them.
    """

    def __init__(self, sharded: Sharded, *, moments: bool = True) -> None:
        layout = sharded.layout
        self.places = Places(layout, sharded.shapes, moments=moments)
        self.schedule = schedule_of(self.places)
        device = torch.device(sharded.mesh.device_type)
        if self.schedule.host_bytes:
            available = host_available_bytes()
            for axis in AXES:  # everybody has looked before anybody takes
                GatherScalars(sharded.mesh.get_group(axis), axis, Ledger())(torch.zeros(1, device=device))
            require(self.schedule.host_bytes, available + _moving_in_bytes(sharded), local_ranks())
        beside_gpu = device.type == "cuda"
        self.cores = cores_of_rank(local_rank(), local_ranks()) if beside_gpu else list[int]()
        self.arena = Arena(self.schedule.host_bytes, pin=beside_gpu, cores=self.cores)
        self.swap = Swap(self.schedule, self.arena, device)
        self._sharded, self._layout, self._delays = sharded, layout, False
        self._held_back: list[tuple[str, list[Move], list[Move]]] = []
        self._units = {unit.shape.name: unit for unit in sharded.units}
        self._incoming: Incoming | None = None
        self.activations: Activations | None = None
        if layout.offload.activations != "device":
            self.activations = Activations(self.swap, pin=device.type == "cuda", cores=self.cores)
            self.activations.attach(_blocks_of(sharded))

    def take_params(self) -> None:
        """Move parameters that live in host memory into the arena; from now on they are brought ahead of use."""
        self._incoming = Incoming(self._sharded, self.places, self.swap)

    def settle(self) -> None:
        """All states are in their places: the rest of the host memory is taken now."""
        self.arena.settle()

    def introduce(self) -> list[str]:
        """For the log: what lives where, and how its work overlaps. Nothing without offload."""
        lines = []
        if self.schedule.slots:
            memory = "page-locked" if self.arena.pinned else "pageable"
            lines.append(
                f"offload: {format_bytes(self.schedule.host_bytes)} of {memory} host memory per rank, "
                f"overlap={self._layout.offload.mode}: {WAITING[self._layout.offload.mode]}"
            )
        if self.activations is not None:
            lines.append(
                "offload: what blocks keep of their inputs for backward leaves the device; its host memory is taken in "
                "the first forward"
            )
        return lines

    @property
    def host_bytes(self) -> int:
        """Host memory in use: the states', and the activations' so far."""
        return self.arena.high_water_bytes + (0 if self.activations is None else self.activations.host_bytes)

    def view(self, name: str, key: str, elems: int | None = None) -> torch.Tensor:
        """The flat host tensor of a parameter's state: its first `elems`, or all with the padding."""
        place = self.places.at[name, key]
        lease = self.swap.leases[place.slot]
        return lease.view(place.dtype, place.elems if elems is None else elems, place.start_bytes)

    def slot(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """A whole slot, flat."""
        data = self.swap.leases[name].data
        return data.view(dtype)

    def evict(self, what: str, unit: str, moves: Sequence[Move]) -> None:
        """Start copies to the host: "grad", "landing" or "moments" of a unit."""
        self.swap.move(Key(Kind.EVICT, what, unit), moves)

    def fetch(self, what: str, unit: str, moves: Sequence[Move]) -> None:
        """Start copies to the device: "work", "moments" or "grad" of a unit."""
        self.swap.move(Key(Kind.FETCH, what, unit), moves)

    def compute(self, what: str, unit: str, work: Callable[[], Any]) -> Future[Any]:
        """Start "accumulate", "ahead" or "undo" of a unit on the host."""
        return self.swap.compute(Key(Kind.COMPUTE, what, unit), work)

    def update(self, unit: str, work: Callable[[], Any]) -> None:
        """Start a unit's update on the host; nobody reads its parameters there before it has ended."""
        if not self.places.waiting:
            self._outdate(unit)
            self._units[unit].pending = partial(self.swap.wait, Key(Kind.COMPUTE, "update", unit))
        self.compute("update", unit, work)

    def _outdate(self, unit: str) -> None:
        """Its parameters on the host are about to change."""
        if self._incoming is not None:
            self._incoming.outdate(unit)
        self._units[unit].settle()

    def send_work(self, unit: str, states: Sequence[tuple[str, torch.Tensor, torch.Tensor | None]]) -> None:
        """Send new working copies to where forward finds them: (name, shard on the device, working copy or None).

        With overlap=delayed only at the end of the next step.
        """
        new = [(name, local, work) for name, local, work in states if work is not None]
        moves = [(local, work) for name, local, work in new if not self.places.on_host("param", name)]
        copies = [
            (self.view(name, "param", work.numel()), work) for name, _, work in new if self.places.published(name)
        ]
        if self._delays:
            self._held_back.append((unit, moves, copies))
        else:
            self._send(unit, moves, copies)

    def _send(self, unit: str, moves: list[Move], copies: list[Move]) -> None:
        """FSDP2 must not read the unit's shards before; the unit itself knows, whatever becomes of the optimizer."""
        keys = []
        if copies:
            self._outdate(unit)
            self.compute("publish", unit, partial(_copy, copies))
            keys.append(Key(Kind.COMPUTE, "publish", unit))
        if moves:
            self.fetch("work", unit, moves)
            keys.append(Key(Kind.FETCH, "work", unit))
        if keys:
            self._units[unit].pending = partial(self.swap.wait, *keys)

    def can_undo(self, unit: str) -> bool:
        """Whether there is room to update this unit before the step is decided."""
        return Key(Kind.COMPUTE, "ahead", unit) in self.schedule.by_key

    def save(self, unit: str, then: Callable[[], None]) -> None:
        """In the host's lane: copy what an update overwrites into the undo slot, `then` update."""
        for saved, data in self._saved(unit):
            saved.copy_(data)
        then()

    def restore(self, unit: str) -> None:
        """In the host's lane: put back what `save` copied."""
        for saved, data in self._saved(unit):
            data.copy_(saved)

    def _saved(self, unit: str) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        room, start = self.swap.leases[f"undo {unit}"].data, 0
        for slot in self.places.overwritten(unit):
            data = self.swap.leases[slot].data
            yield room[start : start + data.numel()], data
            start += aligned(data.numel())

    def wait_grads(self, unit: str) -> None:
        """Return when the unit's gradients that live on the host are there, and added up."""
        self.swap.wait(Key(Kind.EVICT, "grad", unit), Key(Kind.COMPUTE, "accumulate", unit))

    def wait_fetched(self, unit: str) -> None:
        """Return when the unit's gradients and moments that were fetched are on the device."""
        self.swap.wait(Key(Kind.FETCH, "grad", unit), Key(Kind.FETCH, "moments", unit))

    def begin_updates(self, updates: int) -> None:
        """Those of a step follow, after `updates` earlier ones: the last step's delayed working copies are due."""
        self.release()
        self._delays = self._layout.offload.mode == "delayed" and updates >= self._layout.offload.delay_warmup_steps

    def release(self) -> None:
        """With overlap=delayed: send the working copies that were held back."""
        held_back, self._held_back = self._held_back, []
        for unit, moves, copies in held_back:
            self._send(unit, moves, copies)

    def end_step(self) -> None:
        """The step's updates have been started: without overlap, wait for them."""
        if self._layout.offload.mode == "step":
            self.synchronize()
        if self._incoming is not None:
            self._incoming.prepare()

    def take_use(self) -> dict[str, LaneUse]:
        """The use of each lane since the last call."""
        return self.swap.take_use()

    def synchronize(self) -> None:
        """Return when everything that was started has ended, and every working copy is on the device.

        Raises OffloadError for what failed.
        """
        self.release()
        self.swap.drain()
        if self._incoming is not None:
            self._incoming.forget_all()


def _moving_in_bytes(sharded: Sharded) -> int:
    """Host memory of what will move into the arena, and is freed there piece by piece."""
    params = [memory.flat for unit in sharded.units for memory in unit.hosted.values()]
    origins = [origin for unit in sharded.units for origin in unit.origin.values()]
    return sum(tensor.nbytes for tensor in [*params, *origins] if tensor.device.type == "cpu")


def _copy(moves: Sequence[Move]) -> None:
    for destination, source in moves:
        destination.copy_(source)


def _blocks_of(sharded: Sharded) -> list[nn.Module]:
    """Where checkpoints are put: the model's blocks; in a model that has none, the units below the root."""
    blocks = [block for _, block in find_blocks(sharded.model)]
    blocks = blocks or [as_module(module) for unit in sharded.units[:-1] for module in unit.modules]
    if not blocks:
        raise ValueError(
            f"offload.activations=host has no effect: {type(sharded.model).__name__} has no blocks (elements of an "
            "nn.ModuleList or nn.Sequential) and no units; take offload.activations=device"
        )
    return blocks
