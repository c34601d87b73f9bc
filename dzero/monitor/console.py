"""The run for people: one live line where there is a terminal, else plain `key=value` lines without timestamps."""

from __future__ import annotations

from rich.console import Console as Terminal
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Column

from dzero.hardware import format_bytes, format_seconds
from dzero.monitor.records import RunSummary, StepRecord
from dzero.monitor.tables import summary_tables
from dzero.terminal import plain, rich_table


class Console:
    """Writes to `terminal` (default: standard output). Use on one rank only.

    On a terminal the live line is redrawn four times a second, whatever `log_every_steps`; elsewhere a line is
    written for the first step, the last, and every `log_every_steps`-th.
    """

    def __init__(self, total_steps: int, *, log_every_steps: int = 10, terminal: Terminal | None = None) -> None:
        self._total_steps, self._log_every_steps = total_steps, log_every_steps
        self._terminal = terminal or Terminal(highlight=False)
        self._live = self._terminal.is_terminal and not self._terminal.is_dumb_terminal
        self._held_out_loss: float | None = None
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._lines = 0

    def step(self, record: StepRecord) -> None:
        """Show one step."""
        if self._live:
            self._redraw(record)
        elif self._lines == 0 or record.step % self._log_every_steps == 0 or record.step == self._total_steps:
            self._write(plain_line(record))
            self._lines += 1

    def held_out(self, step: int, loss: float) -> None:
        """Show a held-out loss [nats], evaluated after `step` steps."""
        self._held_out_loss = loss
        if not self._live:
            self._write(f"step={step} held_out_loss={loss:.4f}")

    def note(self, step: int, message: str) -> None:
        """Say something rare about a step: a line of its own that stays, above the live line."""
        self._write(f"step={step} {message}")

    def summary(self, summary: RunSummary) -> None:
        """End the live line and print the closing tables."""
        self.close()
        tables = summary_tables(summary)
        if not self._live:
            self._write("\n" + plain(tables))
            return
        for table in tables:
            self._terminal.print(rich_table(table))

    def close(self) -> None:
        """Leave the live line as it is. May be called again."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = self._task = None

    def _redraw(self, record: StepRecord) -> None:
        if self._progress is None or self._task is None:
            self._progress = _progress(self._terminal)
            self._task = self._progress.add_task("", total=self._total_steps, reading="")
            self._progress.start()
        reading = live_line(record, self._held_out_loss)
        self._progress.update(self._task, completed=record.step, reading=reading)

    def _write(self, line: str) -> None:
        self._terminal.print(line, markup=False, emoji=False, highlight=False, soft_wrap=True)


def live_line(record: StepRecord, held_out_loss: float | None) -> str:
    """What stands behind the bar: the most wanted first, since a narrow terminal cuts the end."""
    rate, mfu = record.speed.tokens_per_s, record.speed.mfu
    words = [
        f"loss {record.loss:.3f}",
        None if held_out_loss is None else f"held-out {held_out_loss:.3f}",
        None if rate is None else f"{rate:,.0f} tokens/s",
        None if mfu is None else f"MFU {mfu:.1%}",
        format_bytes(sum(record.memory_bytes.values())) if record.memory_bytes else None,
        f"ETA {format_seconds(record.eta_s)}" if record.eta_s else None,
        f"{record.skipped_steps} skipped" if record.skipped_steps else None,
    ]
    return " · ".join(word for word in words if word)


def plain_line(record: StepRecord) -> str:
    """`key=value` words, units in the keys; what is not known is left out."""
    rate, mfu, scale, eta_s = record.speed.tokens_per_s, record.speed.mfu, record.loss_scale, record.eta_s
    words = [
        f"step={record.step}",
        f"loss={record.loss:.4f}",
        f"lr={record.lr:.3e}",
        f"grad_norm={record.grad_norm:.4g}",
        None if scale is None else f"loss_scale={scale:g}",
        None if rate is None else f"tokens_per_s={rate:.0f}",
        None if mfu is None else f"mfu={mfu:.4f}",
        f"memory_mib={sum(record.memory_bytes.values()) / 2**20:.0f}" if record.memory_bytes else None,
        None if eta_s is None else f"eta_s={eta_s:.0f}",
        f"skipped_steps={record.skipped_steps}" if record.skipped_steps else None,
    ]
    return " ".join(word for word in words if word)


def _progress(terminal: Terminal) -> Progress:
    """One line, redrawn by a thread of its own (a millisecond, four times a second), so that steps never wait."""
    return Progress(
        TextColumn("step {task.completed}/{task.total}", markup=False),
        BarColumn(bar_width=20),
        TextColumn("{task.fields[reading]}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis")),
        console=terminal,
        refresh_per_second=4,
    )
