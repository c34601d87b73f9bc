"""Runs that `zero=auto` chose, really made: what they take of each tier. For pool workers, so importable by name."""

from __future__ import annotations

from functools import partial

import torch
from simulator.measured_memory import MeasuredMemory, MemoryCount
from torch.nn import functional

from dzero import AdamW, Sharded, make_mesh, shard
from dzero.config import RunConfig
from dzero.models.build import build, materialiser
from dzero.parallel.blocks import apply_blocks


def taken_by(rank: int, ranks: int, runs: list[RunConfig]) -> list[MeasuredMemory]:
    """Each of them made, trained for some steps and forgotten."""
    return [one(config, ranks) for config in runs]


def one(config: RunConfig, ranks: int) -> MeasuredMemory:
    with MemoryCount() as taking:
        sharded = sharded_for(config, ranks)
        optim = AdamW(sharded, lr=1e-3, threads=1)
        return taking.taken(partial(step, config, sharded, optim), optim)


def sharded_for(config: RunConfig, ranks: int) -> Sharded:
    model = build(config.model)
    fill = materialiser(config.model, model, seed=0, device="cpu")
    apply_blocks(model, config.block, "cpu")
    replicate, degree = config.mesh.degrees(ranks, stage=config.zero.stage)
    return shard(
        model,
        config.zero,
        precision=config.precision,
        offload=config.offload,
        mesh=make_mesh("cpu", replicate=replicate, shard=degree),
        microbatches=config.train.microbatches(ranks),
        init=fill,
    )


def step(config: RunConfig, sharded: Sharded, optim: AdamW) -> None:
    train, microbatches = config.train, sharded.layout.microbatches
    for index in range(microbatches):
        with sharded.microbatch(is_last=index == microbatches - 1):
            tokens = torch.zeros(train.microbatch_sequences, train.sequence_tokens + 1, dtype=torch.int64)
            logits = sharded.model(tokens[:, :-1])
            loss = functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
            (loss / microbatches).backward()  # type: ignore[no-untyped-call]
    optim.step()
