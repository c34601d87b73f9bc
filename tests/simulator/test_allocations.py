"""Allocations of simulated steps are recorded as the meter counts them, and replayed with and without arenas."""

from __future__ import annotations

import sys

import fragmentation
import pytest
from rank_cases import scenario_of
from simulator.allocations import (
    Allocation,
    Event,
    Trace,
    is_activation,
    is_reduced_grad,
    record,
    replay,
    smallest_device,
    with_arena,
)
from simulator.scenario import Scenario
from simulator.simulate import simulate
from simulator.storage_meter import Where

MIB = 1 << 20
HIDDEN, LAYERS = 64, 3
RECORDED = pytest.mark.full("tests/simulator/test_allocations.py::test_replays_by_hand")


@pytest.fixture(scope="module")
def scenario() -> Scenario:
    given = {"ranks": 4, "sequences": 1, "tokens": 32, "stage": 3, "device_type": "cuda"}
    return scenario_of(model={"layers": LAYERS}, block={"activation_checkpoint": "full"}, **given)


@pytest.fixture(scope="module")
def trace(scenario: Scenario) -> Trace:
    return record(scenario, [[32], [32], [20]])


def allocations(trace: Trace) -> list[Allocation]:
    return [event.allocation for event in trace.events if not event.freed]


@RECORDED
def test_the_peak_is_that_of_the_simulation(scenario: Scenario, trace: Trace) -> None:
    """Or more: the meter looks after every operator, and a trace has what is alive in between."""
    simulated = simulate(scenario).peak.total
    assert simulated <= trace.peak <= 1.05 * simulated


@RECORDED
def test_checkpoints_and_reduced_gradients_are_found(trace: Trace) -> None:
    """By hand: each block's checkpoint is its input in bf16; the first one's is the embedding's output."""
    tokens = 32 + 32 + 20
    kept = [each for each in allocations(trace) if is_activation(each) and each.born.unit.startswith("layers")]
    assert sum(each.bytes for each in kept) >= 2 * tokens * HIDDEN * (LAYERS - 1)
    assert {each.kind for each in allocations(trace) if is_reduced_grad(each)} == {"grad"}


@RECORDED
def test_gathers_and_reductions_are_on_streams_of_their_own(trace: Trace) -> None:
    streams = {kind: {each.stream for each in allocations(trace) if each.kind == kind} for kind in ("grad", "buffers")}
    assert len(streams["grad"] | streams["buffers"]) == 3
    assert {each.stream for each in allocations(trace) if is_activation(each)} == {""}


def hand_made() -> Trace:
    """Two steps: a, b and c are kept in the first one, and d, as large as all of them, in the second one."""
    forward, backward = Where(0, "forward", "layers.0"), Where(0, "backward", "layers.0")
    a, b, c, d = (Allocation(size * MIB, "", forward, "activations", backward) for size in (4, 5, 6, 15))
    other = Allocation(12 * MIB, "", backward, "temporaries", backward)
    made, freed = (lambda one: Event(one, False)), (lambda one: Event(one, True))
    first = [made(a), made(b), made(c), freed(c), made(other), freed(other), freed(b), freed(a)]
    return Trace([*first, made(d), freed(d)], 0)


def test_an_arena_holds_the_fullest_step() -> None:
    trace = hand_made()
    arena, *others = with_arena(trace, is_activation).events
    assert arena.allocation.bytes == 15 * MIB
    assert [event.allocation.kind for event in others] == ["temporaries", "temporaries"]
    assert trace.peak == 21 * MIB


def test_replays_by_hand() -> None:
    """A segment of 20 MiB for a, b and c, and one of 12 for the other; expandable, the other needs one more page."""
    trace = hand_made()
    assert replay(trace, expandable=False).peak_reserved == 32 * MIB
    assert replay(trace, expandable=True).peak_reserved == 40 * MIB
    assert smallest_device(trace, expandable=False, step=1) == (32 * MIB, 0)


@pytest.mark.full("tests/simulator/test_allocations.py::test_replays_by_hand")
def test_the_benchmark_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["fragmentation.py", "--smoke"])
    fragmentation.main()
    assert "Smallest device over live" in capsys.readouterr().out
