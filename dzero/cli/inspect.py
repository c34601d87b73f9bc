"""Command `dzero inspect`: show the contents of a checkpoint, or of a folder of checkpoints."""

from __future__ import annotations

import argparse

from dzero.checkpoint.inspect import bytes_of, inspect
from dzero.errors import RunError
from dzero.hardware import format_bytes
from dzero.utils.terminal import bar, show


def run(options: argparse.Namespace) -> None:
    """Print the tables; raise RunError if something is damaged."""
    path, to_read = options.checkpoint, bytes_of(options.checkpoint) if options.verify else 0
    with bar(f"verifying {path}", to_read) as progress:
        tables, wrong = inspect(path, verify=options.verify, progress=progress)
    show(tables)
    if wrong:
        raise RunError("\n       ".join(wrong))
    if options.verify:
        print(f"\nverified: all {format_bytes(to_read)} are what was written")
