"""Settings of the ZeRO stage, sharding and dtypes; without torch, so that command lines are checked at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from dzero.compatibility import check_compatible
from dzero.utils.ranges import MOST_BYTES, check, whole
from dzero.utils.renamed import accepts_old_names
from dzero.utils.rules import Settings, shown

REDUCTIONS = ("auto", "exact", "native")
FLOATS = ("fp32", "bf16", "fp16")
QUANTIZED = ("int8", "int4", "fp8")
FROZEN_FORMATS = ("param", "int8", "nf4")
MASTERS = ("fp32", "remainder")
COMPUTES = ("param", "fp8_tensorwise", "fp8_rowwise")
MOMENTS = ("fp32", "bf16", "int8")
SHARD_AXES = (["shard"], ["replicate", "shard"])
UNUSED = ("union", "agree", "zeros")


@accepts_old_names("zero")
@dataclass(frozen=True, kw_only=True)
class ZeroConfig:
    """ZeRO stage, and sharding of model states."""

    stage: int = 2
    """States that are sharded: 0 none, 1 master parameters and moments, 2 also gradients, 3 also parameters."""
    reshard_after_forward: bool | int = True
    """Stage 3: true frees a unit after forward, except head and root, which backward needs first; false keeps it until
    backward; N reshards it over N ranks (hpZ)."""
    units: Any = None
    """Class names of modules that are sharded and gathered together, or in Python a predicate of modules. null: blocks,
    large embedding and head."""
    unit_bytes: int | None = None
    """Bytes of gathered parameters beyond which a unit is split: its largest modules become units inside it. null: no
    limit."""
    reduction: str = "auto"
    """Gradient sums: exact (fp32 in rank order), native (the backend's), or auto (exact on CPU, native on CUDA; exact
    where quantized or over nodes)."""
    node_ranks: int | None = None
    """Ranks of a node: sums then take two hops, inside nodes and between them, and a gather crosses between nodes once
    per node. null: one hop, and from 64 ranks on two."""
    optimizer_shard_axes: list[str] = field(default_factory=lambda: ["shard"])
    """Mesh axes over which master parameters and moments are sharded: [shard], or [replicate,shard]."""
    unused: str = "union"
    """Parameters that some ranks do not reach in backward: union (zeros count for these; no gradient if no rank reached
    it), agree (an error unless all or none reached it), or zeros (gradients of zeros in any case)."""

    def __post_init__(self) -> None:
        if [*self.optimizer_shard_axes] not in SHARD_AXES:
            allowed = " or ".join(map(shown, SHARD_AXES))
            raise ValueError(f"zero.optimizer_shard_axes={shown(self.optimizer_shard_axes)}: choose {allowed}")
        if self.unused not in UNUSED:
            raise ValueError(f"zero.unused={self.unused!r}: choose one of {[*UNUSED]}")
        if self.stage not in (0, 1, 2, 3) or type(self.stage) is not int:
            raise ValueError(f"zero.stage={self.stage}: choose 0, 1, 2 or 3")
        if isinstance(self.units, str):
            raise ValueError(f"zero.units={self.units!r}: a list of class names, e.g. [{self.units}]")
        is_names = isinstance(self.units, Sequence) and all(isinstance(each, str) for each in self.units)
        if self.units is not None and not is_names and not callable(self.units):
            raise ValueError(f"zero.units={self.units!r}: a list of class names, or in Python a predicate of modules")
        check("zero", self, unit_bytes=whole(1, MOST_BYTES, or_null="for no limit"))
        if self.reduction not in REDUCTIONS:
            raise ValueError(f"zero.reduction={self.reduction!r}: choose one of {list(REDUCTIONS)}")
        check_compatible(Settings.of(zero=self))


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """Dtypes of model states, compute and communication."""

    param: str = "bf16"
    """Parameters, and compute but for what `compute` says: fp32, bf16 or fp16."""
    reduce: str = "auto"
    """Payload of the gradient reduction: fp32, bf16, fp16, auto (that of param; that of grad for native sums), or int8,
    int4 or fp8 in blocks (qgZ of ZeRO++)."""
    feedback: bool = False
    """Whether what rounding to blocks leaves of a gradient is added to the next one: fp32 residuals on the device."""
    gather: str = "param"
    """Payload of the gathers of parameters: that of param, or int8, int4 or fp8 in blocks (qwZ of ZeRO++)."""
    fetch: str = "param"
    """Payload of the copies of parameters from the host to the device: that of param, or int8, int4 or fp8 in blocks,
    which the device decodes."""
    grad: str = "auto"
    """Stored gradients: that of param, fp32, or auto (fp32 with several microbatches, hybrid sharding, or native sums
    with reduce=auto; otherwise that of param)."""
    master: str = "fp32"
    """Master parameters: fp32, or remainder (the 16 bits that bf16 parameters lack; the same bits in 2 bytes less)."""
    moments: str = "fp32"
    """Moments: fp32, bf16 (rounded stochastically) or int8 (torchao's block-wise 8 bits)."""
    frozen: str = "param"
    """Matrices of blocks that are not trained: that of param, int8 (8.25 bits per element) or nf4 (QLoRA's 4.25)."""
    compute: str = "param"
    """Products of linear layers in blocks: that of param, fp8_tensorwise or fp8_rowwise (8-bit floats by torchao, with
    a scale for each matrix or for each row; emulated where a device has no units for them)."""
    fp8_exclude: list[str] = field(default_factory=list)
    """Names of linear layers that stay in the dtype of param, wildcards allowed. Those outside of blocks (embedding,
    head), matrices of adapters, and dims that are no multiples of 16 stay by themselves."""

    def __post_init__(self) -> None:
        for key, value, allowed in (
            ("param", self.param, [*FLOATS]),
            ("reduce", self.reduce, ["auto", *FLOATS, *QUANTIZED]),
            ("gather", self.gather, ["param", *QUANTIZED]),
            ("fetch", self.fetch, ["param", *QUANTIZED]),
            ("grad", self.grad, ["auto", *FLOATS]),
            ("master", self.master, [*MASTERS]),
            ("moments", self.moments, [*MOMENTS]),
            ("frozen", self.frozen, [*FROZEN_FORMATS]),
            ("compute", self.compute, [*COMPUTES]),
        ):
            if value not in allowed:
                raise ValueError(f"precision.{key}={value!r}: choose one of {allowed}")
        names: object = self.fp8_exclude
        if isinstance(names, str):
            raise ValueError(f"precision.fp8_exclude={names!r}: a list of names, e.g. [{names}]")
        check_compatible(Settings.of(precision=self))


def sums_exactly(zero: ZeroConfig, precision: PrecisionConfig, device_type: str) -> bool:
    """Return whether gradients are summed in fp32 in rank order.

    "auto" is exact on the CPU, where exact sums are also faster over gloo, and for what a backend cannot do: sums of
    quantized payloads, or over nodes. Otherwise it is native (nccl).
    """
    if zero.reduction == "auto":
        return device_type == "cpu" or precision.reduce in QUANTIZED or zero.node_ranks is not None
    return zero.reduction == "exact"


PRECISIONS = {
    "fp32": PrecisionConfig(param="fp32"),
    "bf16": PrecisionConfig(param="bf16"),
    "bf16_remainder": PrecisionConfig(param="bf16", master="remainder"),
    "fp16": PrecisionConfig(param="fp16"),
}
"""The files of conf/precision, by name."""
