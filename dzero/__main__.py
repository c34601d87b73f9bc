"""python -m dzero: tools without a run."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from dzero.checkpoint.contents import Checkpoint
from dzero.checkpoint.export import EXPORTED, SHARD_BYTES, export
from dzero.checkpoint.export import plan as plan_export
from dzero.checkpoint.folder import checkpoint_at
from dzero.checkpoint.inspect import bytes_of, inspect
from dzero.choosing import choose, chosen
from dzero.command_line import composed
from dzero.errors import RunError, user_errors
from dzero.hardware import format_bytes
from dzero.monitor.board import TensorBoardSink
from dzero.offload.disk_speed import bench
from dzero.plan.assumptions import read_papers
from dzero.plan.machine_tables import as_yaml, machine_table
from dzero.plan.measure import cached, measured
from dzero.plan.paper_tables import paper_tables
from dzero.plan.picture import draw
from dzero.plan.search_tables import ranking_tables
from dzero.plan.tables import tables
from dzero.planning import explained, hardware_of, onto_board, planned
from dzero.terminal import bar, show
from dzero.verify.verify import CONF, verify

CHECKPOINT = "a checkpoint's folder, or the folder above for the latest in it"


def main() -> None:
    """The command line. What the user can mend ends it with a message."""
    parser = argparse.ArgumentParser(prog="python -m dzero", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    _disk_bench(commands.add_parser("disk-bench", help="how fast scratch disks are, and the settings that suit them"))
    _export(commands.add_parser("export", help="a checkpoint as safetensors that transformers loads"))
    _inspect(commands.add_parser("inspect", help="what is in a checkpoint, or in a folder of them"))
    _explain(commands.add_parser("explain", help="what settings come to: units, placements, a step's work in order"))
    _plan(commands.add_parser("plan", help="memory, traffic and pace of a run on hardware that need not be here"))
    _verify(commands.add_parser("verify", help="a run's first steps against stage 0 with every state on the device"))
    _hardware(commands.add_parser("hardware", help="this machine in figures, measured once, as predictions use them"))
    _papers(commands.add_parser("papers", help="the ZeRO papers' tables from their assumptions, beside dzero's bytes"))
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
            files_of = plan_export(checkpoint, options.dtype, options.shard_bytes)
            with bar(f"exporting {checkpoint.path}", files_of.tensor_bytes) as progress:
                export(checkpoint, options.out, files_of, progress)
        size, files = format_bytes(files_of.tensor_bytes), len(files_of.files)
        print(f"{options.out}: {len(files_of.source)} tensors, {size} of {options.dtype} in {files} files")

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


def _explain(parser: argparse.ArgumentParser) -> None:
    def run(options: argparse.Namespace) -> None:
        config = chosen(composed(options.settings, CONF, here=False), options.settings)
        shown, off_device = explained(config, options.settings, CONF)
        show(shown)
        if off_device:
            print("\nslots and actions off the device, in order\n  " + "\n  ".join(off_device), flush=True)

    parser.add_argument("settings", nargs="*", metavar="SETTING=VALUE", help="as train.py takes them; mesh.dp=RANKS")
    parser.set_defaults(run=run)


def _plan(parser: argparse.ArgumentParser) -> None:
    def run(options: argparse.Namespace) -> None:
        config = composed(options.settings, CONF, here=False)
        if config.auto:
            choice = choose(config, options.settings)
            show(ranking_tables(choice.ranking, choice.defaults))
            print(f"\n{choice.line}\n", flush=True)
            found = choice.ranking.best[0].forecast
        else:
            found = planned(config, hardware_of(config))
        show(tables(found))
        if options.picture is not None:
            draw(found, options.picture)
        if options.tensorboard is not None:
            board = TensorBoardSink(options.tensorboard)
            lacks = onto_board(board, found)
            board.close()
            if lacks:
                print(lacks, file=sys.stderr)
        print(f"\n{found.verdict()}", flush=True)
        sys.exit(0 if found.fits else 1)

    what = "as train.py takes them; mesh.dp=RANKS, hardware=NODE (conf/hardware). Exit code 1 where it does not fit"
    parser.add_argument("settings", nargs="*", metavar="SETTING=VALUE", help=what)
    parser.add_argument("--picture", type=Path, metavar="FILE", help="tiers, the device, and lanes through a step")
    parser.add_argument("--tensorboard", type=Path, metavar="DIR", help="tables and picture, for tensorboard --logdir")
    parser.set_defaults(run=run)


def _verify(parser: argparse.ArgumentParser) -> None:
    def run(options: argparse.Namespace) -> None:
        sys.exit(verify(options.settings))

    what = "as train.py takes them, and verify.steps=K (5). Exit code 0: they agree, 1: they differ, 2: not compared"
    parser.add_argument("settings", nargs="*", metavar="SETTING=VALUE", help=what)
    parser.set_defaults(run=run)


def _hardware(parser: argparse.ArgumentParser) -> None:
    def run(options: argparse.Namespace) -> None:
        known = None if options.measure else cached(options.ranks)
        if known is None:
            print("measuring, for about half a minute", file=sys.stderr)
        measurement = known or measured(options.ranks, disk=options.disk)
        show([machine_table(measurement)])
        print(f"\nAs a file, conf/hardware/<name>.yaml:\n\n{as_yaml(measurement)}")

    parser.add_argument("--measure", action="store_true", help="measure again, although it was measured")
    parser.add_argument("--ranks", type=int, help="ranks at work; default: one per GPU, or two without")
    parser.add_argument("--disk", default=".", metavar="PATH", help="a directory on the scratch disk; default: .")
    parser.set_defaults(run=run)


def _papers(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=lambda _: show(paper_tables(read_papers())))


if __name__ == "__main__":
    main()
