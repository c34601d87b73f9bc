"""Parameters that are copied to the device as blocks of 8 or 4 bits (`precision.fetch`).

A gather in blocks is the reference: it rounds the same shards in the same blocks, but on the device, on its way to the
other ranks. On one rank, the rounding of a block is computed here by hand.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import offload_lanes
import pytest
import small_decoders
import torch
from pool import Pool
from training_loops import params_of, sharded_net, snapshot, train, unequal

from dzero import AdamW, OffloadConfig

HOSTED = {"param": "host", "grad": "host", "master": "host", "moments": "host"}
BLOCK = 256


def trained(
    rank: int, ranks: int, offload: OffloadConfig | None, precision: dict[str, Any], microbatches: int
) -> dict[str, Any]:
    """Losses, states and an evaluation, with parameters written by hand between two steps."""
    sharded = sharded_net("uneven", stage=3, microbatches=microbatches, offload=offload, **precision)
    optim = AdamW(sharded, lr=1e-2, max_norm=8.0)
    losses = train(sharded, optim, "uneven", steps=2)
    with torch.no_grad():
        for param in sharded.named_params().values():
            param.mul_(0.75)
    losses += train(sharded, optim, "uneven", steps=2, seed=1)
    with torch.no_grad():
        batch = small_decoders.batches("uneven", steps=1, ranks=ranks, microbatches=1, seed=9)[0][rank][0]
        losses.append(float(small_decoders.loss_fn(sharded.model, batch)))
    optim.synchronize()
    whole = {f"whole {name}": each for name, each in params_of(sharded).items()}
    return {**snapshot(sharded, optim), **whole, "losses": torch.tensor(losses)}


@pytest.mark.product(keep=1)
@pytest.mark.parametrize(
    ("code", "overlap", "param", "master", "microbatches"),
    [
        ("int8", "backward", "bf16", "remainder", 1),
        ("fp8", "forward", "bf16", "fp32", 2),
        ("int4", "step", "fp16", "fp32", 1),
        ("fp8", "backward", "fp32", "fp32", 1),
        ("int8", "forward", "fp32", "fp32", 2),
    ],
)
def test_a_fetch_in_blocks_has_the_bits_of_a_gather_in_blocks(
    pool: Pool, code: str, overlap: str, param: str, master: str, microbatches: int
) -> None:
    precision = {"param": param, "master": master}
    gathered = pool.run(trained, 2, None, {**precision, "gather": code}, microbatches)
    hosted = OffloadConfig(**HOSTED, overlap=overlap)
    fetched = pool.run(trained, 2, hosted, {**precision, "fetch": code}, microbatches)
    for ours, theirs in zip(fetched, gathered, strict=True):
        assert unequal(ours, theirs) == []


def rounded(values: np.ndarray) -> np.ndarray:
    """Blocks of int8 and back, by hand: scale = largest magnitude / 127, ties to even, all in fp32."""
    out = np.empty_like(values)
    for at in range(0, values.size, BLOCK):
        block = values[at : at + BLOCK]
        most = np.float32(np.abs(block).max())
        codes = np.rint(block * (np.float32(127) / most)).astype(np.float32)
        out[at : at + BLOCK] = codes * (most / np.float32(127))
    return out


def seen(rank: int, ranks: int) -> None:
    """What one rank computes with: before there is an optimizer, with one, and with none again."""
    sharded = sharded_net("uneven", stage=3, offload=OffloadConfig(**HOSTED), param="fp32", fetch="int8")
    stored = {name: param.detach().full_tensor().clone() for name, param in sharded.named_params().items()}

    def check(when: str) -> None:
        for module in sharded.model.modules():
            if hasattr(module, "unshard"):
                module.unshard()
        for name, param in sharded.model.named_parameters():
            exact = stored[name].flatten().numpy()
            want = exact if stored[name].dim() < 2 else rounded(exact)
            assert np.array_equal(param.detach().clone().flatten().numpy(), want), (when, name)
        sharded.reshard()

    check("without an optimizer")
    optim = AdamW(sharded, lr=1e-2)
    check("with an optimizer")
    train(sharded, optim, "uneven", steps=1)
    stored = {name: param.detach().full_tensor().clone() for name, param in sharded.named_params().items()}
    check("after a step")
    optim.synchronize()
    del optim
    check("without an optimizer again")


def test_one_rank_computes_with_the_rounded_values_with_or_without_an_optimizer(pool: Pool) -> None:
    pool.run(seen, 1)


def moved(rank: int, ranks: int, code: str | None, bits: int) -> None:
    """Bytes that are fetched in a step, by hand, and how often a unit is encoded: 2 M gathers of every shard, M of the
    root's, which stays gathered for backward; one rank gathers nothing, and fetches all of them twice."""
    microbatches, precision = 3, {"fetch": code} if code else {}
    sharded = sharded_net("uneven", stage=3, microbatches=microbatches, offload=OffloadConfig(**HOSTED), **precision)
    optim = AdamW(sharded)

    def payload(unit: Any) -> int:
        """A code for each element of a matrix and a scale for each block, fp32 of all else; without a code all bf16."""
        elems = [(len(param.shape) > 1, param.shard_elems(ranks)) for param in unit.params]
        if code is None:
            return sum(2 * count for _, count in elems)
        scales = sum(4 * -(-count // BLOCK) for is_matrix, count in elems if is_matrix)
        codes = sum(-(-count * bits // 8) for is_matrix, count in elems if is_matrix)
        return scales + sum(4 * count for is_matrix, count in elems if not is_matrix) + -(-codes // 4) * 4

    train(sharded, optim, "uneven", steps=2)
    optim.synchronize()
    offload_lanes.moved(optim)
    encoded: list[str] = []
    offload_lanes.before(optim, lambda action: encoded.append(action) if " encode " in action else None)
    train(sharded, optim, "uneven", steps=3)
    optim.synchronize()
    every, root = sum(map(payload, sharded.shapes)), payload(sharded.shapes[-1])
    in_a_step = microbatches * (2 * every - (root if ranks > 1 else 0))
    assert offload_lanes.moved(optim)["FETCH"] == 3 * in_a_step + root  # one more is for the next step's root
    assert len(encoded) == (3 * len(sharded.shapes) + 1 if code else 0)


@pytest.mark.product(keep=2)
@pytest.mark.parametrize(("ranks", "code", "bits"), [(2, "int4", 4), (1, "fp8", 8), (1, None, 16), (2, None, 16)])
def test_a_unit_is_fetched_in_its_bytes_and_encoded_once_a_step(
    pool: Pool, ranks: int, code: str | None, bits: int
) -> None:
    pool.run(moved, ranks, code, bits)
