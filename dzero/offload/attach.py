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
from dzero.hardware import format_bytes, host_available_bytes
from dzero.mesh import AXES, local_ranks
from dzero.offload.activations import Activations
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

    Empty, without threads or memory, where the table has every state on the device.
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
            require(self.schedule.host_bytes, available, local_ranks())
        self.arena = Arena(self.schedule.host_bytes, pin=device.type == "cuda")
        self.swap = Swap(self.schedule, self.arena, device)
        self._layout, self._steps = layout, 0
        self._held_back: list[tuple[str, Sequence[Move]]] = []
        self._units = {unit.shape.name: unit for unit in sharded.units}
        self.activations: Activations | None = None
        if layout.activations == "host":
            self.activations = Activations(self.swap, pin=device.type == "cuda")
            self.activations.attach(_blocks_of(sharded))

    def introduce(self) -> list[str]:
        """For the log: what lives where, and how its work overlaps. Nothing without offload."""
        lines = []
        if self.schedule.slots:
            memory = "page-locked" if self.arena.pinned else "pageable"
            lines.append(
                f"offload: {format_bytes(self.schedule.host_bytes)} of {memory} host memory per rank, "
                f"overlap={self._layout.overlap}: {WAITING[self._layout.overlap]}"
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
        """Start "update" or "accumulate" of a unit on the host."""
        return self.swap.compute(Key(Kind.COMPUTE, what, unit), work)

    def send_work(self, unit: str, moves: Sequence[Move]) -> None:
        """Send new working copies to the device; with overlap=delayed only at the end of the next step."""
        if self._layout.overlap == "delayed" and self._steps >= self._layout.delay_warmup_steps:
            self._held_back.append((unit, moves))
        else:
            self._fetch_work(unit, moves)

    def _fetch_work(self, unit: str, moves: Sequence[Move]) -> None:
        """FSDP2 must not read the unit's shards before; the unit itself knows, whatever becomes of the optimizer."""
        self.fetch("work", unit, moves)
        self._units[unit].pending = partial(self.swap.wait, Key(Kind.FETCH, "work", unit))

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

    def begin_updates(self) -> None:
        """A step is decided: with overlap=delayed, the last one's working copies are due now."""
        held_back, self._held_back = self._held_back, []
        for unit, moves in held_back:
            self._fetch_work(unit, moves)

    def end_step(self) -> None:
        """The step's updates have been started: without overlap, wait for them."""
        self._steps += 1
        if self._layout.overlap == "step":
            self.synchronize()

    def take_use(self) -> dict[str, LaneUse]:
        """The use of each lane since the last call."""
        return self.swap.take_use()

    def synchronize(self) -> None:
        """Return when everything that was started has ended, and every working copy is on the device.

        Raises OffloadError for what failed.
        """
        self.begin_updates()
        self.swap.drain()


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
