"""Training with payloads in blocks (ZeRO++): the bits of a plain loop that rounds by hand, and of every stage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import small_decoders
import torch
from block_cases import through_blocks
from on_ranks import on_ranks
from pool import Pool
from torch import Tensor, nn
from training_loops import params_of, sharded_net, train, unequal

from dzero import AdamW, CheckpointConfig, Checkpointer, OffloadConfig, TorchOptimizer

RANKS, STEPS, RATE = 4, 2, 0.05


def rounded(values: Tensor, code: str) -> Tensor:
    """The shard of a matrix after one trip in blocks; other parameters are sent as they are."""
    return values if values.ndim < 2 else through_blocks(values.flatten(), code).view_as(values)


def by_shards(values: Tensor, code: str) -> Tensor:
    """A whole parameter, each of whose shards made the trip."""
    return values if code in ("param", "auto") else torch.cat([rounded(shard, code) for shard in values.chunk(RANKS)])


def by_hand(net: str, gather: str, reduce: str, group: int) -> tuple[dict[str, Tensor], list[list[float]]]:
    """SGD in one process: parameters at the end, and the losses of each step and rank."""
    model = small_decoders.build(net, 0)
    batches = small_decoders.batches(net, steps=STEPS, ranks=RANKS, microbatches=1)
    weights = {name: param.detach().clone() for name, param in model.named_parameters()}
    losses = []
    for of_step in batches:
        used = {name: nn.Parameter(by_shards(value, gather)) for name, value in weights.items()}
        grads: list[dict[str, Tensor]] = []
        losses.append([])
        for rank in range(RANKS):
            for param in used.values():
                param.grad = None
            loss = torch.func.functional_call(model, used, (of_step[rank][0][:, :-1],)).flatten(0, 1)
            loss = nn.functional.cross_entropy(loss, of_step[rank][0][:, 1:].flatten())
            loss.backward()
            losses[-1].append(loss.item())
            grads.append({name: param.grad for name, param in used.items() if param.grad is not None})
        for name in weights:
            sums = []
            for first in range(0, RANKS, group):
                total = by_shards(grads[first][name], reduce)
                for each in grads[first + 1 : first + group]:
                    total = total + by_shards(each[name], reduce)
                sums.append(by_shards(total, reduce) if group < RANKS else total)
            total = sums[0]
            for each in sums[1:]:
                total = total + each
            weights[name] = weights[name].add(total * torch.tensor(1 / RANKS), alpha=-RATE)
    return weights, losses


def steps_of(
    rank: int, ranks: int, gather: str, reduce: str, group: int | None
) -> tuple[dict[str, Tensor], list[float]]:
    sharded = sharded_net("uneven", stage=3, param="fp32", gather=gather, reduce=reduce, node_ranks=group)
    optim = TorchOptimizer(sharded, torch.optim.SGD, lr=RATE, foreach=False)
    losses = train(sharded, optim, "uneven", steps=STEPS)
    return params_of(sharded), losses


@pytest.mark.product(keep=1)
@pytest.mark.parametrize(
    ("gather", "reduce", "group"),
    [("int4", "int8", 2), ("param", "int8", None), ("fp8", "fp8", 2), ("int8", "auto", None), ("int4", "int4", 2)],
)
def test_steps_are_those_of_a_loop_that_rounds_by_hand(pool: Pool, gather: str, reduce: str, group: int | None) -> None:
    found = pool.run(steps_of, RANKS, gather, reduce, group)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        weights, losses = by_hand("uneven", gather, reduce, group or RANKS)
    finally:
        torch.set_num_threads(threads)
    for rank, (_, of_rank) in enumerate(found):
        assert of_rank == [step[rank] for step in losses]
    assert unequal(found[0][0], weights) == []


CELLS: list[dict[str, Any]] = [
    {"stage": 2, "offload": OffloadConfig(grad="host", master="host", moments="host", overlap="backward")},
    {"stage": 3, "reshard": 2},
    {"stage": 1},
]


@pytest.mark.product(keep=1)
@pytest.mark.parametrize("cell", CELLS, ids=str)
@on_ranks(RANKS)
def test_stages_and_tiers_have_the_same_bits(rank: int, ranks: int, cell: dict[str, Any]) -> list[str]:
    """What differs from stage 3, with feedback."""
    results, precision = [], {"param": "bf16", "gather": "int8", "reduce": "int4", "feedback": True}
    for settings in ({"stage": 3}, cell):
        sharded = sharded_net("uneven", node_ranks=2, **precision, **settings)
        losses = train(sharded, AdamW(sharded, lr=1e-2), "uneven", steps=STEPS)
        results.append(params_of(sharded) | {"losses": torch.tensor(losses)})
    return unequal(*results)


@on_ranks(2)
def test_a_run_that_resumes_has_the_bits_of_the_one_that_went_on(rank: int, ranks: int, tmp_path: Path) -> list[str]:
    """Residuals are not saved, so that a save drops them; a run that does not save keeps them, which shows."""
    folder = str(tmp_path)
    kind: dict[str, Any] = {"stage": 3, "param": "bf16", "reduce": "int4", "feedback": True}
    ends = []
    for name, seed in (("saves", 0), ("resumes", 1), ("goes on", 0)):
        sharded = sharded_net("uneven", seed=seed, **kind)
        optim = AdamW(sharded, lr=1e-2)
        train(sharded, optim, "uneven", steps=2, seed=seed)
        with Checkpointer(CheckpointConfig(folder=folder), sharded, optim) as checkpoints:
            if name == "saves":
                checkpoints.save(2, {})
                checkpoints.finish()
            elif name == "resumes":
                assert checkpoints.resume(folder) is not None
            losses = train(sharded, optim, "uneven", steps=2, seed=7)
        ends.append(params_of(sharded) | {"losses": torch.tensor(losses)})
    assert unequal(ends[0], ends[2]) != []
    return unequal(ends[0], ends[1])
