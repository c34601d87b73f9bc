"""The norm that gradients are clipped to is that of all ranks: on every mesh, of any type, as in one plain process."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from typing import Any

import clip_cases
import pytest
import torch
from clip_cases import MAX_NORMS, MESHES, Clipped
from pool import Pool

STAGES = (0, 1, 2, 3)
OPTIONS = [("device", "torch"), ("host", "dzero"), ("device", "optimizer")]


def cases_of(mesh: str, products: Iterable[tuple[int, float]]) -> list[Clipped]:
    """Return a case for each (stage, type); who clips, and where gradients are, in turn."""
    turn = itertools.cycle(OPTIONS)
    return [
        Clipped(mesh=mesh, norm_type=norm_type, stage=0 if mesh == "pp2" and stage == 3 else stage, offload=tier, by=by)
        for (stage, norm_type), (tier, by) in zip(products, turn, strict=False)
    ]


def check(pool: Pool, cases: list[Clipped]) -> None:
    for case, of_ranks in zip(
        cases, zip(*pool.run(clip_cases.of_rank, cases[0].ranks, cases), strict=True), strict=True
    ):
        right = clip_cases.of_one_process(case)
        for rank, found in enumerate(of_ranks):
            compare(found, right, rank, case)
            assert [*map(str, found["norms"])] == [*map(str, of_ranks[0]["norms"])], case  # the same bits everywhere


def compare(found: dict[str, Any], right: dict[str, Any], rank: int, case: Clipped) -> None:
    for key in ("norms", "clipped", "heads"):
        assert found[key] == pytest.approx(right[key], rel=2e-5, nan_ok=True), (key, case)
    assert ("non-finite" in found["error"]) == ("non-finite" in right["error"]) == bool(case.poison)
    for name, param in found["params"].items():
        whole = right["params"][name]
        part = whole if param.shape == whole.shape else whole.chunk(case.ranks)[rank]  # this rank's experts
        torch.testing.assert_close(param, part, rtol=1e-4, atol=2e-6, msg=f"{name} of {case}")


@pytest.mark.parametrize("mesh", MESHES)
def test_gradients_are_clipped_by_the_norm_of_all_ranks(pool: Pool, mesh: str) -> None:
    """Three steps of SGD, for which a wrong factor is a wrong step; every stage and every type once."""
    number = [*MESHES].index(mesh)
    check(pool, cases_of(mesh, zip(STAGES[number % 4 :] + STAGES[: number % 4], MAX_NORMS, strict=True)))


@pytest.mark.full
@pytest.mark.parametrize("mesh", MESHES)
def test_every_stage_clips_by_every_type_of_norm(pool: Pool, mesh: str) -> None:
    check(pool, cases_of(mesh, itertools.product(STAGES, MAX_NORMS)))


@pytest.mark.parametrize(("mesh", "types"), [("dp3", MAX_NORMS), ("tp2", (math.inf,)), ("pp2", (1.0, 2.0, math.inf))])
def test_a_gradient_that_is_not_finite_is_seen_on_all_ranks(pool: Pool, mesh: str, types: Iterable[float]) -> None:
    poisons = itertools.product((math.nan, math.inf), types)
    check(pool, [Clipped(mesh=mesh, norm_type=each, poison=poison) for poison, each in poisons])


@pytest.mark.parametrize("axes", [("shard",), ("replicate", "shard")])
def test_replicas_count_once(pool: Pool, axes: tuple[str, ...]) -> None:
    """Of shards, and of states that the replicas divide among them; in copies of the gradients too."""
    case = Clipped(mesh="dp4", norm_type=2.0, replicate=2, axes=axes)
    right = clip_cases.norms_of(clip_cases.in_torch(case))
    for norms in pool.run(clip_cases.of_types, 4, case):
        assert norms == pytest.approx(right, rel=1e-5)


def test_weights_at_both_ends_of_a_pipeline_count_once(pool: Pool) -> None:
    tied = [Clipped(mesh="pp2", norm_type=each, tied=True, by=by) for each in MAX_NORMS for by in ("torch", "dzero")]
    check(pool, tied)


@pytest.mark.parametrize("mesh", ["tp2", "pp2"])
def test_copies_of_gradients_of_a_cut_model_are_refused_on_all_ranks(pool: Pool, mesh: str) -> None:
    for error in pool.run(clip_cases.of_copies, 2, Clipped(mesh=mesh, norm_type=2.0)):
        assert "call dzero.clip_grad_norm_(parameters, max_norm)" in error


def test_gradients_of_earlier_microbatches_count(pool: Pool) -> None:
    """A part of the model that the last microbatch does not reach has its gradients in the norm, or all ranks raise."""
    for norm, step, error in pool.run(clip_cases.of_parts, 2):
        assert norm == pytest.approx(step, rel=1e-6)
        assert "the last microbatch did not reach" in error


def test_functions_that_were_imported_before_clip_by_the_same_norm(pool: Pool) -> None:
    for norms in pool.run(clip_cases.by_early_names, 2):
        assert norms[0] == norms[1] == norms[2]
