"""Settings of offload: the tier of each kind of state, the overlap of host updates, and the scratch disks."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from dzero.compatibility import check_compatible
from dzero.utils.ranges import FRACTION, MOST_BYTES, check, positive, whole
from dzero.utils.rules import Settings

TIERS = ("device", "host", "disk")
OVERLAPS = ("auto", "step", "forward", "backward", "delayed")
KINDS = ("param", "grad", "master", "moments")
"""States of trained parameters."""
FROZEN = "frozen"
"""State of parameters that are not trained."""
PAGE_BYTES = 4096
MOST_BLOCK_BYTES = 1 << 30
MOST_THREADS = 64
MOST_AHEAD = 10_000
PREFETCH_UNITS = 2
WEIGHT = positive(1e18)


@dataclass(frozen=True, kw_only=True)
class DiskConfig:
    """Scratch files on disk."""

    paths: list[str] = field(default_factory=lambda: ["."])
    """Directories for scratch files, one per disk; the last folder of each is created if it is missing."""
    weights: list[float] | None = None
    """Bandwidths of the paths, in any common unit, by which data is distributed over them. null: measured."""
    by_node: bool = True
    """Let each rank use the paths of the memory node (NUMA) of its cores, if each node has its share of the paths."""
    block_bytes: int = 16 << 20
    """Size of one transfer in bytes."""
    threads: int = 8
    """Concurrent transfers per path and direction."""
    direct: bool = True
    """Bypass the page cache where the file system supports it."""
    checksum: bool = True
    """Verify data that is read."""

    def __post_init__(self) -> None:
        if not self.paths or not all(self.paths):
            raise ValueError(
                f"offload.disk.paths={self.paths!r}: name at least one directory, and no empty one, as a list"
            )
        if self.weights is not None and len(self.weights) != len(self.paths):
            raise ValueError(
                f"offload.disk.weights={list(self.weights)}: give one for each of the {len(self.paths)} paths"
            )
        if self.weights is not None and not all(weight in WEIGHT for weight in self.weights):
            raise ValueError(f"offload.disk.weights={list(self.weights)}: each must be {WEIGHT}")
        if self.block_bytes % PAGE_BYTES or not PAGE_BYTES <= self.block_bytes <= MOST_BLOCK_BYTES:
            raise ValueError(
                f"offload.disk.block_bytes={self.block_bytes}: must be a multiple of {PAGE_BYTES} from {PAGE_BYTES} to "
                f"{MOST_BLOCK_BYTES}; 16777216 suits most disks"
            )
        if not 1 <= self.threads <= MOST_THREADS:
            raise ValueError(f"offload.disk.threads={self.threads}: must be 1 to {MOST_THREADS}; 8 suits most disks")


@dataclass(frozen=True, kw_only=True)
class OffloadConfig:
    """Tiers of model states, and overlap of host updates with work on the device.

    A fraction counts elements and selects whole parameters: the root's first, then those of the last units.
    All values of `overlap` except `delayed` give the same bits:
        step      the optimizer's step waits for all updates
        forward   the step returns after the decision on its gradients; a unit's next gather waits for its update
        backward  like forward, but units are updated before the decision, and rolled back if necessary
        delayed   updates may take a whole step; weights are one step older than usual (ZeRO-Offload, section 5.2)
        auto      forward, the fastest with the same bits that needs no additional memory
    """

    param: str = "device"
    """Tier of parameters in the working dtype: device, host or disk (stage 3); units are prefetched."""
    grad: str = "device"
    """Tier of reduced gradients: device, host or disk."""
    master: str = "device"
    """Tier of master parameters, where updates run: device, host or disk."""
    moments: str = "device"
    """Tier of moments: device, host or disk."""
    param_fraction: float = 1.0
    """Fraction of the parameters that is offloaded, in (0, 1]."""
    grad_fraction: float = 1.0
    """Fraction of the gradients that is offloaded, in (0, 1]."""
    master_fraction: float = 1.0
    """Fraction of the master parameters that is offloaded, in (0, 1]."""
    moments_fraction: float = 1.0
    """Fraction of the moments that is offloaded, in (0, 1]."""
    frozen: str | None = None
    """Tier of frozen parameters, which are only read: device, host or disk. null: that of param."""
    overlap: str = "auto"
    """When host updates run: step, forward, backward, delayed (one step stale), or auto (forward)."""
    undo_bytes: int = 1 << 30
    """Host memory per rank, in bytes, with which overlap=backward may roll back updates."""
    delay_warmup_steps: int = 40
    """Steps before overlap=delayed begins to delay updates."""
    activations: str = "device"
    """Tier of the inputs that checkpointed blocks keep for backward: device, host or disk."""
    prefetch_units: int = PREFETCH_UNITS
    """Number of units (parameters, optimizer states) and blocks (activations) that are loaded from disk ahead of their
    use; each takes host memory."""
    disk: DiskConfig = field(default_factory=DiskConfig)
    """Scratch files of tier disk."""

    def __post_init__(self) -> None:
        for kind in (*KINDS, FROZEN):
            tier, fraction = self.tier(kind), self.fraction(kind)
            if tier not in TIERS:
                raise ValueError(f"offload.{kind}={tier!r}: choose one of {list(TIERS)}")
            if fraction not in FRACTION:
                told = f"must be {FRACTION}; for none, offload.{kind}=device"
                raise ValueError(f"offload.{kind}_fraction={fraction}: {told}")
        if self.overlap not in OVERLAPS:
            raise ValueError(f"offload.overlap={self.overlap!r}: choose one of {list(OVERLAPS)}")
        undo, ahead = whole(1, MOST_BYTES), whole(1, MOST_AHEAD)
        check("offload", self, undo_bytes=undo, delay_warmup_steps=whole(0), prefetch_units=ahead)
        if self.activations not in TIERS:
            raise ValueError(f"offload.activations={self.activations!r}: choose one of {list(TIERS)}")
        check_compatible(Settings.of(offload=self))

    @property
    def mode(self) -> str:
        """Overlap that is in effect, with `auto` resolved."""
        return "forward" if self.overlap == "auto" else self.overlap

    @property
    def uses_disk(self) -> bool:
        """Whether any states or activations are on disk."""
        return "disk" in {self.activations, *map(self.tier, (*KINDS, FROZEN))}

    def without_idle(self) -> OffloadConfig:
        """Return these settings without those of scratch disks, if nothing is on disk."""
        return self if self.uses_disk else replace(self, disk=DiskConfig(), prefetch_units=PREFETCH_UNITS)

    def tier(self, kind: str) -> str:
        """Return the tier of "param", "grad", "master", "moments" or "frozen"."""
        return self.param if kind == FROZEN and self.frozen is None else str(getattr(self, kind))

    def fraction(self, kind: str) -> float:
        """Return the fraction of the kind's elements that is on `tier(kind)`."""
        if kind == FROZEN:
            return self.param_fraction if self.frozen is None else 1.0
        return float(getattr(self, f"{kind}_fraction"))


OFFLOADS = {
    "none": OffloadConfig(),
    "host": OffloadConfig(grad="host", master="host", moments="host"),
    "host_all": OffloadConfig(param="host", grad="host", master="host", moments="host"),
    "disk": OffloadConfig(grad="host", master="disk", moments="disk"),
    "infinity": OffloadConfig(param="disk", grad="disk", master="disk", moments="disk"),
}
"""The files of conf/offload, by name."""
