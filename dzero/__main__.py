"""python -m dzero: tools without a run."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from dzero.checkpoint.contents import Checkpoint
from dzero.checkpoint.export import EXPORTED, SHARD_BYTES, export, plan
from dzero.checkpoint.folder import checkpoint_at
from dzero.checkpoint.inspect import bytes_of, inspect
from dzero.errors import RunError, user_errors
from dzero.hardware import format_bytes
from dzero.offload.disk_speed import bench
from dzero.terminal import bar, show

CHECKPOINT = "a checkpoint's folder, or the folder above for the latest in it"


def main() -> None:
    """The command line. What the user can mend ends it with a message."""
    parser = argparse.ArgumentParser(prog="python -m dzero", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    _disk_bench(commands.add_parser("disk-bench", help="how fast scratch disks are, and the settings that suit them"))
    _export(commands.add_parser("export", help="a checkpoint as safetensors that transformers loads"))
    _inspect(commands.add_parser("inspect", help="what is in a checkpoint, or in a folder of them"))
    options = parser.parse_args()
    try:
        with user_errors():
            options.run(options)
    except RunError as error:
        sys.exit(f"error: {error}")


def _disk_bench(parser: argparse.ArgumentParser) -> None:
    def run(options: argparse.Namespace) -> None:
        for line in bench(options.paths, sample_bytes=options.mib << 20, rounds=options.rounds):
            print(line, flush=True)

    parser.add_argument("paths", nargs="*", default=["."], metavar="PATH", help="a directory on each disk; default: .")
    parser.add_argument("--mib", type=int, default=512, help="MiB written and read at a time")
    parser.add_argument("--rounds", type=int, default=3)
    parser.set_defaults(run=run)


def _export(parser: argparse.ArgumentParser) -> None:
    def run(options: argparse.Namespace) -> None:
        with Checkpoint(checkpoint_at(options.checkpoint)) as checkpoint:
            planned = plan(checkpoint, options.dtype, options.shard_bytes)
            with bar(f"exporting {checkpoint.path}", planned.tensor_bytes) as progress:
                export(checkpoint, options.out, planned, progress)
        size, files = format_bytes(planned.tensor_bytes), len(planned.files)
        print(f"{options.out}: {len(planned.source)} tensors, {size} of {options.dtype} in {files} files")

    parser.add_argument("checkpoint", type=Path, metavar="CKPT", help=CHECKPOINT)
    parser.add_argument("out", type=Path, metavar="OUT", help="a new folder")
    parser.add_argument("--dtype", choices=EXPORTED, default="bf16")
    parser.add_argument("--shard-bytes", type=int, default=SHARD_BYTES, help="of tensors in a file")
    parser.set_defaults(run=run)


def _inspect(parser: argparse.ArgumentParser) -> None:
    def run(options: argparse.Namespace) -> None:
        path, to_read = options.checkpoint, bytes_of(options.checkpoint) if options.verify else 0
        with bar(f"verifying {path}", to_read) as progress:
            inspected = inspect(path, verify=options.verify, progress=progress)
        show(inspected.tables)
        if inspected.wrong:
            raise RunError("\n       ".join(inspected.wrong))
        if options.verify:
            print(f"\nverified: all {format_bytes(to_read)} are what was written")

    parser.add_argument("checkpoint", type=Path, metavar="CKPT", help="a checkpoint's folder, or the folder of several")
    parser.add_argument("--verify", action="store_true", help="read everything; exit code 1 if anything is damaged")
    parser.set_defaults(run=run)


if __name__ == "__main__":
    main()
