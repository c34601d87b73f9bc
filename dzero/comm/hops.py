"""Routes of sums and gathers: over all ranks at once, or in two hops, inside groups of consecutive ranks and across.

    hop of a sum    rank g of group h sends to   what                                       where it is summed
    1, inside       ranks (h, 0), (h, 1), ...    what (0, g'), (1, g'), ... own to (h, g')  over the group, by rank
    2, across       ranks (0, g), (1, g), ...    its group's sums of what they own          over the groups, in order

    hop of a gather   groups are nodes                  groups only save messages
    1                 across: its part                  inside: its part
    2                 inside: its part of each node     across: all parts of its group, which are neighbors

With G ranks in each of H groups, a sum posts G + H - 2 messages each way instead of G H - 1, and so does a gather that
begins inside. One that begins across posts more, but sends a part once to another node, not to each of its ranks. A sum
sends 1/G of the bytes of one hop to other nodes (ZeRO++, Wang et al. 2023, section 3.3). The order of additions follows
from the numbers of ranks alone, so that every stage has the same bits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

FLAT_RANKS = 64
"""Number of ranks from which routes have two hops without given nodes."""


@dataclass(frozen=True)
class Leg:
    """Part of a collective in which ranks send directly to each other.

    Attributes:
        ranks: Ranks that exchange.
        stride: Distance between them along the axis.
        sent_bytes: Bytes that one rank sends.
    """

    ranks: int
    stride: int
    sent_bytes: int


@dataclass(frozen=True)
class Hops:
    """Groups of consecutive ranks of an axis.

    Attributes:
        inner: Ranks of a group.
        outer: Number of groups; with one, there is one hop.
        nodes: Whether groups are nodes, between which links are slow.
    """

    inner: int
    outer: int = 1
    nodes: bool = False

    @classmethod
    def of(cls, ranks: int, node_ranks: int | None = None) -> Hops:
        """Return the route over `ranks` ranks.

        Args:
            ranks: Number of ranks.
            node_ranks: Ranks of a node, a divisor of `ranks`. None: below `FLAT_RANKS` one group, else groups of the
                least divisor that is no less than the square root.
        """
        if node_ranks is not None:
            return cls(node_ranks, ranks // node_ranks, nodes=True)
        divisors = (each for each in range(math.isqrt(ranks - 1) + 1, ranks) if ranks % each == 0)
        inner = ranks if ranks < FLAT_RANKS else next(divisors, ranks)
        return cls(inner, ranks // inner)

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.inner * self.outer

    def inside(self, rank: int) -> range:
        """Return the ranks of the group of `rank`."""
        first = rank - rank % self.inner
        return range(first, first + self.inner)

    def across(self, rank: int) -> range:
        """Return the ranks with the place of `rank` in their groups."""
        return range(rank % self.inner, self.ranks, self.inner)

    def of_sum(self, first: int, second: int) -> tuple[Leg, ...]:
        """Return the legs of a sum whose parts take `first` and `second` bytes in the two hops."""
        return self._legs((self.inner - 1) * self.outer * first, (self.outer - 1) * second)

    def of_gather(self, part: int) -> tuple[Leg, ...]:
        """Return the legs of a gather of parts of `part` bytes."""
        across = (self.outer - 1) * part * (1 if self.nodes else self.inner)
        return self._legs((self.ranks - 1) * part - across, across)

    def _legs(self, inside: int, across: int) -> tuple[Leg, ...]:
        legs = (Leg(self.inner, 1, inside), Leg(self.outer, self.inner, across))
        return tuple(leg for leg in legs if leg.sent_bytes)


def sent_bytes(legs: tuple[Leg, ...]) -> int:
    """Return the bytes that one rank sends in a collective."""
    return sum(leg.sent_bytes for leg in legs)
