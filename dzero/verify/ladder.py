"""What a configuration is compared with, and what that comparison may expect.

The baseline is stage 0 with every state on the device: the user's model, data, seed, precision and ranks, and nothing
sharded, moved, overlapped or tiled. What is not one order of additions cannot be one set of bits, so between the
baseline and the configuration stands a rung for each thing that changes the arithmetic; each is compared with the one
before it.

    rung                         differs from the one before by                     expected
    stage 0 on the device        (it runs twice)                                    the same bits
    ... with its tiles           partial sums of an MLP, of logits                  a tolerance
    ... over cut sequences       partial sums of attention, tokens of a mean        a tolerance
    stage s on the device        when gradients are reduced, in how many hops,      a tolerance
                                 how 8-bit moments are cut into blocks
    ... a step late              overlap=delayed, once its warm-up is over          a tolerance
    the configuration            placement alone: stage, tiers, overlap             the same bits

Where sequences are cut, the rungs below have them whole: each rank reads a cp-th of those that cp ranks share above, so
that a step has the same ones.

Rungs that change nothing are left out, so most configurations are compared with the baseline itself. Bits are expected
of the last rung where the design promises them: with exact reductions, one kind of update kernel, and AdamW.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from dzero.checkpoint.config import CheckpointConfig
from dzero.comm.collectives import is_exact
from dzero.config import RunConfig
from dzero.degrees import MeshConfig
from dzero.hardware import dtype_name
from dzero.monitor.profile import ProfileConfig
from dzero.optim.build import OURS
from dzero.verify.compare import Gap
from dzero.zero.layout import Layout
from dzero.zero.tiers import OffloadConfig

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


@dataclass(frozen=True, kw_only=True)
class VerifyConfig:
    """`steps`: how many are compared; of the run's own schedule, whose length stays train.steps."""

    steps: int = 5

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"verify.steps={self.steps}: must be a whole number ≥ 1")


@dataclass(frozen=True, kw_only=True)
class VerifyRun(RunConfig):
    """A run's configuration, and how it is verified."""

    verify: VerifyConfig = field(default_factory=VerifyConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.verify.steps > self.train.steps:
            raise ValueError(
                f"verify.steps={self.verify.steps} exceeds train.steps={self.train.steps}; lower it, or raise that"
            )


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
    """The runs that are made of `run` on `ranks` data-parallel ranks, the baseline first, `run` itself last."""
    if run.mesh.tp > 1:
        raise ValueError(
            f"mesh.tp={run.mesh.tp}: verify compares rows of parameters, and tensor parallelism cuts columns too; "
            "take mesh.tp=1"
        )
    for key in ("pp", "ep"):
        if (degree := getattr(run.mesh, key)) > 1:
            raise ValueError(f"mesh.{key}={degree}: verify compares whole models on every rank; take mesh.{key}=1")
    layout = layout_of(run, ranks)
    config = _plain(run, layout)
    device = run.launch.device_type
    base = replace(
        config,
        zero=replace(config.zero, stage=0, reshard_after_forward=True, states_over="shard"),
        mesh=_whole(config.mesh),
        train=replace(config.train, microbatch_sequences=_share(config)),
        offload=OffloadConfig(),
        block=replace(config.block, tiles=1, loss_tiles=1),
    )
    rounding = _rounding(layout)
    rungs = [Rung(BASELINE, base, None, "the same run again")]

    def climb(name: str, to: VerifyRun, allowed: Gap | None, why: str) -> None:
        if to != rungs[-1].config:
            rungs.append(Rung(CONFIGURATION if to == config else name, to, allowed, why))

    if why := _unpromised(run, layout, device):
        climb(CONFIGURATION, config, rounding, why)
        return rungs
    climb(
        f"{BASELINE} with its tiles",
        replace(base, block=config.block),
        rounding,
        "tiles add partial sums, rounded once",
    )
    climb(
        f"{BASELINE} over cut sequences",
        replace(rungs[-1].config, mesh=replace(config.mesh, replicate=1), train=config.train),
        rounding,
        "attention over parts of a sequence adds partial sums, and gradients are means over other tokens first",
    )
    order = order_of(layout)
    if order != order_of(layout_of(base, ranks)):
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
    climb(CONFIGURATION, config, None, "placement never changes the numbers")
    return rungs


def layout_of(config: RunConfig, ranks: int) -> Layout:
    """The table of a run on `ranks` data-parallel ranks. Raises ValueError as the table does."""
    replicate, shard = config.mesh.degrees(ranks, stage=config.zero.stage)
    return Layout.of(
        config.zero,
        config.precision,
        config.offload,
        replicate=replicate,
        shard=shard,
        microbatches=config.train.microbatches(config.mesh.readers(ranks)),
        exact=is_exact(config.zero.reduction, config.launch.device_type),
    )


def _whole(mesh: MeshConfig) -> MeshConfig:
    """The same ranks, each with sequences of its own, and no copies of shards."""
    return MeshConfig(dp=None if mesh.dp is None else mesh.dp * mesh.cp)


def _share(config: RunConfig) -> int:
    """Of a microbatch's sequences, those of each of the ranks that share them. Raises ValueError."""
    sequences, cp = config.train.microbatch_sequences, config.mesh.cp
    if sequences % cp:
        raise ValueError(
            f"train.microbatch_sequences={sequences} with mesh.cp={cp}: verify compares with a run in which each rank "
            f"has whole ones, and they cannot be shared out; take a multiple of {cp}"
        )
    return sequences // cp


def _plain(run: VerifyRun, layout: Layout) -> VerifyRun:
    """Without what changes no result; and gradients in the dtype that `auto` stands for here, so that all have it."""
    return replace(
        run,
        precision=replace(run.precision, grad=dtype_name(layout.grad.dtype)),
        checkpoint=CheckpointConfig(),
        resume=None,
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
