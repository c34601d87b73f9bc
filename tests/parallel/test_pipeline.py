"""Pipeline parallelism, alone and with every other axis: the same training as in one process, and states that move."""

from __future__ import annotations

import random
from itertools import combinations, pairwise
from pathlib import Path

import pytest
import torch
from comparison_steps import of_lengths
from parity_cells import together
from pipeline_cases import CLIP, LR, SHAPE, Piped, at_one_end, loaded, model_of, oracle, own_loop, saved, trained
from pool import Pool
from torch import nn

from dzero import PipelinePlan
from dzero.models.llama import Llama
from dzero.parallel.divisibility import check_microbatches
from dzero.parallel.pipeline.split import balanced, split_pipeline

FP32 = 1e-5
"""Relative: of losses and norms of every step, and of the length of each parameter at the end. Sums are cut elsewhere;
but where only layers are, every bit is the same."""

RUNS = [
    *(Piped(stage=stage, dp=2) for stage in range(4)),
    Piped(stage=2, schedule="interleaved", parts=2, tied=True),
    Piped(stage=3, schedule="interleaved", parts=2, dp=2, microbatches=2, recompute="full"),
    Piped(stage=0, schedule="gpipe", microbatches=1, offload="host"),
    Piped(stage=1, pp=4, tied=True),
    Piped(stage=3, dp=2, offload="host", tied=True),
    Piped(stage=1, tp=2, offload="host"),
    Piped(stage=2, offload="disk", tied=True),
    Piped(stage=3, tp=2, recompute="selective"),
    Piped(stage=2, dp=2, tp=2, tied=True),
    Piped(stage=1, schedule="zero_bubble", parts=2),
    Piped(stage=3, schedule="zero_bubble", parts=2, dp=2, offload="host", tied=True),
]
MORE = [
    Piped(stage=stage, dp=dp, tp=tp, schedule=schedule, parts=parts, offload=offload, tied=True, microbatches=4)
    for stage in range(4)
    for dp, tp in ((2, 1), (1, 2), (2, 2))
    for schedule, parts in (("1f1b", 1), ("interleaved", 2), ("gpipe", 1), ("zero_bubble", 2))
    for offload in ("device", "host")
]


@pytest.mark.product(keep=2)
@pytest.mark.parametrize("run", of_lengths(RUNS, lambda run: (run.pp, run.dp, run.tp), MORE), ids=str)
def test_every_stage_trains_as_in_one_process_and_moves_what_formulas_say(pool: Pool, run: Piped) -> None:
    told = pool.run(trained, run.ranks, run, timeout_s=300)
    want = oracle(run.dp, run.microbatches, run.tied, run.steps)
    for step, expected in enumerate(want.losses):
        losses = [loss for of_rank in told if (loss := of_rank["losses"][step]) is not None]
        assert len(losses) == run.dp * run.tp, "the ranks that have the last part"
        assert sum(losses) / len(losses) == pytest.approx(expected, rel=FP32)
        assert {of_rank["norms"][step] for of_rank in told} == {told[0]["norms"][step]}
        assert told[0]["norms"][step] == pytest.approx(want.norms[step], rel=FP32)
    params = {name: value for of_rank in told for name, value in of_rank["params"].items()}
    assert params.keys() == want.params.keys()
    for name, value in want.params.items():
        copies = [of_rank["params"][name] for of_rank in told if name in of_rank["params"]]
        assert all(torch.equal(*pair) for pair in pairwise(copies)), f"{name}: copies differ"
        apart = (params[name] - value).norm() / value.norm()
        only_layers = run.dp == run.tp == 1 and not run.tied
        assert torch.equal(params[name], value) if only_layers else apart < FP32, f"{name}: {apart:.1e}"
    for of_rank in told:
        assert of_rank["moved"] == of_rank["expected"]


@pytest.mark.parametrize("unused", ["union", "agree"])
def test_a_tied_weight_takes_what_one_end_alone_has(pool: Pool, unused: str) -> None:
    for run in Piped(stage=1, tied=True, unused=unused), Piped(stage=2, dp=2, offload="host", tied=True, unused=unused):
        told = pool.run(at_one_end, run.ranks, run)
        (start, idle, stepped), norm = told[0]
        weight = nn.Parameter(start.clone())
        optim = torch.optim.AdamW([weight], lr=LR)
        weight.grad = 2 * start * CLIP / (norm + 1e-6)
        optim.step()
        assert norm > (2 * start).norm() > CLIP
        assert torch.equal(idle, start)
        assert (stepped - weight).abs().max() < FP32
        assert all(torch.equal(last, stepped) for (_, _, last), _ in told)


def test_a_model_of_its_own_in_a_loop_of_its_own(pool: Pool) -> None:
    (want,) = pool.run(own_loop, 1, False)
    got = together(pool.run(own_loop, 2, False, 4, True))
    assert got.keys() == want.keys()
    assert all(torch.equal(got[name], value) for name, value in want.items())


def test_a_model_that_does_something_between_its_modules_is_refused(pool: Pool) -> None:
    for told in pool.run(own_loop, 2, True):
        assert "mesh.pp=2: the forward of Own changes hidden states outside of its modules" in told


def test_a_microbatch_of_another_size_is_refused_before_ranks_wait_for_each_other(pool: Pool) -> None:
    for told in pool.run(own_loop, 2, False, 3):
        assert told.startswith(
            "tokens of microbatch 1 are [3, 8]: the pipeline was planned for 4 sequences of one length"
        )
    for told in pool.run(own_loop, 2, False, 3, True):
        assert told.startswith("tokens of microbatch 0 are [3, 8]: the pipeline was planned for 4 sequences")


MESHES = [
    Piped(pp=1, dp=2, tp=2, stage=3, microbatches=1, param="bf16", tied=True),
    Piped(pp=1, dp=4, stage=2, microbatches=1, param="bf16", tied=True),
    Piped(pp=2, tp=2, stage=2, microbatches=2, param="bf16", tied=True),
    Piped(pp=2, schedule="interleaved", parts=2, dp=2, stage=1, microbatches=2, param="bf16", tied=True),
    Piped(pp=1, dp=1, stage=0, microbatches=1, param="bf16", tied=True),
]


@pytest.mark.full
def test_checkpoints_move_between_meshes_to_the_bit(pool: Pool, tmp_path: Path) -> None:
    for number, (before, after) in enumerate(pairwise([*MESHES, MESHES[2]])):
        folder = tmp_path / str(number)
        want = together(pool.run(saved, before.ranks, before, folder, timeout_s=300))
        assert len([name for name in want if name.startswith("exp_avg_sq ")]) == 4 * 9 + 2
        got = together(pool.run(loaded, after.ranks, after, folder, timeout_s=300))
        assert got.keys() == want.keys()
        for name, value in want.items():
            assert torch.equal(got[name], value), (before, after, name)


@pytest.mark.parametrize(
    ("costs", "last", "parts", "lengths"),
    [
        ([1] * 8, 0, 4, [2, 2, 2, 2]),
        ([1] * 8, 1.7, 4, [2, 2, 3, 1]),
        ([1] * 8, 0, 3, [2, 3, 3]),
        ([231_383_004.0] * 8, 0, 3, [2, 3, 3]),
        ([1e9 / 3] * 128, 0, 16, [8] * 16),
        ([5, 1, 1, 1, 1, 1], 0, 2, [1, 5]),
        ([1, 1, 1], 100, 3, [1, 1, 1]),
        ([3], 1, 1, [1]),
    ],
)
def test_parts_are_even_and_early_ones_short(costs: list[float], last: float, parts: int, lengths: list[int]) -> None:
    spans = balanced(costs, parts, last=last)
    assert [each.stop - each.start for each in spans] == lengths
    assert [*range(len(costs))] == [i for each in spans for i in range(each.start, each.stop)]


def test_no_other_cut_has_a_cheaper_dearest_part_or_is_more_even() -> None:
    draw = random.Random(0)
    for _ in range(200):
        costs = [float(draw.randint(1, 9)) for _ in range(draw.randint(1, 8))]
        parts, last = draw.randint(1, len(costs)), float(draw.randint(0, 12))
        spans = balanced(costs, parts, last=last)
        every = []
        for ends in combinations(range(1, len(costs)), parts - 1):
            cut = [slice(*each) for each in pairwise((0, *ends, len(costs)))]
            every.append(worth_of(costs, cut, last))
        assert worth_of(costs, spans, last) == min(every)


def worth_of(costs: list[float], spans: list[slice], last: float) -> tuple[float, float]:
    """The dearest part, and the sum of squares."""
    each = [sum(costs[span]) + (last if span is spans[-1] else 0) for span in spans]
    return max(each), sum(cost**2 for cost in each)


def test_every_parameter_has_its_name_and_one_rank_or_both_ends() -> None:
    whole = dict(model_of(Piped(stage=0, tied=True)).named_parameters())
    found: dict[str, list[int]] = {}
    for rank in range(2):
        model = model_of(Piped(stage=0, tied=True))
        parts = split_pipeline(model, rank, 2, stages_per_rank=2)
        for name, param in model.named_parameters():
            assert param.shape == whole[parts.aliases.get(name, name)].shape
            found.setdefault(parts.aliases.get(name, name), []).append(rank)
        assert parts.names == tuple(whole)
        assert parts.shared == ("embedding.weight",)
        assert [part.index for part in parts.own] == [rank, rank + 2]
    assert found.keys() == whole.keys()
    assert {name for name, ranks in found.items() if ranks == [0, 1]} == {"embedding.weight"}


def test_what_cannot_be_cut_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"8 pipeline stages of a model of 4 blocks; take at most 2 ranks"):
        split_pipeline(model_of(Piped(stage=0)), 0, 4, stages_per_rank=2)
    with pytest.raises(ValueError, match=r"no pipeline stages are known for Linear, only for \['Llama'"):
        split_pipeline(nn.Linear(2, 2), 0, 2)
    with pytest.raises(ValueError, match=r"no pipeline stage has \['norm.weight'\]"):
        split_pipeline(model_of(Piped(stage=0)), 0, 2, plan=PipelinePlan(("embedding",), ("head",), SHAPE.hidden_size))
    with pytest.raises(ValueError, match=r"the plan names \['embd'\], which Llama has not as modules"):
        split_pipeline(
            model_of(Piped(stage=0)), 0, 2, plan=PipelinePlan(("embd",), ("norm", "head"), SHAPE.hidden_size)
        )
    frozen = model_of(Piped(stage=0))
    frozen.layers[2:].requires_grad_(False)
    for name in ("norm", "head"):
        frozen.get_submodule(name).requires_grad_(False)
    with pytest.raises(
        ValueError, match=r"every parameter of stage 1 of 2 is frozen \(\['layers.2', 'layers.3', 'norm',"
    ):
        split_pipeline(frozen, 0, 2)
    with torch.device("meta"):
        model = Llama(SHAPE)
        model.layers[2].ffn.up.weight = model.layers[0].ffn.up.weight
    with pytest.raises(ValueError, match=r"only the first stage and the last may share .*layers.0.ffn.up.weight"):
        split_pipeline(model, 0, 4)
    with pytest.raises(ValueError, match=r"mesh.pp_schedule=1f1b over mesh.pp=4 ranks with 3 microb.* at least 4"):
        check_microbatches("1f1b", 3, 4)
    with pytest.raises(ValueError, match=r"take a multiple of 2"):
        check_microbatches("interleaved", 5, 2)
