"""Parameters that some ranks, or none, reach in backward: gradients, updates and norms are those of one process."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from parity_cells import whole
from pool import Pool
from torch import Tensor, nn
from training_loops import params_of, unequal

import dzero

EXPERTS, STEPS, MICROBATCHES, WIDTH = 4, 6, 2, 6
CHOSEN = {  # the experts that a rank runs, by (step, rank); those that are missing run none
    (0, 0): [0],
    (0, 1): [0, 1],
    (1, 0): [2],
    (1, 1): [2],
    (2, 0): [0],
    (2, 1): [1],
    (3, 0): [1],
    (3, 3): [3],
    (4, 1): [0],
    (5, 0): [0, 1, 2, 3],
}
HOST = {"grad": "host", "master": "host", "moments": "host"}
WAYS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "stage 3": (2, {"stage": 3}, {}),
    "stage 0": (2, {"stage": 0}, {}),
    "shared out": (4, {"stage": 2, "replicate": 2, "optimizer_shard_axes": ["replicate", "shard"]}, {}),
    "stage 2": (3, {"stage": 2}, {}),
    "stage 1": (2, {"stage": 1}, {"grad": "host"}),
    "host, early": (2, {"stage": 2}, {**HOST, "overlap": "backward"}),
    "replicas": (4, {"stage": 3, "replicate": 2}, {}),
    "host": (2, {"stage": 3}, HOST),
}


class Mixture(nn.Module):
    """A unit whose experts run where they are chosen; the second and third microbatch may choose another."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS))
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor, chosen: list[int]) -> Tensor:
        for expert in chosen:
            x = x + self.scale * self.experts[expert](x).tanh()
        return x


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mixture, self.head = nn.Linear(3, WIDTH), Mixture(), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor, chosen: list[int]) -> Tensor:
        out: Tensor = self.head(self.mixture(self.embed(x), chosen)).square().mean()
        return out


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def batch(step: int, rank: int, microbatch: int) -> tuple[Tensor, list[int]]:
    seed = 100 * step + 10 * rank + microbatch
    chosen = CHOSEN.get((step, rank), [])
    return torch.randn(2, 3, generator=torch.Generator().manual_seed(seed)), chosen[: 1 + microbatch]


def in_torch(ranks: int, max_norm: float) -> tuple[dict[str, Tensor], list[float], dict[str, int]]:
    model, norms = net(), []
    optim = torch.optim.AdamW(model.parameters(), lr=0.05, eps=1e-3, weight_decay=0.1, betas=(0.9, 0.95))
    for step in range(STEPS):
        for rank in range(ranks):
            for microbatch in range(MICROBATCHES):
                (model(*batch(step, rank, microbatch)) / (ranks * MICROBATCHES)).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), max_norm).item())
        optim.step()
        optim.zero_grad()
    counts = {name: int(optim.state[p]["step"]) if p in optim.state else 0 for name, p in model.named_parameters()}
    return {name: param.detach() for name, param in model.named_parameters()}, norms, counts


def in_dzero(rank: int, ranks: int, way: str, by_hand: bool) -> tuple[dict[str, Tensor], list[float], dict[str, int]]:
    _, zero, tiers = WAYS[way]
    zero = dict(zero)
    replicate = ranks if zero["stage"] == 0 else zero.pop("replicate", 1)
    units = dzero.ZeroConfig(**zero, units=lambda module: isinstance(module, Mixture))
    sharded = dzero.shard(
        net(),
        units,
        mesh=dzero.make_mesh("cpu", replicate=replicate),
        precision="fp32",
        offload=dzero.OffloadConfig(**tiers) if tiers else None,
        microbatches=MICROBATCHES,
    )
    max_norm = None if by_hand else 0.5
    optim = dzero.AdamW(sharded, lr=0.05, eps=1e-3, weight_decay=0.1, betas=(0.9, 0.95), max_norm=max_norm)
    norms = []
    for step in range(STEPS):
        for microbatch in range(MICROBATCHES):
            with sharded.microbatch(is_last=microbatch == MICROBATCHES - 1):
                (sharded.model(*batch(step, rank, microbatch)) / MICROBATCHES).backward()
        if by_hand:
            norms.append(float(nn.utils.clip_grad_norm_(sharded.model.parameters(), 0.5)))
        optim.step()
        assert optim.last_decision is not None
        norms = norms if by_hand else [*norms, optim.last_decision.norm]
        optim.zero_grad()
    optim.synchronize()
    params = sharded.named_params()
    counts = {name: int(optim.state[param].get("step", 0)) for name, param in params.items()}
    return params_of(sharded), norms, counts


@pytest.mark.product(keep=3)
@pytest.mark.parametrize("way", WAYS)
def test_what_no_rank_reached_stays_and_what_one_reached_moves(pool: Pool, way: str) -> None:
    ranks = WAYS[way][0]
    params, norms, counts = in_torch(ranks, 0.5)
    assert len(set(counts.values())) > 2  # experts have steps of their own
    for by_hand in (False,) if "early" in way or ranks == 4 else (False, True):
        for found, found_norms, found_counts in pool.run(in_dzero, ranks, way, by_hand):
            assert found_counts == counts
            assert found_norms == pytest.approx(norms, rel=1e-5)
            for name, value in params.items():
                torch.testing.assert_close(found[name].view_as(value), value, rtol=0, atol=1e-6, msg=name)


def small(stage: int) -> dzero.Sharded:
    zero = dzero.ZeroConfig(stage=stage, units=lambda module: isinstance(module, Mixture))
    return dzero.shard(net(), zero, mesh=dzero.make_mesh("cpu"), precision="fp32")


def by_torchs_optimizer(rank: int, ranks: int) -> dict[str, Tensor]:
    """Without an optimizer of dzero, where no step asks which ranks reached a parameter."""
    sharded = small(3)
    optim = torch.optim.AdamW(sharded.model.parameters(), lr=0.05, eps=1e-3, weight_decay=0.1)
    for chosen in ([0], [0, 1 - rank], [1, 2 * rank]):
        sharded.model(torch.ones(2, 3) * (1 + rank), chosen).backward()
        optim.step()
        optim.zero_grad()
    return params_of(sharded)


def test_an_optimizer_of_torch_gets_the_gradients_of_all_ranks(pool: Pool) -> None:
    model = net()
    optim = torch.optim.AdamW(model.parameters(), lr=0.05, eps=1e-3, weight_decay=0.1)
    for of_ranks in ([[0], [0]], [[0, 1], [0, 0]], [[1, 0], [1, 2]]):
        for rank, chosen in enumerate(of_ranks):
            (model(torch.ones(2, 3) * (1 + rank), chosen) / 2).backward()
        optim.step()
        optim.zero_grad()
    for found in pool.run(by_torchs_optimizer, 2):
        for name, value in model.named_parameters():
            torch.testing.assert_close(found[name].view_as(value), value.detach(), rtol=0, atol=1e-6, msg=name)


def removed(rank: int, ranks: int, by: str) -> str:
    """A gradient that some or all ranks remove between backward and `step`."""
    sharded = small(2)
    optim = dzero.AdamW(sharded, lr=0.1)
    sharded.model(torch.ones(2, 3), [rank]).backward()
    weight = sharded.named_params()["mixture.experts.1.weight"]
    before = whole(weight)
    if by == "all" or rank == 0:
        weight.grad = None
    try:
        optim.step()
    except RuntimeError as error:
        return str(error)
    return "stays" if torch.equal(whole(weight), before) else "moves"


def test_a_gradient_that_all_ranks_remove_is_none_and_one_that_some_remove_is_refused(pool: Pool) -> None:
    assert pool.run(removed, 2, "all") == ["stays", "stays"]
    for told in pool.run(removed, 2, "one"):
        assert "rank 0: gradients of all parameters but mixture.experts.1.weight" in told


def by_other_ways(rank: int, ranks: int) -> list[float]:
    """How far three weights move that no expert's forward reached: one whose `.grad` is written, one of a penalty."""
    sharded = small(3)
    optim = dzero.AdamW(sharded, lr=0.1, weight_decay=0.0)
    weights = [sharded.named_params()[f"mixture.experts.{expert}.weight"] for expert in (1, 2, 3)]
    before = [whole(weight) for weight in weights]
    (weights[1].square().sum() + sharded.model(torch.ones(2, 3), [0])).backward()
    assert weights[0].grad is not None
    weights[0].grad.add_(1.0)
    optim.step()
    assert optim.last_decision is not None
    assert math.isfinite(optim.last_decision.norm)
    return [(whole(weight) - value).abs().amax().item() for weight, value in zip(weights, before, strict=True)]


def test_a_gradient_that_is_written_by_hand_counts_and_so_does_a_penalty(pool: Pool) -> None:
    """AdamW's first step has the length of the rate, but for eps."""
    for moved in pool.run(by_other_ways, 2):
        assert moved == pytest.approx([0.1, 0.1, 0.0], rel=1e-3)


@on_ranks(2)
def test_counts_of_experts_are_resumed(rank: int, ranks: int, tmp_path: Path) -> list[str]:
    """What differs after a run, in which some experts have no states, and after one that resumes it."""
    ends = []
    for resumes in (False, True):
        sharded = small(2)
        optim = dzero.AdamW(sharded, lr=0.1)
        config = dzero.CheckpointConfig(folder=str(tmp_path))
        with dzero.Checkpointer(config, sharded, optim) as checkpoints:
            if resumes:
                checkpoints.resume("auto")
            for step in range(2 * resumes, 4):
                sharded.model(torch.ones(2, 3) * step, [rank] if step < 3 else [2]).backward()
                optim.step()
                optim.zero_grad()
                if step == 1 and not resumes:
                    checkpoints.save(2, {})
        dist.barrier()
        ends.append(params_of(sharded))
    return unequal(*ends)
