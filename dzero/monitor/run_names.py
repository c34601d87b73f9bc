"""Folder names for the runs of a sweep, from the settings that differ between them; TensorBoard shows these names.

python train.py --multirun zero.stage=0,3 train.steps=100      zero.stage=0    zero.stage=3
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import OmegaConf

MOST_CHARACTERS = 120
"""Limit for a folder name; file systems allow 255 bytes."""
UNSAFE = re.compile(r"[^A-Za-z0-9._=,+-]+")


def register() -> None:
    """Register the OmegaConf resolver `run_name` for conf/config.yaml: number and settings of a run -> folder name."""
    OmegaConf.register_new_resolver(
        "run_name", lambda number, given: run_name(number, given, sys.argv[1:]), replace=True
    )


def run_name(number: int, given: Sequence[str], command_line: Sequence[str]) -> str:
    """Return the folder name of the run of this `number` in its sweep, which is unique in the sweep.

    Of the settings that are `given`, `key=value`, those with several values on the sweep's `command_line` make up the
    name. If none can be determined, all settings do.
    """
    swept = _swept(command_line)
    keys = {override.key_or_group for override in swept}
    chosen = [setting for setting in given if setting.lstrip("+").partition("=")[0] in keys] or [*given]
    wanted = ",".join(chosen)
    name = UNSAFE.sub("_", wanted)[:MOST_CHARACTERS]
    alone = name == wanted and bool(swept) and not any(map(_repeats, swept))
    return name if alone else f"{name},{number}".lstrip(",")


def _swept(command_line: Sequence[str]) -> list[Override]:
    words = [word for word in command_line if "=" in word and not word.startswith("-")]
    try:
        return [each for each in OverridesParser.create().parse_overrides(words) if each.is_sweep_override()]
    except HydraException:
        return []


def _repeats(override: Override) -> bool:
    """Return whether two runs may get the same value; true for a pattern, whose matches are unknown."""
    if not override.is_discrete_sweep():
        return True
    try:
        values = [*override.sweep_string_iterator()]
    except HydraException:
        return True
    return len(set(values)) < len(values)
