"""Terminal output: tables, and a progress bar for long work; plain text if the output is no terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from rich import box
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table as RichTable
from rich.text import Text

OK, DIFFERS, DAMAGED = "ok", "≠", "damaged"


@dataclass(frozen=True)
class Table:
    """Table whose header and rows have the same number of cells.

    Attributes:
        left: Number of left-aligned columns, which hold words; the others hold numbers.
    """

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    left: int = 1


def show(tables: Sequence[Table]) -> None:
    """Print tables to standard output."""
    terminal = Console(highlight=False)
    if not terminal.is_terminal:
        print(plain(tables), flush=True)
        return
    for table in tables:
        terminal.print(rich_table(table))


@contextmanager
def bar(what: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
    """Show a progress bar on standard error, and yield the function that advances it by a number of bytes.

    The bar is hidden if standard error is no terminal, and for 0 bytes.
    """
    terminal = Console(file=sys.stderr)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(binary_units=True))
    disable = not (terminal.is_terminal and total_bytes)
    with Progress(
        *columns, TransferSpeedColumn(), TimeRemainingColumn(), console=terminal, disable=disable, transient=True
    ) as progress:
        task = progress.add_task(what, total=total_bytes)
        yield lambda count: progress.advance(task, count)


def plain(tables: Sequence[Table]) -> str:
    """Format tables as aligned text, with a blank line between them."""
    return "\n\n".join(_plain_table(table) for table in tables)


def from_here(path: Path) -> Path:
    """Return `path` relative to the working directory if it is below that, else unchanged."""
    with suppress(ValueError, FileNotFoundError):  # it is elsewhere, or the working directory was removed
        return path.relative_to(Path.cwd())
    return path


def _plain_table(table: Table) -> str:
    lines = (table.header, *table.rows)
    widths = [max(len(line[column]) for line in lines) for column in range(len(table.header))]

    def aligned(line: tuple[str, ...]) -> str:
        """Pad cells to the widths of their columns: the first `table.left` to the left, the others to the right."""
        cells = (
            cell.ljust(width) if column < table.left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        return "  ".join(cells).rstrip()

    return "\n".join([table.title, *("  " + aligned(line) for line in lines)])


def rich_table(table: Table) -> RichTable:
    """Return the table for a rich terminal, with errors in red."""
    drawn = RichTable(
        title=table.title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False
    )
    for column, name in enumerate(table.header):
        drawn.add_column(name, justify="left" if column < table.left else "right", overflow="fold")
    styles = {OK: "green", DIFFERS: "bold red", DAMAGED: "bold red"}
    for row in table.rows:
        drawn.add_row(*(Text(cell, style=styles.get(cell, "")) for cell in row))
    return drawn
