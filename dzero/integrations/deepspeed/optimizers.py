"""Optimizer and schedule of a DeepSpeed configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dzero.integrations.deepspeed.config_keys import OPTIMIZERS, REFUSED_OPTIMIZERS
from dzero.integrations.deepspeed.forms import AUTO
from dzero.integrations.deepspeed.schedules import NEEDED
from dzero.integrations.deepspeed.verdicts import Conflict

PARAMS, SCHEDULER = "optimizer.params", "scheduler"
SUBJECTS = {
    "AdamW": ("betas", "eps"),
    "Adam": ("betas", "eps"),
    "SGD": ("momentum", "dampening", "nesterov"),
    "Adagrad": ("eps", "lr_decay", "initial_accumulator_value"),
}
"""Parameters of each rule beside lr and weight_decay."""
SCHEDULES = {
    "warmuplr": "warmup_num_steps warmup_type warmup_min_lr warmup_max_lr",
    "warmupdecaylr": "warmup_num_steps warmup_type warmup_min_lr warmup_max_lr total_num_steps",
    "warmupcosinelr": "warmup_num_steps warmup_type warmup_min_ratio cos_min_ratio total_num_steps",
    "onecycle": "cycle_min_lr cycle_max_lr decay_lr_rate cycle_first_step_size cycle_second_step_size "
    "cycle_first_stair_count cycle_second_stair_count decay_step_size cycle_momentum",
    "lrrangetest": "lr_range_test_min_lr lr_range_test_step_size lr_range_test_step_rate lr_range_test_staircase",
}
"""Parameters of each schedule."""


@dataclass(frozen=True)
class Optimizer:
    """The optimizer of a configuration.

    Attributes:
        rule: `AdamW`, which is dzero's, or a class of torch.optim.
        options: Its arguments; those that are "auto" are left out and named in `auto`.
    """

    rule: str
    options: dict[str, Any]
    auto: tuple[str, ...] = ()


def optimizer_of(v: dict[str, Any], **_: Any) -> dict[str, Any]:
    """Return the optimizer that the values ask for, under the name of its field in a translation."""
    params = {key.rpartition(".")[2]: value for key, value in v.items() if key.startswith(f"{PARAMS}.")}
    if (kind := v.get("optimizer.type")) is None:
        if params:
            raise Conflict("optimizer.type", "name the optimizer of these params, such as AdamW")
        return {}
    rule = OPTIMIZERS.get(kind.lower())
    if rule is None:
        known = REFUSED_OPTIMIZERS.get(kind.lower(), "Adam, AdamW, SGD or Adagrad")
        raise Conflict("optimizer.type", known)
    is_torchs = params.pop("torch_adam", False)
    is_decoupled = params.pop("adam_w_mode", True)
    if kind.lower() == "adam" and not is_decoupled:
        rule = "Adam"
    if unfit := sorted(params.keys() - {"lr", "weight_decay", *SUBJECTS[rule]}):
        raise Conflict(f"{PARAMS}.{unfit[0]}", f"remove it: {rule} takes {['lr', 'weight_decay', *SUBJECTS[rule]]}")
    options: dict[str, Any] = {"lr": 1e-2 if rule == "Adagrad" else 1e-3, "weight_decay": 0.0}
    if rule in ("AdamW", "Adam"):
        options |= {"betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01 if is_torchs and rule == "AdamW" else 0.0}
    options |= params
    if options.get("nesterov") and (not options.get("momentum") or options.get("dampening")):
        raise Conflict(f"{PARAMS}.nesterov", "false, or a momentum without dampening")
    auto = tuple(key for key, value in options.items() if value == AUTO)
    return {"optimizer": Optimizer(rule, {k: value for k, value in options.items() if k not in auto}, auto)}


def schedule_of(v: dict[str, Any], **_: Any) -> dict[str, Any]:
    """Return the schedule that the values ask for, under the name of its field in a translation."""
    params = {key.rpartition(".")[2]: value for key, value in v.items() if key.startswith(f"{SCHEDULER}.params.")}
    if (kind := v.get(f"{SCHEDULER}.type")) is None:
        if params:
            raise Conflict(f"{SCHEDULER}.type", "name the schedule of these params, such as WarmupDecayLR")
        return {}
    kind = kind.lower()
    if unfit := sorted(params.keys() - {*SCHEDULES[kind].split()}):
        raise Conflict(f"{SCHEDULER}.params.{unfit[0]}", f"remove it: this schedule takes {SCHEDULES[kind].split()}")
    if missing := [each for each in NEEDED.get(kind, ()) if each not in params]:
        raise Conflict(
            f"{SCHEDULER}.params.{missing[0]}",
            "write false: only rates are scheduled"
            if missing[0] == "cycle_momentum"
            else "write it: this has no default",
        )
    return {"schedule": (kind, params)}
