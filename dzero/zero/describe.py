"""A layout as tables: what every kind of state is on a rank, and the units."""

from __future__ import annotations

from collections.abc import Sequence

from dzero.hardware import dtype_name, format_bytes, format_count
from dzero.utils.terminal import Table
from dzero.zero.cost_model import resting_bytes
from dzero.zero.layout import Layout, TableRow
from dzero.zero.offload_config import FROZEN, KINDS
from dzero.zero.unit_shapes import UnitShape


def kinds_table(layout: Layout, units: Sequence[UnitShape]) -> Table:
    """Return a row for each kind of state: how it is cut, its dtype and tier, and one rank's bytes between steps."""
    rows, at_rest = [], resting_bytes(layout, units)
    frozen = any(not param.trainable for unit in units for param in unit.params)
    for kind in (*KINDS, FROZEN) if frozen else KINDS:
        row: TableRow = getattr(layout, kind)
        cut = f"1/{layout.shard} of each over the shard axis" if row.sharded and layout.shard > 1 else "whole"
        cut = f"1/{layout.ranks} of each over all data-parallel ranks" if row.over_replicas else cut
        own = kind == "master" and layout.param.dtype == layout.master.dtype
        dtype = "the parameter itself" if own else dtype_name(row.dtype) if row.codec is None else row.codec.name
        part = f", {row.fraction:.0%} of them" if row.fraction < 1 else ""
        rest = "none between steps" if kind == "grad" else format_bytes(getattr(at_rest, kind))
        rows.append((kind, cut, dtype, f"{row.tier}{part}", rest))
    title = f"stage {layout.stage} on {layout.replicate} (replicate) x {layout.shard} (shard) ranks"
    title += f", of {layout.model_ranks} (tp) each" if layout.model_ranks > 1 else ""
    return Table(title, ("kind of state", "cut", "dtype", "tier", "bytes of a rank"), tuple(rows), left=4)


def units_table(layout: Layout, units: Sequence[UnitShape]) -> Table:
    """Return a row for each unit; neighbours of one size share a row."""
    rows: list[tuple[str, str, int, int, int]] = []
    for unit in units:
        size = len(unit.params), sum(p.elems for p in unit.params), unit.shard_elems(layout.of_unit(unit).shard)
        if rows and rows[-1][2:] == size:
            first, _, *_ = rows[-1]
            rows[-1] = (first, unit.name, *size)
        else:
            rows.append((unit.name, unit.name, *size))
    told = tuple(
        (first if first == last else f"{first} … {last}", str(count), format_count(elems), format_count(shard))
        for first, last, count, elems, shard in rows
    )
    header = ("unit (gathered, reduced and moved together)", "parameters", "elements", "of which a rank's shard")
    return Table("units, each of", header, told)
