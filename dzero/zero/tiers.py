"""Where each kind of state lives between its uses: the table's third column.

    tier      what it is
    device    the memory that computes the model: the GPU's, or on a CPU machine the process's own
    host      the offload arena (offload/pinned.py)
    disk      scratch files (offload/disk.py); host memory then holds what is in use, and what comes next

A parameter is updated on the device if its master lives there, else on the host; its gradient and moments travel there
if they live elsewhere. Activations are no row of the table, but what blocks keep of their inputs for backward may wait
on the host or on disk as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dzero.zero.shapes import ParamShape, UnitShape

TIERS = ("device", "host", "disk")
OVERLAPS = ("auto", "step", "forward", "backward", "delayed")
KINDS = ("param", "grad", "master", "moments")
PAGE_BYTES = 4096
MOST_BLOCK_BYTES = 1 << 30
MOST_THREADS = 64


@dataclass(frozen=True, kw_only=True)
class DiskConfig:
    """Where scratch data goes, and how.

    paths: directories that exist, one per disk. weights: their bandwidths, in any unit, by which data is dealt to them;
    none: measured. block_bytes: of one transfer. threads: transfers at a time, per path and direction. direct: past the
    page cache, where the file system can. checksum: verify what is read.
    """

    paths: list[str] = field(default_factory=lambda: ["."])
    weights: list[float] | None = None
    block_bytes: int = 16 << 20
    threads: int = 8
    direct: bool = True
    checksum: bool = True

    def __post_init__(self) -> None:
        if not self.paths or not all(self.paths):
            raise ValueError(f"paths={self.paths!r}: name at least one directory, and no empty one, as a list")
        if self.weights is not None and len(self.weights) != len(self.paths):
            raise ValueError(f"weights={list(self.weights)}: give one for each of the {len(self.paths)} paths")
        if self.block_bytes % PAGE_BYTES or not PAGE_BYTES <= self.block_bytes <= MOST_BLOCK_BYTES:
            raise ValueError(
                f"block_bytes={self.block_bytes}: must be a multiple of {PAGE_BYTES} from {PAGE_BYTES} to "
                f"{MOST_BLOCK_BYTES}; 16777216 suits most disks"
            )
        if not 1 <= self.threads <= MOST_THREADS:
            raise ValueError(f"threads={self.threads}: must be 1 to {MOST_THREADS}; 8 suits most disks")


@dataclass(frozen=True, kw_only=True)
class OffloadConfig:
    """The tier of each kind of state, and how the host's updates overlap with the device's work.

    `<kind>_fraction`: part of its elements that leaves the device, by whole parameters, the last units' first; the
    root (embedding, head) is the last. `param`, the working copy, leaves at stage 3, and each unit is fetched ahead of
    its use. `overlap`, all but `delayed` with the same bits:
        step      the optimizer's step waits for all updates
        forward   it returns once the step is decided; each unit waits for its own update when it is next gathered
        backward  as forward, and units are updated before the step is decided, undone where it is decided otherwise;
                  `undo_bytes` of host memory per rank bound how much (optim/ahead.py)
        delayed   updates have a whole step's time: weights are one step older than usual (ZeRO-Offload, section 5.2),
                  from the step after `delay_warmup_steps` on
        auto      forward: the fastest with the same bits that takes no more memory
    `activations`: where what a block keeps of its inputs waits for backward (offload/activations.py).
    `disk`: the scratch files behind tier disk. `prefetch_units`: how many units' parameters, and how many blocks'
    activations, are loaded from there ahead of their use.
    """

    param: str = "device"
    grad: str = "device"
    master: str = "device"
    moments: str = "device"
    param_fraction: float = 1.0
    grad_fraction: float = 1.0
    master_fraction: float = 1.0
    moments_fraction: float = 1.0
    overlap: str = "auto"
    undo_bytes: int = 1 << 30
    delay_warmup_steps: int = 40
    activations: str = "device"
    prefetch_units: int = 2
    disk: DiskConfig = field(default_factory=DiskConfig)

    def __post_init__(self) -> None:
        for kind in KINDS:
            tier, fraction = self.tier(kind), self.fraction(kind)
            if tier not in TIERS:
                raise ValueError(f"offload.{kind}={tier!r}: choose one of {list(TIERS)}")
            if not 0 < fraction <= 1:
                raise ValueError(
                    f"offload.{kind}_fraction={fraction}: must be in (0, 1]; for none, offload.{kind}=device"
                )
            if tier == "device" and fraction != 1.0:
                raise ValueError(
                    f"offload.{kind}_fraction={fraction} has no effect with offload.{kind}=device; remove it"
                )
        if self.param != "device" and (self.master == "device" or self.param_fraction > self.master_fraction):
            raise ValueError(
                f"offload.param={self.param} with offload.param_fraction={self.param_fraction}, "
                f"offload.master={self.master}, "
                f"offload.master_fraction={self.master_fraction}: a parameter leaves the device with its master, which "
                "is larger; take offload.master=host and offload.master_fraction ≥ offload.param_fraction"
            )
        if self.overlap not in OVERLAPS:
            raise ValueError(f"offload.overlap={self.overlap!r}: choose one of {list(OVERLAPS)}")
        if self.overlap != type(self).overlap and self.master == "device":
            raise ValueError(
                f"offload.overlap={self.overlap} has no effect while updates run on the device; remove it, or take "
                "offload.master=host"
            )
        for key, mode in (("undo_bytes", "backward"), ("delay_warmup_steps", "delayed")):
            value = getattr(self, key)
            least = 1 if key == "undo_bytes" else 0
            if value < least:
                raise ValueError(f"offload.{key}={value}: must be ≥ {least}")
            if value != getattr(type(self), key) and self.overlap != mode:
                raise ValueError(
                    f"offload.{key}={value} has no effect with offload.overlap={self.overlap}, only with {mode}"
                )
        if self.activations not in TIERS:
            raise ValueError(f"offload.activations={self.activations!r}: choose one of {list(TIERS)}")
        if self.overlap == "backward" and "device" in {self.grad, self.master, self.moments}:
            raise ValueError(
                "offload.overlap=backward updates units on the host while gradients are still arriving: it needs "
                "offload.grad, offload.master and offload.moments on host or disk"
            )
        if self.prefetch_units < 1:
            raise ValueError(f"offload.prefetch_units={self.prefetch_units}: must be ≥ 1")
        if "disk" not in {self.activations, *map(self.tier, KINDS)}:
            for key, default in (("prefetch_units", 2), ("disk", DiskConfig())):
                if getattr(self, key) != default:
                    raise ValueError(f"offload.{key} has no effect while nothing is on disk; remove it")

    @property
    def mode(self) -> str:
        """The overlap that `auto` stands for, or the one that was chosen."""
        return "forward" if self.overlap == "auto" else self.overlap

    def tier(self, kind: str) -> str:
        """Of "param", "grad", "master" or "moments"."""
        return str(getattr(self, kind))

    def fraction(self, kind: str) -> float:
        """Of the kind's elements that are on `tier(kind)`."""
        return float(getattr(self, f"{kind}_fraction"))


def names_off_device(tiers: Mapping[str, tuple[str, float]], units: Sequence[UnitShape]) -> dict[str, frozenset[str]]:
    """The parameters whose state of each kind does not live on the device, from the (tier, fraction) of each kind.

    Frozen ones have a "param" only; a trained one's leaves the device where its master does.
    """
    every = [param for unit in units for param in unit.params]
    trained = [param for param in every if param.trainable]

    def leaving(kind: str, params: Sequence[ParamShape], of: Sequence[ParamShape]) -> frozenset[str]:
        tier, fraction = tiers[kind]
        return _trailing(params, fraction * sum(param.elems for param in of)) if tier != "device" else frozenset()

    names = {kind: leaving(kind, trained, trained) for kind in KINDS if kind != "param"}
    free = [param for param in every if not param.trainable or param.name in names["master"]]
    return {"param": leaving("param", free, every), **names}


def _trailing(params: Sequence[ParamShape], wanted_elems: float) -> frozenset[str]:
    """The last parameters that hold at least `wanted_elems`, or all."""
    taken, names = 0, set()
    for param in reversed(params):
        if taken >= wanted_elems:
            break
        names.add(param.name)
        taken += param.elems
    return frozenset(names)
