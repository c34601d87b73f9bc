"""Command `dzero train`, also `python train.py`: Hydra composes the settings, and the launcher runs them."""

from __future__ import annotations

import sys
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from dzero import config, overrides
from dzero.config import CONF, RunConfig
from dzero.errors import RunError
from dzero.launch.launcher import start
from dzero.launch.warm_process import WarmProcess, found
from dzero.precedence import Typed


def train(warm: WarmProcess | None) -> None:
    """Run the command line in `sys.argv`.

    Args:
        warm: Process that checks this machine and forks the workers. None under torchrun, and if nothing is run.
    """

    @hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")
    def main(composed: DictConfig) -> None:
        """Train one run; a sweep (--multirun) continues after a run that failed."""
        this_run = HydraConfig.get()
        try:
            typed, folder = list(this_run.overrides.task), Path(this_run.runtime.output_dir)
            settled, gave_way = config.resolve_typed(composed, overrides.typed_keys(typed))
            overrides.tell(gave_way)
            if this_run.mode is RunMode.MULTIRUN:
                settled = config.saving_apart(settled, folder)
            prepare = "dzero.plan.preflight:prepare_run", settled, [*typed, *(way.word for way in gave_way)]
            run, workers = warm.call(*prepare) if warm is not None else found(prepare[0])(*prepare[1:])
            save_s = 0.0 if run.checkpoint.every is None else run.checkpoint.deadline_s
            start("dzero.trainer.trainer:train", run, folder, workers=workers, warm=warm, save_s=save_s)
        except RunError as error:
            if this_run.mode is not RunMode.MULTIRUN:
                sys.exit(f"error: {error}")
            print(f"error: {error}", file=sys.stderr)
            raise RunError("a run of the sweep failed: see above") from error

    def check_here(runs: list[RunConfig], typed: Typed) -> None:
        check = "dzero.plan.run_layout:check_all_here", runs, typed
        _ = warm.call(*check) if warm is not None else found(check[0])(*check[1:])

    config.register()
    overrides.run(main, CONF, check_here)
