"""What the user drops is freed: no reference survives in FSDP2's or autograd's hooks."""

from __future__ import annotations

import gc
import weakref

import small_decoders
from pool import Pool

from dzero import AdamW, ZeroConfig, shard


def survivors(rank: int, ranks: int, stage: int) -> list[str]:
    """Train a step, drop everything, and tell what is still alive."""
    sharded = shard(small_decoders.build("even"), ZeroConfig(stage=stage))
    optim = AdamW(sharded)
    small_decoders.loss_fn(
        sharded.model, small_decoders.batches("even", steps=1, ranks=ranks, microbatches=1)[0][rank][0]
    ).backward()
    optim.step()
    watched = {"sharded": sharded, "optimizer": optim, "gradients": optim.gradients, "model": sharded.model}
    references = {name: weakref.ref(value) for name, value in watched.items()}
    del sharded, optim, watched
    gc.collect()
    return [name for name, reference in references.items() if reference() is not None]


def test_dropped_models_and_optimizers_are_freed(pool: Pool) -> None:
    for stage in (0, 3):
        assert pool.run(survivors, 2, stage) == [[], []]
