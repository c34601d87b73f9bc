"""What does the one-step delay of offload.overlap=delayed cost in loss? The default run, exact and delayed.

    python benchmarks/delayed.py

    side              offload.overlap   offload.delay_warmup_steps
    exact             forward           -
    delayed after 40  delayed           40, the default
    delayed at once   delayed           0

The run of `python train.py` (model, data, steps, learning rate) on one process. Same seed, hence the same batches and
the same first weights: the curves part where the delay begins.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from hydra import compose, initialize_config_dir
from report import append_row, plot_lines, table, write_table

from dzero import config
from dzero.trainer.trainer import Trainer

CONF = Path(__file__).parents[1] / "conf"
SIDES = {
    "exact": [],
    "delayed after 40": ["offload.overlap=delayed"],
    "delayed at once": ["offload.overlap=delayed", "offload.delay_warmup_steps=0"],
}
SMOOTHED_STEPS = 10


def losses_of(settings: list[str], folder: Path) -> tuple[list[float], float | None]:
    """The training loss of every step, and the last held-out loss."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        run = config.resolve(compose("config", overrides=["offload=host", *settings]))
    trainer = Trainer(run, folder, torch.device("cpu"))
    held_out = trainer.run().held_out_loss
    return trainer.recorder.losses, held_out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--set", nargs="*", default=[], help="settings of all sides, e.g. train.steps=100")
    options = parser.parse_args()
    config.register()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with tempfile.TemporaryDirectory() as folder:
            runs = {side: losses_of([*options.set, *settings], Path(folder) / side) for side, settings in SIDES.items()}
    finally:
        dist.destroy_process_group()
    rows = []
    for side, (losses, held_out) in runs.items():
        parts = next((i for i, (a, b) in enumerate(zip(losses, runs["exact"][0], strict=True), 1) if a != b), None)
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
    write_table("delayed", table(header, rows))
    sides = {side: {"losses": losses, "held_out": held_out} for side, (losses, held_out) in runs.items()}
    append_row("delayed", {"config": {"settings": options.set}, "sides": sides})
    plot_lines("delayed", "training loss of the default run", {side: losses for side, (losses, _) in runs.items()})


if __name__ == "__main__":
    main()
