"""A layout in words: what every unit is, and what happens in a step, in order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from dzero.hardware import format_bytes
from dzero.mesh import REPLICATE, SHARD
from dzero.offload.buffer_layout import BufferLayout
from dzero.offload.build_schedule import schedule_of
from dzero.utils.terminal import Table
from dzero.zero.describe import kinds_table, units_table
from dzero.zero.layout import Layout
from dzero.zero.unit_shapes import UnitShape
from dzero.zero.units import unit_around


@dataclass(frozen=True)
class PlannedCollective:
    """Of the unit, or of `count` units from `unit` to `last_unit`. `sent_bytes`: by one rank, for each."""

    phase: str
    kind: str
    axis: str
    unit: str
    last_unit: str
    sent_bytes: int
    count: int = 1


def phase_of(direction: str, microbatch: int, microbatches: int) -> str:
    """What a collective's `phase` says; `microbatch` from 0 on."""
    return f"{direction} {microbatch + 1} of {microbatches}" if microbatches > 1 else direction


def collectives(layout: Layout, units: Sequence[UnitShape]) -> Iterator[PlannedCollective]:
    """Of a step, in order: blocks forward in the model's order, backward the other way, the root around them; experts
    that ranks share beside the block that has them."""
    *blocks, root = _nested(units)
    microbatches, itemsize = layout.microbatches, layout.param.dtype.itemsize
    tables = {unit.name: layout.of_unit(unit) for unit in units}

    def one(
        phase: str, kind: str, axis: str, unit: UnitShape, ranks: int, owned_bytes: int
    ) -> Iterator[PlannedCollective]:
        if ranks > 1 and owned_bytes:
            yield PlannedCollective(phase, kind, axis, unit.name, unit.name, (ranks - 1) * owned_bytes)

    def reduced(phase: str, unit: UnitShape, last: bool) -> Iterator[PlannedCollective]:
        own = tables[unit.name]
        n, copies, hop = own.shard, own.replicate, own.replicate_wire
        trained = unit.shard_elems(n, trainable_only=True)
        yield from one(phase, "reduce_scatter", SHARD, unit, n, trained * layout.wire.itemsize)
        if last and layout.shares > 1:
            part = unit.shard_elems(n, copies, trainable_only=True)
            yield from one(phase, "reduce_scatter", REPLICATE, unit, copies, part * hop.itemsize)
        elif last:
            back = layout.grad.dtype if layout.exact else hop
            owned = -(-trained // copies) * (hop.itemsize + back.itemsize)
            yield from one(phase, "all_reduce", REPLICATE, unit, copies, owned)

    for index in range(microbatches):
        last = index == microbatches - 1
        forward, backward = (phase_of(direction, index, microbatches) for direction in ("forward", "backward"))
        if layout.param.sharded or index == 0:
            for unit in (root, *blocks):
                n = tables[unit.name].shard
                yield from one(forward, "all_gather", SHARD, unit, n, unit.shard_elems(n) * itemsize)
        for unit in (root, *reversed(blocks)):
            own = tables[unit.name]
            if layout.param.sharded and own.gathers_again:
                inner = own.shard if isinstance(own.reshard_after_forward, bool) else own.reshard_after_forward
                owned = unit.shard_elems(inner) * itemsize
                yield from one(backward, "all_gather", SHARD, unit, inner, owned)
            if layout.cadence(last).reduce and unit is not root:
                yield from reduced(backward, unit, last)
        if layout.cadence(last).reduce:
            yield from reduced(backward, root, last)
    for unit in units if layout.shares > 1 else ():
        part = unit.shard_elems(layout.shard, layout.replicate, trainable_only=True)
        yield from one("update", "all_gather", REPLICATE, unit, layout.replicate, part * itemsize)


def _nested(units: Sequence[UnitShape]) -> list[UnitShape]:
    """Experts, which are listed first, after the unit that has them."""
    experts = [unit for unit in units if unit.shared_by > 1]
    others = [unit for unit in units if unit.shared_by == 1]
    around = {each.name: unit_around(each.name, [unit.name for unit in others]) for each in experts}
    *blocks, root = others
    nested = [each for unit in blocks for each in (unit, *(e for e in experts if around[e.name] == unit.name))]
    return [*nested, *(each for each in experts if around[each.name] == root.name), root]


def folded(found: Iterator[PlannedCollective]) -> list[PlannedCollective]:
    """The same with neighbours of one kind and size as one; what takes turns (gather, reduce) is told kind by kind."""
    rows: list[PlannedCollective] = []
    for each in found:
        like = (each.phase, each.kind, each.axis, each.sent_bytes)
        for number, row in enumerate(reversed(rows[-6:]), 1):  # of a block, and of its experts: three kinds each
            in_turn = all(between.count == row.count for between in rows[len(rows) - number + 1 :])
            if in_turn and (row.phase, row.kind, row.axis, row.sent_bytes) == like:
                rows[-number] = replace(row, last_unit=each.unit, count=row.count + 1)
                break
        else:
            rows.append(each)
    return rows


def tables(layout: Layout, units: Sequence[UnitShape]) -> list[Table]:
    """What every kind of state is, the units, a step's collectives, and its actions off the device."""
    return [
        table for table in (kinds_table(layout, units), units_table(layout, units), _step(layout, units)) if table.rows
    ]


def actions(layout: Layout, units: Sequence[UnitShape]) -> list[str]:
    """Slots and actions off the device, in order; nothing where every state is on it."""
    schedule = schedule_of(BufferLayout(layout, units))
    return [*schedule.lines()] if schedule.slots else []


def _step(layout: Layout, units: Sequence[UnitShape]) -> Table:
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
