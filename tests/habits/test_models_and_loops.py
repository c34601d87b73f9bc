"""Models and loops that plain torch takes give what it gives, at every stage, on one rank and on several."""

from __future__ import annotations

from typing import Any

import pytest
from loops_of_torch import HOST
from models_of_torch import LOOPS, MODELS, in_dzero, in_torch
from pool import Pool

TOLERANCE = 1e-6
STAGES = (0, 1, 2, 3)
COMMON = [name for name in MODELS if name not in ("Net", "Branch", "Memoised", "Nested")]


def check(
    pool: Pool,
    model: str,
    loop: str,
    ranks: int,
    microbatches: int,
    tiers: dict[str, str],
    stages: tuple[int, ...] = STAGES,
    **zero: Any,
) -> None:
    """The parameters of every stage are those of plain torch in one process."""
    expected = in_torch(model, loop, ranks, microbatches)
    for stage in stages if not tiers else (1, 3):
        for found in pool.run(in_dzero, ranks, model, loop, stage, microbatches, tiers, zero):
            far = {name: (found[name] - value).abs().max().item() for name, value in expected.items() if name in found}
            assert len(far) == len(found)
            assert {name: gap for name, gap in far.items() if not gap <= TOLERANCE} == {}, stage


@pytest.mark.product(keep=7)
@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("model", COMMON)
def test_a_model_gives_what_torch_gives(pool: Pool, model: str, ranks: int, microbatches: int) -> None:
    check(pool, model, "plain", ranks, microbatches, {})


def test_containers_without_forward_may_be_nested(pool: Pool) -> None:
    check(pool, "Nested", "plain", 2, 1, {})


@pytest.mark.product(keep=9)
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("loop", [name for name in LOOPS if name not in ("plain", "reached_later", "half_detached")])
def test_a_loop_gives_what_torch_gives(pool: Pool, loop: str, ranks: int) -> None:
    check(pool, "Net", loop, ranks, 1 if loop == "closure" else 3, {})


@pytest.mark.parametrize("tiers", [{}, HOST])
@pytest.mark.parametrize("ranks", [1, 2])
def test_what_autograd_delivers_after_a_units_reduction_counts(pool: Pool, ranks: int, tiers: dict[str, str]) -> None:
    """A function of a weight that is older than the forward that goes backward, as a cast in the cache of autocast."""
    check(pool, "Memoised", "half_detached", ranks, 3, tiers)


def test_units_may_be_computed_again_for_several_uses_in_one_backward(pool: Pool) -> None:
    check(pool, "Recomputed", "two_forwards_kept", 2, 3, {})


@pytest.mark.product(keep=2)
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("model", ["Again", "Tied", "Scalars", "Recomputed"])
def test_probes_and_edits_between_everything_give_what_torch_gives(pool: Pool, model: str, ranks: int) -> None:
    check(pool, model, "probed", ranks, 3, {})


@pytest.mark.product(keep=1)
@pytest.mark.parametrize("reshard", [False, 2])
def test_so_they_do_where_stage_three_keeps_copies_after_forward(pool: Pool, reshard: bool | int) -> None:
    check(pool, "Again", "probed", 4, 3, {}, stages=(3,), reshard_after_forward=reshard)


@pytest.mark.product(keep=1)
@pytest.mark.parametrize("ranks", [1, 2])
def test_blocks_that_share_parameters_may_run_one_without_the_other(pool: Pool, ranks: int) -> None:
    check(pool, "Tied", "evaluated_in_part", ranks, 2, {})


@pytest.mark.product(keep=1)
@pytest.mark.parametrize("model", ["Again", "PartlyAgain", "Unused", "Scalars"])
def test_three_ranks_cut_unevenly(pool: Pool, model: str) -> None:
    check(pool, model, "accumulated", 3, 2, {})


@pytest.mark.product(keep=3)
@pytest.mark.parametrize(
    ("model", "loop"),
    [
        ("Again", "accumulated"),
        ("PartlyAgain", "one_graph_twice"),
        ("Unused", "plain"),
        ("Scalars", "accumulated"),
        ("Net", "group_added"),
        ("Net", "frozen_for_a_while"),
        ("Net", "scaled"),
        ("Net", "evaluated"),
        ("Net", "changed_between"),
        ("Net", "raised"),
        ("Net", "penalised_whole"),
        ("Net", "restarted"),
    ],
)
def test_so_it_does_where_states_are_on_the_host(pool: Pool, model: str, loop: str) -> None:
    check(pool, model, loop, 2, 2, HOST)


def test_ranks_may_reach_parameters_one_after_the_other(pool: Pool) -> None:
    check(pool, "Branch", "reached_later", 2, 2, {})


def test_zeros_count_where_some_ranks_have_no_gradient(pool: Pool) -> None:
    check(pool, "Branch", "plain", 2, 2, {}, unused="zeros")
