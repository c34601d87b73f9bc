"""Layout of model states: how each kind is sharded, its dtype, and its tier.

    row       over the shard axis                        dtype                        bytes per element
    param     stages 0-2 unsharded, stage 3 Shard(0)     fp32 | bf16 | fp16           2 (4)
    grad      stages 0-1 unsharded, 2-3 Shard(0)         that of param, or fp32       2 or 4
    master    stage 0 unsharded, 1-3 Shard(0)            fp32 | 16-bit remainder      4 or 2 (none for fp32)
    moments   stage 0 unsharded, 1-3 Shard(0)            fp32 | bf16 | int8           8, 4 or about 2
    frozen    as param                                   that of param | int8 | nf4   2 (4), about 1 or about 0.5

A trained parameter has all rows but the last, and one that is not trained has the last alone: it is never written.

With `zero.optimizer_shard_axes=[replicate,shard]`, master and moments are `Shard(0)` over the replicate axis too: each
replica of a shard owns a part of it, its replica shard (zero/replica_shards.py).

Stage 0 is the same table on a mesh whose shard axis has one rank (`MeshConfig.degrees`), so code that uses a `Layout`
does not branch on the stage. FSDP2's switches, the synchronization of microbatches, the collectives and the byte counts
are all derived from it. This module has no tensors and no communication.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch.distributed.tensor import Placement, Replicate, Shard

from dzero.comm.hops import Hops
from dzero.comm.wire import FORMATS, Blocks, Wire
from dzero.compatibility import check_compatible
from dzero.hardware import dtype_name, dtype_of
from dzero.mesh import REPLICATE, SHARD, expert_degrees
from dzero.utils.rules import Settings
from dzero.zero.config import PrecisionConfig, ZeroConfig
from dzero.zero.offload_config import FROZEN, KINDS, OffloadConfig
from dzero.zero.quantized_weights import CODECS, WeightCodec
from dzero.zero.unit_shapes import ParamShape, UnitShape

RuleStates = tuple[tuple[str, torch.dtype], ...]
"""Key and dtype of each tensor of a parameter's shape that a class of `torch.optim` keeps for every parameter."""


@dataclass(frozen=True)
class TableRow:
    """Layout of one kind of state.

    Attributes:
        sharded: Whether the kind is sharded over the shard axis.
        dtype: Dtype in which it is stored.
        tier: Tier on which it is stored (zero/tiers.py).
        fraction: Fraction of the elements on `tier`; the others are on the device.
        over_replicas: Whether it is sharded over the replicate axis too.
        codec: Format of those that are quantized (zero/quantized_weights.py), if any.
    """

    sharded: bool
    dtype: torch.dtype
    tier: str = "device"
    fraction: float = 1.0
    over_replicas: bool = False
    codec: WeightCodec | None = None

    @property
    def placements(self) -> tuple[Placement, Placement]:
        """DTensor placements over (replicate, shard); if both are sharded, the shard axis comes first."""
        return Shard(0) if self.over_replicas else Replicate(), Shard(0) if self.sharded else Replicate()


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
    frozen: TableRow
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
    unused: str = "union"
    """Setting `ZeroConfig.unused`."""
    reduce_code: str | None = None
    """Format of codes, if reductions are of blocks (comm/wire.py)."""
    feedback: bool = False
    """Setting `PrecisionConfig.feedback`."""
    gather_code: str | None = None
    """Format of codes, if parameters are gathered in blocks."""
    fetch_code: str | None = None
    """Format of codes, if parameters are copied from the host to the device in blocks."""
    node_ranks: int | None = None
    """Setting `ZeroConfig.node_ranks`."""
    rule_states: RuleStates | None = None
    """What moments are, if a class of `torch.optim` keeps them; None for both of AdamW."""
    settings: Settings = field(default=Settings({}), repr=False, compare=False)
    """Settings that the layout was derived from, for checks of what comes later, such as an update rule."""

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
            ValueError: For combinations that cannot take effect, and a number of microbatches that is not one.
        """
        if not isinstance(microbatches, int) or isinstance(microbatches, bool) or microbatches < 1:
            raise ValueError(f"microbatches={microbatches!r}: must be a whole number ≥ 1")
        offload = offload or OffloadConfig()
        hybrid = replicate > 1 and shard > 1
        axes = {"axis.replicate": replicate, "axis.shard": shard}
        cuts = {"mesh.tp": model_ranks, "mesh.pp": pipeline_ranks, "mesh.ep": expert_ranks}
        on_disk = {"offload.uses_disk": offload.uses_disk}
        settings = Settings.of(zero=zero, precision=precision, offload=offload).having(axes | cuts | on_disk)
        check_compatible(settings)
        if expert_ranks > 1:
            expert_degrees(replicate, shard, expert_ranks, model_ranks)
        param = dtype_of(precision.param)
        # Exact sums are fp32 whatever the wire dtype. The backend's sums are rounded to the wire dtype at each hop.
        summed_on_wire = not exact and replicate * shard > 1
        wide = microbatches > 1 or hybrid or (precision.reduce == "auto" and summed_on_wire)
        fp32_grad = precision.grad == "fp32" or (precision.grad == "auto" and wide)
        grad = torch.float32 if fp32_grad else param
        plain = precision.reduce not in ("auto", *FORMATS)
        wire = dtype_of(precision.reduce) if plain else grad if summed_on_wire else param
        check_compatible(settings.having({"grad.dtype": dtype_name(grad)}))
        remainder = precision.master == "remainder"
        moments = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.uint8}[precision.moments]

        def row(kind: str, first_stage: int, dtype: torch.dtype) -> TableRow:
            over_replicas = "replicate" in zero.optimizer_shard_axes and kind in ("master", "moments")
            return TableRow(zero.stage >= first_stage, dtype, offload.tier(kind), offload.fraction(kind), over_replicas)

        return cls(
            stage=zero.stage,
            replicate=replicate,
            shard=shard,
            microbatches=microbatches,
            param=row("param", 3, param),
            grad=row("grad", 2, grad),
            master=row("master", 1, torch.int16 if remainder else torch.float32),
            moments=row("moments", 1, moments),
            frozen=replace(row(FROZEN, 3, param), codec=CODECS.get(precision.frozen)),
            wire=wire,
            remainder=remainder,
            # With one rank, nothing is gathered, and parameters fetched to the device are freed as early as possible.
            reshard_after_forward=zero.reshard_after_forward if zero.stage >= 3 else shard == 1,
            exact=exact,
            offload=offload,
            model_ranks=model_ranks,
            pipeline_ranks=pipeline_ranks,
            unused=zero.unused,
            reduce_code=precision.reduce if precision.reduce in FORMATS else None,
            feedback=precision.feedback,
            gather_code=precision.gather if precision.gather in FORMATS else None,
            fetch_code=precision.fetch if precision.fetch in FORMATS else None,
            node_ranks=zero.node_ranks,
            settings=settings,
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

    def hops(self, axis: str, ranks: int) -> Hops:
        """Return the route of sums over the `ranks` ranks of an axis."""
        if not self.exact:
            return Hops(ranks)
        widest = SHARD if self.shard > 1 else REPLICATE
        return Hops.of(ranks, self.node_ranks if axis == widest else None)

    def reduce_wire(self, unit: UnitShape) -> Wire:
        """Return the format in which a unit with this layout is reduced over the shard axis."""
        trained = [param for param in unit.params if param.trainable]
        return self.wire if self.reduce_code is None else self._blocks(trained, self.reduce_code)

    def gather_blocks(self, unit: UnitShape) -> Blocks | None:
        """Return the blocks in which a unit with this layout is gathered, or None if it is gathered as it is."""
        if self.gather_code is None or unit.quantized:
            return None
        return self._blocks(unit.params, self.gather_code)

    def _blocks(self, params: Sequence[ParamShape], code: str) -> Blocks:
        """Return blocks of padded shards; parameters with one dimension are sent whole."""
        return Blocks(tuple((param.shard_elems(self.shard), len(param.shape) < 2) for param in params), code)

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
    def replica_shards(self) -> int:
        """Number of replica shards of a shard, each with its own masters and moments."""
        return self.replicate if self.master.over_replicas else 1

    @property
    def replicate_wire(self) -> torch.dtype:
        """Dtype of gradients in the reduction over the replicate axis."""
        return torch.float32 if self.hybrid else self.wire

    @property
    def tiers(self) -> dict[str, tuple[str, float]]:
        """Tier and fraction of each kind of state."""
        return {kind: (row.tier, row.fraction) for kind in (*KINDS, FROZEN) for row in [getattr(self, kind)]}

    def grad_sync_policy(self, is_last: bool) -> GradSyncPolicy:
        """Return what FSDP2 does after a microbatch.

        Unsharded gradients are reduced after the last microbatch. Until then, unsharded parameters stay gathered.
        """
        return GradSyncPolicy(
            reduce=is_last or self.grad.sharded,
            reshard=is_last or self.param.sharded or self.shard == 1,
        )
