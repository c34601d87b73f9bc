"""The loss scale's moves and the learning rate's shapes, as arithmetic."""

from __future__ import annotations

import math

import pytest
import torch

from dzero import ScalerConfig
from dzero.optim.loss_scaler import LossScaler
from dzero.optim.lr_schedule import ScheduleConfig


def scales(config: ScalerConfig, outcomes: str) -> list[float]:
    """The scale after each step; g: a good one, b: a bad one."""
    scaler, seen = LossScaler(config), []
    for outcome in outcomes:
        scaler.update(finite=outcome == "g")
        seen.append(scaler.scale)
    return seen


def test_the_scale_doubles_after_good_steps_in_a_row_and_halves_at_a_bad_one() -> None:
    config = ScalerConfig(init=8.0, growth_interval=2)
    assert scales(config, "gggg") == [8, 16, 16, 32]
    assert scales(config, "gbgg") == [8, 4, 4, 8]


def test_the_scale_never_falls_below_its_floor() -> None:
    assert scales(ScalerConfig(init=8.0, floor=2.0), "bbbb") == [4, 2, 2, 2]


def test_hysteresis_forgives_bad_steps_until_they_come_in_a_row() -> None:
    config = ScalerConfig(init=8.0, hysteresis=2)
    assert scales(config, "bgbgbb") == [8, 8, 8, 8, 8, 4]
    assert scales(config, "bbb") == [8, 4, 2]


def test_without_a_config_the_scale_is_one_for_ever() -> None:
    scaler = LossScaler(None)
    for finite in (True, False) * 3:
        scaler.update(finite=finite)
    assert scaler.scale == 1.0


def test_a_loaded_scaler_continues_where_the_saved_one_was() -> None:
    config = ScalerConfig(init=8.0, growth_interval=3, hysteresis=2)
    first, second = LossScaler(config), LossScaler(config)
    for finite in (True, True, False, True, True):
        first.update(finite=finite)
    second.load_state_dict(first.state_dict())
    for finite in (True, False, False):
        first.update(finite=finite)
        second.update(finite=finite)
    assert first.scale == second.scale == 8.0  # grown once to 16, halved once


def test_a_scale_goes_on_only_between_runs_that_scale() -> None:
    """A run in fp16 begins at its own scale after one in bf16, which keeps 1 after one in fp16."""
    scaled, fixed = LossScaler(ScalerConfig(init=8.0)), LossScaler(None)
    scaled.load_state_dict(LossScaler(None).state_dict())
    fixed.load_state_dict(LossScaler(ScalerConfig(init=8.0)).state_dict())
    assert (scaled.scale, fixed.scale) == (8.0, 1.0)


def test_a_loaded_scale_grows_also_where_its_interval_became_shorter() -> None:
    before, after = (LossScaler(ScalerConfig(init=8.0, growth_interval=interval)) for interval in (9, 2))
    for _ in range(5):
        before.update(finite=True)
    after.load_state_dict(before.state_dict())
    after.update(finite=True)
    assert after.scale == 16.0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"init": 1.0, "floor": 2.0}, r"scaler\.floor=2\.0.*scaler\.init=1\.0.*0 < floor ≤ init"),
        ({"growth_interval": 0}, r"scaler\.growth_interval=0.*≥ 1"),
        ({"hysteresis": 0}, r"scaler\.hysteresis=0.*≥ 1"),
    ],
)
def test_scaler_settings_that_cannot_work_are_errors(settings: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ScalerConfig(**settings)  # type: ignore[arg-type]


def test_cosine_warms_up_and_falls_to_its_final_factor() -> None:
    at = ScheduleConfig(kind="cosine", warmup_steps=4, final=0.1).factor(104)
    assert [at(step) for step in range(4)] == [0.2, 0.4, 0.6, 0.8]
    assert at(4) == 1.0
    assert math.isclose(at(103), 0.1)
    assert math.isclose(at(4 + 33), 1 - 0.9 * (1 - math.cos(math.pi / 3)) / 2)
    assert all(at(step) >= at(step + 1) for step in range(4, 103))
    assert math.isclose(at(500), 0.1)


def test_wsd_stays_at_one_until_its_decay() -> None:
    at = ScheduleConfig(kind="wsd", warmup_steps=2, decay_steps=5, final=0.0).factor(20)
    assert [at(step) for step in range(2, 16)] == [1.0] * 14
    assert [round(at(step), 9) for step in range(15, 20)] == [1.0, 0.75, 0.5, 0.25, 0.0]


def test_linear_falls_from_one_to_the_final_factor_after_a_fraction_of_warm_up() -> None:
    at = ScheduleConfig(kind="linear", warmup_fraction=0.29, final=0.5).factor(100)
    assert at(28) < 1.0 == at(29)
    assert [round(at(step), 9) for step in (29, 64, 99)] == [1.0, 0.75, 0.5]


def test_constant_stays_at_one() -> None:
    at = ScheduleConfig(kind="constant", warmup_steps=1).factor(10)
    assert [at(step) for step in range(10)] == [0.5] + [1.0] * 9


def test_a_schedule_drives_torchs_own_scheduler() -> None:
    optim = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optim, ScheduleConfig(warmup_steps=1).factor(10))
    assert optim.param_groups[0]["lr"] == 1.0
    optim.step()
    scheduler.step()
    assert optim.param_groups[0]["lr"] == 2.0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "steps"}, r"schedule\.kind='steps': choose one of \['constant', 'cosine', 'linear', 'wsd'\]"),
        ({"warmup_steps": -1}, r"schedule\.warmup_steps=-1"),
        ({"final": 1.5}, r"schedule\.final=1\.5"),
        ({"kind": "wsd"}, r"schedule\.kind=wsd with schedule\.decay_steps=null"),
        ({"decay_steps": 3}, r"schedule\.decay_steps=3 with schedule\.kind=cosine"),
        ({"kind": "wsd", "decay_steps": 0}, r"schedule\.decay_steps=0"),
    ],
)
def test_schedule_settings_without_effect_are_errors(settings: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ScheduleConfig(**settings)  # type: ignore[arg-type]


def test_warm_up_and_decay_must_fit_the_run() -> None:
    with pytest.raises(ValueError, match=r"warmup_steps=8 \+ schedule\.decay_steps=5 exceed train\.steps=10"):
        ScheduleConfig(kind="wsd", warmup_steps=8, decay_steps=5).factor(10)
