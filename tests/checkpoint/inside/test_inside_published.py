"""Of published weights each rank reads the bytes that it keeps, before there is an optimizer; logits are theirs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from pool import Pool
from small_mixtures import VOCAB, mixture, tokens
from torch import Tensor

import dzero
from dzero import testing
from dzero.checkpoint.import_hf import blank, fill
from dzero.models.build import build, weights_of
from dzero.models.config import ModelConfig
from dzero.models.meta_init import MetaInitializer

OURS = ModelConfig(
    kind="moe",
    hidden_size=32,
    layers=2,
    heads=4,
    kv_heads=2,
    ffn_size=48,
    experts=4,
    top_k=2,
    balance="none",
    rope_theta=1e6,
)


def read_bytes() -> int:
    """By this process so far."""
    return int(Path("/proc/self/io").read_text().split()[1])


def filled(rank: int, ranks: int, ours: bool, stage: int, source: Path) -> tuple[int, int, Tensor, str]:
    """Bytes that were read and that this rank keeps, logits, and what filling it with an optimizer says."""
    config = (
        replace(OURS, weights=str(source)) if ours else ModelConfig(kind="hf", name_or_path=str(source), weights=True)
    )
    model = build(config, VOCAB)
    weights = weights_of(config, model)
    zeros = MetaInitializer(model, seed=0, device="cpu", weights=blank(model, weights))
    cut = dzero.parallelize(model, dzero.make_mesh("cpu"), dzero.ParallelConfig(ep=ranks)) if ours else model
    sharded = dzero.shard(cut, stage=stage, init=zeros, precision="fp32")
    before = read_bytes()
    fill(sharded, weights)
    read = read_bytes() - before
    kept = sum(4 * testing.local(param).numel() for param in sharded.named_params().values())
    with torch.no_grad():
        logits = sharded.model.eval()(tokens())
    sharded.reshard()
    optim = dzero.AdamW(sharded)
    with pytest.raises(RuntimeError) as late:
        fill(sharded, weights)
    optim.synchronize()
    return read, kept, logits, str(late.value)


@pytest.mark.parametrize(("ours", "stage", "ranks"), [(False, 3, 2), (False, 1, 2), (True, 3, 2)])
def test_a_rank_reads_what_it_keeps(pool: Pool, tmp_path: Path, ours: bool, stage: int, ranks: int) -> None:
    theirs = mixture("mixtral", num_local_experts=4)
    theirs.save_pretrained(tmp_path, max_shard_size="20KB")
    want = theirs(tokens()).logits
    for read, kept, logits, late in pool.run(filled, ranks, ours, stage, tmp_path):
        assert 0 <= read - kept < 2048  # the reading of the counter itself, wake-ups of threads
        # The same fp32 values; the outputs of the chosen experts are summed in another order.
        torch.testing.assert_close(logits, want, rtol=1e-5, atol=1e-6)
        assert "fill it before making one" in late
