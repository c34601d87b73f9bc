"""Train a model: `python train.py zero.stage=3`, or under torchrun. Settings: conf/ and dzero/config.py."""

import sys
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from dzero import config, launch
from dzero.trainer import train

CONF = Path(__file__).parent / "conf"


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")
def main(composed: DictConfig) -> None:
    """One run; with --multirun, one of several."""
    try:
        code = launch.start(train, config.resolve(composed), Path(HydraConfig.get().runtime.output_dir))
    except config.ConfigError as error:
        sys.exit(f"error: {error}")
    if code:
        sys.exit(code)


if __name__ == "__main__":
    config.register()
    try:
        config.check_overrides(sys.argv[1:], CONF)
    except config.ConfigError as error:
        sys.exit(f"error: {error}")
    sys.argv += launch.quiet_hydra()
    main()
