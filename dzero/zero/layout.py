"""Layout of model states: how each kind is sharded, its dtype, and its tier.

    row       over the shard axis                        dtype                        bytes per element
    param     stages 0-2 unsharded, stage 3 Shard(0)     fp32 | bf16 | fp16           2 (4)
    grad      stages 0-1 unsharded, 2-3 Shard(0)         that of param, or fp32       2 or 4
    master    stage 0 unsharded, 1-3 Shard(0)            fp32 | 16-bit remainder      4 or 2 (none for fp32)
    moments   stage 0 unsharded, 1-3 Shard(0)            fp32 | bf16 | int8           8, 4 or about 2

With `zero.states_over=all`, master and moments are `Shard(0)` over the replicate axis too: each replica of a shard owns
a part of it, its replica shard (zero/replica_shards.py).

Stage 0 is the same table on a mesh whose shard axis has one rank (`MeshConfig.degrees`), so code that uses a `Layout`
does not branch on the stage. FSDP2's switches, the synchronization of microbatches, the collectives and the byte counts
are all derived from it. This module has no tensors and no communication.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch.distributed.tensor import Placement, Replicate, Shard

from dzero.hardware import dtype_of
from dzero.mesh import expert_degrees
from dzero.utils.ranges import divisors
from dzero.zero.config import PrecisionConfig, ZeroConfig
from dzero.zero.offload_config import KINDS, OffloadConfig
from dzero.zero.unit_shapes import UnitShape


@dataclass(frozen=True)
class TableRow:
    """Layout of one kind of state.

    Attributes:
        sharded: Whether the kind is sharded over the shard axis.
        dtype: Dtype in which it is stored.
        tier: Tier on which it is stored (zero/tiers.py).
        fraction: Fraction of the elements on `tier`; the others are on the device.
        over_copies: Whether it is sharded over the replicate axis too.
    """

    sharded: bool
    dtype: torch.dtype
    tier: str = "device"
    fraction: float = 1.0
    over_copies: bool = False

    @property
    def placements(self) -> tuple[Placement, Placement]:
        """DTensor placements over (replicate, shard); if both are sharded, the shard axis comes first."""
        return Shard(0) if self.over_copies else Replicate(), Shard(0) if self.sharded else Replicate()


@dataclass(frozen=True)
class GradSyncPolicy:
    """Whether FSDP2 reduces gradients and reshards parameters at the end of a microbatch's backward."""

    reduce: bool
    reshard: bool


@dataclass(frozen=True)
class Layout:
    """Layout of all states on a mesh of `replicate` x `shard` ranks, with `microbatches` per optimizer step."""

    stage: int
    replicate: int
    shard: int
    microbatches: int
    param: TableRow
    grad: TableRow
    master: TableRow
    moments: TableRow
    wire: torch.dtype
    """Dtype of gradients in the reduction over the shard axis (at stage 0, over the replicate axis)."""
    remainder: bool
    reshard_after_forward: bool | int
    exact: bool
    offload: OffloadConfig
    """Settings of the tiers (zero/tiers.py)."""
    model_ranks: int = 1
    """Tensor-parallel ranks, which share every matrix of one data-parallel rank."""
    pipeline_ranks: int = 1
    """Ranks of the pipeline, which share the layers."""
    unused: str = "agree"
    """Setting `ZeroConfig.unused`."""

    @classmethod
    def of(
        cls,
        zero: ZeroConfig,
        precision: PrecisionConfig,
        offload: OffloadConfig | None = None,
        *,
        replicate: int,
        shard: int,
        microbatches: int = 1,
        exact: bool = True,
        model_ranks: int = 1,
        pipeline_ranks: int = 1,
        expert_ranks: int = 1,
    ) -> Layout:
        """Derive a layout from settings.

        Args:
            zero: ZeRO stage and sharding.
            precision: Dtypes.
            offload: Tiers. None: all states are on the device.
            replicate: Ranks along the replicate axis.
            shard: Ranks along the shard axis.
            microbatches: Microbatches per optimizer step.
            exact: Whether gradients are summed in fp32 in rank order.
            model_ranks: Tensor-parallel ranks.
            pipeline_ranks: Ranks of the pipeline.
            expert_ranks: Ranks that share experts, whose layout comes from `of_unit`.

        Raises:
            ValueError: For combinations that cannot take effect.
        """
        offload = offload or OffloadConfig()
        hybrid = replicate > 1 and shard > 1
        _check_stage(zero, shard)
        _check_gradients(precision, hybrid)
        _check_tiers(zero, precision, offload)
        _check_states_over(
            zero, offload, replicate, shard, {"tp": model_ranks, "pp": pipeline_ranks, "ep": expert_ranks}
        )
        _check_cut(zero, offload, "a model that is", model_ranks, "tp")
        _check_cut(zero, offload, "experts that are", expert_ranks, "ep")
        _check_pipeline(offload, pipeline_ranks)
        if expert_ranks > 1:
            expert_degrees(replicate, shard, expert_ranks, model_ranks)
        param = dtype_of(precision.param)
        # Exact sums are fp32 whatever the wire dtype. The backend's sums are rounded to the wire dtype at each hop.
        summed_on_wire = not exact and replicate * shard > 1
        wide = microbatches > 1 or hybrid or (precision.reduce == "auto" and summed_on_wire)
        fp32_grad = precision.grad == "fp32" or (precision.grad == "auto" and wide)
        grad = torch.float32 if fp32_grad else param
        wire = dtype_of(precision.reduce) if precision.reduce != "auto" else grad if summed_on_wire else param
        if wire.itemsize > grad.itemsize:
            raise ValueError(
                f"precision.reduce={precision.reduce} is wider than the {grad} gradients it would carry; "
                "take precision.grad=fp32 as well, or precision.reduce=auto"
            )
        remainder = precision.master == "remainder"
        moments = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.uint8}[precision.moments]

        def row(kind: str, first_stage: int, dtype: torch.dtype) -> TableRow:
            over_copies = zero.states_over == "all" and kind in ("master", "moments")
            return TableRow(zero.stage >= first_stage, dtype, offload.tier(kind), offload.fraction(kind), over_copies)

        return cls(
            stage=zero.stage,
            replicate=replicate,
            shard=shard,
            microbatches=microbatches,
            param=row("param", 3, param),
            grad=row("grad", 2, grad),
            master=row("master", 1, torch.int16 if remainder else torch.float32),
            moments=row("moments", 1, moments),
            wire=wire,
            remainder=remainder,
            # With one rank, nothing is gathered, and parameters fetched to the device are freed as early as possible.
            reshard_after_forward=zero.reshard_after_forward if zero.stage >= 3 else shard == 1,
            exact=exact,
            offload=offload,
            model_ranks=model_ranks,
            pipeline_ranks=pipeline_ranks,
            unused=zero.unused,
        )

    def of_unit(self, unit: UnitShape) -> Layout:
        """Return the layout of one unit.

        Experts that ranks share are replicated and sharded over the remaining ranks. A unit that closes forward stays
        gathered for backward, which begins with it, unless it is resharded over fewer ranks in between.
        """
        if unit.shared_by > 1:
            replicate, shard = expert_degrees(self.replicate, self.shard, unit.shared_by, self.model_ranks)
            after_forward = self.reshard_after_forward if self.param.sharded else shard == 1
            return replace(self, replicate=replicate, shard=shard, reshard_after_forward=after_forward)
        if unit.closes_forward and self.shard > 1 and self.reshard_after_forward is True:
            return replace(self, reshard_after_forward=False)
        return self

    @property
    def gathers_again(self) -> bool:
        """Whether parameters are gathered, or fetched to the device, for backward as well as for forward."""
        return self.reshard_after_forward is not False

    @property
    def ranks(self) -> int:
        """Number of data-parallel ranks, which is also the number of chunks in which norms are summed."""
        return self.replicate * self.shard

    @property
    def world(self) -> int:
        """Number of all ranks."""
        return self.ranks * self.model_ranks * self.pipeline_ranks

    @property
    def hybrid(self) -> bool:
        """Whether both axes have several ranks; gradients are then reduced in two steps, with fp32 in between."""
        return self.replicate > 1 and self.shard > 1

    @property
    def shares(self) -> int:
        """Number of replica shards of a shard, each with its own masters and moments."""
        return self.replicate if self.master.over_copies else 1

    @property
    def replicate_wire(self) -> torch.dtype:
        """Dtype of gradients in the reduction over the replicate axis."""
        return torch.float32 if self.hybrid else self.wire

    @property
    def tiers(self) -> dict[str, tuple[str, float]]:
        """Tier and fraction of each kind of state."""
        return {kind: (row.tier, row.fraction) for kind in KINDS for row in [getattr(self, kind)]}

    def cadence(self, is_last: bool) -> GradSyncPolicy:
        """Return what FSDP2 does after a microbatch.

        Unsharded gradients are reduced after the last microbatch. Until then, unsharded parameters stay gathered.
        """
        return GradSyncPolicy(
            reduce=is_last or self.grad.sharded,
            reshard=is_last or self.param.sharded or self.shard == 1,
        )


def _check_stage(zero: ZeroConfig, shard: int) -> None:
    if zero.stage == 0 and shard != 1:
        raise ValueError(
            f"zero.stage=0 replicates everything, so its mesh has a shard axis of 1, not {shard}: "
            "make_mesh(device_type, replicate=<world size>)"
        )
    post_forward = zero.reshard_after_forward
    allowed = divisors(shard)[1:-1]
    if not isinstance(post_forward, bool) and post_forward not in allowed:
        axis = f"the shard axis of {shard} ranks"
        choose = f"true, false or a non-trivial divisor of {axis}: {allowed}"
        choose = choose if allowed else f"true or false; {axis} has no non-trivial divisor"
        raise ValueError(f"zero.reshard_after_forward={post_forward}: choose {choose}")


def _check_gradients(precision: PrecisionConfig, hybrid: bool) -> None:
    if hybrid and precision.grad not in ("auto", "fp32"):
        raise ValueError(
            f"precision.grad={precision.grad}: hybrid sharding keeps fp32 gradients between its two hops; "
            "take precision.grad=auto or fp32"
        )


def _check_states_over(
    zero: ZeroConfig, offload: OffloadConfig, replicate: int, shard: int, others: Mapping[str, int]
) -> None:
    if zero.states_over == "shard":
        return
    if replicate == 1 or shard == 1:
        raise ValueError(
            f"zero.states_over={zero.states_over} has no effect on {replicate} (replicate) x {shard} (shard) ranks: it "
            "cuts the states of a shard over its copies; remove it, or take zero.stage=1, 2 or 3 and mesh.replicate > 1"
        )
    if offload.param != "device":
        raise ValueError(
            f"offload.param={offload.param} with zero.states_over={zero.states_over}: new values come from other ranks "
            "to the device; take offload.param=device, other states may leave it"
        )
    if offload.mode in ("backward", "delayed"):
        raise ValueError(
            f"offload.overlap={offload.overlap} with zero.states_over={zero.states_over}: a unit's new values travel "
            "between ranks as soon as it is updated, and cannot wait or be taken back; take offload.overlap=forward or "
            "step"
        )
    for axis, ranks in others.items():
        if ranks > 1:
            raise ValueError(
                f"zero.states_over={zero.states_over} with a model that is cut over {ranks} ranks (mesh.{axis}): "
                "states that three axes cut are not built; take zero.states_over=shard"
            )


def _check_cut(zero: ZeroConfig, offload: OffloadConfig, what: str, ranks: int, axis: str) -> None:
    if ranks == 1:
        return
    what = f"{what} cut over {ranks} ranks (mesh.{axis})"
    if offload.param != "device":
        raise ValueError(
            f"offload.param={offload.param} with {what}: FSDP2 takes parameters that are cut along another axis from "
            "the device only; take offload.param=device, other states may leave it"
        )
    if not isinstance(zero.reshard_after_forward, bool):
        raise ValueError(
            f"zero.reshard_after_forward={zero.reshard_after_forward} with {what}: FSDP2 keeps no second copy of "
            "parameters that are cut along another axis; take true or false"
        )


def _check_pipeline(offload: OffloadConfig, pipeline_ranks: int) -> None:
    if pipeline_ranks == 1:
        return
    if offload.activations != "device":
        raise ValueError(
            f"offload.activations={offload.activations} with mesh.pp={pipeline_ranks}: a pipeline runs the backward of "
            "its oldest microbatch first, and activations come back in the order in which the newest went; take "
            "offload.activations=device"
        )
    if offload.mode in ("backward", "delayed"):
        raise ValueError(
            f"offload.overlap={offload.overlap} with mesh.pp={pipeline_ranks}: tied parameters and norms need the "
            "gradients of all parts; take offload.overlap=forward or step"
        )


def _check_tiers(zero: ZeroConfig, precision: PrecisionConfig, offload: OffloadConfig) -> None:
    alike = offload.moments == offload.master and offload.moments_fraction == offload.master_fraction
    if precision.moments == "int8" and not alike:
        raise ValueError(
            f"offload.moments={offload.moments} with offload.master={offload.master}: 8-bit moments are decoded "
            "where the update runs, so both need one tier and one fraction"
        )
    if offload.master == "disk" and precision.param == "fp32" and offload.mode in ("backward", "delayed"):
        raise ValueError(
            f"offload.overlap={offload.overlap} with offload.master=disk and precision.param=fp32: new weights wait on "
            "the host, but fp32 parameters are their own masters, which go back to disk at once; take "
            "offload.overlap=forward, or precision.param=bf16"
        )
    if offload.param != "device" and zero.stage != 3:
        raise ValueError(
            f"offload.param={offload.param} with zero.stage={zero.stage}: only stage 3 frees gathered parameters "
            "after use; take zero.stage=3, or offload.param=device"
        )
    if offload.param != "device" and not isinstance(zero.reshard_after_forward, bool):
        raise ValueError(
            f"offload.param={offload.param} with zero.reshard_after_forward={zero.reshard_after_forward}: FSDP2 keeps "
            "a second copy on the device and does not let it come from elsewhere; take reshard_after_forward=true"
        )
