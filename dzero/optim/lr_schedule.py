"""Learning-rate schedules as factors of the base learning rate, for `torch.optim.lr_scheduler.LambdaLR`.

    constant   warm-up, then 1
    cosine     warm-up, then half a cosine from 1 to `final`
    linear     warm-up, then linear decay from 1 to `final`
    wsd        warm-up, stable at 1, then linear decay to `final` over the last `decay_steps` (Hu et al. 2024)

Warm-up is linear. Lengths and `final` are fields of `ScheduleConfig`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from dzero.compatibility import check_compatible
from dzero.utils.ranges import BELOW_1, check, number, whole
from dzero.utils.rules import Settings

ROUNDING = 1e-9
"""Added before a product is rounded down, because 0.29 * 100 is a little less than 29."""
KINDS = ("constant", "cosine", "linear", "wsd")


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """Learning-rate schedule of a run, as a factor of optim.lr."""

    kind: str = "cosine"
    """Kind of schedule: constant, cosine, linear, or wsd (warm-up, stable, linear decay)."""
    warmup_steps: int | None = None
    """Steps of linear warm-up. null: warmup_fraction of the run."""
    warmup_fraction: float = 0.05
    """Fraction of the run that is warm-up, rounded down to steps."""
    decay_steps: int | None = None
    """Steps of the decay (wsd only)."""
    final: float = 0.1
    """Factor at the last step (cosine, linear, wsd)."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"schedule.kind={self.kind!r}: choose one of {list(KINDS)}")
        check("schedule", self, warmup_steps=whole(0), decay_steps=whole(), final=number(1.0))
        check("schedule", self, warmup_fraction=BELOW_1)
        check_compatible(Settings.of(schedule=self))

    def factor(self, total_steps: int) -> Callable[[int], float]:
        """Return a function of the step, from 0, that computes the factor of a run of `total_steps`.

        Raises:
            ValueError: Warm-up and decay together are longer than the run.
        """
        warmup = self.warmup_steps
        if warmup is None:
            warmup = int(total_steps * self.warmup_fraction + ROUNDING)
        decay = self.decay_steps or 0
        if warmup + decay > total_steps:
            both = f"schedule.warmup_steps={warmup}" + (f" + schedule.decay_steps={decay}" if decay else "")
            raise ValueError(f"{both} exceed train.steps={total_steps}: take fewer of them, or more train.steps")

        def at(step: int) -> float:
            if step < warmup:
                return (step + 1) / (warmup + 1)
            if self.kind == "constant":
                return 1.0
            length = decay if self.kind == "wsd" else total_steps - warmup
            done = min(1.0, max(0.0, (step - (total_steps - length)) / max(1, length - 1)))
            fall = done if self.kind in ("linear", "wsd") else (1 - math.cos(math.pi * done)) / 2
            return 1 - (1 - self.final) * fall

        return at
