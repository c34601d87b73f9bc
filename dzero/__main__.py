"""Command line `dzero COMMAND` or `python -m dzero COMMAND`. Help texts do not import torch."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

from dzero import __version__
from dzero.errors import RunError, user_errors
from dzero.launch.warm_process import WarmProcess
from dzero.utils.launched import launched
from dzero.utils.stdout import outlast_readers

HELP = {"-h", "--help"}
SHOWS = {*HELP, "-c", "--cfg", "-i", "--info", "--hydra-help", "--version", "-sc", "--shell-completion"}
"""Options with which `train` only prints something."""
CHECKPOINT = "a checkpoint's folder, or the folder above for the latest in it"
SETTINGS = "as `dzero train` takes them, such as zero.stage=3"
SHARD_BYTES = 5_000_000_000
MODULES = {
    "explain": "plan",
    "inspect": "checkpoints",
    "export": "checkpoints",
    "hardware": "machine",
    "disk-bench": "machine",
    "from-deepspeed": "from_deepspeed",
    "import-deepspeed": "import_deepspeed",
}
"""Module in `dzero/cli` of each command that is not in one of its own name."""


def main() -> None:
    """Run the command that `sys.argv` names; end with a message for errors that the user can fix."""
    outlast_readers()
    if sys.argv[1:2] == ["train"]:
        sys.argv = [f"{sys.argv[0]} train", *sys.argv[2:]]
        train()
        return
    options = parsed(sys.argv[1:])
    _guarded(lambda: _run(options))


def parsed(words: list[str]) -> argparse.Namespace:
    """Return the options of a command; `settings` begin with the configuration that --config-name selects."""
    options = _parser().parse_args(words)
    if getattr(options, "config_name", None) is not None:
        options.settings.insert(0, f"--config-name={options.config_name}")
    return options


def _run(options: argparse.Namespace) -> None:
    module = import_module(f"dzero.cli.{MODULES.get(options.command, options.command)}")
    with user_errors():
        getattr(module, options.command.replace("-", "_"))(options)


def train() -> None:
    """Train according to `sys.argv`, whose words are settings and Hydra's options."""
    outlast_readers()
    flags = {word.split("=")[0] for word in sys.argv[1:] if word.startswith("-")}
    if "--version" in flags:
        print(f"dzero {__version__}")
    elif flags & HELP:
        _guarded(lambda: import_module("dzero.cli.settings_help").show())
    elif launched() or flags & SHOWS:
        _guarded(lambda: import_module("dzero.cli.train").train(None))
    else:
        _guarded(_train_warm)


def _train_warm() -> None:
    with WarmProcess() as warm:  # imports torch while this process imports Hydra and reads the settings
        import_module("dzero.cli.train").train(warm)


def _guarded(run: Callable[[], object]) -> None:
    try:
        os.getcwd()
    except FileNotFoundError:
        sys.exit("error: the working directory is gone: cd to one that exists")
    try:
        run()
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except RunError as error:
        sys.exit(f"error: {error}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dzero",
        description="Train models larger than their memory: ZeRO stages 0 to 3, offload to host and disk.",
        epilog="dzero COMMAND --help tells a command's options; dzero train --help tells every setting of a run.",
    )
    parser.add_argument("--version", action="version", version=f"dzero {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", title="commands")
    commands.add_parser("train", help="train a model; the same as python train.py", add_help=False)
    _plan(
        commands.add_parser(
            "plan", help="predict memory, traffic and seconds of a run, on hardware that need not be here"
        )
    )
    _explain(
        commands.add_parser("explain", help="show what settings come to: units, placements, a step's work in order")
    )
    _verify(commands.add_parser("verify", help="compare a run's first steps with stage 0 on the device, bit by bit"))
    _tokenize(commands.add_parser("tokenize", help="tokenize conversations ahead of a run, and show what will count"))
    _inspect(commands.add_parser("inspect", help="show what is in a checkpoint, or in a folder of them"))
    _export(commands.add_parser("export", help="write a checkpoint as safetensors that transformers loads"))
    _from_deepspeed(commands.add_parser("from-deepspeed", help="translate a DeepSpeed configuration, key by key"))
    _import_deepspeed(
        commands.add_parser("import-deepspeed", help="turn a checkpoint of DeepSpeed into one that runs resume from")
    )
    _hardware(commands.add_parser("hardware", help="measure this machine once, for predictions"))
    _disk_bench(commands.add_parser("disk-bench", help="measure scratch disks, and find the settings that suit them"))
    return parser


def _whole(word: str) -> int:
    """Parse a whole number of at least 1."""
    if not (word.isdecimal() and int(word) >= 1):
        raise argparse.ArgumentTypeError(f"{word!r} is no whole number of at least 1")
    return int(word)


def _plan(parser: argparse.ArgumentParser) -> None:
    _settings(parser, "; mesh.dp=RANKS, hardware=NODE (conf/hardware). Exit code 1 where it does not fit")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="tiers, the device, and lanes through a step")
    parser.add_argument("--tensorboard", type=Path, metavar="DIR", help="tables and picture, for tensorboard --logdir")


def _explain(parser: argparse.ArgumentParser) -> None:
    _settings(parser, "; mesh.dp=RANKS")


def _verify(parser: argparse.ArgumentParser) -> None:
    _settings(parser, ", and verify.steps=K (5). Exit code 0: they agree, 1: they differ, 2: not compared")


def _tokenize(parser: argparse.ArgumentParser) -> None:
    _settings(parser, "; data.path=FILES and the model, or data.tokenizer=FOLDER", config_name="finetune")


def _settings(parser: argparse.ArgumentParser, more: str, config_name: str | None = None) -> None:
    parser.add_argument("settings", nargs="*", metavar="SETTING=VALUE", help=f"{SETTINGS}{more}")
    what = "file in conf/ with the defaults: config, or finetune"
    parser.add_argument("--config-name", metavar="NAME", default=config_name, help=what)


def _inspect(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", type=Path, metavar="CKPT", help="a checkpoint's folder, or the folder of several")
    parser.add_argument("--verify", action="store_true", help="read everything; exit code 1 if anything is damaged")


def _export(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", type=Path, metavar="CKPT", help=CHECKPOINT)
    parser.add_argument("out", type=Path, metavar="OUT", help="a new folder")
    parser.add_argument("--dtype", choices=("bf16", "fp16", "fp32"), default="bf16")
    parser.add_argument("--merge", action="store_true", help="of adapters: the whole model, with them merged in")
    parser.add_argument("--base", metavar="FOLDER", help="with --merge: their model, if it is elsewhere now")
    parser.add_argument("--shard-bytes", type=_whole, default=SHARD_BYTES, help="bytes of tensors in a file")


def _from_deepspeed(parser: argparse.ArgumentParser) -> None:
    told = "its JSON file. Exit code 0: every key is taken or needless, 3: one is refused, 1: it cannot be read"
    parser.add_argument("config", type=Path, metavar="CONFIG", help=told)
    parser.add_argument("--ranks", type=_whole, help="processes that train, by which batch sizes are checked")
    parser.add_argument("--json", action="store_true", help="print the same as JSON")


def _import_deepspeed(parser: argparse.ArgumentParser) -> None:
    folder = "a universal checkpoint, as DeepSpeed's ds_to_universal writes it, or the weights of its zero_to_fp32"
    parser.add_argument("folder", type=Path, metavar="FOLDER", help=folder)
    parser.add_argument("target", type=Path, metavar="TARGET", help="a new folder of checkpoints")
    model = "folder with config.json, for a run of model=hf; without it, parameters keep their names"
    parser.add_argument("--model", metavar="FOLDER", help=model)
    parser.add_argument("--step", type=_whole, help="step of the checkpoint; default: that of the run of DeepSpeed")


def _hardware(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--measure", action="store_true", help="measure again, although it was measured")
    parser.add_argument("--ranks", type=_whole, help="ranks at work; default: one per GPU, or two without")
    disk = "a directory on each scratch disk; default: ."
    parser.add_argument("--disk", nargs="+", default=["."], metavar="PATH", help=disk)


def _disk_bench(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("paths", nargs="*", default=["."], metavar="PATH", help="a directory on each disk; default: .")
    parser.add_argument("--mib", type=_whole, default=512, help="MiB written and read at a time")
    parser.add_argument("--rounds", type=_whole, default=3)


if __name__ == "__main__":
    main()
