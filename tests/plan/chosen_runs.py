"""Runs that `zero=auto` chose, really made: what they take of each tier. For pool workers, so importable by name."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from dzero import AdamW, Sharded, make_mesh, shard
from dzero.config import RunConfig
from dzero.models.build import build, materialiser
from dzero.parallel.blocks import apply_blocks
from dzero.plan.storages import StorageMeter


@dataclass(frozen=True)
class Taken:
    """Bytes of one rank."""

    device: int
    host: int
    disk: int


def taken(rank: int, ranks: int, runs: list[RunConfig]) -> list[Taken]:
    """Each of them for two steps; the second is measured."""
    return [one(config, ranks) for config in runs]


def one(config: RunConfig, ranks: int) -> Taken:
    model = build(config.model)
    fill = materialiser(config.model, model, seed=0, device="cpu")
    apply_blocks(model, config.block, "cpu")
    replicate, degree = config.mesh.degrees(ranks, stage=config.zero.stage)
    sharded = shard(
        model,
        config.zero,
        precision=config.precision,
        offload=config.offload,
        mesh=make_mesh("cpu", replicate=replicate, shard=degree),
        microbatches=config.train.microbatches(ranks),
        materialise=fill,
    )
    optim = AdamW(sharded, lr=1e-3, threads=1)
    with StorageMeter() as meter:
        for stored in optim._stored.values():
            meter.claim("master", (each for key, each in stored.tensors.items() if key not in stored.off_device))
        step(config, sharded, optim)
        optim.await_updates()
        meter.begin()
        step(config, sharded, optim)
    optim.await_updates()
    peak = max(moment.total for moment in meter.moments())
    schedule = optim.offload.schedule
    return Taken(peak, schedule.host_bytes, schedule.disk_bytes)


def step(config: RunConfig, sharded: Sharded, optim: AdamW) -> None:
    train, microbatches = config.train, sharded.layout.microbatches
    for index in range(microbatches):
        with sharded.microbatch(is_last=index == microbatches - 1):
            tokens = torch.zeros(train.microbatch_sequences, train.sequence_tokens + 1, dtype=torch.int64)
            logits = sharded.model(tokens[:, :-1])
            loss = functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
            (loss / microbatches).backward()  # type: ignore[no-untyped-call]
    optim.step()
