"""Timeline of one step: bars that show which lane runs for which unit and when.

    lane                bars                               earliest start
    compute             forward and backward of a unit     end of the previous bar, once its parameters are gathered
    tp, cp, ep          exchange                           end of its unit's compute; the next unit waits for it
    shard, replicate    all-gather                         start of the compute of the unit before
                        reduce-scatter, all-reduce         end of the last backward of the unit
                        decisions                          end of the last reduction
    device to host      gradients (evict)                  end of their reduction
    host to device      parameters (fetch)                 one unit ahead of their gather
                        new working copies (fetch)         end of their update
    update              masters on the device              decision of the norm
    host update         offloaded masters                  see below, once the gradient and states have arrived
    disk                load, spill                        load: a few units ahead of the use; spill: after it

    overlap     update of a unit                                                what waits for it
    step        after backward, once all gradients are reduced                  the end of the step
    forward     at the start, from the gradients of the previous step           the unit's first gather
    backward    the same, except for units within the undo budget: in backward  the unit's first gather
    delayed     at the start, from the gradients of the previous step           nothing

The step is one of many, so each bar appears once, and the seconds of each lane are those of `step_time.py`. A lane does
one thing at a time and fills its gaps. On a CPU the cores execute all lanes except disk, so these bars are sequential
and nothing is gathered ahead.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dzero.estimate.durations import Durations, of_experts
from dzero.estimate.explain import PlannedCollective, collectives, phase_of
from dzero.estimate.hardware_spec import HardwareConfig
from dzero.estimate.microbatch_costs import BACKWARD, FORWARD, MicrobatchCosts
from dzero.estimate.step_time import COMPUTE, DISK, HOST_UPDATE, UPDATE
from dzero.estimate.transfers import moved_of
from dzero.mesh import CONTEXT, EXPERT, REPLICATE, SHARD, TENSOR
from dzero.offload.buffer_layout import BufferLayout
from dzero.offload.build_schedule import update_order
from dzero.zero.layout import Layout
from dzero.zero.unit_shapes import UnitShape

OUT, BACK = "device to host", "host to device"
LANES = (COMPUTE, TENSOR, CONTEXT, EXPERT, SHARD, REPLICATE, UPDATE, OUT, BACK, HOST_UPDATE, DISK)
EXCHANGE, ALL_GATHER, DECIDE = "exchange", "all_gather", "decide"
EVICT, FETCH, LOAD, SPILL, ENCODE = "evict", "fetch", "load", "spill", "encode"
COLLECTIVES = (EXCHANGE, ALL_GATHER, "reduce_scatter", "all_reduce", DECIDE)
KINDS = (FORWARD, BACKWARD, *COLLECTIVES, EVICT, FETCH, UPDATE, ENCODE, LOAD, SPILL)


@dataclass(frozen=True)
class Bar:
    """Work of a lane for a unit, in seconds from the start of the step."""

    lane: str
    unit: str
    kind: str
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Timeline:
    """Bars in no particular order, and the start of each microbatch's compute."""

    bars: tuple[Bar, ...]
    microbatches_s: tuple[float, ...]

    @property
    def end_s(self) -> float:
        """End of the last bar in seconds."""
        return max((bar.end_s for bar in self.bars), default=0.0)

    def busy_s(self) -> dict[str, float]:
        """Return the seconds of work by lane."""
        seconds = defaultdict[str, float](float)
        for bar in self.bars:
            seconds[bar.lane] += bar.end_s - bar.start_s
        return dict(seconds)


def timeline_of(
    layout: Layout, units: Sequence[UnitShape], costs: MicrobatchCosts, hardware: HardwareConfig
) -> Timeline:
    """Return the timeline of a step on `hardware`; raises ValueError if a rate that it needs is unknown."""
    step = _Step(layout, units, costs, hardware)
    step.run()
    if step.unknown:
        raise ValueError(f"the hardware does not say {', '.join(dict.fromkeys(step.unknown))}")
    return Timeline(tuple(step.lanes.bars), tuple(step.begun_s))


class _Lanes:
    """Bars at the earliest free times of their lanes; if `one_by_one`, all lanes except disk share one processor."""

    def __init__(self, *, one_by_one: bool) -> None:
        self.bars: list[Bar] = []
        self._one_by_one = one_by_one
        self._taken: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)

    def add(self, lane: str, kind: str, unit: str, seconds: float, *after_s: float) -> float:
        """Add a bar unless it takes no time, and return its end."""
        start_s = max(after_s, default=0.0)
        if not seconds:
            return start_s
        taken = self._taken[COMPUTE if self._one_by_one and lane != DISK else lane]
        at = bisect_right(taken, start_s, key=lambda each: each[1])
        while at < len(taken) and taken[at][0] - start_s < seconds:
            start_s, at = max(start_s, taken[at][1]), at + 1
        taken.insert(at, (start_s, start_s + seconds))
        self.bars.append(Bar(lane, unit, kind, start_s, start_s + seconds))
        return start_s + seconds


class _Step:
    """Bars of a step, added in the order in which the work is issued. Names in `_s` are points in time."""

    def __init__(
        self, layout: Layout, units: Sequence[UnitShape], costs: MicrobatchCosts, hardware: HardwareConfig
    ) -> None:
        self._layout, self._durations = layout, Durations(layout, hardware, costs.beside)
        moved = moved_of(layout, units)
        self._moves, self._decisions, self.unknown = moved.units, moved.decisions, self._durations.unknown
        self.lanes, self._ahead = _Lanes(one_by_one=hardware.devices_are_host), not hardware.devices_are_host
        self._spans = {way: [span for span in costs.spans if span.direction == way] for way in (FORWARD, BACKWARD)}
        self._order = [unit.name for unit in update_order(units)]
        self._updated = [unit.name for unit in update_order(units, layout.offload.mode)]
        buffers = BufferLayout(layout, units)
        self._early, self._turns = buffers.early, buffers.turns
        self._again = {unit.name: layout.of_unit(unit).gathers_again for unit in units}
        self._shared = {unit.name for unit in units if unit.shared_by > 1}
        self._collectives: defaultdict[tuple[str, str], list[PlannedCollective]] = defaultdict(list)
        for each in collectives(layout, units):
            self._collectives[each.phase, each.unit].append(each)
        self.begun_s: list[float] = []
        self._computed_s = 0.0
        self._issued_s = [0.0] * (2 + layout.offload.prefetch_units)
        self._fresh_s = dict.fromkeys(self._order, 0.0)
        self._to_update: list[str] = []
        self._encoded: set[str] = set()
        self._updates: Iterator[str] = iter(())
        self._reduced_s, self._evicted_s = (dict.fromkeys(self._order, 0.0) for _ in range(2))

    def run(self) -> None:
        """Add the bars from one step's decision to the next; for overlap=step, from first gather to last update."""
        from_before = self._layout.offload.mode != "step"
        if from_before:
            for name in self._updated:
                if name in self._early:
                    self._send_back(name, 0.0)
                else:
                    self._to_update.append(name)
            self._updates = self._update(self._to_update, 0.0)
        for index in range(self._layout.microbatches):
            self.begun_s.append(self._computed_s)
            for direction in (FORWARD, BACKWARD):
                self._pass(direction, index)
        decided_s = self._decide(max(self._reduced_s.values()))
        for name in self._updated:
            seconds = self._durations.updated_on_device(self._moves[name].device_elems)
            self.lanes.add(UPDATE, UPDATE, name, seconds, decided_s)
        if not from_before:
            list(self._update(self._updated, decided_s))

    def _decide(self, reduced_s: float) -> float:
        """Add the collectives in which all ranks agree on norm and loss."""
        ends = [
            self.lanes.add(axis, DECIDE, "", self._durations.decided(n), reduced_s)
            for axis, n in self._decisions.items()
        ]
        return max(ends, default=reduced_s)

    def _pass(self, direction: str, index: int) -> None:
        """Add the forward or backward of a microbatch, with at most one unit gathered ahead."""
        spans = self._spans[direction]
        used = dict.fromkeys(span.unit for span in spans if span.unit in self._moves)
        to_gather = [*used, *(name for name in self._order if name not in used)]
        last = {span.unit: at for at, span in enumerate(spans)}
        there_s, at_work = dict[str, float](), set[str]()
        for at, span in enumerate(spans):
            if span.unit in to_gather:
                to_gather.remove(span.unit)
                there_s[span.unit] = self._gather(direction, index, span.unit, self._computed_s)
            start_s = max(self._computed_s, there_s.get(span.unit, 0.0))
            seconds = self._durations.compute(span.work)
            if span.unit in used and span.unit not in at_work and (direction == FORWARD or self._again[span.unit]):
                seconds += self._durations.decoded(self._moves[span.unit].decoded)
            at_work.add(span.unit)
            if self._ahead and to_gather and there_s.keys() <= at_work:
                name = to_gather.pop(0)
                there_s[name] = self._gather(direction, index, name, start_s)
            done_s = self.lanes.add(COMPUTE, direction, span.unit, seconds, start_s)
            for axis, sent_bytes, calls in span.work.exchanged():
                within_s = self._durations.sent(axis, int(sent_bytes), calls)
                done_s = self.lanes.add(axis, EXCHANGE, span.unit, within_s, done_s)
            self._computed_s = done_s
            if direction == BACKWARD and span.unit in used and last[span.unit] == at:
                self._reduce(index, span.unit)
        for name in to_gather:
            self._gather(direction, index, name, self._computed_s)
        for name in self._order:
            if direction == BACKWARD and name not in used:
                self._reduce(index, name)

    def _gather(self, direction: str, index: int, name: str, issued_s: float) -> float:
        """Add the transfers of a unit's parameters, and return when they are gathered."""
        layout, take, moves = self._layout, self._durations, self._moves[name]
        while name in self._to_update:
            self._to_update.remove(next(self._updates))
        fresh_s = 0.0 if layout.offload.mode == "delayed" else self._fresh_s[name]
        self._issued_s.append(issued_s)
        there_s = max(issued_s, fresh_s)
        if direction == FORWARD or self._again[name]:
            load_s, fetch_s = self._issued_s[-2 - layout.offload.prefetch_units], self._issued_s[-2]
            disk_s, host_s = take.read(moves.disk_param + moves.disk_frozen), take.copied(moves.param + moves.frozen)
            loaded_s = self.lanes.add(DISK, LOAD, name, disk_s, fresh_s, load_s)
            if name not in self._encoded:
                self._encoded.add(name)
                loaded_s = self.lanes.add(HOST_UPDATE, ENCODE, name, take.encoded(moves.encoded), loaded_s)
            fetched_s = self.lanes.add(BACK, FETCH, name, host_s, loaded_s, fetch_s)
            there_s = max(there_s, fetched_s)
        for each in self._of(direction, index, name):
            if each.kind == ALL_GATHER:
                there_s = self.lanes.add(each.axis, each.kind, name, self._sent(each), there_s)
        return there_s

    def _sent(self, each: PlannedCollective) -> float:
        axis = of_experts(each.axis) if each.unit in self._shared else each.axis
        return self._durations.collective(axis, each.legs)

    def _reduce(self, index: int, name: str) -> None:
        """Add the transfers of a unit's gradients from the end of its backward to where they wait for the update."""
        take, moves, add, at_s = self._durations, self._moves[name], self.lanes.add, self._computed_s
        is_last = index == self._layout.microbatches - 1
        if not self._layout.grad_sync_policy(is_last).reduce:
            return
        at_s = add(TENSOR, EXCHANGE, name, take.sent(TENSOR, moves.copies_grad, moves.copies), at_s)
        for each in self._of(BACKWARD, index, name):
            if each.kind != ALL_GATHER:
                at_s = add(each.axis, each.kind, name, self._sent(each), at_s)
        self._reduced_s[name] = at_s
        at_s = add(OUT, EVICT, name, take.copied(moves.grad + moves.late_grad * is_last), at_s)
        if index and self._layout.grad.sharded:
            at_s = add(DISK, LOAD, name, take.read(moves.disk_grad), at_s)
        self._evicted_s[name] = add(DISK, SPILL, name, take.written(moves.disk_grad), at_s)
        if is_last and name in self._early:
            list(self._update([name], self._evicted_s[name], ahead=True))

    def _update(self, names: Sequence[str], begun_s: float, *, ahead: bool = False) -> Iterator[str]:
        """Add the updates of units; yield each name after its bars, so that those of forward can be added in between.

        Units on disk take turns in host slots. If `ahead`, new working copies stay on the host.
        """
        take, add, names = self._durations, self.lanes.add, [*names]
        loaded_s, spilled_s = list[float](), list[float]()
        for at, name in enumerate(names):
            for coming in names[len(loaded_s) : at + self._turns]:
                free_s = spilled_s[len(loaded_s) - self._turns] if len(loaded_s) >= self._turns else 0.0
                count = self._moves[coming].read_states + self._moves[coming].disk_grad
                loaded_s.append(add(DISK, LOAD, coming, take.read(count), begun_s, free_s, self._evicted_s[coming]))
            moves = self._moves[name]
            to, fro = ((OUT, EVICT), (BACK, FETCH))[:: 1 if moves.host_elems else -1]
            grad_s = add(BACK, FETCH, name, take.copied(moves.grad_back), loaded_s[at])
            moments_s = add(*to, name, take.copied(moves.moments), loaded_s[at])
            done_s = add(HOST_UPDATE, UPDATE, name, take.updated(moves.host_elems), grad_s, moments_s)
            spilled_s.append(add(DISK, SPILL, name, take.written(moves.written_states), done_s))
            add(*fro, name, take.copied(moves.moments), done_s)
            if not ahead:
                self._send_back(name, done_s)
            yield name

    def _send_back(self, name: str, updated_s: float) -> None:
        """Add the transfer of new working copies to disk or to the device."""
        take, moves = self._durations, self._moves[name]
        spilled_s = self.lanes.add(DISK, SPILL, name, take.written(moves.disk_param), updated_s)
        self._fresh_s[name] = self.lanes.add(BACK, FETCH, name, take.copied(moves.work), spilled_s)

    def _of(self, direction: str, index: int, name: str) -> list[PlannedCollective]:
        return self._collectives[phase_of(direction, index, self._layout.microbatches), name]
