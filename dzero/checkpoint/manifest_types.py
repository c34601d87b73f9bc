"""What a manifest holds besides tensors, as types, so that what a file says is checked before it is used."""

from __future__ import annotations

from typing import Any, NotRequired, TypedDict

import msgspec

from dzero.checkpoint.errors import CheckpointError

Number = int | float


class SavedGroup(TypedDict):
    """An optimizer's group of parameters; its settings, which differ from rule to rule, are left open."""

    params: list[str]


class SavedOptim(TypedDict):
    """An optimizer's numbers. `states`: by parameter. `scaler`: nothing of a fixed scale."""

    rule: str
    groups: list[SavedGroup]
    scaler: dict[str, Number]
    skipped_steps: int
    consecutive_skips: int
    states: dict[str, dict[str, Number]]
    updates: NotRequired[int]


class SavedState(TypedDict):
    """A checkpoint's state that is no tensor. `extra`: what the training loop gave."""

    optim: SavedOptim
    extra: dict[str, Any]


class SavedConfig(TypedDict, total=False):
    """The settings of a saved run that a resumed run reads; the others are only compared."""

    mesh: dict[str, Any]


class SavedExtra(TypedDict):
    """The `extra` of train.py."""

    stream: dict[str, int]
    step_sequences: int
    config: SavedConfig


def check_state(path: str, state: dict[str, Any]) -> None:
    """Raises CheckpointError where a manifest's `state` is not what a save of `Checkpointer` writes."""
    _check(path, "state", state, SavedState)
    scaler = state["optim"]["scaler"]
    if scaler and scaler.keys() != {"scale", "good_steps", "bad_steps"}:
        raise CheckpointError(path, f"state.optim.scaler has {sorted(scaler)}, no scale of a loss")


def check_extra(path: str, extra: dict[str, Any]) -> None:
    """Raises CheckpointError where `state.extra` is not what train.py saves."""
    _check(path, "state.extra", extra, SavedExtra)


def _check(path: str, key: str, value: Any, kind: Any) -> None:
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        what, _, where = str(error).partition(" - at `$")
        raise CheckpointError(path, f"{key}{where.rstrip('`')}: {what}; it was not saved by this program") from error
