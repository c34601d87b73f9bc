"""Provenance of a run's settings, and the values that `auto` settings resolve to."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from dzero.config import RunConfig
from dzero.hardware import dtype_name
from dzero.overrides import config_name
from dzero.utils.terminal import Table
from dzero.zero.layout import Layout

BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
COMMAND_LINE, EXPERIMENT = "the command line", "experiment"
GLOBAL = "# @package _global_"
"""First line of an option that sets keys of any group."""


def settings_table(config: RunConfig, settings: Sequence[str], conf: Path) -> Table:
    """Return a table of the settings that are given or differ from the default, with their origin."""
    given = {line.lstrip("+~").partition("=")[0] for line in settings}
    files, default_file = _from_files(settings, conf), f"conf/{config_name(settings, conf)[0]}.yaml"
    rows = []
    if config.hardware is not None:
        rows.append(("hardware", config.hardware.name, COMMAND_LINE if "hardware" in given else default_file))
    for key, value, default in _settings(config):
        if key in given:
            rows.append((key, str(value), COMMAND_LINE))
        elif key.startswith("hardware."):
            continue  # the node's name stands for all its figures
        elif value != default:
            rows.append((key, str(value), files.get(key, default_file)))
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
    """Return the file of conf/ that sets each key last, for the chosen configuration and options, in Hydra's order.

    An experiment chooses options that the command line does not, and its own values override those of the options.
    """
    name, settings = config_name(settings, conf)
    own = _plain(conf / f"{name}.yaml")
    entries = own.pop("defaults")
    given = {key: option for key, _, option in (line.partition("=") for line in settings) if (conf / key).is_dir()}
    chosen = {group: option for entry in entries if isinstance(entry, dict) for group, option in entry.items()} | given
    for entry in _plain(conf / EXPERIMENT / f"{chosen[EXPERIMENT]}.yaml").get("defaults", []):
        chosen |= {group.removeprefix("override /"): option for group, option in entry.items()} | given
    found: dict[str, str] = {}
    for entry in entries:
        if entry == "_self_":
            found |= dict.fromkeys(_keys(own), f"conf/{name}.yaml")
        for group in entry if isinstance(entry, dict) else ():
            if (path := conf / group / f"{chosen[group]}.yaml").exists():
                values = {key: value for key, value in _plain(path).items() if key != "defaults"}
                keys = _keys(values if GLOBAL in path.read_text() else {group: values})
                found |= dict.fromkeys(keys, f"conf/{group}/{path.name}")
    return found


def _keys(values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield the dotted names of the settings in nested `values`."""
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from _keys(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


def _plain(path: Path) -> dict[str, Any]:
    values: Any = OmegaConf.to_container(OmegaConf.load(path))
    return values if isinstance(values, dict) else {}
