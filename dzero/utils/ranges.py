"""Ranges that numeric settings are checked against, and integer arithmetic that is fast for any size.

Every bound is finite: a larger value is a typing mistake, and would overflow or hang later.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

MOST_COUNT = 10**12
"""Limit of steps, and of values that are counted in steps."""
MOST_RANKS = 2**20
MOST_BYTES = 2**60


@dataclass(frozen=True)
class Range:
    """Numbers from `least` to `most`, without `least` if `above`, without `most` if `below`.

    Messages name the `unit` of the numbers, and the meaning of null if `or_null` is set.
    """

    least: float
    most: float
    above: bool = False
    below: bool = False
    unit: str = ""
    or_null: str = ""

    def __contains__(self, value: float) -> bool:
        """Return whether `value` is in the range; nan and infinities never are."""
        low = value > self.least if self.above else value >= self.least
        return low and (value < self.most if self.below else value <= self.most)

    def __str__(self) -> str:
        null = f", or null {self.or_null}" if self.or_null else ""
        if isinstance(self.most, int):
            return f"a whole number ≥ {self.least} and ≤ {self.most}{null}"
        left, right = "(" if self.above else "[", ")" if self.below else "]"
        return f"a number in {left}{self.least:g}, {self.most:g}{right}{self.unit}{null}"


def whole(least: int = 1, most: int = MOST_COUNT, *, or_null: str = "") -> Range:
    """Return the range of whole numbers from `least` to `most`."""
    return Range(least, most, or_null=or_null)


def number(most: float, *, or_null: str = "") -> Range:
    """Return the range of numbers from 0 to `most`."""
    return Range(0.0, most, or_null=or_null)


def positive(most: float, *, or_null: str = "") -> Range:
    """Return the range of numbers above 0 up to `most`."""
    return Range(0.0, most, above=True, or_null=or_null)


FRACTION = positive(1.0)
BELOW_1 = Range(0.0, 1.0, below=True)
SECONDS = Range(1e-3, 30.0 * 24 * 3600, unit=" seconds")


def check(group: str, config: Any, **ranges: Range) -> None:
    """Raise ValueError for the first field of a configuration dataclass that is out of its range.

    Fields that are None are unset and pass. Messages name the `group`, e.g. `train` or `optim.muon`.
    """
    for name, allowed in ranges.items():
        value = getattr(config, name)
        if value is not None and value not in allowed:
            raise ValueError(f"{group}.{name}={shown(value)}: must be {allowed}")


def shown(value: float) -> str:
    """Format a number for a message; integers of more than 40 digits by their order of magnitude."""
    digits = value.bit_length() * 0.30103 if isinstance(value, int) else 0
    return f"{'-' if value < 0 else ''}10^{digits:.0f} or so" if digits > 40 else str(value)


def divisors(count: int) -> list[int]:
    """Return the divisors of `count` ≥ 1 in ascending order, in time of its square root."""
    small = [each for each in range(1, math.isqrt(count) + 1) if count % each == 0]
    return small + [count // each for each in reversed(small) if each * each != count]
