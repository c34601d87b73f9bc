"""Settings of a launch, and checks of the launch environment; does not import torch."""

from __future__ import annotations

import os
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


def check_group() -> None:
    """Raise ValueError if the environment variables of a worker do not define a valid rank of a group."""
    if not launched():
        if "RANK" in os.environ:
            raise ValueError(
                f"RANK={os.environ['RANK']} without WORLD_SIZE: torchrun sets both, unset it for a run without it"
            )
        return
    told = {key: os.environ.get(key, "0") for key in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")}
    if wrong := {key: value for key, value in told.items() if not value.isdecimal()}:
        raise ValueError(f"{wrong}: must be whole numbers; torchrun sets them, unset them for a run without it")
    for rank, ranks in (("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE")):
        if ranks in os.environ and not int(told[rank]) < int(told[ranks]):
            raise ValueError(
                f"{rank}={told[rank]} with {ranks}={told[ranks]}: a rank is less than the number of ranks; torchrun "
                "sets both, unset them for a run without it"
            )


def launched() -> bool:
    """Return whether this process is a worker already, started by torchrun or by the launcher."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def is_first_of_node() -> bool:
    """Return whether this process reports to the user what all processes of its node find."""
    local_rank = os.environ.get("LOCAL_RANK", "0")
    return not (launched() and local_rank.isdecimal() and int(local_rank) > 0)
