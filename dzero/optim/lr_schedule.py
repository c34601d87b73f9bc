"""Learning-rate schedules as factors of the base learning rate, for `torch.optim.lr_scheduler.LambdaLR`.

    constant   warm-up, then 1
    cosine     warm-up, then half a cosine from 1 to `final`
    wsd        warm-up, stable at 1, then linear decay to `final` over the last `decay_steps` (Hu et al. 2024)

Warm-up is linear. Lengths and `final` are fields of `ScheduleConfig`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from dzero.compatibility import check_compatible
from dzero.utils.ranges import check, number, whole
from dzero.utils.rules import Settings

KINDS = ("constant", "cosine", "wsd")


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """Learning-rate schedule of a run, as a factor of optim.lr."""

    kind: str = "cosine"
    """Kind of schedule: constant, cosine, or wsd (warm-up, stable, linear decay)."""
    warmup_steps: int | None = None
    """Steps of linear warm-up. null: 1/20 of the run."""
    decay_steps: int | None = None
    """Steps of the decay (wsd only)."""
    final: float = 0.1
    """Factor at the last step (cosine, wsd)."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"schedule.kind={self.kind!r}: choose one of {list(KINDS)}")
        check("schedule", self, warmup_steps=whole(0), decay_steps=whole(), final=number(1.0))
        check_compatible(Settings.of(schedule=self))

    def factor(self, total_steps: int) -> Callable[[int], float]:
        """Return a function of the step, from 0, that computes the factor of a run of `total_steps`.

        Raises:
            ValueError: Warm-up and decay together are longer than the run.
        """
        warmup = total_steps // 20 if self.warmup_steps is None else self.warmup_steps
        decay = self.decay_steps or 0
        if warmup + decay > total_steps:
            raise ValueError(
                f"schedule.warmup_steps={warmup} + schedule.decay_steps={decay} exceed train.steps={total_steps}"
            )

        def at(step: int) -> float:
            if step < warmup:
                return (step + 1) / (warmup + 1)
            if self.kind == "constant":
                return 1.0
            length = decay if self.kind == "wsd" else total_steps - warmup
            done = min(1.0, max(0.0, (step - (total_steps - length)) / max(1, length - 1)))
            fall = done if self.kind == "wsd" else (1 - math.cos(math.pi * done)) / 2
            return 1 - (1 - self.final) * fall

        return at
