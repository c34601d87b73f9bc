"""Folder names of runs, from the settings that set them apart; TensorBoard shows these names.

python train.py zero.stage=3 data.path=/texts/a.txt            15-04-05-678901_zero.stage=3_data.path=a.txt
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
NO_WORD = re.compile(r"[^A-Za-z0-9._=-]+")
"""What a shell or Hydra does not take as it is; `overrides.spelt_out` takes care of "="."""


def register() -> None:
    """Register the OmegaConf resolvers of conf/config.yaml.

    `run_name`: number and settings of a run of a sweep -> folder name. `settings_name`: settings of a run -> end of a
    folder name.
    """
    OmegaConf.register_new_resolver(
        "run_name", lambda number, given: run_name(number, given, sys.argv[1:]), replace=True
    )
    OmegaConf.register_new_resolver("settings_name", settings_name, replace=True)


def settings_name(given: Sequence[str]) -> str:
    """Return the settings `key=value` as the end of a folder name, each after "_"; of paths, the last part alone.

    Settings for which a name of `MOST_CHARACTERS` has no room are counted at its end. The name can stand in another
    setting, such as `resume=FOLDER`, without quotes.
    """
    name, named = "", 0
    for setting in given:
        key, equals, value = setting.lstrip("+~").partition("=")
        word = NO_WORD.sub("-", key + equals + value.strip("'\"").rstrip("/").rpartition("/")[2]).strip("-")
        if len(name) + len(word) < MOST_CHARACTERS:
            name, named = f"{name}_{word}", named + 1
    return name if named == len(given) else f"{name}_and-{len(given) - named}-more"


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
