"""Layers that ranks share: how they are assigned, a loop of one's own, ties of both ends; training is in
test_cut_training."""

from __future__ import annotations

from itertools import accumulate, combinations, pairwise
from typing import Any

import cut_runs
import decoders
import pytest
import torch
import torch.nn.functional as F
from cut_runs import CLIP, EPS, LR, Run
from on_ranks import on_ranks
from parity_cells import together, whole
from pool import Pool
from torch import Tensor, nn

from dzero import AdamW, HiddenStates, ParallelConfig, Pipeline, PipelinePlan, make_mesh, parallelize, shard

FP32 = 1e-5


def llama(**settings: Any) -> Any:
    return decoders.on_meta(**{"layers": 4, **settings})


def stages_of(model: nn.Module, rank: int, ranks: int, *, parts: int = 1, plan: PipelinePlan | None = None) -> Any:
    """A rank's stages of a model, which is cut in place."""
    how = ParallelConfig(stages_per_rank=parts, pipeline_plan=plan)
    return parallelize(model, None, how, pipeline=(rank, ranks)).stages


class Chain(nn.Module):
    """Blocks that cost a token as many products as `costs` says, and as many after them as `last`, times 4."""

    def __init__(self, costs: list[int], last: int) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(2, 2), nn.Linear(2, 2 * last) if last else nn.LayerNorm(2)
        self.blocks = nn.ModuleList(nn.Linear(2, 2 * cost) for cost in costs)


def lengths(costs: list[int], last: int, parts: int) -> list[int]:
    """Numbers of blocks of the stages, all on one rank."""
    plan = PipelinePlan(("enter",), ("leave",), width=2)
    with torch.device("meta"):
        found = [stages_of(Chain(costs, last), rank, parts, plan=plan) for rank in range(parts)]
    return [stage.blocks for stages in found for stage in stages.own]


CUTS: list[tuple[list[int], int, list[int]]] = [
    ([3] * 8, 0, [2, 2, 2, 2]),
    ([3] * 8, 5, [2, 2, 3, 1]),
    ([3] * 8, 0, [2, 3, 3]),
    ([1] * 16, 0, [2] * 8),
    ([5, 1, 1, 1, 1, 1], 0, [1, 5]),
    ([1, 9, 2, 7, 3], 4, [2, 2, 1]),
    ([5, 1, 6, 2, 8, 1], 0, [2, 2, 2]),
]


@pytest.mark.parametrize(("costs", "last", "expected"), CUTS)
def test_parts_are_even_and_early_ones_short(costs: list[int], last: int, expected: list[int]) -> None:
    """No other cut has a cheaper dearest part, or is more even."""

    def worth_of(ends: tuple[int, ...]) -> tuple[int, int]:
        """The dearest part, and the sum of squares."""
        parts = [sum(costs[begin:end]) for begin, end in pairwise((0, *ends, len(costs)))]
        parts[-1] += last
        return max(parts), sum(cost**2 for cost in parts)

    assert lengths(costs, last, len(expected)) == expected
    *ends, _ = accumulate(expected)
    assert worth_of((*ends,)) == min(worth_of(each) for each in combinations(range(1, len(costs)), len(ends)))


def test_a_part_costs_what_a_token_uses_of_its_experts() -> None:
    """A block multiplies 960 of its 13,056 elements with a token, and the head 1,920: as many as two blocks."""
    sizes = {"hidden_size": 8, "heads": 2, "kv_heads": 2, "ffn_size": 8}
    model = decoders.on_meta(240, kind="moe", layers=4, **sizes, experts=64, top_k=1, balance="none")
    assert [part.blocks for part in stages_of(model, 0, 2).own] == [3]


def test_every_parameter_has_its_name_and_one_rank_or_both_ends() -> None:
    whole = dict(llama(tied=True).named_parameters())
    found: dict[str, list[int]] = {}
    for rank in range(2):
        model = llama(tied=True)
        stages = stages_of(model, rank, 2, parts=2)
        for name, param in model.named_parameters():
            assert param.shape == whole[stages.aliases.get(name, name)].shape
            found.setdefault(stages.aliases.get(name, name), []).append(rank)
        assert stages.names == tuple(whole)
        assert stages.shared == ("embedding.weight",)
        assert [part.index for part in stages.own] == [rank, rank + 2]
    assert found.keys() == whole.keys()
    assert {name for name, ranks in found.items() if ranks == [0, 1]} == {"embedding.weight"}


def frozen_at_the_end() -> Any:
    model = llama()
    for part in (model.layers[2:], model.norm, model.head):
        part.requires_grad_(False)
    return model


def sharing_blocks() -> Any:
    model = llama()
    model.layers[2].ffn.up.weight = model.layers[0].ffn.up.weight
    return model


@pytest.mark.parametrize(
    ("model_fn", "ranks", "how", "message"),
    [
        (llama, 4, {"parts": 2}, r"8 pipeline stages of a model of 4 blocks; take at most 2 ranks"),
        (lambda: nn.Linear(2, 2), 2, {}, r"no pipeline stages are known for Linear, only for \['Llama'"),
        (llama, 2, {"plan": PipelinePlan(("embedding",), ("head",), 32)}, r"no pipeline stage has \['norm.weight'\]"),
        (
            llama,
            2,
            {"plan": PipelinePlan(("embd",), ("norm", "head"), 32)},
            r"names \['embd'\], which Llama has not",
        ),
        (frozen_at_the_end, 2, {}, r"every parameter of stage 1 of 2 is frozen \(\['layers.2', 'layers.3', 'norm',"),
        (sharing_blocks, 4, {}, r"only the first stage and the last may share .*layers.0.ffn.up.weight"),
    ],
)
def test_what_cannot_be_cut_is_refused_by_name(model_fn: Any, ranks: int, how: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        stages_of(model_fn(), 0, ranks, **how)


def at_one_end(rank: int, ranks: int, run: Run) -> tuple[list[Tensor], float]:
    """A tied weight at its start, after a step of other weights, and after one of the last end's; the last's norm."""
    made = cut_runs.build(run)
    (name,) = made.sharded.stages.shared if made.sharded.stages else ()
    params = made.sharded.named_params()
    tied, other = params[name], next(param for each, param in params.items() if each != name)
    found = [whole(tied).clone()]
    for weight in other, tied if rank >= ranks // 2 else other:
        total: Any = weight.square().sum()
        total.full_tensor().backward()
        made.optim.step()
        found.append(whole(tied).clone())
    return found, made.optim.last_decision.norm


PIPED = {"pp": 2, "layers": 4, "microbatches": 4, "tied": True}
ENDS = [Run(stage=1, **PIPED), Run(stage=2, dp=2, offload="host", unused="agree", **PIPED)]
OTHER_ENDS = [Run(stage=1, unused="agree", **PIPED), Run(stage=2, dp=2, offload="host", **PIPED)]
CHEAPER = "tests/parallel/test_pipeline.py::test_a_tied_weight_takes_what_one_end_alone_has"


@pytest.mark.parametrize("run", [*ENDS, *(pytest.param(run, marks=pytest.mark.full(CHEAPER)) for run in OTHER_ENDS)])
def test_a_tied_weight_takes_what_one_end_alone_has(pool: Pool, run: Run) -> None:
    told = pool.run(at_one_end, run.ranks, run)
    (start, idle, stepped), norm = told[0]
    weight = nn.Parameter(start.clone())
    optim = torch.optim.AdamW([weight], lr=LR, eps=EPS)
    weight.grad = 2 * start * CLIP / (norm + 1e-6)
    optim.step()
    assert norm > (2 * start).norm() > CLIP
    assert torch.equal(idle, start)
    assert (stepped - weight).abs().max() < FP32
    assert all(torch.equal(last, stepped) for (_, _, last), _ in told)


class Own(nn.Module):
    """Of its own kind: x [batch, 8] -> [batch, 4]. outside: a function between its blocks, of no module."""

    def __init__(self, outside: bool) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(8, 16), nn.Linear(16, 4)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3))
        self.outside = outside

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x).sin() if self.outside else block(x)
        out: Tensor = self.leave(x)
        return out


def own_loop(
    rank: int, ranks: int, outside: bool = False, last_rows: int = 4, evaluates: bool = False
) -> dict[str, Tensor]:
    """As the README has it; parameters after three steps of two microbatches, the last of `last_rows`.

    If it `evaluates`, a loop of several ranks evaluates the last microbatch before each step.
    """
    torch.manual_seed(0)
    model, mesh = Own(outside), make_mesh("cpu", pp=ranks)
    cut = parallelize(model, mesh, ParallelConfig(pipeline_plan=PipelinePlan(("enter",), ("leave",), width=16)))
    sharded = shard(cut, stage=1, microbatches=2, precision="fp32")
    optim, pipeline = AdamW(sharded, lr=1e-2), None
    if cut.stages is not None:
        pipeline = Pipeline(
            cut.stages,
            mesh.get_group("pp"),
            sharded.ledger,
            schedule="1f1b",
            microbatches=2,
            device=torch.device("cpu"),
            hooks=sharded,
            hidden=HiddenStates((4, cut.stages.width), torch.float32),
            run=lambda stage, x: stage(x),
            loss=lambda stage, x, targets: F.mse_loss(stage(x), targets),
        )
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        x, y = (torch.randn(2, 4, width, generator=generator) for width in (8, 4))
        if pipeline is not None:
            if evaluates:
                pipeline.evaluate(x[1, :last_rows], y[1, :last_rows])
            pipeline.step([x[0], x[1, :last_rows]], [y[0], y[1, :last_rows]], lambda loss: loss / 2)
        else:
            for index in range(2):
                with sharded.microbatch(is_last=index == 1):
                    (F.mse_loss(sharded.model(x[index]), y[index]) / 2).backward()
        optim.step()
    return {name: whole(param).clone() for name, param in sharded.named_params().items()}


def test_a_model_of_its_own_in_a_loop_of_its_own(pool: Pool) -> None:
    (want,) = pool.run(own_loop, 1)
    got = together(pool.run(own_loop, 2, False, 4, True))
    assert got.keys() == want.keys()
    assert all(torch.equal(got[name], value) for name, value in want.items())


@on_ranks(2)
def test_what_a_pipeline_cannot_run_is_refused_before_ranks_wait_for_each_other(rank: int, ranks: int) -> None:
    """Of a forward that does something between its modules, and of a microbatch of another size: each rank raises by
    itself, before it waits for another."""
    with pytest.raises(
        ValueError, match=r"mesh\.pp=2: the forward of Own changes hidden states outside of its modules"
    ):
        own_loop(rank, ranks, outside=True)
    for evaluates, which in ((False, 1), (True, 0)):
        planned_for = r"are \[3, 8\]: the pipeline was planned for 4 sequences"
        with pytest.raises(ValueError, match=rf"^tokens of microbatch {which} {planned_for}"):
            own_loop(rank, ranks, last_rows=3, evaluates=evaluates)
