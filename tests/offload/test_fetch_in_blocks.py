"""Parameters that are copied to the device as blocks of 8 or 4 bits (`precision.fetch`).

A gather in blocks is the reference: it rounds the same shards in the same blocks, but on the device, on its way to the
other ranks. On one rank, the rounding of a block is computed here by hand.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import small_decoders
import torch
from pool import Pool
from training_loops import params_of, sharded_net, snapshot, train, unequal

from dzero import AdamW, OffloadConfig
from dzero.estimate.transfers import moved_of
from dzero.zero.dtensors import local_of

HOSTED = {"param": "host", "grad": "host", "master": "host", "moments": "host"}
BLOCK = 256


def trained(
    rank: int, ranks: int, offload: OffloadConfig | None, precision: dict[str, Any], microbatches: int
) -> dict[str, Any]:
    """Losses, states and an evaluation, with parameters written by hand between two steps."""
    sharded = sharded_net("uneven", stage=3, microbatches=microbatches, offload=offload, **precision)
    optim = AdamW(sharded, lr=1e-2, max_norm=8.0)
    losses = train(sharded, optim, "uneven", steps=3)
    with torch.no_grad():
        for param in sharded.named_params().values():
            param.mul_(0.75)
    losses += train(sharded, optim, "uneven", steps=3, seed=1)
    with torch.no_grad():
        batch = small_decoders.batches("uneven", steps=1, ranks=ranks, microbatches=1, seed=9)[0][rank][0]
        losses.append(float(small_decoders.loss_fn(sharded.model, batch)))
    optim.synchronize()
    kept = {**snapshot(sharded, optim), **{f"whole {name}": each for name, each in params_of(sharded).items()}}
    optim.offload.executor.close()
    return {**kept, "losses": torch.tensor(losses)}


@pytest.mark.parametrize(
    ("code", "overlap", "param", "master", "microbatches"),
    [
        ("fp8", "forward", "bf16", "fp32", 2),
        ("int8", "backward", "bf16", "remainder", 1),
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
    plain = pool.run(trained, 2, hosted, precision, microbatches)
    for ours, theirs, exact in zip(fetched, gathered, plain, strict=True):
        assert unequal(ours, theirs) == []
        assert not torch.equal(ours["losses"], exact["losses"])


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
        sharded.model.unshard()  # type: ignore[operator]
        for module in sharded.model.modules():
            if hasattr(module, "unshard"):
                module.unshard()
        for name, param in sharded.model.named_parameters():
            want = stored[name].clone().flatten().numpy()
            want = want if stored[name].dim() < 2 else rounded(want)
            assert np.array_equal(param.detach().clone().flatten().numpy(), want), (when, name)
        sharded.reshard()

    check("without an optimizer")
    optim = AdamW(sharded, lr=1e-2)
    check("with an optimizer")
    train(sharded, optim, "uneven", steps=1)
    stored = {name: param.detach().full_tensor().clone() for name, param in sharded.named_params().items()}
    check("after a step")
    optim.synchronize()
    optim.offload.executor.close()
    del optim
    check("without an optimizer again")


def test_one_rank_computes_with_the_rounded_values_with_or_without_an_optimizer(pool: Pool) -> None:
    pool.run(seen, 1)


def moved(rank: int, ranks: int, code: str, bits: int) -> None:
    """Bytes that are fetched in a step, by hand, and how often a unit is encoded."""
    microbatches, counted = 3, Counter[str]()
    sharded = sharded_net(
        "uneven", stage=3, microbatches=microbatches, offload=OffloadConfig(**HOSTED), param="bf16", fetch=code
    )
    optim = AdamW(sharded)

    def payload(unit: Any) -> int:
        scales = codes = whole = 0
        for param in unit.shape.params:
            elems = param.shard_elems(ranks)
            if len(param.shape) < 2:
                whole += 4 * elems
            else:
                scales += 4 * -(-elems // BLOCK)
                codes += -(-elems * bits // 8)
        return scales + whole + -(-codes // 4) * 4

    train(sharded, optim, "uneven", steps=2)
    optim.synchronize()
    optim.offload.take_use()
    optim.offload.executor.before = lambda key: counted.update([f"{key.kind} {key.what}"])
    train(sharded, optim, "uneven", steps=3)
    optim.synchronize()
    use = optim.offload.take_use()
    every = sum(map(payload, sharded.units))
    root = payload(sharded.units[-1])
    in_a_step = microbatches * (2 * every - (root if ranks > 1 else 0))
    assert use["FETCH"].moved_bytes == 3 * in_a_step + root, (use, in_a_step, root)
    planned = moved_of(sharded.layout, sharded.shapes)
    assert planned.back == in_a_step
    in_bf16 = sum(2 * param.shard_elems(ranks) for unit in sharded.shapes for param in unit.params)
    assert sum(unit.encoded for unit in planned.units.values()) == every + in_bf16
    assert counted["COMPUTE encode"] == 3 * len(sharded.units) + 1, counted  # one more is for the next step's root
    stored = sum(2 * local_of(param.detach()).numel() for param in sharded.named_params().values())
    assert bits < 8 or 0.4 * stored < every < 0.7 * stored
    optim.offload.executor.close()


@pytest.mark.parametrize(("code", "bits"), [("fp8", 8), ("int4", 4)])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_unit_is_encoded_once_a_step_and_fetched_in_its_bytes(pool: Pool, ranks: int, code: str, bits: int) -> None:
    pool.run(moved, ranks, code, bits)
