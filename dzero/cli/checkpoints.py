"""Commands `dzero inspect` and `dzero export`: show a checkpoint, and write it as files that transformers can load."""

from __future__ import annotations

import argparse

from dzero.checkpoint import inspect as contents
from dzero.checkpoint.export_hf import export as write
from dzero.checkpoint.export_hf import plan
from dzero.checkpoint.reader import Checkpoint
from dzero.checkpoint.store import checkpoint_at
from dzero.errors import RunError
from dzero.hardware import format_bytes
from dzero.utils.terminal import bar, show


def inspect(options: argparse.Namespace) -> None:
    """Print the tables; raise RunError if something is damaged."""
    path, to_read = options.checkpoint, contents.bytes_of(options.checkpoint) if options.verify else 0
    with bar(f"verifying {path}", to_read) as progress:
        tables, wrong = contents.inspect(path, verify=options.verify, progress=progress)
    show(tables)
    if wrong:
        raise RunError("\n       ".join(wrong))
    if options.verify:
        print(f"\nverified: all {format_bytes(to_read)} are what was written")


def export(options: argparse.Namespace) -> None:
    """Write the files to `options.out`, a new folder."""
    with Checkpoint(checkpoint_at(options.checkpoint)) as checkpoint:
        files_of = plan(checkpoint, options.dtype, options.shard_bytes, merge=options.merge, base=options.base)
        with bar(f"exporting {checkpoint.path}", files_of.tensor_bytes) as progress:
            write(options.out, files_of, progress)
    size, files = format_bytes(files_of.tensor_bytes), len(files_of.files)
    print(f"{options.out}: {len(files_of.source)} tensors, {size} of {options.dtype} in {files} files")
