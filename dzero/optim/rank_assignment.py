"""Assignment of parameters to the ranks that update them whole, and its traffic, computed from shapes alone.

All ranks compute the same assignment. Parameters are assigned in rounds, in order of decreasing cost. Within a round, a
parameter is assigned to the owner with the least work that has space for it, and of those to the one with the least
work in all rounds, as owners keep states. An owner holds at most `ROOM_ELEMS` elements of whole inputs at a time, or
those of one larger parameter.

    parameters         to the owners, per round               from the owners, per round
    cut (stages 1-3)   all_to_all of shards of each input     all_to_all of shards
    whole (stage 0)    nothing: every rank has the gradient   all_gather of each owner's results

Bytes are counted as in `comm/ledger.py`, with shards padded to the largest. Owners have different parameters, so ranks
send different amounts: the P bytes of this rank's shards for each other owner, and its own P to every other rank.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import torch

from dzero.comm.ledger import Entry, Traffic, dtype_key
from dzero.zero.layout import Layout
from dzero.zero.unit_shapes import ParamShape

ROOM_ELEMS = 1 << 24
"""Maximum elements of whole inputs that an owner holds at a time, unless those of one parameter are more."""
Cost = Callable[[ParamShape], int]
"""Work of the update of a parameter, in any unit."""
Round = tuple[tuple[ParamShape, ...], ...]
"""Parameters of each owner, by rank, in one round."""


@dataclass
class _Owner:
    rank: int
    shapes: list[ParamShape] = field(default_factory=list)
    elems: int = 0
    cost: int = 0


def rounds_of(shapes: Sequence[ParamShape], owners: int, cost: Cost, room_elems: int = ROOM_ELEMS) -> list[Round]:
    """Assign each parameter to one round and, in it, to one of `owners` ranks.

    Parameters of equal cost are taken in the model's order. Of owners with equal work, the lowest rank is chosen. A
    parameter larger than `room_elems` raises this limit to its own size.
    """
    room = max([room_elems, *(shape.elems for shape in shapes)])
    rounds: list[list[_Owner]] = []
    totals = [0] * owners
    for shape in sorted(shapes, key=cost, reverse=True):
        free = [each for each in rounds if any(owner.elems <= room - shape.elems for owner in each)]
        if not free:
            rounds.append([_Owner(rank) for rank in range(owners)])
            free = rounds[-1:]
        fitting = [owner for owner in free[0] if owner.elems <= room - shape.elems]
        owner = min(fitting, key=lambda owner: (owner.cost, totals[owner.rank]))
        owner.shapes.append(shape)
        owner.elems += shape.elems
        owner.cost += cost(shape)
        totals[owner.rank] += cost(shape)
    return [tuple(tuple(owner.shapes) for owner in each) for each in rounds]


def of_names(each: Round, names: Collection[str]) -> Round:
    """Return the round with only the parameters of these names."""
    return tuple(tuple(shape for shape in owned if shape.name in names) for owned in each)


def part_elems(owned: Sequence[ParamShape], shards: int) -> int:
    """Return the elements of one rank's padded shards of an owner's parameters."""
    return sum(shape.shard_elems(shards) for shape in owned)


def expected_updates(
    layout: Layout, rounds: Sequence[Round], axis: str, rank: int, payload: torch.dtype, inputs: int = 1
) -> dict[Entry, Traffic]:
    """Return the calls and bytes that `rank` of mesh axis `axis` sends for these rounds, by entry of the ledger."""
    totals: defaultdict[Entry, Traffic] = defaultdict(Traffic)
    cut = layout.shard > 1
    for each in rounds:
        part_bytes = [part_elems(owned, layout.shard) * payload.itemsize for owned in each]
        entry = Entry("update", "all_to_all" if cut else "all_gather", axis, dtype_key(payload))
        if cut:
            totals[entry] += Traffic(1, inputs * (sum(part_bytes) - part_bytes[rank]))
        if len(each) > 1:
            totals[entry] += Traffic(1, (len(each) - 1) * part_bytes[rank])
    return dict(totals)
