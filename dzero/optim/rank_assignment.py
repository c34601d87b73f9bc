"""Assignment of matrices to the ranks that orthogonalize them, and its traffic, computed from shapes alone.

All ranks compute the same assignment. Matrices are assigned in rounds, in order of decreasing cost. Within a round, a
matrix is assigned to the owner with the least work that has space for it. An owner holds at most `ROOM_ELEMS` elements
of whole matrices at a time, or one larger matrix.

    parameters         to the owners, per round               from the owners, per round
    cut (stages 1-3)   all_to_all of shards                   all_to_all of shards
    whole (stage 0)    nothing: every rank has the gradient   all_gather of each owner's results

Bytes are counted as in `comm/ledger.py`, with shards padded to the largest. Owners have different matrices, so ranks
send different amounts: the P bytes of this rank's shards for each other owner, and its own P to every other rank.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import torch

from dzero.comm.ledger import Entry, Traffic, dtype_key
from dzero.zero.layout import Layout
from dzero.zero.unit_shapes import ParamShape

ROOM_ELEMS = 1 << 24
"""Maximum elements of whole matrices that an owner holds at a time, unless one matrix is larger."""
Round = tuple[tuple[ParamShape, ...], ...]
"""Matrices of each owner, by rank, in one round."""


@dataclass
class _Owner:
    matrices: list[ParamShape] = field(default_factory=list)
    elems: int = 0
    cost: int = 0

    def take(self, matrix: ParamShape) -> None:
        self.matrices.append(matrix)
        self.elems += matrix.elems
        self.cost += cost_of(matrix)


def rounds_of(matrices: Sequence[ParamShape], owners: int, room_elems: int = ROOM_ELEMS) -> list[Round]:
    """Assign each matrix to one round and, in it, to one of `owners` ranks.

    Matrices of equal cost are taken in the model's order. Of owners with equal work, the lowest rank is chosen. A
    matrix larger than `room_elems` raises this limit to its own size.
    """
    room = max([room_elems, *(matrix.elems for matrix in matrices)])
    rounds: list[list[_Owner]] = []
    for matrix in sorted(matrices, key=cost_of, reverse=True):
        free = [owner for each in rounds for owner in _with_room(each, room - matrix.elems)[:1]]
        if not free:
            rounds.append([_Owner() for _ in range(owners)])
            free = rounds[-1]
        free[0].take(matrix)
    return [tuple(tuple(owner.matrices) for owner in each) for each in rounds]


def _with_room(owners: list[_Owner], most_elems: int) -> list[_Owner]:
    """Return the owners that hold at most `most_elems` elements, in order of increasing work."""
    return sorted((owner for owner in owners if owner.elems <= most_elems), key=lambda owner: owner.cost)


def cost_of(matrix: ParamShape) -> int:
    """Return the number of multiplications of one Newton-Schulz iteration on the matrix."""
    short, long = sorted(matrix.shape)
    return 2 * short * short * long + short**3


def of_names(each: Round, names: Collection[str]) -> Round:
    """Return the round with only the matrices of these names."""
    return tuple(tuple(matrix for matrix in owned if matrix.name in names) for owned in each)


def part_elems(owned: Sequence[ParamShape], shards: int) -> int:
    """Return the elements of one rank's padded shards of an owner's matrices."""
    return sum(matrix.shard_elems(shards) for matrix in owned)


def expected_updates(
    layout: Layout, rounds: Sequence[Round], axis: str, rank: int, payload: torch.dtype
) -> dict[Entry, Traffic]:
    """Return the calls and bytes that `rank` of mesh axis `axis` sends for one step, by entry of the ledger."""
    totals: defaultdict[Entry, Traffic] = defaultdict(Traffic)
    cut = layout.shard > 1
    for each in rounds:
        part_bytes = [part_elems(owned, layout.shard) * payload.itemsize for owned in each]
        entry = Entry("update", "all_to_all" if cut else "all_gather", axis, dtype_key(payload))
        if cut:
            totals[entry] += Traffic(1, sum(part_bytes) - part_bytes[rank])
        if len(each) > 1:
            totals[entry] += Traffic(1, (len(each) - 1) * part_bytes[rank])
    return dict(totals)
