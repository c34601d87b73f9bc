"""What a configuration is compared with, and what that comparison may expect.

The baseline is stage 0 with every state on the device: the user's model, data, seed, precision and ranks, and nothing
sharded, moved, overlapped or tiled. What is not one order of additions cannot be one set of bits, so between the
baseline and the configuration stands a rung for each thing that changes the arithmetic; each is compared with the one
before it.

    rung                         differs from the one before by                     expected
    stage 0 on the device        (it runs twice)                                    the same bits
    ... with its tiles           partial sums of an MLP, of logits                  a tolerance
    ... over cut sequences       partial sums of attention, tokens of a mean        a tolerance
    ... over cut matrices        partial sums of products; experts that are shared  a tolerance
    ... over a pipeline          ranks over which a gradient is a mean              a tolerance
    stage s on the device        when gradients are reduced, in how many hops,      a tolerance
                                 how 8-bit moments are cut into blocks
    ... a step late              overlap=delayed, once its warm-up is over          a tolerance
    the configuration            placement alone: stage, tiers, overlap             the same bits

Where an axis cuts sequences or the model, the rungs below have them whole: each of the ranks that share them above does
all of it, for the same sequences, so that a step is the mean of the same ones. (Ranks that share experts have sequences
of their own either way.)

Rungs that change nothing are left out, so most configurations are compared with the baseline itself. Bits are expected
of the last rung where the design promises them: with exact reductions, one kind of update kernel, and AdamW.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from dzero.checkpoint.config import CheckpointConfig, ResumeConfig
from dzero.config import RunConfig
from dzero.hardware import dtype_name
from dzero.launch.devices import device_type
from dzero.monitor.config import ProfileConfig
from dzero.optim.config import OURS
from dzero.verify.compare import Gap
from dzero.verify.config import WHY, VerifyRun, meshes_to
from dzero.zero.config import is_exact
from dzero.zero.layout import Layout
from dzero.zero.offload_config import OffloadConfig

BASELINE, CONFIGURATION = "stage 0 on the device", "the configuration"
IN_FP32 = Gap(loss=1e-5, norm=1e-4, unit_norm=1e-3, masters=0.01)
IN_16_BITS = Gap(loss=1e-3, norm=5e-3, unit_norm=1e-2, masters=0.25)
"""What other roundings of the same sums may do in a few steps: several times what small models show.

AdamW's first updates are nearly the sign of a gradient, so where terms cancel the last bit of a sum decides about a
whole update: masters differ by a part of what they moved, though losses and norms hardly do. A unit that is not updated
is off by 1. A unit's gradient norm moves by up to 1.4e-3 in bf16, 1e-4 in fp16 and 2e-8 in fp32, with tiles too; one
rank of 16 too many in its divisor moves it by 6e-2."""
STALE = Gap(loss=0.1, norm=0.5, unit_norm=0.5, masters=0.5)
"""What gradients of weights that are one update old may do."""


@dataclass(frozen=True)
class Rung:
    """One run. `allowed`: how far it may be from the rung before, None where the same bits are expected; `why`."""

    name: str
    config: VerifyRun
    allowed: Gap | None
    why: str


class Order(NamedTuple):
    """In which order, and through which roundings, a layout adds gradients: two that are alike here add alike.

    early: every microbatch is reduced, then added; else they are added first. hops: of the reduction. blocks: shards
    whose 8-bit moments lie in blocks of their own; 1 where they do not matter.
    """

    early: bool
    hops: int
    blocks: int


def order_of(layout: Layout) -> Order:
    """The order of additions of `layout`; stage 0's is (False, 1, 1)."""
    eight_bit = layout.moments.dtype == torch.uint8
    return Order(
        early=layout.microbatches > 1 and layout.grad.sharded,
        hops=2 if layout.hybrid else 1,
        blocks=layout.shard * layout.shares if eight_bit else 1,
    )


def ladder(run: VerifyRun, ranks: int) -> list[Rung]:
    """The runs that are made of `run` on `ranks` ranks, the baseline first, `run` itself last."""
    layout = layout_of(run, ranks)
    config = _plain(run, layout)
    device = device_type(run.launch)
    (_, whole), *meshes = meshes_to(config.mesh)
    base = replace(
        config,
        zero=replace(config.zero, stage=0, reshard_after_forward=True, states_over="shard"),
        mesh=whole,
        offload=OffloadConfig(),
        block=replace(config.block, tiles=1, loss_tiles=1),
    )
    rounding = _rounding(layout)
    rungs = [Rung(BASELINE, base, None, "the same run again")]

    def climb(name: str, to: VerifyRun, allowed: Gap | None, why: str) -> None:
        if to != rungs[-1].config:
            rungs.append(Rung(CONFIGURATION if to == config else name, to, allowed, why))

    why = _unpromised(run, layout, device)
    climb(
        f"{BASELINE} with its tiles",
        replace(base, block=config.block),
        rounding,
        "tiles add partial sums, rounded once",
    )
    for name, mesh in meshes:
        climb(f"{BASELINE} over {name}", replace(rungs[-1].config, mesh=mesh), rounding, WHY[name])
    order = order_of(layout)
    if not why and order != order_of(layout_of(base, ranks)):
        stage = 2 if order.early else 1
        over = config.zero.states_over if order.blocks > 1 else "shard"
        sharded = replace(rungs[-1].config, zero=replace(base.zero, stage=stage, states_over=over), mesh=config.mesh)
        climb(f"stage {stage} on the device", sharded, rounding, _other_order(order))
    if layout.offload.mode == "delayed" and run.verify.steps > layout.offload.delay_warmup_steps:
        climb(
            "updates a step late",
            replace(rungs[-1].config, offload=_delayed(config.offload)),
            STALE,
            f"overlap=delayed: from step {layout.offload.delay_warmup_steps + 2} on weights are one update old",
        )
    climb(CONFIGURATION, config, rounding if why else None, why or "placement never changes the numbers")
    return rungs


def layout_of(config: RunConfig, ranks: int) -> Layout:
    """The table of a run on `ranks` ranks. Raises ValueError as the table does."""
    mesh = config.mesh
    data = mesh.data_ranks(ranks)
    replicate, shard = mesh.degrees(data, stage=config.zero.stage)
    return Layout.of(
        config.zero,
        config.precision,
        config.offload,
        replicate=replicate,
        shard=shard,
        microbatches=config.train.microbatches(mesh.readers(data)),
        exact=is_exact(config.zero.reduction, device_type(config.launch)),
        model_ranks=mesh.tp,
        pipeline_ranks=mesh.pp,
        expert_ranks=mesh.ep,
    )


def _plain(run: VerifyRun, layout: Layout) -> VerifyRun:
    """Without what changes no result; and gradients in the dtype that `auto` stands for here, so that all have it."""
    return replace(
        run,
        precision=replace(run.precision, grad=dtype_name(layout.grad.dtype)),
        checkpoint=CheckpointConfig(),
        resume=ResumeConfig(),
        profile=ProfileConfig(),
    )


def _rounding(layout: Layout) -> Gap:
    """By the narrowest of what is computed, sent and kept."""
    in_fp32 = layout.param.dtype == layout.wire == torch.float32 and layout.moments.dtype != torch.uint8
    return IN_FP32 if in_fp32 else IN_16_BITS


def _unpromised(run: VerifyRun, layout: Layout, device: str) -> str:
    """Why no bits are promised between this configuration and any other; empty where they are."""
    if not layout.exact and layout.ranks > 1:
        return "zero.reduction=native follows the backend's order of additions"
    if device == "cuda" and layout.offload.master != "device":
        return "updates on the host have other kernels than those on a GPU"
    if run.optim.rule not in OURS and layout.master.sharded:
        return f"torch's kernels of {run.optim.rule} may round a slice otherwise than the whole"
    return ""


def _other_order(order: Order) -> str:
    reasons = {
        "every microbatch is reduced, then added": order.early,
        "gradients take two hops": order.hops > 1,
        "8-bit moments are cut into blocks shard by shard": order.blocks > 1,
    }
    return "; ".join(reason for reason, holds in reasons.items() if holds)


def _delayed(offload: OffloadConfig) -> OffloadConfig:
    return OffloadConfig(
        grad="host",
        master="host",
        moments="host",
        overlap="delayed",
        delay_warmup_steps=offload.delay_warmup_steps,
    )
