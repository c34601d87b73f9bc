"""Settings of parameter groups in checkpoints: whatever a group holds besides its parameters.

Schedules and callbacks keep values of their own in groups (`initial_lr`, `max_momentum`, a changing `weight_decay`), so
no list of keys is complete. A checkpoint holds every setting, beside the names of the group's parameters, and a run
that resumes has the saved settings, as after `torch.optim.Optimizer.load_state_dict`. Only `KERNELS` are of the run.

    saved        in a group of the optimizer
    number       number; a tensor that the group has there keeps its identity, and gets the value
    list         list; a tuple where the group has one
    "...", null  the same
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch

from dzero.optim.config import MOST_RATE
from dzero.utils.ranges import number

KERNELS = ("fused", "foreach")
"""Settings that choose among torch's own kernels, and change no number that a user would see."""
BEGINNINGS = {"lr": "initial_lr"}
"""Settings from which a schedule computes others, by the setting; a run that overrides one has its own of both."""
Group = Mapping[str, Any]


class UnfitSettings(ValueError):
    """A setting of a saved parameter group that no update can use."""


def is_number(value: object) -> bool:
    """Return whether a setting is a number, or a tensor of one."""
    if isinstance(value, torch.Tensor):
        return value.numel() == 1
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def check_rate(key: str, settings: Group) -> None:
    """Raise ValueError if a setting, where it is set, is no rate: a number from 0 to `MOST_RATE`."""
    if key in settings and not (is_number(value := settings[key]) and value in number(MOST_RATE)):
        what = "a number that is not negative" if is_number(value) and value < 0 else f"a number up to {MOST_RATE:g}"
        raise ValueError(f"{key}={value!r}: pass {what}")


def checked_norm(max_norm: float | None) -> float | None:
    """Return a norm to clip to; raise ValueError if it is neither None nor a number above 0."""
    if max_norm is not None and not (is_number(max_norm) and max_norm > 0):
        raise ValueError(f"max_norm={max_norm!r}: must be a number above 0, or None for no clipping")
    return max_norm


def saved_groups(groups: Iterable[Group], names: Iterable[list[str]]) -> list[dict[str, Any]]:
    """Return the settings of groups as JSON values, each with the `names` of its parameters as `params`.

    Raises:
        ValueError: A setting has no form in JSON, such as a function.
    """
    return [
        {**{key: _plain(key, value) for key, value in group.items() if key != "params"}, "params": of_group}
        for group, of_group in zip(groups, names, strict=True)
    ]


def restore_groups(
    groups: Sequence[dict[str, Any]], names: Iterable[list[str]], saved: Iterable[Group], keep: Collection[str] = ()
) -> None:
    """Give groups the settings that were saved with their parameters, which may have been grouped in another way.

    Args:
        groups: Groups of an optimizer. One whose parameters were in no saved group stays as it is.
        names: Names of the parameters of each group.
        saved: Groups as `saved_groups` returns them.
        keep: Settings that stay as the groups have them.

    Raises:
        ValueError: Parameters of one group were saved with different settings, or `keep` has a setting that neither
            side has. Nothing has been changed.
    """
    saved_of = {name: group for group in saved for name in group["params"]}
    every_key = {key for group in (*groups, *saved_of.values()) for key in group} - {"params"}
    if saved_of and (unknown := sorted({*keep} - every_key)):
        raise ValueError(f"the parameter groups have no setting {unknown[0]!r} to keep: choose of {sorted(every_key)}")
    own_keys = {"params", *KERNELS, *keep, *(BEGINNINGS[key] for key in keep if key in BEGINNINGS)}
    restored = [_common([name for name in of_group if name in saved_of], saved_of, own_keys) for of_group in names]
    for group, settings in zip(groups, restored, strict=True):
        for key, value in settings.items():
            set_setting(group, key, value)


def set_setting(group: dict[str, Any], key: str, value: Any) -> None:
    """Set a group's setting to a saved value, which is a number where the group may have a tensor."""
    present = group.get(key)
    if isinstance(present, torch.Tensor) and isinstance(value, (int, float)):
        present.fill_(value)
    elif isinstance(value, list) and isinstance(present, tuple):
        group[key] = tuple(value)
    else:
        group[key] = value


def _common(names: Sequence[str], saved_of: Mapping[str, Group], own_keys: Collection[str]) -> dict[str, Any]:
    """Return the settings, without `own_keys`, that were saved with all of the parameters `names`."""
    settings = [{key: value for key, value in saved_of[name].items() if key not in own_keys} for name in names]
    for name, others in zip(names, settings, strict=True):
        if others != settings[0]:
            differing = sorted(key for key in {*others, *settings[0]} if others.get(key) != settings[0].get(key))
            raise ValueError(
                f"{names[0]} and {name} are in one parameter group, and were saved with different {differing}: group "
                f"them as the saved run did, or keep this run's by resume(..., override={differing})"
            )
    return settings[0] if settings else {}


def _plain(key: str, value: Any) -> Any:
    """Return a setting as a JSON value; a tensor with one element, as a rate may be, as a number."""
    if isinstance(value, (list, tuple)):
        return [_plain(key, element) for element in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if hasattr(value, "item") and torch.Size(value.shape).numel() == 1:  # a tensor, or a number of NumPy
        return value.item()
    raise ValueError(
        f"a parameter group has {key}={value!r}, which a checkpoint cannot hold: keep numbers, strings and lists there"
    )
