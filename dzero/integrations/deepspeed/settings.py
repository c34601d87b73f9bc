"""Settings and counts of a run of DeepSpeed, read from plain values that are checked first."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

RULES = {"adam", "adamw", "fusedadam", "cpuadam", "deepspeedcpuadam"}
"""Names, in lower case, of DeepSpeed's optimizers whose update is that of AdamW."""
KEPT = ("lr", "betas", "eps", "weight_decay", "amsgrad", "maximize", "decoupled_weight_decay")
Plain = dict[str, Any]


def count_of(value: Any, where: str) -> int:
    """Return a number of steps, which may be stored as a float."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 2**53 or value != int(value):
        raise ValueError(f"{where} is {value!r}, no number of steps")
    return int(value)


def updates_of(steps: Mapping[str, int], where: str) -> int | None:
    """Return the number of updates, which must be that of all parameters or groups; None if none tells it."""
    if len({*steps.values()}) > 1:
        least, most = (pick(steps, key=lambda name: steps[name]) for pick in (min, max))
        raise ValueError(
            f"{where}: {least} has made {steps[least]} updates, {most} {steps[most]}; all parameters of a checkpoint "
            "must have made the same number"
        )
    return next(iter(steps.values()), None)


def steps_of_groups(optimizer: Plain, where: str) -> dict[str, int]:
    """Return the number of updates of each group, which stage 3 writes beside the settings of all groups."""
    inner = optimizer.get("optimizer_state_dict")
    states = inner.get("state") if isinstance(inner, dict) else None
    found = states.items() if isinstance(states, dict) else ()
    return {
        f"group {number}": count_of(state["step"], f"{where}: step")
        for number, state in found
        if isinstance(state, dict) and "step" in state
    }


def groups_of(optimizer: Plain, names: Sequence[Sequence[str]], where: str) -> list[Plain]:
    """Return the settings of each parameter group with the names of its parameters.

    Where DeepSpeed splits its groups further, all must have the same settings, and are one group.
    """
    found = optimizer.get("param_groups")
    if not isinstance(found, list) or not found or not all(isinstance(each, dict) for each in found):
        raise ValueError(f"{where}: no parameter groups are in it")
    settings = [{key: each[key] for key in KEPT if each.get(key) is not None} for each in found]
    for each in settings:
        for key in ("lr", "eps", "weight_decay"):
            value = each.get(key, 0.0)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
                raise ValueError(f"{where}: {key} is {value!r}")
    if len(settings) == len(names):
        return [{**each, "params": [*of_group]} for each, of_group in zip(settings, names, strict=True)]
    if any(each != settings[0] for each in settings):
        raise ValueError(
            f"{where}: {len(settings)} parameter groups with different settings, and {len(names)} groups of names: it "
            "does not tell which parameter has which"
        )
    return [{**settings[0], "params": [name for of_group in names for name in of_group]}]


def check_rule(states: Plain, groups: Collection[Plain], where: str) -> None:
    """Raise ValueError for an update rule that is not AdamW."""
    config = states.get("ds_config")
    told = config.get("optimizer") if isinstance(config, dict) else None
    rule = told.get("type") if isinstance(told, dict) else None
    options = told.get("params") if isinstance(told, dict) else None
    other = rule if isinstance(rule, str) and rule.lower() not in RULES else None
    if any(each.get("amsgrad") or each.get("maximize") for each in groups):
        other = "AdamW with amsgrad or maximize"
    coupled = isinstance(options, dict) and options.get("adam_w_mode") is False
    coupled = coupled or any(each.get("decoupled_weight_decay") is False for each in groups)
    if coupled and any(each.get("weight_decay") for each in groups):
        other = "Adam with the weight decay in its gradients"
    if other is not None:
        raise ValueError(f"{where}: its optimizer is {other}, and only states of AdamW are imported")


def loss_scale_of(optimizer: Plain) -> float | None:
    """Return the dynamic loss scale of fp16; None without one."""
    scaler = optimizer.get("loss_scaler")
    scale = scaler.get("cur_scale") if isinstance(scaler, dict) and optimizer.get("dynamic_loss_scale") else None
    return float(scale) if isinstance(scale, int | float) and 0 < scale < math.inf else None


def omits_frozen(states: Plain) -> bool:
    """Return whether frozen parameters were left out of model states; those of stage 1 do not tell."""
    config = states.get("ds_config")
    zero = config.get("zero_optimization") if isinstance(config, dict) else None
    tells = isinstance(zero, dict) and zero.get("stage") in (2, 3) and "frozen_param_shapes" in states
    return tells and states["frozen_param_shapes"] is None
