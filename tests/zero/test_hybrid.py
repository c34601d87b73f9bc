"""Shards inside, copies across (HSDP), the backend's own sums, and plain `.grad`: close to the exact run."""

from __future__ import annotations

from typing import Any

import pytest
import small_decoders
import torch
from parity_cells import whole
from pool import Pool
from training_loops import params_of, sharded_net, train, unequal

from dzero import AdamW


def without_our_optimizer(rank: int, ranks: int) -> None:
    """`.grad` as FSDP2 leaves it: the average over all ranks of the gradients of their own batches."""
    drawn = small_decoders.batches("even", steps=1, ranks=ranks, microbatches=1)[0]
    plain = small_decoders.build("even")
    sum(small_decoders.loss_fn(plain, of_rank[0]) for of_rank in drawn).backward()  # type: ignore[union-attr]
    cells: tuple[dict[str, Any], ...] = ({"stage": 0}, {"stage": 2}, {"stage": 3, "replicate": 2})
    for kwargs in cells:
        sharded = sharded_net("even", param="fp32", **kwargs)
        small_decoders.loss_fn(sharded.model, drawn[rank][0]).backward()  # type: ignore[no-untyped-call]
        for name, want in plain.named_parameters():
            grad = sharded.named_params()[name].grad
            assert grad is not None
            assert want.grad is not None
            torch.testing.assert_close(whole(grad), want.grad / ranks, rtol=1e-4, atol=1e-6)


def test_grads_are_right_without_our_optimizer_too(pool: Pool) -> None:
    pool.run(without_our_optimizer, 4)


CELLS: dict[str, dict[str, Any]] = {
    "1x4": {"stage": 2},
    "2x2": {"stage": 2, "replicate": 2},
    "2x2 stage 3": {"stage": 3, "replicate": 2},
    "2x2 native": {"stage": 1, "replicate": 2, "reduction": "native"},
    "1x4 native": {"stage": 3, "reduction": "native"},
}


def hybrid(rank: int, ranks: int, microbatches: int) -> dict[str, Any]:
    """Losses and parameters by name of the cell after 3 fp32 steps."""
    results = {}
    for name, kwargs in CELLS.items():
        sharded = sharded_net("uneven", microbatches=microbatches, param="fp32", **kwargs)
        losses = train(sharded, AdamW(sharded, lr=1e-3, max_norm=0.5), "uneven", steps=3)
        results[name] = {"losses": losses, "params": params_of(sharded)}
    return results


@pytest.mark.full("tests/zero/test_hybrid.py::test_grads_are_right_without_our_optimizer_too")
@pytest.mark.parametrize("microbatches", [1, 4])
def test_hybrid_and_native_runs_agree_with_the_exact_one(pool: Pool, microbatches: int) -> None:
    """fp32; sums of four gradients in another order. Tolerance: 1e-5 of the loss; an element moves by at most
    lr = 1e-3 a step, of which another rounding of a near-zero gradient may take a part: 1e-3 absolute, 1e-6 on
    average."""
    first, *others = pool.run(hybrid, 4, microbatches)
    want = first["1x4"]
    for key, got in first.items():
        torch.testing.assert_close(torch.tensor(got["losses"]), torch.tensor(want["losses"]), rtol=1e-5, atol=0)
        off = torch.cat([(got["params"][n] - p).abs().view(-1) for n, p in want["params"].items()])
        assert off.max() < 1e-3, key
        assert off.mean() < 1e-6, key
    for other in others:  # copies are copies, to the bit
        assert all(unequal(other[key]["params"], first[key]["params"]) == [] for key in first)
