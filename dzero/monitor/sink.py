"""Where records go: every sink that the config asks for, on rank 0; nowhere on the other ranks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console as Terminal

from dzero.monitor.board import TensorBoardSink
from dzero.monitor.console import Console
from dzero.monitor.records import RunSummary, StepRecord


@dataclass(frozen=True, kw_only=True)
class MonitorConfig:
    """What is shown and kept.

    `log_every_steps`: steps between two lines of the plain log (a terminal has a live line instead).
    `tensorboard`: write event files to `<run folder>/tensorboard`, a point every `scalars_every_steps` steps.
    `plan`: with this run's plan (`python -m dzero plan`), which rank 0 makes after the first step; the others wait for
    it, a second or two, 10 s for 80 layers.
    """

    log_every_steps: int = 10
    tensorboard: bool = True
    scalars_every_steps: int = 1
    plan: bool = True

    def __post_init__(self) -> None:
        for name in ("log_every_steps", "scalars_every_steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"monitor.{name}={getattr(self, name)}: must be a whole number ≥ 1")
        if not self.tensorboard and self.scalars_every_steps != 1:
            raise ValueError(
                f"monitor.scalars_every_steps={self.scalars_every_steps} has no effect with monitor.tensorboard=false; "
                "remove it, or set monitor.tensorboard=true"
            )
        if not self.tensorboard and not self.plan:
            raise ValueError("monitor.plan=false has no effect with monitor.tensorboard=false; remove it")


class Sink(Protocol):
    """Something that keeps or shows what it is told."""

    def step(self, record: StepRecord) -> None:
        """After every optimizer step, skipped ones included."""

    def held_out(self, step: int, loss: float) -> None:
        """After an evaluation; `loss` in nats per token."""

    def note(self, step: int, message: str) -> None:
        """A line of text about a step; 0 is before the first."""

    def summary(self, summary: RunSummary) -> None:
        """Once, when the run has ended well."""

    def close(self) -> None:
        """Last, however the run ended: write what is buffered, give the terminal back."""


class Monitor:
    """All sinks as one, closed at the end of a `with` block. Every rank may call it; only rank 0 has sinks.

    board: that for TensorBoard, where there is one.
    """

    board: TensorBoardSink | None = None

    def __init__(
        self,
        config: MonitorConfig,
        run_folder: Path,
        *,
        rank: int,
        total_steps: int,
        resolved_config: str = "",
        terminal: Terminal | None = None,
    ) -> None:
        self.sinks: list[Sink] = []
        if rank != 0:
            return
        self.sinks.append(Console(total_steps, log_every_steps=config.log_every_steps, terminal=terminal))
        if config.tensorboard:
            self.board = TensorBoardSink(
                run_folder / "tensorboard",
                resolved_config=resolved_config,
                scalars_every_steps=config.scalars_every_steps,
            )
            self.sinks.append(self.board)

    def step(self, record: StepRecord) -> None:
        """Tell of one optimizer step."""
        for sink in self.sinks:
            sink.step(record)

    def held_out(self, step: int, loss: float) -> None:
        """Tell of a held-out loss [nats], evaluated after `step` steps."""
        for sink in self.sinks:
            sink.held_out(step, loss)

    def note(self, step: int, message: str) -> None:
        """Tell of something rare: a skipped step and the parameter that caused it, say."""
        for sink in self.sinks:
            sink.note(step, message)

    def summary(self, summary: RunSummary) -> None:
        """Tell how the run went."""
        for sink in self.sinks:
            sink.summary(summary)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for sink in self.sinks:
            sink.close()
