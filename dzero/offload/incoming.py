"""Brings parameters that live in host memory to the device, a unit ahead of its use (ZeRO-Infinity, section 6.2).

FSDP2 asks a unit for its shards when it gathers it: in forward, and in the other order in backward. Which unit comes
after which two is learned as it happens, so the next one's copy starts when a unit is handed over. A wrong guess
costs one copy; a copy of values that are about to change is dropped.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch

from dzero.offload.places import Places
from dzero.offload.schedule import Key, Kind
from dzero.offload.swap import Swap
from dzero.zero.unit import Unit

Recent = tuple[str | None, str | None]


class Incoming:
    """The door of units with parameters on the host; moves those parameters into the offload's arena first.

    Device memory: the shards of the unit that is handed over, and of the one that comes next.
    """

    def __init__(self, units: Sequence[Unit], places: Places, swap: Swap) -> None:
        self._swap = swap
        self._units = {unit.shape.name: unit for unit in units if unit.hosted}
        self._next: dict[Recent, str] = {}
        self._recent: Recent = (None, None)
        self._ahead: dict[str, dict[str, torch.Tensor]] = {}
        for unit in self._units.values():
            unit.settle()
            for name, memory in unit.hosted.items():
                place = places.at[name, "param"]
                memory.move_to(swap.leases[place.slot].view(place.dtype, place.elems, place.start_bytes))
            unit.fetch, unit.forget = weakref.WeakMethod(self.bring), weakref.WeakMethod(self.forget)

    def bring(self, unit: Unit) -> dict[str, torch.Tensor]:
        """The unit's padded shards [elems] on the device, for the stream that is current now."""
        name = unit.shape.name
        unit.arrive()
        self._start(name)
        self._swap.wait(Key(Kind.FETCH, "param", name))
        brought = self._ahead.pop(name)
        for tensor in brought.values():
            if tensor.is_cuda:  # allocated while another stream may have been current
                tensor.record_stream(torch.cuda.current_stream())
        self._next[self._recent] = name
        self._recent = self._recent[1], name
        self.prepare()
        return brought

    def prepare(self) -> None:
        """Start the copy of the unit that came next, the last time."""
        if (coming := self._next.get(self._recent)) is not None:
            self._start(coming)

    def _start(self, name: str) -> None:
        if name in self._ahead:
            return
        held = self._units[name].hosted
        self._ahead[name] = {each: torch.empty_like(held[each].flat, device=held[each].device) for each in held}
        moves = [(there, held[each].flat) for each, there in self._ahead[name].items()]
        self._swap.move(Key(Kind.FETCH, "param", name), moves)

    def forget(self, unit: str) -> None:
        """Drop what was copied of a unit: its values are about to change."""
        self._ahead.pop(unit, None)

    def forget_all(self) -> None:
        """Drop what was copied ahead."""
        self._ahead.clear()
