"""Provenance of a run's settings, and the values that `auto` settings resolve to."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from dzero.config import RunConfig
from dzero.hardware import dtype_name
from dzero.utils.terminal import Table
from dzero.zero.layout import Layout

BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
COMMAND_LINE, EXPERIMENT = "the command line", "experiment"


def settings_table(config: RunConfig, settings: Sequence[str], conf: Path) -> Table:
    """Return a table of the settings that are given or differ from the default, with their origin."""
    given = {line.lstrip("+~").partition("=")[0] for line in settings}
    files = _from_files(settings, conf)
    rows = []
    if config.hardware is not None:
        rows.append(("hardware", config.hardware.name, COMMAND_LINE if "hardware" in given else "conf/config.yaml"))
    for key, value, default in _settings(config):
        if key in given:
            rows.append((key, str(value), COMMAND_LINE))
        elif key.startswith("hardware."):
            continue  # the node's name stands for all its figures
        elif value != default:
            rows.append((key, str(value), files.get(key, "conf/config.yaml")))
    return Table("settings that are not the defaults", ("setting", "value", "from"), tuple(rows), left=3)


def auto_values(config: RunConfig, layout: Layout, device_type: str, where: str) -> Table:
    """Return a table of `auto` settings and their resolved values; `where` is the machine in words."""
    backend = BACKENDS[device_type]
    exact = f"exact, over {backend}: fp32 sums in rank order, the same bits at every stage"
    reduction = exact if layout.exact else f"native: {backend}'s own sums, in its own order"
    chosen = (
        ("zero.reduction", config.zero.reduction, "auto", reduction),
        ("precision.reduce", config.precision.reduce, "auto", f"{dtype_name(layout.wire)} on the wire"),
        ("precision.grad", config.precision.grad, "auto", f"{dtype_name(layout.grad.dtype)} where gradients are kept"),
        ("offload.overlap", config.offload.overlap, "auto", layout.offload.mode),
        ("train.accumulate", config.train.accumulate, None, f"{layout.microbatches} microbatches per step"),
    )
    off_device = layout.master.tier != "device"
    rows = [
        (key, "null" if value is None else str(value), meaning)
        for key, value, asks, meaning in chosen
        if value == asks and (key != "offload.overlap" or off_device)
    ]
    return Table(f"settings that choose by themselves, on {where}", ("setting", "value", "is"), tuple(rows), left=3)


def _settings(config: Any, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield (key, value, default) of all settings, group by group."""
    for field in dataclasses.fields(config):
        value, key = getattr(config, field.name), f"{prefix}{field.name}"
        if dataclasses.is_dataclass(value):
            yield from _settings(value, f"{key}.")
            continue
        default = field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
        yield key, value, None if default is dataclasses.MISSING else default


def _from_files(settings: Sequence[str], conf: Path) -> dict[str, str]:
    """Return the file of conf/ that sets each key, for the chosen options.

    An experiment chooses options that the command line does not, and its own values override those of the options.
    """
    chosen: dict[str, str] = {}
    for entry in OmegaConf.load(conf / "config.yaml").defaults:
        if isinstance(entry, DictConfig):
            chosen |= {str(group): str(option) for group, option in entry.items()}
    given = {key: option for key, _, option in (line.partition("=") for line in settings) if (conf / key).is_dir()}
    experiment = f"{(chosen | given).pop(EXPERIMENT)}.yaml"
    made = _plain(conf / EXPERIMENT / experiment)
    for entry in made.pop("defaults", []):
        chosen |= {group.removeprefix("override /"): option for group, option in entry.items()}
    found: dict[str, str] = {}
    for group, option in (chosen | given).items():
        if group != EXPERIMENT and (path := conf / group / f"{option}.yaml").exists():
            found |= {f"{group}.{key}": f"conf/{group}/{option}.yaml" for key in _plain(path)}
    return found | {f"{group}.{key}": f"conf/{EXPERIMENT}/{experiment}" for group in made for key in made[group]}


def _plain(path: Path) -> dict[str, Any]:
    values: Any = OmegaConf.to_container(OmegaConf.load(path))
    return values if isinstance(values, dict) else {}
