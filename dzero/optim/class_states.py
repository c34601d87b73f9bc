"""The states that a `torch.optim` class keeps for the masters of an optimizer: placed, loaded, and exported.

Every method that reads or writes tensors is called where updates find the states (`OffloadManager.visit`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from dzero.optim.base import PortableState
from dzero.optim.class_step import ClassStep
from dzero.optim.master_param import MasterParam
from dzero.optim.state_numbers import numbers_from, numbers_of

IN_GROUP = "group."
"""Start of the keys of numbers that a class counts in its groups, in a checkpoint's manifest."""


class ClassStates:
    """States of a class.

    Args:
        step: The step of the class.
        whole: Whether the class keeps the states of whole parameters, on their owners; otherwise those of shards.
    """

    def __init__(self, step: ClassStep, *, whole: bool) -> None:
        self._step, self._whole = step, whole

    def of(self, held: MasterParam) -> Mapping[str, Any]:
        """Return the states of a parameter on this rank."""
        return {} if held.target is None else self._step.inner.state.get(held.target, {})

    def tensors_of(self, held: MasterParam) -> list[torch.Tensor]:
        """Return those of its states that are tensors with dims."""
        return [value for value in self.of(held).values() if isinstance(value, torch.Tensor) and value.ndim]

    def place(self, some: Iterable[MasterParam]) -> None:
        """Move states that the class has made to their places."""
        for held in some:
            if held.target is not None and held.target in self._step.inner.state:
                held.place(self._step.inner.state[held.target])

    def make(self, some: Sequence[MasterParam]) -> None:
        """Let the class make the states of shards, by an update with zero gradients."""
        for held in some:
            held.master.grad = torch.zeros_like(held.master)
        self._step.run()
        for held in some:
            held.master.grad = None
        self.place(some)

    def load(self, held: MasterParam, saved: Mapping[str, Any]) -> None:
        """Copy the master and the states of a parameter from plain tensors and numbers of a state dict."""
        if "master" in saved:
            held.master.data.copy_(saved["master"])
        self._replace(held, {key: value for key, value in saved.items() if key != "master"})

    def _replace(self, held: MasterParam, states: Mapping[str, Any]) -> None:
        """Replace the states of a parameter by copies of `states`."""
        if held.target is not None:
            self._step.inner.state[held.target] = {
                key: value.to(held.master.device, copy=True) if isinstance(value, torch.Tensor) else value
                for key, value in states.items()
            }
            self.place([held])

    def export(self, held: MasterParam) -> Iterator[tuple[str, torch.Tensor, tuple[int, ...] | None]]:
        """Yield key, flat tensor, and shape if it is unsharded, of the master and of each state.

        Raises:
            TypeError: A state of a shard has another shape.
        """
        yield "master", held.master.detach().view(-1), None
        for key, value in sorted(self.of(held).items()):  # not in the order in which they were made or loaded
            if isinstance(value, torch.Tensor) and value.ndim and self._whole:
                yield key, value.reshape(-1), tuple(value.shape)
            elif isinstance(value, torch.Tensor) and value.ndim and value.shape == held.master.shape:
                yield key, value.view(-1), None
            elif isinstance(value, torch.Tensor) and value.ndim:
                raise TypeError(
                    f"{held.name}: {type(self._step.inner).__name__} keeps the state {key!r} of shape "
                    f"{tuple(value.shape)}, and checkpoints hold tensors of the parameter's shape and numbers"
                )

    def take(self, held: MasterParam, portable: PortableState) -> None:
        """Import the master and the states of a parameter, and round the master into the working copy."""
        held.master.data.view(-1).copy_(portable.tensors["master"])
        held.write_back()
        tensors = {key: value for key, value in portable.tensors.items() if key not in ("param", "master")}
        if not self._whole:
            tensors = {key: value.view(held.master.shape) for key, value in tensors.items()}
        numbers = {key: number for key, number in portable.scalars.items() if not key.startswith(IN_GROUP)}
        if states := {**numbers_from(numbers), **tensors}:
            self._replace(held, states)
        elif held.target is not None:
            self._step.inner.state.pop(held.target, None)  # a save before the first update has no states

    def numbers(self, held: MasterParam, group: Mapping[str, Any]) -> dict[str, float]:
        """Return the numbers that the class keeps for a parameter of this rank, and what it counts in its `group`."""
        if held.target is None:
            return {}
        rule = type(self._step.inner).__name__
        counts = {key: group[key] for key in self._step.counted if key in group and _is_number(group[key])}
        return numbers_of(rule, self.of(held)) | {IN_GROUP + key: n for key, n in numbers_of(rule, counts).items()}

    def take_counts(self, group: dict[str, Any], scalars: Mapping[str, float]) -> None:
        """Write what the class counted in a parameter's `group`, from its `numbers`, into the group."""
        counts = {key.removeprefix(IN_GROUP): n for key, n in scalars.items() if key.startswith(IN_GROUP)}
        group.update(numbers_from(counts))
        self._step.counted |= numbers_from(counts).keys()


def _is_number(value: Any) -> bool:
    return isinstance(value, (bool, int, float)) or (isinstance(value, torch.Tensor) and value.ndim == 0)


def summary_of(states: Mapping[str, Any]) -> dict[str, Any]:
    """Return numbers that differ wherever states differ, in all likelihood: sums of tensors and of their squares."""
    return {
        key: (float(value.double().sum()), float(value.double().square().sum()))
        if isinstance(value, torch.Tensor)
        else value
        for key, value in states.items()
        if key != "master"
    }
