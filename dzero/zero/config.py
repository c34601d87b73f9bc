"""Settings of the table: what is sharded, and in which dtypes. No torch, so that a command line is checked at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

REDUCTIONS = ("auto", "exact", "native")
FLOATS = ("fp32", "bf16", "fp16")
MASTERS = ("fp32", "remainder")
MOMENTS = ("fp32", "bf16", "int8")
STATES_OVER = ("shard", "all")
UNUSED = ("agree", "zeros")


def is_exact(reduction: str, device_type: str) -> bool:
    """`auto` is `exact` for CPU tensors (over gloo it is also the faster one) and `native` for CUDA tensors (nccl)."""
    if reduction not in REDUCTIONS:
        raise ValueError(f"zero.reduction={reduction!r}: choose one of {list(REDUCTIONS)}")
    return reduction == "exact" or (reduction == "auto" and device_type == "cpu")


@dataclass(frozen=True, kw_only=True)
class ZeroConfig:
    """The stage, and how states are sharded."""

    stage: int = 2
    """What is sharded: 0 nothing, 1 master and moments, 2 and gradients, 3 and parameters."""
    reshard_after_forward: bool | int = True
    """Stage 3: true frees a unit after forward, but for head and root, with which backward begins; false keeps it, N
    reshards it over N ranks (hpZ)."""
    units: Any = None
    """Class names of modules that are sharded and gathered together, or in Python a predicate of modules. null: blocks,
    large embedding and head."""
    reduction: str = "auto"
    """exact (fp32 sums in rank order), native (the backend's), or auto (exact on CPU, native on CUDA)."""
    states_over: str = "shard"
    """Ranks that masters and moments are cut over: shard, or all (also over the replicate axis)."""
    unused: str = "agree"
    """Parameters that a backward does not reach: agree (on all ranks, else refused) or zeros (count as gradients)."""

    def __post_init__(self) -> None:
        if self.states_over not in STATES_OVER:
            raise ValueError(f"zero.states_over={self.states_over!r}: choose one of {[*STATES_OVER]}")
        if self.unused not in UNUSED:
            raise ValueError(f"zero.unused={self.unused!r}: choose one of {[*UNUSED]}")
        if self.stage not in (0, 1, 2, 3):
            raise ValueError(f"zero.stage={self.stage}: choose 0, 1, 2 or 3")
        if isinstance(self.units, str):
            raise ValueError(f"zero.units={self.units!r}: a list of class names, e.g. [{self.units}]")
        is_names = isinstance(self.units, Sequence) and all(isinstance(each, str) for each in self.units)
        if self.units is not None and not is_names and not callable(self.units):
            raise ValueError(f"zero.units={self.units!r}: a list of class names, or in Python a predicate of modules")
        is_exact(self.reduction, "cpu")  # raises for an unknown one
        if self.reshard_after_forward is not True and self.stage != 3:
            raise ValueError(
                f"zero.reshard_after_forward={self.reshard_after_forward} has no effect at zero.stage={self.stage}, "
                "which keeps unsharded parameters from forward to backward; remove it or take zero.stage=3"
            )


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """Dtypes of the table."""

    param: str = "bf16"
    """Parameters and compute: fp32, bf16 or fp16."""
    reduce: str = "auto"
    """Payload of the gradient reduction: fp32, bf16, fp16, or auto (that of param; fp32 where native sums it)."""
    grad: str = "auto"
    """Stored gradients: fp32, or auto (that of param; fp32 with several microbatches, two hops or an fp32 payload)."""
    master: str = "fp32"
    """fp32, or remainder: the 16 bits that bf16 lacks, the same bits in 2 bytes less."""
    moments: str = "fp32"
    """fp32, bf16 (rounded stochastically) or int8 (torchao's block-wise 8 bits)."""

    def __post_init__(self) -> None:
        for key, value, allowed in (
            ("param", self.param, [*FLOATS]),
            ("reduce", self.reduce, ["auto", *FLOATS]),
            ("grad", self.grad, ["auto", *FLOATS]),
            ("master", self.master, [*MASTERS]),
            ("moments", self.moments, [*MOMENTS]),
        ):
            if value not in allowed:
                raise ValueError(f"precision.{key}={value!r}: choose one of {allowed}")
        if self.master == "remainder" and self.param != "bf16":
            raise ValueError(
                f"precision.master=remainder needs precision.param=bf16, not {self.param}: the remainder is the low "
                "half of an fp32 whose high half is the bf16 parameter; take precision.master=fp32"
            )
        if self.grad not in ("auto", "fp32", self.param):
            raise ValueError(f"precision.grad={self.grad}: choose auto, fp32 or precision.param's {self.param}")


PRECISIONS = {
    "fp32": PrecisionConfig(param="fp32"),
    "bf16": PrecisionConfig(param="bf16"),
    "bf16_remainder": PrecisionConfig(param="bf16", master="remainder"),
    "fp16": PrecisionConfig(param="fp16"),
}
"""The files of conf/precision, by name."""
