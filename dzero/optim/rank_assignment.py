"""Which rank orthogonalises which matrix, and what that moves. Pure: from shapes alone, the same on every rank.

Matrices go in rounds, the costliest first. In a round each goes to the owner with the least work that has room for it;
an owner holds at most `ROOM_ELEMS` of whole matrices at a time, or one that is larger.

    parameters are        to the owners                          back from them
    cut (stages 1-3)      all_to_all of shards in, a round       all_to_all of shards out, a round
    whole (stage 0)       nothing: every rank has the gradient   all_gather of what each owner made, a round

Bytes follow `comm/ledger.py`, with shards padded to the largest. Owners differ in what they own, so ranks differ in
what they send: P bytes of shards for each owner that is not this rank, and its own P to every other rank.
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
Round = tuple[tuple[ParamShape, ...], ...]
"""What each owner, by rank, has in a round."""


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
    """Every matrix in one round, with one of `owners` ranks; ties go in the model's order to the lowest rank."""
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
    """Those that hold no more than that, the one with the least work first."""
    return sorted((owner for owner in owners if owner.elems <= most_elems), key=lambda owner: owner.cost)


def cost_of(matrix: ParamShape) -> int:
    """Multiplications of one Newton-Schulz iteration: two products of the matrix's size, one of its smaller side's."""
    short, long = sorted(matrix.shape)
    return 2 * short * short * long + short**3


def of_names(each: Round, names: Collection[str]) -> Round:
    """A round of only these matrices."""
    return tuple(tuple(matrix for matrix in owned if matrix.name in names) for owned in each)


def part_elems(owned: Sequence[ParamShape], shards: int) -> int:
    """Elements of one rank's padded shards of what an owner has."""
    return sum(matrix.shard_elems(shards) for matrix in owned)


def expected_updates(
    layout: Layout, rounds: Sequence[Round], axis: str, rank: int, payload: torch.dtype
) -> dict[Entry, Traffic]:
    """Calls and bytes that `rank` of the owners' axis sends for one optimizer step, by the ledger's entries."""
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
