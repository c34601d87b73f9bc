"""Train a model: `python train.py zero.stage=3`, or under torchrun. Settings: conf/ and dzero/config.py."""

import sys
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from dzero import command_line, config, fitting, launch
from dzero.errors import RunError
from dzero.trainer import train

CONF = Path(__file__).parent / "conf"


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")
def main(composed: DictConfig) -> None:
    """One run; with --multirun one of several, of which one that fails does not keep the others from running."""
    this_run = HydraConfig.get()
    try:
        run = fitting.settled(config.resolve(composed), this_run.overrides.task)
        launch.start(train, run, Path(this_run.runtime.output_dir), workers=run.worker_count)
    except RunError as error:
        if this_run.mode is not RunMode.MULTIRUN:
            sys.exit(f"error: {error}")
        print(f"error: {error}", file=sys.stderr)
        raise RunError("a run of the sweep failed: see above") from error


if __name__ == "__main__":
    config.register()
    command_line.run(main, CONF)
