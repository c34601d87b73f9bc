"""Models and loops that plain torch takes give what it gives, at every stage, on one rank and on several.

Most models and loops are in the default suite at one stage, in turn; stage 3, which has most to do, comes most often.
"""

from __future__ import annotations

from typing import Any

import pytest
from models_of_torch import HOST, LOOPS, MODELS, TOLERANCE, in_dzero, in_torch
from pool import Pool

STAGES = (0, 1, 2, 3)
COMMON = [name for name in MODELS if name not in ("Branch", "Memoised")]
NAMED = [name for name in LOOPS if name not in ("plain", "reached_later", "half_detached")]
ALIKE = {
    "synchronised": "last_outside",
    "prefetched": "plain",
    "called_as_function": "plain",
    "probed": "evaluated",
    "inferred": "evaluated",
    "evaluated_in_part": "evaluated",
    "one_graph_twice": "two_forwards_kept",
}
"""Loops of which another one, or a model, is so close that it would fail first, and that one."""
ALL_STAGES = pytest.mark.full("tests/habits/test_models_and_loops.py::test_a_model_gives_what_torch_gives")


def check(
    pool: Pool,
    model: str,
    loop: str,
    ranks: int = 2,
    microbatches: int = 2,
    stages: tuple[int, ...] = STAGES,
    tiers: dict[str, str] | None = None,
    **zero: Any,
) -> None:
    """The parameters of every stage are those of plain torch in one process."""
    microbatches = 1 if loop == "closure" else microbatches
    expected = in_torch(model, loop, ranks, microbatches)
    for by_stage in pool.run(in_dzero, ranks, model, loop, stages, microbatches, tiers or {}, zero):
        for stage, found in by_stage.items():
            far = {name: (found[name] - value).abs().max().item() for name, value in expected.items() if name in found}
            assert len(far) == len(found)
            assert {name: gap for name, gap in far.items() if not gap <= TOLERANCE} == {}, stage


def in_turn(name: str, names: list[str]) -> tuple[int]:
    return ((3, 2, 3, 1, 3, 0)[names.index(name) % 6],)


@pytest.mark.product(keep=10)
@pytest.mark.parametrize("model", COMMON)
def test_a_model_gives_what_torch_gives(pool: Pool, model: str) -> None:
    check(pool, model, "plain", stages=in_turn(model, COMMON))


@pytest.mark.parametrize("loop", [name for name in NAMED if name not in ALIKE])
def test_a_loop_gives_what_torch_gives(pool: Pool, loop: str) -> None:
    check(pool, "Net", loop, stages=in_turn(loop, NAMED))


@ALL_STAGES
@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 3), (2, 1), (2, 3)])
@pytest.mark.parametrize(
    ("model", "loop"), [*((model, "plain") for model in COMMON), *(("Net", loop) for loop in NAMED)]
)
def test_models_and_loops_give_what_torch_gives_at_all_stages(
    pool: Pool, model: str, loop: str, ranks: int, microbatches: int
) -> None:
    check(pool, model, loop, ranks, microbatches)


@pytest.mark.product(keep=1)
@pytest.mark.parametrize(("ranks", "tiers"), [(2, {}), (1, {}), (2, HOST), (1, HOST)])
def test_what_autograd_delivers_after_a_units_reduction_counts(pool: Pool, ranks: int, tiers: dict[str, str]) -> None:
    """A function of a weight that is older than the forward that goes backward, as a cast in the cache of autocast."""
    check(pool, "Memoised", "half_detached", ranks, 3, (1, 3) if ranks == 1 else (3,), tiers)


SHARED_OUT = {"optimizer_shard_axes": ["replicate", "shard"], "replicate": 2}
MEETINGS: list[tuple[str, str, int, dict[str, Any]]] = [
    ("Recomputed", "two_forwards_kept", 2, {}),  # units computed again for several uses in one backward
    ("Tied", "evaluated_in_part", 2, {}),  # blocks that share a matrix, one run without the other
    ("Branch", "reached_later", 2, {}),  # ranks reach parameters one after the other
    ("Branch", "plain", 2, {"unused": "zeros"}),  # zeros count where some ranks have no gradient
    ("Table", "probed", 2, {}),
    ("Net", "one_graph_twice", 2, {"replicate": 2}),  # copies average what comes late by itself
]
MORE: list[tuple[str, str, int, dict[str, Any]]] = [
    ("PartlyAgain", "accumulated", 3, {}),  # three ranks cut unevenly
    ("Again", "probed", 4, {"reshard_after_forward": 2}),  # stage 3 keeps copies after forward
    ("Again", "probed", 4, {"reshard_after_forward": False}),
    ("Net", "assigned", 4, SHARED_OUT),  # copies that share states out
    *((model, "probed", 2, {}) for model in ("Again", "Tied", "Scalars", "Recomputed")),
]


@pytest.mark.parametrize(("model", "loop", "ranks", "zero"), MEETINGS, ids=str)
def test_a_model_and_a_loop_that_meet_give_what_torch_gives(
    pool: Pool, model: str, loop: str, ranks: int, zero: dict[str, Any]
) -> None:
    check(pool, model, loop, ranks, 2, (3,), **zero)


@pytest.mark.full("tests/habits/test_models_and_loops.py::test_a_model_and_a_loop_that_meet_give_what_torch_gives")
@pytest.mark.parametrize(("model", "loop", "ranks", "zero"), MEETINGS + MORE, ids=str)
def test_models_and_loops_that_meet_give_what_torch_gives_at_all_stages(
    pool: Pool, model: str, loop: str, ranks: int, zero: dict[str, Any]
) -> None:
    stages = (3,) if "reshard_after_forward" in zero else (2,) if zero is SHARED_OUT else STAGES
    check(pool, model, loop, ranks, 2, stages, **zero)


@pytest.mark.product(keep=3)
@pytest.mark.parametrize(
    ("model", "loop"),
    [
        ("Again", "accumulated"),
        ("PartlyAgain", "one_graph_twice"),
        ("Scalars", "accumulated"),
        *(("Net", loop) for loop in NAMED if loop not in ("accumulated", "one_graph_twice", "closure")),
    ],
)
def test_so_it_does_where_states_are_on_the_host(pool: Pool, model: str, loop: str) -> None:
    check(pool, model, loop, stages=(3,), tiers=HOST)
