"""Types of a manifest's contents other than tensors, which validate a file before its values are used."""

from __future__ import annotations

import math
from typing import Annotated, Any, NotRequired, TypedDict

import msgspec

from dzero.checkpoint.errors import CheckpointError
from dzero.checkpoint.format import MOST_COUNT

Number = int | float
Count = Annotated[int, msgspec.Meta(ge=0, le=MOST_COUNT)]


class SavedGroup(TypedDict):
    """A parameter group of an optimizer; its other settings depend on the update rule and are not typed."""

    params: list[str]


class SavedOptim(TypedDict):
    """Optimizer state other than tensors; `states` is by parameter, and `scaler` is empty for a fixed loss scale."""

    rule: str
    groups: list[SavedGroup]
    scaler: dict[str, Number]
    skipped_steps: Count
    consecutive_skips: Count
    states: dict[str, dict[str, Number]]
    updates: NotRequired[Count]
    axes: NotRequired[dict[str, Count]]


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
    step: Count
    worse: Count


class SavedExtra(TypedDict):
    """The `extra` that train.py saves."""

    stream: dict[str, int]
    step_sequences: Annotated[int, msgspec.Meta(ge=1, le=MOST_COUNT)]
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
    counts = [value for key, value in scaler.items() if key != "scale"]
    if scaler and not (0 < scaler["scale"] < math.inf and all(0 <= each <= MOST_COUNT for each in counts)):
        raise CheckpointError(path, f"state.optim.scaler has {scaler}, no scale of a loss")
    for name, of_param in state["optim"]["states"].items():
        if not 0 <= of_param.get("step", 0) <= MOST_COUNT:
            raise CheckpointError(
                path, f"state.optim.states of {name} has step={of_param['step']}, no count of updates"
            )
    if not any(group["params"] for group in state["optim"]["groups"]):
        raise CheckpointError(path, "state.optim.groups has no parameter; it was not saved by this program")


def check_extra(path: str, extra: dict[str, Any]) -> None:
    """Raise `CheckpointError` if `extra` is not what train.py saves."""
    _check(path, "state.extra", extra, SavedExtra)


def _check(path: str, key: str, value: Any, kind: Any) -> None:
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        what, _, where = str(error).partition(" - at `$")
        raise CheckpointError(path, f"{key}{where.rstrip('`')}: {what}; it was not saved by this program") from error
