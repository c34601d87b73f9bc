"""Console sink: one live line on a terminal, otherwise plain `key=value` lines without timestamps."""

from __future__ import annotations

from collections.abc import Mapping

from rich.cells import cell_len
from rich.console import Console as Terminal
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Column

from dzero.hardware import format_bytes, format_seconds
from dzero.monitor.records import RunSummary, StepRecord, shown_perplexity
from dzero.monitor.summary import summary_tables
from dzero.utils.terminal import plain, rich_table

SEPARATOR = " · "
WIDE_COLUMNS, WIDE_BAR, NARROW_BAR = 110, 20, 10
"""Terminals with at least so many columns get the wide bar; narrower ones keep the space for figures."""


class Console:
    """Sink that writes to a terminal or plain stream, by default standard output. Use it on one rank only.

    On a terminal, the live line is redrawn four times a second, independent of `log_every_steps`. Elsewhere a line is
    written for the first step, the last step, and every `log_every_steps`-th step.
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

    def held_out(self, step: int, loss: float, by_source: Mapping[str, float]) -> None:
        """Show a held-out loss [nats], and outside of a terminal its perplexity and the loss of each source."""
        self._held_out_loss = loss
        if not self._live:
            sources = "".join(f" held_out_loss[{name}]={each:.4f}" for name, each in by_source.items())
            self._write(f"step={step} held_out_loss={loss:.4f}{sources} held_out_perplexity={shown_perplexity(loss)}")

    def note(self, step: int, message: str) -> None:
        """Print a message about a step on its own line, above the live line."""
        self._write(f"step={step} {message}")

    def summary(self, summary: RunSummary) -> None:
        """End the live line and print the closing tables."""
        self.close()
        tables = summary_tables(summary)
        if not self._live:
            self._write("\n" + plain(tables))
        for table in tables if self._live else ():
            self._terminal.print(rich_table(table))
        if summary.places:
            self._write("\n".join(["\nlook inside", *(f"  {line}" for line in summary.places)]))

    def close(self) -> None:
        """End the live line and leave it on the terminal; may be called again."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = self._task = None

    def _redraw(self, record: StepRecord) -> None:
        if self._progress is None or self._task is None:
            self._progress = _progress(self._terminal)
            self._task = self._progress.add_task("", total=self._total_steps, reading="")
            self._progress.start()
        step = f"step {self._total_steps}/{self._total_steps}"
        room = self._terminal.width - cell_len(step) - _bar_width(self._terminal) - len("  ")
        reading = live_line(record, self._held_out_loss, room)
        self._progress.update(self._task, completed=record.step, reading=reading)

    def _write(self, line: str) -> None:
        self._terminal.print(line, markup=False, emoji=False, highlight=False, soft_wrap=True)


def live_line(record: StepRecord, held_out_loss: float | None, room: int | None = None) -> str:
    """Return the text behind the progress bar, with the last held-out loss [nats].

    The least important figures are left out until the others fit in `room` columns.
    """
    rate, mfu = record.speed.tokens_per_s, record.speed.mfu
    wanted = {  # in the order of the line; figures with lower numbers are left out first
        f"loss {record.loss:.3f}": 7,
        None if held_out_loss is None else f"held-out {held_out_loss:.3f}": 2,
        None if rate is None else f"{rate:,.0f} tokens/s": 6,
        None if mfu is None else f"MFU {mfu:.1%}": 3,
        format_bytes(sum(record.memory_bytes.values())) if record.memory_bytes else None: 1,
        f"ETA {format_seconds(record.eta_s)}" if record.eta_s else None: 5,
        f"{record.skipped_steps} skipped" if record.skipped_steps else None: 4,
    }
    words = [word for word in wanted if word]
    while room is not None and len(words) > 1 and cell_len(SEPARATOR.join(words)) > room:
        words.remove(min(words, key=lambda word: wanted[word]))
    return SEPARATOR.join(words)


def plain_line(record: StepRecord) -> str:
    """Return `key=value` words with units in the keys; unknown values are left out."""
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
    """Return a one-line progress bar that its own thread redraws in 1 ms, four times a second; steps never wait."""
    return Progress(
        TextColumn("step {task.completed}/{task.total}", markup=False),
        BarColumn(bar_width=_bar_width(terminal)),
        TextColumn("{task.fields[reading]}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis")),
        console=terminal,
        refresh_per_second=4,
    )


def _bar_width(terminal: Terminal) -> int:
    return WIDE_BAR if terminal.width >= WIDE_COLUMNS else NARROW_BAR
