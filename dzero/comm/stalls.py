"""What the statuses of ranks tell: who is gone, who can never go on, and the report of it.

    a rank waits             for the ranks of the group that it waits in, until they come to the same place
    it can never go on       if one of them has left, or waits in another place and can never go on itself

The largest set of ranks with that property is what is left when those that may still go on are taken out of it, one
after the other: ranks that compute, that a process beside the ranks may wake, or that only wait for such ranks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from dzero.errors import RankLost, first_line

STALL_S = 4.0
"""Seconds that a rank waits in one place before it looks whether the others can still come."""
TRANSFERS = ("send", "recv", "isend", "irecv", "batch_isend_irecv", "_wait_batch_p2p")
"""Functions of torch that wait for one other rank, which waits in another one of them."""
NO_ERROR = "no error"
WAIT = "wait"
"""Waiting for what was begun before, of which nobody knows what it is."""


@dataclass(frozen=True)
class RankStatus:
    """Status of a rank at its last heartbeat, the number of which is `beat`.

    Attributes:
        count: Number of collectives begun.
        last: Description of the last collective begun.
        ended: Reason why the rank left; empty while it runs.
        waits: Whether the rank waits for other ranks.
        own: Whether it does so in something of dzero's own.
        meets: Where ranks are that it could meet there, without the line of the program; empty if it may be woken by a
            process that is none of the ranks.
        group: Ranks that it meets there, as arguments of `range`; empty if unknown.
        waits_s: Seconds that it has waited in the same place.
        at: Where in the program it stands, unless it waits in its last collective.
    """

    rank: int
    host: str
    pid: int
    beat: int
    count: int
    last: str
    ended: str = ""
    waits: bool = False
    own: bool = True
    meets: str = ""
    group: Sequence[int] = ()
    waits_s: float = 0.0
    at: str = ""

    def __str__(self) -> str:
        return f"rank {self.rank} (pid {self.pid} on {self.host})"

    @property
    def left(self) -> str:
        """How it left."""
        return f"ended with {self.ended}" if self.ended != NO_ERROR else "has left, without an error"

    @property
    def place(self) -> str:
        """The last collective, and where the rank is since."""
        return f"{self.last}; now {'waits' if self.waits else 'is'} in {self.at}" if self.at else self.last


def silent(before: Sequence[RankStatus | None], now: Sequence[RankStatus | None]) -> list[RankStatus]:
    """Return the ranks that neither wrote a heartbeat nor ended between two readings."""
    return [
        new
        for old, new in zip(before, now, strict=True)
        if old is not None and new is not None and old.beat == new.beat and not new.ended
    ]


def stuck(places: Sequence[RankStatus | None], gone: Sequence[RankStatus]) -> set[int]:
    """Return the ranks that can never go on, although they are there.

    Ranks that all wait in the same collective may just have a slow network. What transfers of the program's own wait
    for may come from any thread of another rank.
    """
    left = {place.rank for place in places if place is not None and (place.ended or place in gone)}
    found = {
        place.rank: place
        for place in places
        if place is not None
        and place.rank not in left
        and place.waits_s >= STALL_S
        and place.meets
        and (place.own or place.meets not in TRANSFERS)
    }
    while may_go_on := [
        rank
        for rank, here in found.items()
        if not any(
            other in left or (other in found and not _may_meet(here, found[other]))
            for other in range(*here.group or (0,))
            if other != rank
        )
    ]:
        for rank in may_go_on:
            del found[rank]
    return {*found}


def _may_meet(here: RankStatus, other: RankStatus) -> bool:
    """Return whether two ranks may wait in the same thing, or one of them has its part of it and waits in the next."""
    if here.own != other.own:
        return False
    if not here.own:
        return here.meets == other.meets or WAIT in (here.meets, other.meets)
    if here.meets == other.meets and (here.count == other.count or here.meets in TRANSFERS):
        return True
    is_in_collectives = not here.at and not other.at
    return is_in_collectives and [*here.group] == [*other.group] and abs(here.count - other.count) == 1


def met(places: Sequence[RankStatus | None], rank: int) -> list[RankStatus | None]:
    """Return the status of each rank that `rank` waits for, its own among them; of all ranks if that is unknown."""
    here = places[rank]
    return [*places] if here is None or not here.group else [places[other] for other in range(*here.group)]


def all_wait(places: Sequence[RankStatus | None], *, own: bool) -> bool:
    """Return whether all these ranks wait for each other; with `own`, in what only the network can hold up."""
    return all(
        place is not None and place.waits_s >= STALL_S and bool(place.meets) and (place.own or not own)
        for place in places
    )


def report(
    places: Sequence[RankStatus | None],
    gone: Sequence[RankStatus],
    rank: int,
    within: str,
    error: Exception | None = None,
    *,
    is_pipeline: bool = False,
) -> str:
    """Return the message for a wait, or for an `error` out of a collective: the missing ranks, and where all are.

    Args:
        places: Status of each rank.
        gone: Those without a new heartbeat.
        rank: The rank that waits.
        within: How long.
        error: What the backend raised.
        is_pipeline: Whether ranks are stages of a pipeline, which begin different collectives.
    """
    here = places[rank]
    assert here is not None
    there = [place for place in places if place is not None]
    ended = [place for place in there if place.ended]
    elsewhere = [place for place in there if place.waits and place.at and place.meets != here.meets]
    busy = [place for place in there if not place.waits and place != here]
    # At the same count, all ranks must be in the same collective, but for stages of a pipeline.
    alike = (
        [] if is_pipeline else [place for place in there if not (here.waits and place.waits and _may_meet(here, place))]
    )
    others = [place for place in alike if place.count == here.count and place.last != here.last]
    behind = [place for place in alike if place.count < here.count]
    ahead = [place for place in alike if place.count > here.count]
    absent = [
        other for other, place in enumerate(places) if place is None and (not here.group or other in range(*here.group))
    ]
    if ended:
        why = "; ".join(f"{place} {place.left}" for place in ended[:3])
    elif gone:
        why = f"{', '.join(map(str, gone[:3]))} gives no sign of life: dead, stopped or hung"
    elif elsewhere:
        why = "; ".join(f"{place} waits in {place.at}" for place in elsewhere[:3])
    elif others:
        why = f"the ranks have diverged: {here} is in {here.last}, {others[0]} in {others[0].last}"
    elif behind:
        why = f"{', '.join(map(str, behind[:3]))} is behind"
    elif ahead:
        why = "; ".join(f"{place} is in {place.last}" for place in ahead[:3])
    elif absent:
        why = f"rank {_ranges(absent)} is not there yet"
    elif busy:
        why = f"{', '.join(map(str, busy[:3]))} waits for no other rank"
    else:
        why = "every rank is there"
    where = f"in {here.last}" if here.count else "at the start"
    if isinstance(error, RankLost):
        where = "about a checkpoint"
    elif here.waits and here.at:
        where = f"in {here.at}"
    lines = [f"rank {rank} got no answer {where}{within}: {why}", "last collective of each rank:"]
    said = [] if error is None else [f"the backend says: {first_line(error)}"]
    return "\n".join([*lines, *_by_place(places, gone), *said])


def _by_place(places: Sequence[RankStatus | None], gone: Sequence[RankStatus]) -> list[str]:
    """Return a line for each place (last collective), with the ranks that are there."""
    at: dict[str, list[int]] = defaultdict(list)
    for rank, place in enumerate(places):
        where = "not there yet" if place is None else place.place + (" at its last beat" if place in gone else "")
        at[where].append(rank)
    return [f"  rank {_ranges(ranks)}: {text}" for text, ranks in at.items()]


def _ranges(ranks: list[int]) -> str:
    """Return ranks as ranges: "0, 2-5" for 0, 2, 3, 4, 5."""
    starts = [rank for rank in ranks if rank - 1 not in ranks]
    ends = [rank for rank in ranks if rank + 1 not in ranks]
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True))
