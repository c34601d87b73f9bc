"""Experts that ranks share: a module of one's own, skipped steps, and what is refused; training is in
test_cut_training."""

from __future__ import annotations

from typing import Any

import cut_runs
import decoders
import pytest
import torch
from cut_runs import Run
from on_ranks import on_ranks
from parity_cells import whole
from pool import Pool
from torch import Tensor, nn
from training_loops import unequal

from dzero import ParallelConfig, TorchOptimizer, ZeroConfig, make_mesh, parallelize, shard, testing


class Experts(nn.Module):
    """One's own, with weights and biases, which does nothing without rows: rows [n, 8] -> the same."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(experts, 8, 8))
        self.bias = nn.Parameter(torch.randn(experts, 8))

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        parts = [(e, part) for e, part in enumerate(rows.split(counts.tolist())) if len(part)]
        return torch.cat([part @ self.weight[e] + self.bias[e] for e, part in parts]) if parts else rows


class Hashed(nn.Module):
    """A mixture of one's own, of which token t goes to expert t mod `used` of 4: x [tokens, 8] -> the same."""

    def __init__(self, used: int = 4) -> None:
        super().__init__()
        self.used = used
        self.experts = Experts(4)
        self.before, self.after = nn.Parameter(torch.ones(8)), nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        chosen = torch.arange(len(x)) % self.used
        order, counts = chosen.argsort(stable=True), torch.bincount(chosen, minlength=4)
        rows = self.experts((x * self.before)[order], counts)
        out: Tensor = torch.empty_like(x).index_copy(0, order, rows) * self.after
        return out


def by_own_module(rank: int, ranks: int) -> list[float]:
    """How far a step of SGD is from that of one process with the first rank's values and all tokens, of its length;
    with four experts in use, and with one, so that every other rank has none to do."""
    found = []
    for used in (4, 1):
        torch.manual_seed(0)
        alone, tokens = Hashed(used), torch.randn(ranks, 10, 8)
        (sum(alone(each).square().mean() for each in tokens) / ranks).backward()  # type: ignore[union-attr]
        torch.manual_seed(rank)  # other values on every rank
        cut = parallelize(Hashed(used), make_mesh("cpu"), ParallelConfig(ep=2))
        sharded = shard(cut, ZeroConfig(stage=3), precision="fp32")
        optim = TorchOptimizer(sharded, torch.optim.SGD, lr=1.0)
        sharded.model(tokens[rank]).square().mean().backward()
        optim.step()
        params = sharded.named_params()
        for name, param in alone.named_parameters():
            assert param.grad is not None
            stepped = param - whole(params[name])
            found.append(float((stepped - param.grad).detach().norm() / param.grad.norm()))
    return found


def test_a_module_of_ones_own_steps_as_one_process_with_the_first_ranks_values(pool: Pool) -> None:
    """Rounding of a difference of values near 1 is 6e-8, and gradients are about 1e-2 and larger."""
    for apart in pool.run(by_own_module, 4):
        assert max(apart) < 1e-5


def biases_after_a_skip(rank: int, ranks: int) -> list[Tensor]:
    """The first router's: afresh, after a step that was refused, after one that was made."""
    run = Run(stage=2, dp=ranks, ep=ranks, experts=4)
    made = cut_runs.build(run)
    seen = [next(iter(cut_runs.biases(made).values()))]
    made.optim.refuse_step(lambda: "the test")
    for of_step in cut_runs.batches(2, ranks, 1):
        cut_runs.one_step(run, made, of_step[rank])
        seen.append(next(iter(cut_runs.biases(made).values())))
    return seen


def test_a_skipped_step_moves_no_bias(pool: Pool) -> None:
    for before, skipped, after in pool.run(biases_after_a_skip, 2):
        assert torch.equal(before, skipped)
        assert not torch.equal(skipped, after)
        assert after.abs().max() == pytest.approx(0.01)  # once, by what was counted after it


def overflowed(rank: int, ranks: int, run: Run) -> tuple[set[str], bool, bool]:
    """In a first step the last rank finds an infinite gradient of one of its experts: culprits, whether all that this
    rank has stayed the same, and whether the next step was made."""
    made, still = cut_runs.build(run), [True]

    def overflow(grad: Tensor) -> Tensor:
        if still:
            testing.local(grad)[0] = float("inf")
        return grad

    def watch(experts: Any, _: Any) -> None:
        experts.down.register_hook(overflow)

    for name, module in made.sharded.model.named_modules() if rank == ranks - 1 else ():
        if name.endswith("ffn.experts"):
            module.register_forward_pre_hook(watch)
    before = cut_runs.states(made)
    first, second = (of_step[cut_runs.reader_of(run)] for of_step in cut_runs.batches(2, run.dp, run.microbatches))
    cut_runs.one_step(run, made, first)
    culprits = {name.split(" ")[0] for name in made.optim.last_decision.nonfinite_params}
    same = unequal(cut_runs.states(made), before) == []
    still.clear()
    cut_runs.one_step(run, made, second)
    return culprits, same, made.optim.last_decision.finite


CHEAPER = pytest.mark.full(
    "tests/parallel/test_experts.py::test_an_overflow_in_one_expert_of_one_rank_is_skipped_by_all"
)


@pytest.mark.parametrize("axis", ["", pytest.param("pp", marks=CHEAPER), pytest.param("tp", marks=CHEAPER)])
def test_an_overflow_in_one_expert_of_one_rank_is_skipped_by_all(pool: Pool, axis: str) -> None:
    cut = {axis: 2} if axis else {}
    run = Run(stage=2, dp=2, ep=2, experts=4, microbatches=2, precision={"param": "fp16"}, **cut)
    layers = (1,) if axis == "pp" else (0, 1)
    culprits = {f"layers.{index}.ffn.experts.down" for index in layers}
    assert pool.run(overflowed, run.ranks, run) == [(culprits, True, True)] * run.ranks


def tied_experts() -> Any:
    model: Any = decoders.on_meta(**decoders.EXPERTS)
    model.layers[1].ffn.experts.gate = model.layers[0].ffn.experts.gate
    return model


@on_ranks(2)
def test_what_ep_does_not_divide_and_experts_without_their_handle_are_named(rank: int, ranks: int) -> None:
    odd = decoders.on_meta(**{**decoders.EXPERTS, "experts": 3, "ffn_size": 5})
    refused = [
        (odd, 2, r"mesh\.ep=2 does not divide dim 0 of parameter layers\.0\.ffn\.experts\.gate"),
        (nn.Linear(2, 2), 2, r"mesh\.ep=2: Linear has no module of experts; take mesh\.ep=1"),
        (tied_experts(), 2, r"layers\.0\.ffn\.experts\.gate of experts is used elsewhere too"),
        (decoders.on_meta(**decoders.EXPERTS), 4, r"mesh\.ep=4 does not divide the 2 "),
    ]
    mesh = make_mesh("cpu")
    for model, ep, message in refused:
        with pytest.raises(ValueError, match=message):
            parallelize(model, mesh, ParallelConfig(ep=ep))
    model = parallelize(Hashed(), mesh, ParallelConfig(ep=2)).model
    with pytest.raises(
        ValueError, match="2 ranks share experts of unit root: pass what parallelize_experts returned as"
    ):
        shard(model, mesh=mesh)
