"""Numbers from rounds: ratios of medians with a 95 % interval, and the goals they are held against."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median

RESAMPLES = 2000


@dataclass(frozen=True)
class Ratio:
    """A quotient of medians and the interval that holds it with 95 % (percentile bootstrap over rounds)."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


def ratio_of_medians(above: Sequence[float], below: Sequence[float]) -> Ratio:
    """median(above) / median(below); round i of both ran next to each other, so rounds are drawn in pairs."""
    draw, pairs = random.Random(0), list(zip(above, below, strict=True))
    values = []
    for _ in range(RESAMPLES):
        sample = draw.choices(pairs, k=len(pairs))
        values.append(median(a for a, _ in sample) / median(b for _, b in sample))
    values.sort()
    tail = RESAMPLES // 40
    return Ratio(median(above) / median(below), values[tail], values[-tail - 1])


@dataclass(frozen=True)
class Goal:
    """`side` against `peer`: `what` is `speed` (quotient of tokens/s, at least `bound`), `fair` (speed whose interval
    must reach `bound`) or `memory` (quotient of peak bytes, at most `bound`)."""

    what: str
    side: str
    peer: str
    bound: float


def goals() -> list[Goal]:
    """What the project promises, row by row."""
    found = [Goal("speed", f"dzero_{s}", f"deepspeed_{s}", 1.10) for s in range(4)]
    found += [Goal("speed", f"dzero_{s}", "ddp", 0.85) for s in (1, 2)]
    found += [Goal("memory", f"dzero_{s}", f"deepspeed_{s}", 0.75 if s == 3 else 0.90) for s in (1, 2, 3)]
    found += [Goal("memory", "dzero_0", "ddp", 1.05)]
    for stage, peer in ((1, "fsdp2_2"), (2, "fsdp2_2"), (3, "fsdp2_3")):
        found += [Goal("speed", f"dzero_{stage}", f"{peer}{wire}", 1.15) for wire in ("", "_bf16")]
        found += [Goal("memory", f"dzero_{stage}", f"{peer}{wire}", 0.80) for wire in ("", "_bf16")]
        found += [Goal("fair", f"dzero_{stage}_native", f"{peer}_bf16", 1 / 1.02)]
    return found


@dataclass(frozen=True)
class Verdict:
    """A goal and what was measured."""

    goal: Goal
    ratio: Ratio
    met: bool

    def row(self) -> dict[str, object]:
        """For JSON."""
        return {**asdict(self.goal), **asdict(self.ratio), "met": self.met}


def judge(goal: Goal, step_s: dict[str, list[float]], peak_bytes: dict[str, int]) -> Verdict | None:
    """None when one of the goal's sides did not run."""
    if goal.side not in step_s or goal.peer not in step_s:
        return None
    if goal.what == "memory":
        quotient = peak_bytes[goal.side] / peak_bytes[goal.peer]
        return Verdict(goal, Ratio(quotient, quotient, quotient), quotient <= goal.bound)
    ratio = ratio_of_medians(step_s[goal.peer], step_s[goal.side])
    return Verdict(goal, ratio, (ratio.high if goal.what == "fair" else ratio.value) >= goal.bound)
