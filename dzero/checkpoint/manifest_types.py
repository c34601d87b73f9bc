"""Types of a manifest's contents other than tensors, which validate a file before its values are used."""

from __future__ import annotations

from typing import Any, NotRequired, TypedDict

import msgspec

from dzero.checkpoint.errors import CheckpointError

Number = int | float


class SavedGroup(TypedDict):
    """A parameter group of an optimizer; its other settings depend on the update rule and are not typed."""

    params: list[str]


class SavedOptim(TypedDict):
    """Optimizer state other than tensors; `states` is by parameter, and `scaler` is empty for a fixed loss scale."""

    rule: str
    groups: list[SavedGroup]
    scaler: dict[str, Number]
    skipped_steps: int
    consecutive_skips: int
    states: dict[str, dict[str, Number]]
    updates: NotRequired[int]


class SavedState(TypedDict):
    """State of a checkpoint other than tensors; `extra` is that of the training loop."""

    optim: SavedOptim
    extra: dict[str, Any]


class SavedConfig(TypedDict, total=False):
    """Settings of a saved run that a resumed run reads; all other settings are only compared."""

    mesh: dict[str, Any]


class SavedBase(TypedDict):
    """The model that adapters belong to (models/base_record.py)."""

    config: dict[str, Any]
    checksum: str
    frozen: NotRequired[str]
    dtype: NotRequired[str]


class SavedHeldOut(TypedDict):
    """Record of the lowest held-out loss of a run (trainer/held_out.py)."""

    loss: Number | None
    step: int
    worse: int


class SavedExtra(TypedDict):
    """The `extra` that train.py saves."""

    stream: dict[str, int]
    step_sequences: int
    config: SavedConfig
    base: NotRequired[SavedBase]
    held_out: NotRequired[SavedHeldOut]
    held_out_loss: NotRequired[Number | None]


def check_state(path: str, state: dict[str, Any]) -> None:
    """Raise `CheckpointError` if a manifest's `state` is not what `Checkpointer` saves."""
    _check(path, "state", state, SavedState)
    scaler = state["optim"]["scaler"]
    if scaler and scaler.keys() != {"scale", "good_steps", "bad_steps"}:
        raise CheckpointError(path, f"state.optim.scaler has {sorted(scaler)}, no scale of a loss")


def check_extra(path: str, extra: dict[str, Any]) -> None:
    """Raise `CheckpointError` if `extra` is not what train.py saves."""
    _check(path, "state.extra", extra, SavedExtra)


def _check(path: str, key: str, value: Any, kind: Any) -> None:
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        what, _, where = str(error).partition(" - at `$")
        raise CheckpointError(path, f"{key}{where.rstrip('`')}: {what}; it was not saved by this program") from error
