"""The default run of `train.py` with other settings on each side, compared by its losses.

Model, data, steps and learning rate are those of `python train.py`. Same seed, hence the same batches and the same
first weights: the curves part where the settings begin to matter.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

from children import Children, process_group
from report import append_row, plot_lines, table, write_table

CONF = Path(__file__).parents[1] / "conf"
SMOOTHED_STEPS = 10


def losses_of(settings: Sequence[str], folder: Path) -> tuple[list[float], float | None]:
    """The training loss of every step, and the last held-out loss."""
    import torch
    from hydra import compose, initialize_config_dir

    from dzero import config
    from dzero.trainer.trainer import Trainer

    config.register()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        run = config.resolve(compose("config", overrides=[*settings]))
    trainer = Trainer(run, folder, torch.device("cpu"))
    held_out = trainer.run().held_out_loss
    return trainer.recorder.losses, held_out


def serve(pipe: Connection, sides: Mapping[str, Sequence[str]], folder: Path, ranks: int, rank: int) -> None:
    """A child process: one rank, which runs all sides in turn."""
    with process_group(rank, ranks, str(folder / "rendezvous")):
        pipe.send({side: losses_of(settings, folder / side) for side, settings in sides.items()})


def compare(name: str, description: str | None, sides: Mapping[str, Sequence[str]], *, ranks: int = 1) -> None:
    """Run every side on `ranks` processes; write table, row and plot `name`, which compare with the first side."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--set", nargs="*", default=[], help="settings of all sides, e.g. train.steps=100")
    options = parser.parse_args()
    sides = {side: [*options.set, *settings] for side, settings in sides.items()}
    with tempfile.TemporaryDirectory() as folder:
        children = Children(ranks, serve, sides, Path(folder), ranks)
        children.close()
    runs = children.first[0]
    first, *_ = runs
    rows = []
    for side, (losses, held_out) in runs.items():
        parts = next((i for i, (a, b) in enumerate(zip(losses, runs[first][0], strict=True), 1) if a != b), None)
        last = sum(losses[-SMOOTHED_STEPS:]) / SMOOTHED_STEPS
        rows.append(
            (side, len(losses), parts or "never", f"{last:.3f}", "-" if held_out is None else f"{held_out:.3f}")
        )
    header = (
        "side",
        "steps",
        "first step with another loss",
        f"mean loss of the last {SMOOTHED_STEPS}",
        "held-out loss",
    )
    write_table(name, table(header, rows))
    found = {side: {"losses": losses, "held_out": held_out} for side, (losses, held_out) in runs.items()}
    append_row(name, {"config": {"settings": options.set, "ranks": ranks}, "sides": found})
    plot_lines(name, "training loss of the default run", {side: losses for side, (losses, _) in runs.items()})
