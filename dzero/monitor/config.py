"""Settings of a run's output and of its profile."""

from __future__ import annotations

from dataclasses import dataclass

from dzero.compatibility import check_compatible
from dzero.utils.ranges import check, whole
from dzero.utils.rules import Settings

MOST_TRACED = 1000
MOST_POINTS = 10_000


@dataclass(frozen=True, kw_only=True)
class MonitorConfig:
    """Output of a run, on the terminal and in files."""

    log_every_steps: int = 10
    """Steps between two lines of the plain log. A terminal shows a live line instead."""
    tensorboard: bool = True
    """Write TensorBoard event files to the run folder."""
    wandb: str | None = None
    """Project of Weights & Biases to send the scalars to (extra wandb). null: none."""
    scalars_every_steps: int | None = None
    """Steps between two points in the event files and in Weights & Biases. Unset: 1, or as many as give a run of
    train.steps 10,000 points: a point takes about 1.8 KiB."""
    plan: bool = True
    """Add this run's plan to TensorBoard. Rank 0 computes it after the first step, in a second or two."""

    def __post_init__(self) -> None:
        check("monitor", self, log_every_steps=whole(), scalars_every_steps=whole(or_null="for at most 10,000"))
        check_compatible(Settings.of(monitor=self))

    def scalars_every(self, steps: int) -> int:
        """Return the number of steps between two points of a run of `steps`."""
        return self.scalars_every_steps or max(1, -(-steps // MOST_POINTS))


@dataclass(frozen=True, kw_only=True)
class ProfileConfig:
    """Steps of the run that are traced with the torch profiler."""

    enabled: bool = False
    """Trace some steps, into one file per rank."""
    start_step: int = 10
    """First traced step, at least 2."""
    steps: int = 3
    """Number of traced steps."""
    memory_snapshot: bool | None = None
    """Record every allocation of those steps too. null: on CUDA devices."""

    def __post_init__(self) -> None:
        if self.start_step < 2:
            raise ValueError(
                f"profile.start_step={self.start_step}: must be a whole number ≥ 2, "
                "since the step before warms the profiler up"
            )
        check("profile", self, start_step=whole(), steps=whole(1, MOST_TRACED))
        check_compatible(Settings.of(profile=self))

    def check(self, run_steps: int) -> None:
        """Raise ValueError if a run of `run_steps` steps ends before the trace does."""
        last = self.start_step + self.steps - 1
        if self.enabled and run_steps < last:
            raise ValueError(
                f"profile.start_step={self.start_step}, profile.steps={self.steps}: the trace ends with step "
                f"{last}, but the run has {run_steps}; trace earlier or fewer steps, or train longer"
            )
