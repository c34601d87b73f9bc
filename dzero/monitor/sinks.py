"""Sinks of a run's records: all that the config enables on rank 0, none on the other ranks."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Protocol, Self

from rich.console import Console as Terminal

from dzero.monitor.config import MonitorConfig
from dzero.monitor.console import Console
from dzero.monitor.profile import SNAPSHOTS, TRACES
from dzero.monitor.records import RunSummary, StepRecord
from dzero.monitor.tensorboard import TensorBoardSink
from dzero.monitor.wandb import WandbSink
from dzero.utils.terminal import from_here

NO_SOURCES: Mapping[str, float] = MappingProxyType({})


class Sink(Protocol):
    """Receiver that shows or stores the records of a run."""

    def step(self, record: StepRecord) -> None:
        """Receive the record of an optimizer step, skipped steps included."""

    def held_out(self, step: int, loss: float, by_source: Mapping[str, float]) -> None:
        """Receive a held-out loss in nats per token, and that of each source of a mixture, after `step` steps."""

    def note(self, step: int, message: str) -> None:
        """Receive a line of text about a step; step 0 is before the first."""

    def summary(self, summary: RunSummary) -> None:
        """Receive the summary, once, when the run has completed."""

    def close(self) -> None:
        """Write buffered output and release the terminal; called last, however the run ended."""


class Monitor:
    """All sinks as one, closed at the end of a `with` block. Every rank may call it; only rank 0 has sinks.

    Attributes:
        board: TensorBoard sink, or None.
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
        self._run_folder = run_folder
        if rank != 0:
            return
        every = config.scalars_every(total_steps)
        self.sinks.append(Console(total_steps, log_every_steps=config.log_every_steps, terminal=terminal))
        if config.tensorboard:
            try:
                self.board = TensorBoardSink(run_folder, resolved_config=resolved_config, scalars_every_steps=every)
                self.sinks.append(self.board)
            except OSError as error:
                self.note(0, f"no TensorBoard: nothing can be written to {run_folder}: {error}")

        if config.wandb is not None:
            try:
                self.sinks.append(
                    WandbSink(config.wandb, run_folder, resolved_config=resolved_config, scalars_every_steps=every)
                )
            except Exception as error:  # of the network, the account or the disk: the run does not depend on them
                self.note(0, f"monitor.wandb={config.wandb}: nothing is sent: {type(error).__name__}: {error}")

    def step(self, record: StepRecord) -> None:
        """Send the record of one optimizer step to all sinks."""
        self._tell(lambda sink: sink.step(record), record.step)

    def held_out(self, step: int, loss: float, by_source: Mapping[str, float] = NO_SOURCES) -> None:
        """Send a held-out loss [nats], and that of each source of a mixture, after `step` steps, to all sinks."""
        self._tell(lambda sink: sink.held_out(step, loss, by_source), step)

    def note(self, step: int, message: str) -> None:
        """Send a message about a rare event, such as a skipped step, to all sinks."""
        self._tell(lambda sink: sink.note(step, message), step)

    def summary(self, summary: RunSummary) -> None:
        """Send the summary to all sinks, with the places of TensorBoard files and traces."""
        summary = replace(summary, places=places(self._run_folder, board=self.board is not None))
        self._tell(lambda sink: sink.summary(summary), summary.steps)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._tell(lambda sink: sink.close())

    def _tell(self, do: Callable[[Sink], None], step: int | None = None) -> None:
        """Call `do` with every sink; drop a sink that fails and report that to the others. Output never ends a run.

        Without a `step`, the run has ended, and sinks may be closed already.
        """
        for sink in [*self.sinks]:
            try:
                do(sink)
            except Exception as error:
                self.sinks.remove(sink)
                self.board = None if sink is self.board else self.board
                lost = f"{type(sink).__name__} failed, the run goes on without it: {type(error).__name__}: {error}"
                if step is None or not self.sinks:
                    print(lost, file=sys.stderr)
                else:
                    self.note(step, lost)


def places(run_folder: Path, *, board: bool) -> list[str]:
    """Return one line for each output of a run, with its path from the current directory and how to open it."""
    here = from_here(run_folder)
    lines = [f"TensorBoard      tensorboard --logdir {shlex.quote(str(here))}"] if board else []
    for what, pattern, opened in (
        ("trace", TRACES, "https://ui.perfetto.dev"),
        ("memory snapshot", SNAPSHOTS, "https://pytorch.org/memory_viz"),
    ):
        if next(run_folder.glob(pattern), None) is not None:
            lines.append(f"{what:<15}  {here / pattern}: open one at {opened}")
    return lines
