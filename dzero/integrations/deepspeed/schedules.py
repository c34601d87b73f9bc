"""Learning rates of DeepSpeed's schedules, as factors for `torch.optim.lr_scheduler.LambdaLR`.

Before its first step a schedule is at iteration -1, so update t (from 0) runs at iteration t - 1:

    kind             rate at iteration i >= 0
    WarmupLR         min + (max - min) * rise, with rise = log(i + 1) / log(steps), or i / steps; then max
    WarmupDecayLR    as WarmupLR up to max, then linear to 0 at iteration `total_num_steps`
    WarmupCosineLR   parts of the optimizer's rate: rise from warmup_min_ratio to 1, then half a cosine to cos_min_ratio
    OneCycle         linear from min to max and back, then min / (1 + slope * intervals)
    LRRangeTest      min * (1 + slope * intervals)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

Rate = Callable[[int], float]
PEAKS = {"warmuplr": "warmup_max_lr", "warmupdecaylr": "warmup_max_lr", "onecycle": "cycle_max_lr"}
"""Parameter that replaces the optimizer's rate."""
NEEDED = {
    "warmupdecaylr": ("total_num_steps",),
    "warmupcosinelr": ("total_num_steps",),
    "onecycle": ("cycle_min_lr", "cycle_max_lr", "cycle_momentum"),
}
"""Parameters without a default; cycle_momentum must be false, since only rates are scheduled."""


@dataclass(frozen=True)
class Schedule:
    """A schedule of a DeepSpeed configuration.

    Attributes:
        kind: Its type, in lower case.
        params: Its parameters.
        lr: Rate of the optimizer.
    """

    kind: str
    params: Mapping[str, Any]
    lr: float

    @property
    def peak(self) -> float:
        """Rate with which the optimizer is created, which `factor` refers to; above 0 if any rate is."""
        if self.kind == "lrrangetest":
            return float(self.params.get("lr_range_test_min_lr", 1e-3))
        default = 1e-3 if self.kind == "warmupdecaylr" else self.lr
        found = float(self.params.get(PEAKS.get(self.kind, ""), default))
        lowest = self.params.get("warmup_min_lr" if self.kind in ("warmuplr", "warmupdecaylr") else "cycle_min_lr", 0.0)
        return found or float(lowest)

    def factor(self) -> Rate:
        """Return the function from the number of an update, from 0, to its rate as a part of `peak`."""
        rate, peak = RATES[self.kind](self.params, self), self.peak
        return lambda update: rate(update - 1) / peak if peak else 0.0


def _rise(params: Mapping[str, Any]) -> tuple[int, Rate]:
    """Return the steps of the warm-up, and how far it has come at an iteration."""
    steps = max(2, int(params.get("warmup_num_steps", 1000)))
    if params.get("warmup_type", "log").lower() == "linear":
        return steps, lambda at: at / steps
    return steps, lambda at: math.log(at + 1) / math.log(steps)


def _warmup(params: Mapping[str, Any], schedule: Schedule, *, decays: bool = False) -> Rate:
    least = float(params.get("warmup_min_lr", 0.0))
    most = float(params.get("warmup_max_lr", 1e-3 if decays else schedule.lr))
    steps, rise = _rise(params)
    total = int(params.get("total_num_steps", steps))

    def rate(at: int) -> float:
        if at < 0:
            return least
        if at < steps:
            return least + (most - least) * rise(at)
        return least + (most - least) * (max(0.0, (total - at) / max(1.0, total - steps)) if decays else 1.0)

    return rate


def _cosine(params: Mapping[str, Any], schedule: Schedule) -> Rate:
    first, last = float(params.get("warmup_min_ratio", 0.0)), float(params.get("cos_min_ratio", 1e-4))
    steps, rise = _rise(params)
    length = max(1, int(params["total_num_steps"]) - steps)

    def rate(at: int) -> float:
        if at < 0:
            return 0.0
        if at < steps:
            return schedule.lr * (first + (1 - first) * rise(at))
        done = min(1.0, (at - steps + 1) / length)
        return schedule.lr * (last + (1 - last) * (1 + math.cos(math.pi * done)) / 2)

    return rate


def _one_cycle(params: Mapping[str, Any], _: Schedule) -> Rate:
    least, most = float(params["cycle_min_lr"]), float(params["cycle_max_lr"])
    up = int(params.get("cycle_first_step_size", 2000))
    down = int(params.get("cycle_second_step_size", up))
    stairs_up = params.get("cycle_first_stair_count", 0)
    stairs_down = params.get("cycle_second_stair_count", stairs_up)
    interval, slope = params.get("decay_step_size", 0), params.get("decay_lr_rate", 0.0)

    def height(at: int) -> float:
        done = (at + 1) % (up + down)
        part, stairs = (done / up, stairs_up) if done <= up else ((up + down - done) / down, stairs_down)
        return math.floor(part * stairs) / stairs if stairs else part

    def rate(at: int) -> float:
        if at < 0:
            return least
        if at < up + down:
            return least + (most - least) * height(at)
        return least / (1 + slope * (at - up - down + 1) / interval) if interval and slope else least

    return rate


def _range_test(params: Mapping[str, Any], schedule: Schedule) -> Rate:
    size, slope = params.get("lr_range_test_step_size", 2000), float(params.get("lr_range_test_step_rate", 1.0))
    is_stair = params.get("lr_range_test_staircase", False)

    def rate(at: int) -> float:
        intervals: float = (at + 1) / size
        return schedule.peak * (1.0 + slope * (math.floor(intervals) if is_stair else intervals))

    return rate


RATES: dict[str, Callable[[Mapping[str, Any], Schedule], Rate]] = {
    "warmuplr": _warmup,
    "warmupdecaylr": partial(_warmup, decays=True),
    "warmupcosinelr": _cosine,
    "onecycle": _one_cycle,
    "lrrangetest": _range_test,
}
