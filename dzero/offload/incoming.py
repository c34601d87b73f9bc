"""Brings parameters that live in host memory to the device, a unit ahead of its use (ZeRO-Infinity, section 6.2).

FSDP2 asks a unit for its shards when it gathers it: in forward, and in the other order in backward. Which unit comes
after which two is learned as it happens, so the next one's copy starts when a unit is handed over. A wrong guess
costs one copy. A copy of values that then changed is dropped, and at that point of the step nothing is copied ahead
again: the next step's first unit is copied once its update has been started.
"""

from __future__ import annotations

import weakref

import torch

from dzero.offload.places import Places
from dzero.offload.schedule import Key, Kind
from dzero.offload.swap import Swap
from dzero.zero.hosted import InMemory
from dzero.zero.shard import Sharded
from dzero.zero.unit import Unit

Point = tuple[str | None, str | None, bool]
"""The last two units, and whether the last microbatch runs."""


class Incoming:
    """The door of units with parameters on the host; moves those parameters into the offload's arena first.

    Device memory: the shards of the unit that is handed over, and of the one that comes next.
    """

    def __init__(self, sharded: Sharded, places: Places, swap: Swap) -> None:
        self._sharded, self._swap = sharded, swap
        self._units = {unit.shape.name: unit for unit in sharded.units if unit.hosted}
        self._next: dict[Point, str] = {}
        self._in_vain: set[Point] = set()
        self._point: Point = (None, None, True)
        self._ahead: dict[str, dict[str, torch.Tensor]] = {}
        for unit in self._units.values():
            unit.settle()
            for name, memory in unit.hosted.items():
                place = places.at[name, "param"]
                memory.move_to(InMemory(swap.leases[place.slot].view(place.dtype, place.elems, place.start_bytes)))
            unit.fetch, unit.forget = weakref.WeakMethod(self.bring), weakref.WeakMethod(self.forget)

    def bring(self, unit: Unit) -> dict[str, torch.Tensor]:
        """The unit's padded shards [elems] on the device, for the stream that is current now."""
        name = unit.shape.name
        unit.arrive()
        self._start(name)
        brought = self._ahead.pop(name)
        self._ahead.clear()  # wrong guesses
        self._swap.wait(Key(Kind.FETCH, "param", name))
        for tensor in brought.values():
            if tensor.is_cuda:  # allocated while another stream may have been current
                tensor.record_stream(torch.cuda.current_stream())
        self._next[self._point] = name
        self._point = self._point[1], name, self._sharded.is_last
        if self._point not in self._in_vain:
            self.prepare()
        return brought

    def prepare(self) -> None:
        """Start the copy of the unit that came next, the last time."""
        if (coming := self._next.get(self._point)) is not None:
            self._start(coming)

    def _start(self, name: str) -> None:
        if name in self._ahead:
            return
        held = self._units[name].hosted
        with torch.inference_mode(False):  # the lane, and later callers, may be outside of it
            self._ahead[name] = {each: torch.empty_like(held[each].flat, device=held[each].device) for each in held}
        moves = [(there, held[each].flat) for each, there in self._ahead[name].items()]
        self._swap.move(Key(Kind.FETCH, "param", name), moves)

    def outdate(self, unit: str) -> None:
        """The step changes a unit: what was copied of it was copied too early, here and in every step."""
        if unit in self._ahead:
            self._in_vain.add(self._point)
        self.forget(unit)

    def forget(self, unit: str) -> None:
        """Drop what was copied of a unit: its values may change."""
        self._ahead.pop(unit, None)

    def forget_all(self) -> None:
        """Drop what was copied ahead."""
        self._ahead.clear()
