"""Routes of sums: over all ranks at once, or in two hops, inside groups of ranks and then between the groups.

    hop     rank g of group h sends to   what                                      where it is summed
    1       ranks (h, 0), (h, 1), ...    what (0, g'), (1, g'), ... own to (h, g') over the group, in rank order
    2       ranks (0, g), (1, g), ...    its group's sums of what they own         over the groups, in order

With G ranks in each of H groups, a rank posts G + H - 2 messages each way instead of G * H - 1. If groups are nodes,
1/G of the bytes of one hop cross between them (ZeRO++, Wang et al. 2023, section 3.3). The order of additions follows
from the numbers of ranks alone, so every stage has the same bits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

FLAT_RANKS = 64
"""Number of ranks from which sums take two hops unless groups are given."""


@dataclass(frozen=True)
class Hops:
    """Groups of consecutive ranks of an axis.

    Attributes:
        inner: Ranks of a group.
        outer: Number of groups; with one, there is one hop.
    """

    inner: int
    outer: int = 1

    @classmethod
    def of(cls, ranks: int, inner: int | None = None) -> Hops:
        """Return the route over `ranks` ranks.

        Args:
            ranks: Number of ranks.
            inner: Ranks of a group, a divisor of `ranks`. None: all ranks below `FLAT_RANKS`, else the divisor next
                above the square root.
        """
        if inner is None:
            divisors = (each for each in range(math.isqrt(ranks - 1) + 1, ranks) if ranks % each == 0)
            inner = ranks if ranks < FLAT_RANKS else next(divisors, ranks)
        return cls(inner, ranks // inner)

    def inside(self, rank: int) -> range:
        """Return the ranks of the group of `rank`."""
        first = rank - rank % self.inner
        return range(first, first + self.inner)

    def across(self, rank: int) -> range:
        """Return the ranks with the place of `rank` in their groups."""
        return range(rank % self.inner, self.inner * self.outer, self.inner)

    def sent_bytes(self, first: int, second: int) -> int:
        """Return the bytes that a rank sends for a sum whose parts take `first` and `second` bytes in the two hops."""
        return (self.inner - 1) * self.outer * first + (self.outer - 1) * second
