"""The step of a `torch.optim` class, which runs several times in one step of training, each for some parameters.

Off the device it runs for one unit after the other, and of whole parameters for one after the other. What a class
counts by itself in its groups or in attributes, such as its steps, is therefore set back before each run. All runs of
a step then see the same numbers, and what they make of them is kept once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from threading import Lock
from typing import Any

import torch
from torch import nn

Values = dict[str, Any]


class ClassStep:
    """Steps of a class.

    Attributes:
        inner: The class, set once it has been made.
        in_use: Held while the class runs, which lanes of the host and the main thread share.
        counted: Keys of what the class has written into its groups in any step.
    """

    inner: torch.optim.Optimizer

    def __init__(self) -> None:
        self.in_use, self.counted = Lock(), set[str]()
        self._groups: list[dict[str, Any]] = []
        self._before: list[Values] = []
        self._made: list[Values] = []
        self._has_run = True

    def regroup(self, params: Sequence[list[nn.Parameter]]) -> None:
        """Let the class have groups of these parameters."""
        own = self.inner.param_groups  # the same groups and lists, which the class may refer to
        own[len(params) :] = [{"params": []} for _ in params[len(own) :]]
        for group, targets in zip(own, params, strict=True):
            group["params"][:] = targets

    def begin(self, groups: Sequence[dict[str, Any]]) -> None:
        """Begin a step of training, with the settings in `groups`, which are those of the class after `regroup`."""
        self._groups = [*groups]
        self._before = [_settings(group) for group in groups] + [_numbers(vars(self.inner))]
        self._made = [{} for _ in self._before]
        self._has_run = False

    def run(self) -> None:
        """Run the class's step for the parameters that have gradients; hold `in_use`.

        Raises:
            RuntimeError: The class makes another number in a group than in an earlier run of the same step.
        """
        for group, before in zip(self.inner.param_groups, self._before, strict=False):
            params = group["params"]
            group.clear()
            group.update({"params": params} | {key: _copied(value) for key, value in before.items()})
        for key in _numbers(vars(self.inner)).keys() - self._before[-1].keys():
            delattr(self.inner, key)  # made in an earlier run
        vars(self.inner).update(self._before[-1])
        self._has_run = True
        self.inner.step()
        after = [*map(_settings, self.inner.param_groups), _numbers(vars(self.inner))]
        for before, made, now in zip(self._before, self._made, after, strict=True):
            for key, value in now.items():
                if not _same(value, before.get(key)) and not _same(value, made.setdefault(key, value)):
                    raise RuntimeError(
                        f"{type(self.inner).__name__} makes {key}={made[key]} in its group for some parameters and "
                        f"{value} for others, so it mixes parameters, which are updated one after the other here: "
                        "take zero.stage=0 with all states on the device, and leave elementwise out"
                    )

    def finish(self) -> None:
        """End a step of training: write what the class made into the groups, except where others have changed it.

        Where no parameter of this rank had a gradient, the class runs once without any, so that it counts the step.
        """
        if not self._has_run:
            self.run()
        for group, before, made in zip(self._groups, self._before, self._made, strict=False):
            group.update({key: value for key, value in made.items() if _same(group.get(key), before.get(key))})
            self.counted |= made.keys()
        if self._made:
            vars(self.inner).update(self._made[-1])
        self._made = [{} for _ in self._made]


def _settings(group: Mapping[str, Any]) -> Values:
    return {key: _copied(value) for key, value in group.items() if key != "params"}


def _numbers(values: Mapping[str, Any]) -> Values:
    return {key: value for key, value in values.items() if isinstance(value, (bool, int, float))}


def _on_host(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == "cpu"


def _copied(value: Any) -> Any:
    return value.clone() if _on_host(value) else value


def _same(one: Any, other: Any) -> bool:
    """Return whether two settings are equal; tensors on a device are compared by identity, to make nobody wait."""
    if one is other:
        return True
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        if not _on_host(one) or not _on_host(other) or one.shape != other.shape:
            return False
        return bool(((one == other) | ((one != one) & (other != other))).all())
    return bool(one == other) or bool(one != one and other != other)  # not a number
