"""Description of a layout: its units, and the collectives and actions of a step in order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from dzero.comm.hops import sent_bytes
from dzero.hardware import format_bytes
from dzero.mesh import REPLICATE, SHARD
from dzero.offload.buffer_layout import BufferLayout
from dzero.offload.build_schedule import schedule_of
from dzero.utils.terminal import Table
from dzero.zero.cost_model import Legs, collectives_of
from dzero.zero.layout import Layout
from dzero.zero.unit_shapes import UnitShape
from dzero.zero.units import nested


@dataclass(frozen=True)
class PlannedCollective:
    """Collective of a unit, or of `count` neighboring units from `unit` to `last_unit`.

    `phase` is a pass as `phase_of` names it, or "update". `legs` are those of each of the collectives.
    """

    phase: str
    kind: str
    axis: str
    unit: str
    last_unit: str
    legs: Legs
    count: int = 1

    @property
    def sent_bytes(self) -> int:
        """Bytes that one rank sends in each of the collectives."""
        return sent_bytes(self.legs)


def phase_of(direction: str, microbatch: int, microbatches: int) -> str:
    """Return the `phase` of the collectives of a pass; `microbatch` counts from 0."""
    return f"{direction} {microbatch + 1} of {microbatches}" if microbatches > 1 else direction


def collectives(layout: Layout, units: Sequence[UnitShape]) -> Iterator[PlannedCollective]:
    """Yield the collectives of a step in order.

    Forward goes through the blocks in the model's order, backward in reverse. The root comes first in forward and in
    the gathers of backward, and last in the reductions. Units inside a block are next to it.
    """
    *blocks, root = _nested(units)
    microbatches = layout.microbatches
    sent = {unit.name: collectives_of(layout, unit) for unit in units}

    def one(phase: str, kind: str, axis: str, unit: UnitShape, legs: Legs) -> Iterator[PlannedCollective]:
        if legs:
            yield PlannedCollective(phase, kind, axis, unit.name, unit.name, legs)

    def reduced(phase: str, unit: UnitShape, last: bool) -> Iterator[PlannedCollective]:
        yield from one(phase, "reduce_scatter", SHARD, unit, sent[unit.name].reduce)
        if last:
            kind = "reduce_scatter" if layout.replica_shards > 1 else "all_reduce"
            yield from one(phase, kind, REPLICATE, unit, sent[unit.name].across)

    for index in range(microbatches):
        last = index == microbatches - 1
        forward, backward = (phase_of(direction, index, microbatches) for direction in ("forward", "backward"))
        if layout.param.sharded or index == 0:
            for unit in (root, *blocks):
                yield from one(forward, "all_gather", SHARD, unit, sent[unit.name].gather)
        for unit in (root, *reversed(blocks)):
            yield from one(backward, "all_gather", SHARD, unit, sent[unit.name].gather_again)
            if layout.grad_sync_policy(last).reduce and unit is not root:
                yield from reduced(backward, unit, last)
        if layout.grad_sync_policy(last).reduce:
            yield from reduced(backward, root, last)
    for unit in units:
        yield from one("update", "all_gather", REPLICATE, unit, sent[unit.name].update)


def _nested(units: Sequence[UnitShape]) -> list[UnitShape]:
    """Return the units with each unit inside another, which `units` lists before that one, after it."""
    around = nested([unit.name for unit in units])
    outer = [unit for unit in units if unit.name not in around]
    return [each for one in outer for each in (one, *(unit for unit in units if around.get(unit.name) == one.name))]


def folded(found: Iterator[PlannedCollective]) -> list[PlannedCollective]:
    """Merge collectives of neighboring units that have the same kind and size.

    Alternating sequences (gather, reduce, gather, reduce) are merged kind by kind.
    """
    rows: list[PlannedCollective] = []
    for each in found:
        like = (each.phase, each.kind, each.axis, each.sent_bytes)
        for number, row in enumerate(reversed(rows[-6:]), 1):  # a block and its experts have three kinds each
            in_turn = all(between.count == row.count for between in rows[len(rows) - number + 1 :])
            if in_turn and (row.phase, row.kind, row.axis, row.sent_bytes) == like:
                rows[-number] = replace(row, last_unit=each.unit, count=row.count + 1)
                break
        else:
            rows.append(each)
    return rows


def actions(layout: Layout, units: Sequence[UnitShape]) -> list[str]:
    """Return the host and disk slots and the offload actions in order, one per line; empty if no state is offloaded."""
    schedule = schedule_of(BufferLayout(layout, units))
    return [*schedule.lines()] if schedule.slots else []


def collectives_table(layout: Layout, units: Sequence[UnitShape]) -> Table:
    """Return a table of the collectives of a step, in order."""
    rows = tuple(
        (
            each.phase,
            each.kind,
            each.axis,
            each.unit if each.count == 1 else f"{each.unit} … {each.last_unit}",
            str(each.count),
            format_bytes(each.sent_bytes * each.count),
        )
        for each in folded(collectives(layout, units))
    )
    return Table("collectives of a step, in order", ("when", "what", "axis", "units", "calls", "sent"), rows, left=4)
