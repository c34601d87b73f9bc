"""Rates by hand, with a clock that is told the time."""

from __future__ import annotations

import pytest

from dzero.monitor.meter import Meter, Throughput


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def run_steps(meter: Meter, clock: Clock, seconds: list[float], *, tokens: int = 100, pause_s: float = 0.0) -> None:
    """Steps of the given lengths, each followed by a pause that belongs to none."""
    for step_s in seconds:
        meter.begin()
        clock.now_s += step_s
        assert meter.end(tokens) == pytest.approx(step_s)
        clock.now_s += pause_s


def test_warm_up_steps_are_in_no_rate() -> None:
    clock = Clock()
    meter = Meter(total_steps=10, warmup_steps=2, clock=clock)
    run_steps(meter, clock, [50.0, 40.0])
    assert meter.now() == meter.overall() == Throughput()
    assert meter.eta_s() is None
    run_steps(meter, clock, [2.0, 2.0])
    assert meter.now().tokens_per_s == meter.overall().tokens_per_s == pytest.approx(100 / 2)
    assert (meter.steps, meter.counted_steps, meter.tokens) == (4, 2, 400)
    assert meter.seconds == pytest.approx(94)


def test_now_is_the_median_of_the_window_and_overall_the_mean() -> None:
    clock = Clock()
    meter = Meter(total_steps=10, warmup_steps=0, window_steps=3, clock=clock)
    run_steps(meter, clock, [10.0, 1.0, 2.0, 8.0])
    assert meter.now().tokens_per_s == pytest.approx(50)  # of 100, 50, 12.5
    assert meter.overall().tokens_per_s == pytest.approx(400 / 21)


def test_mfu_is_model_flops_over_the_peak_of_all_devices() -> None:
    clock = Clock()
    meter = Meter(total_steps=1, flops_per_token=6e9, peak_flops=1e12, ranks=4, warmup_steps=0, clock=clock)
    run_steps(meter, clock, [0.5], tokens=100)
    assert meter.now().mfu == pytest.approx(6e9 * 200 / 4e12)  # 200 tokens/s: 0.3


def test_mfu_is_unknown_without_a_peak() -> None:
    clock = Clock()
    meter = Meter(total_steps=1, flops_per_token=6e9, warmup_steps=0, clock=clock)
    run_steps(meter, clock, [0.5])
    assert meter.now() == Throughput(tokens_per_s=200.0, mfu=None)


def test_time_left_includes_what_lies_between_steps_but_rates_do_not() -> None:
    clock = Clock()
    meter = Meter(total_steps=7, warmup_steps=1, clock=clock)
    run_steps(meter, clock, [30.0, 1.0, 1.0, 1.0], pause_s=0.5)
    assert meter.overall().tokens_per_s == pytest.approx(100)
    assert meter.eta_s() == pytest.approx(3 * (3 * 1.0 + 2 * 0.5) / 3)  # 3 steps left; 4 s for the 3 counted


def test_an_end_needs_a_begin() -> None:
    meter = Meter(total_steps=1)
    with pytest.raises(RuntimeError, match=r"begin\(\)"):
        meter.end(1)
