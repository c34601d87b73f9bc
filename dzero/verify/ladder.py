"""Ladder of runs that leads from the baseline to the configuration, and the expected result of each comparison.

The baseline is stage 0 with all states on the device. It has the user's model, data, seed, precision and ranks; nothing
is sharded, offloaded, overlapped, tiled, or split into parts of units. Another order of additions gives other bits. So
between the baseline and the configuration there is a rung for each setting that changes the arithmetic, and each rung
is compared with the one before it.

    rung                         difference from the rung before                    expected
    stage 0 on the device        (runs twice)                                       the same bits
    ... with its tiles           partial sums of an MLP, of logits                  a tolerance
    ... over cut sequences       partial sums of attention, tokens of a mean        a tolerance
    ... over cut matrices        partial sums of products; experts that are shared  a tolerance
    ... over a pipeline          ranks over which a gradient is a mean              a tolerance
    stage s on the device        when gradients are reduced, in how many hops,      a tolerance
                                 how 8-bit moments are cut into blocks,
                                 payloads in blocks of 8 or 4 bits
    ... a step late              overlap=delayed, once its warm-up is over          a tolerance
    the configuration            placement alone: stage, units, tiers, overlap      the same bits

If an axis of the configuration shards sequences or the model, lower rungs have them whole: each of the ranks that share
them later does all of the work, for the same sequences, so that a step is a mean over the same sequences. (Ranks that
share experts read their own sequences in any case.)

Rungs that change nothing are left out, so most configurations are compared directly with the baseline. The last rung is
expected to have the same bits if the design guarantees them: with exact reductions, one kind of update kernel, and
AdamW.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from dzero.checkpoint.config import CheckpointConfig, ResumeConfig
from dzero.hardware import dtype_name
from dzero.launch.devices import device_type
from dzero.monitor.config import ProfileConfig
from dzero.optim.build import rule_needs
from dzero.optim.config import OURS
from dzero.optim.requires_unsharded import ELEMENTS
from dzero.plan.run_layout import layout_of
from dzero.verify.compare import Gap
from dzero.verify.config import GROUPS, VerifyRun, meshes_to
from dzero.zero.config import QUANTIZED, PrecisionConfig
from dzero.zero.layout import Layout
from dzero.zero.offload_config import OffloadConfig

BASELINE, CONFIGURATION = "stage 0 on the device", "the configuration"
IN_FP32 = Gap(loss=1e-5, norm=1e-4, unit_norm=1e-3, masters=0.01)
IN_16_BITS = Gap(loss=1e-3, norm=5e-3, unit_norm=1e-2, masters=0.25)
IN_8_BITS = Gap(loss=3e-3, norm=3e-2, unit_norm=5e-2, masters=0.4)
"""Tolerances for other roundings of the same sums over a few steps: several times what small models show.

AdamW's first updates are nearly the sign of the gradient. If terms cancel, the last bit of a sum decides a whole
update, so masters differ by a fraction of how far they moved, while losses and norms hardly differ. A unit that is not
updated has a difference of 1. The gradient norm of a unit moves by up to 1.4e-3 in bf16, 1e-4 in fp16 and 2e-8 in fp32,
also with tiles. With products in 8 bits, where another last bit of an operand may round to another of few values, and
ranks that share tokens scale their own, it moves by up to 1.7e-2, and masters by 0.15 of how far they moved. A divisor
that counts one rank of 16 too many moves the norm by 6e-2.
"""
STALE = Gap(loss=0.1, norm=0.5, unit_norm=0.5, masters=0.5)
"""Tolerance for gradients of weights that are one update old."""


QUANTIZED_PAYLOADS = Gap(loss=0.02, norm=0.1, unit_norm=0.3, masters=0.9)
"""Tolerance for payloads of 8 or 4 bits. In 4 bits small models show 4e-3, 2e-2, 7e-2 and 0.65, in 8 bits a tenth."""


@dataclass(frozen=True)
class Rung:
    """One run of the ladder.

    Attributes:
        allowed: Tolerance against the rung before; None if the same bits are expected.
        why: Reason for a tolerance.
    """

    name: str
    config: VerifyRun
    allowed: Gap | None
    why: str


EARLY, TWO_HOPS = "every microbatch is reduced, then added", "gradients take two hops"
BLOCKS = "8-bit moments are cut into blocks shard by shard"
ON_WIRE = "parameters or gradients are sent in blocks of 8 or 4 bits"
FETCHED = "parameters are fetched in blocks of 8 or 4 bits"


def order_of(layout: Layout) -> dict[str, int]:
    """Return how a layout adds and rounds gradients otherwise than stage 0, which has 1 everywhere.

    Layouts with equal values add gradients alike: when microbatches are reduced, in how many hops, and how many shards
    have 8-bit moments in blocks of their own.
    """
    return {
        EARLY: 2 if layout.microbatches > 1 and layout.grad.sharded else 1,
        TWO_HOPS: 2 if layout.hybrid else 1,
        BLOCKS: layout.shard * layout.replica_shards if layout.moments.dtype == torch.uint8 else 1,
        ON_WIRE: 2 if layout.reduce_code or layout.gather_code else 1,
    }


def ladder(run: VerifyRun, ranks: int) -> list[Rung]:
    """Return the runs of the ladder for `run` on `ranks` ranks, from the baseline to `run` itself."""
    device = device_type(run.launch)
    layout = layout_of(run, device, run.mesh.data_ranks(ranks))
    config = _plain(run, layout)
    (_, whole), *meshes = meshes_to(config.mesh)
    base = replace(
        config,
        zero=replace(config.zero, stage=0, unit_bytes=None, reshard_after_forward=True, optimizer_shard_axes=["shard"]),
        precision=_unquantized(config.precision),
        mesh=whole,
        offload=OffloadConfig(),
        block=replace(config.block, tiles=1, embedding_tiles=1, loss_tiles=config.block.loss_tiles and 1),
    )
    rounding = _rounding(run, layout)
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
        climb(f"{BASELINE} over {name}", replace(rungs[-1].config, mesh=mesh), rounding, GROUPS[name][1])
    order = order_of(layout)
    if not why and order != order_of(layout_of(base, device, base.mesh.data_ranks(ranks))):
        stage = 2 if order[EARLY] > 1 else 1
        over = config.zero.optimizer_shard_axes if order[BLOCKS] > 1 else ["shard"]
        sharded = replace(
            rungs[-1].config,
            zero=replace(base.zero, stage=stage, optimizer_shard_axes=over),
            precision=replace(config.precision, fetch="param"),
            mesh=config.mesh,
        )
        why_other = "; ".join(reason for reason, count in order.items() if count > 1)
        climb(
            f"stage {stage} on the device", sharded, QUANTIZED_PAYLOADS if order[ON_WIRE] > 1 else rounding, why_other
        )
    if layout.offload.mode == "delayed" and run.verify.steps > layout.offload.delay_warmup_steps:
        climb(
            "updates a step late",
            replace(rungs[-1].config, offload=_delayed(config.offload)),
            STALE,
            f"overlap=delayed: from step {layout.offload.delay_warmup_steps + 2} on weights are one update old",
        )
    if layout.fetch_code:
        climb(CONFIGURATION, config, QUANTIZED_PAYLOADS, FETCHED)
    climb(CONFIGURATION, config, rounding if why else None, why or "placement never changes the numbers")
    return rungs


def _plain(run: VerifyRun, layout: Layout) -> VerifyRun:
    """Return `run` without settings that change no result, and with the dtype that `grad=auto` means here."""
    return replace(
        run,
        precision=replace(run.precision, grad=dtype_name(layout.grad.dtype)),
        checkpoint=CheckpointConfig(),
        resume=ResumeConfig(),
        profile=ProfileConfig(),
    )


def _unquantized(precision: PrecisionConfig) -> PrecisionConfig:
    """Return `precision` with payloads that stage 0 can send."""
    reduce = "auto" if precision.reduce in QUANTIZED else precision.reduce
    feedback = precision.feedback and reduce == precision.reduce
    return replace(precision, gather="param", fetch="param", reduce=reduce, feedback=feedback)


def _rounding(run: VerifyRun, layout: Layout) -> Gap:
    """Return the tolerance for the narrowest dtype in which values are computed, sent or stored."""
    if run.precision.compute != "param":
        return IN_8_BITS
    in_fp32 = layout.param.dtype == layout.wire == torch.float32 and layout.moments.dtype != torch.uint8
    return IN_FP32 if in_fp32 else IN_16_BITS


def _unpromised(run: VerifyRun, layout: Layout, device: str) -> str:
    """Return why the configuration is not guaranteed to have the bits of another; empty if it is."""
    if not layout.exact and layout.ranks > 1:
        return "zero.reduction=native follows the backend's order of additions"
    if device == "cuda" and layout.offload.master != "device":
        return "updates on the host have other kernels than those on a GPU"
    if layout.master.sharded and run.optim.rule not in OURS and rule_needs(run.optim) == ELEMENTS:
        return f"torch's kernels of {run.optim.rule} may round a slice otherwise than the whole"
    return ""


def _delayed(offload: OffloadConfig) -> OffloadConfig:
    return OffloadConfig(
        grad="host",
        master="host",
        moments="host",
        overlap="delayed",
        delay_warmup_steps=offload.delay_warmup_steps,
    )
