"""Prefetch of offloaded parameters to the device, one unit ahead of its use (ZeRO-Infinity, section 6.2).

FSDP2 requests the shards of a unit when it gathers the unit: in forward, and in reverse order in backward.
`ParamPrefetch` records which unit follows each pair of units. When a unit is delivered, the copy of the predicted next
unit starts. A wrong prediction costs one copy. Units on disk are loaded into host memory further ahead, along the same
predictions.

If the values of a prefetched unit change, its copy is dropped, and later steps do not prefetch at that point. The next
step's first unit is copied once its update has been started.

With `precision.fetch`, a unit is encoded on the host when it is first needed after a change, copied as a payload of
blocks, and decoded on the device when it is delivered. What is copied ahead is then a payload.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch

from dzero import streams
from dzero.offload.buffer_layout import BufferLayout, Payload
from dzero.offload.disk_staging import DiskStaging, DiskStorage
from dzero.offload.executor import ScheduleExecutor
from dzero.offload.lane import copy_all
from dzero.offload.schedule import ActionKey, ActionKind
from dzero.zero.offload_config import FROZEN
from dzero.zero.offloaded_param import HostStorage
from dzero.zero.sharded import Sharded
from dzero.zero.unit import Unit

Point = tuple[str | None, str | None, bool]
"""The last two units, and whether the last microbatch is running."""


class ParamPrefetch:
    """`ParamCarrier` of units with offloaded parameters, which it first moves to their slots.

    Device memory holds the shards of the unit that was delivered and of the next one. Host memory holds, of units on
    disk, the next unit and those that are loaded ahead.

    Args:
        sharded: The sharded model.
        buffer_layout: Locations of its states.
        executor: Executor of the copies.
        staging: Staging of units on disk.
        threads: Number of threads that encode a unit.
    """

    def __init__(
        self,
        sharded: Sharded,
        buffer_layout: BufferLayout,
        executor: ScheduleExecutor,
        staging: DiskStaging,
        threads: int,
    ) -> None:
        self._sharded, self._buffer_layout, self._executor, self._staging = sharded, buffer_layout, executor, staging
        self._units = {unit.shape.name: unit for unit in sharded.units if unit.carried}
        self._next: dict[Point, str] = {}
        self._in_vain: set[Point] = set()
        self._point: Point = (None, None, True)
        self._ahead: dict[str, dict[str, torch.Tensor]] = {}
        self._threads, self._encoded = threads, set[str]()
        encodes = any(buffer_layout.payloads.values())
        self._pool = ThreadPoolExecutor(threads, "offload encode") if encodes and threads > 1 else None
        for unit in self._units.values():
            unit.await_update()
            self._take(unit)
            unit.carrier = weakref.ref(self)

    def _take(self, unit: Unit) -> None:
        name = unit.shape.name
        spilled = []
        for each, memory in unit.carried.items():
            if any(self._buffer_layout.on_disk(kind, each) for kind in ("param", FROZEN)):
                spilled.append((memory, self._view(each)))
            else:
                memory.move_to(HostStorage(self._view(each)))
        if spilled:
            values = [(view, memory.flat) for memory, view in spilled]
            self._staging.visit("param", name, partial(copy_all, values), fresh=True)
        for memory, view in spilled:
            memory.storage = DiskStorage(self._staging, "param", name, view)

    def _view(self, name: str) -> torch.Tensor:
        return self._executor.view(self._buffer_layout.at[name, "param"])

    def fetch(self, unit: Unit) -> dict[str, torch.Tensor]:
        """Return a unit's padded shards by name, ready for the current stream, and prefetch the next unit."""
        name = unit.shape.name
        unit.wait_for_update()
        self._start(name)
        fetched = self._ahead.pop(name)
        self._ahead.clear()  # wrong predictions
        self._executor.stream_wait(ActionKey(ActionKind.FETCH, "param", name))
        for tensor in fetched.values():
            streams.record_stream(tensor)  # another stream may have been current at its allocation
        for payload in self._buffer_layout.payloads[name]:
            fetched |= _decoded(payload, fetched.pop(payload.source.slot))
        self._next[self._point] = name
        self._point = self._point[1], name, self._sharded.is_last
        if self._point not in self._in_vain:
            self.prepare()
        return fetched

    def prepare(self) -> None:
        """Start copying the predicted next unit, and loading the ones after it."""
        if (coming := self._next.get(self._point)) is None:
            return
        self._start(coming)
        point = self._point
        passes = 2 * len(self._units)  # forward and backward; predictions repeat beyond
        for _ in range(min(self._buffer_layout.layout.offload.prefetch_units, passes)):
            point = point[1], coming, point[2]
            if (behind := self._next.get(point)) is None or point in self._in_vain:
                return
            coming = behind
            self._staging.load("param", coming)

    def _start(self, name: str) -> None:
        if name in self._ahead:
            return
        payloads = self._buffer_layout.payloads[name]
        in_blocks = {each for payload in payloads for each in payload.names}
        stored = {each: self._view(each) for each in self._units[name].carried if each not in in_blocks}
        stored |= {payload.source.slot: self._executor.view(payload.place) for payload in payloads}
        self._staging.load("param", name)
        if payloads and name not in self._encoded:
            self._encoded.add(name)
            self._executor.compute(ActionKey(ActionKind.COMPUTE, "encode", name), partial(self._encode, payloads))
        device = self._executor.device
        with torch.inference_mode(False):  # the lane and later callers may be outside of inference mode
            ahead = {each: torch.empty(view.numel(), dtype=view.dtype, device=device) for each, view in stored.items()}
        self._ahead[name] = ahead
        moves = [(ahead[each], view) for each, view in stored.items()]
        self._executor.move(ActionKey(ActionKind.FETCH, "param", name), moves)

    def _encode(self, payloads: Sequence[Payload]) -> None:
        """Write the payloads of a unit on the host."""
        pieces = [
            piece
            for each in payloads
            for piece in each.within.encoders(
                self._executor.view(each.source), self._executor.view(each.place), self._threads
            )
        ]
        if self._pool is None:
            for piece in pieces:
                piece()
        else:
            list(self._pool.map(_call, pieces))

    def outdate(self, unit: str) -> None:
        """Drop the copy of a unit that the step changes; if there was one, stop prefetching at this point of a step."""
        if unit in self._ahead:
            self._in_vain.add(self._point)
        self.forget(unit)

    def forget(self, unit: str) -> None:
        """Drop the prefetched copy of a unit, and its payload."""
        self._ahead.pop(unit, None)
        self._encoded.discard(unit)

    def forget_all(self) -> None:
        """Drop all prefetched copies, and all payloads."""
        self._ahead.clear()
        self._encoded.clear()


def _call(piece: Callable[[], None]) -> None:
    piece()


def _decoded(payload: Payload, row: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the padded shards of a payload on the device, by name."""
    with torch.inference_mode(False):
        values = torch.empty(payload.blocks.elems, dtype=payload.source.dtype, device=row.device)
        payload.blocks.decode(row, values)
        parts = torch.split(values, [elems for elems, _ in payload.blocks.sizes])
    return dict(zip(payload.names, parts, strict=True))
