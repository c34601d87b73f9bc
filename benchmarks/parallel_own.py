"""Factorings by the library, as a user's plain loop would call it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from parallel_sides import Factoring, Step
from sides import ADAM
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dzero import AdamW, ParallelConfig, PrecisionConfig, Sharded, ZeroConfig, make_mesh, parallelize, shard
from dzero.parallel.context.parallelize import ContextParallel
from dzero.parallel.pipeline.run import Pipeline
from dzero.parallel.pipeline.schedule import HiddenStates
from dzero.parallel.pipeline.split import ModelStages


def build(model: nn.Module, stage: int, cut: Factoring, samples: int) -> Step:
    """See parallel_sides."""
    mesh = make_mesh("cpu", tp=cut.tp, pp=cut.pp)
    own = parallelize(model, mesh, ParallelConfig(ep=cut.ep, cp=cut.cp))
    losses, parts = own.loss, own.stages
    sharded = shard(
        own,
        ZeroConfig(stage=stage),
        precision=PrecisionConfig(grad="bf16"),  # as by hand; by itself it adds microbatches in fp32
        microbatches=samples if cut.pp > 1 else 1,
    )
    optim, context = AdamW(sharded, **ADAM), sharded.context
    if parts is not None:
        parts.forget()
        group = mesh.get_group("pp")
        return _pipelined(sharded, parts, group, optim, context, losses, cut, samples)

    def step(batch: Tensor) -> Tensor:
        tokens, targets = (each if context is None else context.part(each) for each in (batch[:, :-1], batch[:, 1:]))
        with sharded.microbatch(), losses():
            loss = _loss(sharded.model(tokens), targets)
            loss.backward()  # type: ignore[no-untyped-call]
        optim.step()
        return _plain(loss)

    return step


def _pipelined(
    sharded: Sharded,
    parts: ModelStages,
    group: dist.ProcessGroup,
    optim: AdamW,
    context: ContextParallel | None,
    losses: Any,
    cut: Factoring,
    samples: int,
) -> Step:
    """Microbatches of one sequence."""
    pipeline: Pipeline | None = None

    def made(tokens: int) -> Pipeline:
        positions = torch.arange(tokens) if context is None else context.positions(tokens)

        def run(part: nn.Module, x: Tensor) -> Tensor:
            out: Tensor = part(x, positions)
            return out

        return Pipeline(
            parts,
            group,
            sharded.ledger,
            schedule="1f1b",
            microbatches=samples,
            hidden=HiddenStates((1, tokens // cut.tp, parts.width), sharded.layout.param.dtype),
            device=torch.device("cpu"),
            hooks=sharded,
            run=run,
            loss=lambda part, x, targets: _loss(run(part, x), targets),
        )

    def step(batch: Tensor) -> Tensor:
        nonlocal pipeline
        total = torch.zeros(())

        def take(loss: Tensor) -> Tensor:
            mean = (loss.to_local() if isinstance(loss, DTensor) else loss) / samples
            total.add_(mean.detach())
            return mean

        whole = (batch[:, :-1], batch[:, 1:])
        tokens, targets = ((each if context is None else context.part(each)).split(1) for each in whole)
        pipeline = pipeline or made(tokens[0].shape[1])
        with losses():
            pipeline.step(tokens, targets, take)
        optim.step()
        return total * cut.pp

    return step


def _loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def _plain(loss: Tensor) -> Tensor:
    found = loss.detach()
    return found.full_tensor() if isinstance(found, DTensor) else found
