"""Settings of a launch; does not import torch."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from dzero.utils.ranges import MOST_RANKS, SECONDS, check, whole

MOST_THREADS = 1024


@dataclass(frozen=True, kw_only=True)
class LauncherConfig:
    """Number of workers on this machine, their device, and how long they wait for each other."""

    workers: int | None = None
    """Workers on this machine. Unset: one per GPU, or two on a machine without GPUs."""
    device: str = "auto"
    """Device type: `cpu`, `cuda`, or `auto` (cuda if torch finds a GPU)."""
    threads: int | None = None
    """CPU threads of each worker. Unset: cores / workers."""
    timeout_s: float = 120.0
    """Seconds that a collective may take before the error names the missing ranks."""
    check_collectives: bool = False
    """Compare every collective between ranks before it moves data, to find divergence; costs a small gather each."""
    check_memory: bool = True
    """Refuse to start a run that cannot fit this machine."""

    def __post_init__(self) -> None:
        if self.device not in ("auto", "cpu", "cuda"):
            raise ValueError(f"launch.device={self.device!r}: choose auto, cpu or cuda")
        machine = "to choose by the machine"
        workers, threads = whole(1, MOST_RANKS, or_null=machine), whole(1, MOST_THREADS, or_null=machine)
        check("launch", self, workers=workers, threads=threads, timeout_s=SECONDS)

    @property
    def timeout(self) -> timedelta:
        """Longest duration of any collective."""
        return timedelta(seconds=self.timeout_s)
