"""Command `dzero export`: write a checkpoint as safetensors files that transformers can load."""

from __future__ import annotations

import argparse

from dzero.checkpoint.export_hf import export, plan
from dzero.checkpoint.reader import Checkpoint
from dzero.checkpoint.store import checkpoint_at
from dzero.hardware import format_bytes
from dzero.utils.terminal import bar


def run(options: argparse.Namespace) -> None:
    """Write the files to `options.out`, a new folder."""
    with Checkpoint(checkpoint_at(options.checkpoint)) as checkpoint:
        files_of = plan(checkpoint, options.dtype, options.shard_bytes)
        with bar(f"exporting {checkpoint.path}", files_of.tensor_bytes) as progress:
            export(checkpoint, options.out, files_of, progress)
    size, files = format_bytes(files_of.tensor_bytes), len(files_of.files)
    print(f"{options.out}: {len(files_of.source)} tensors, {size} of {options.dtype} in {files} files")
