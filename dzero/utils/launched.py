"""What launchers tell a process of its place among several, in environment variables; does not import torch.

torchrun and dzero's launcher set RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE; mpirun, mpiexec and srun only
numbers of their own (`SIZES`), with which no group of ranks is joined.
"""

from __future__ import annotations

import os

SIZES = (
    "WORLD_SIZE",
    "OMPI_COMM_WORLD_SIZE",
    "MV2_COMM_WORLD_SIZE",
    "PMI_SIZE",
    "FLUX_JOB_SIZE",
    "SLURM_STEP_NUM_TASKS",
)
"""Variables by which launchers tell a process how many there are. A script of sbatch has SLURM_NTASKS too."""
TERMINAL = "SLURM_PTY_PORT"
"""Variable of a shell that `srun --pty` started, where what is typed is one process, whatever the step's size."""


def launched() -> bool:
    """Return whether this process is a worker already, started by torchrun or by the launcher."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def one_of_several() -> str | None:
    """Return what tells that a launcher has started several processes, as NAME=NUMBER; None if nothing does."""
    for name in SIZES:
        of_step = name.startswith("SLURM_")
        if os.environ.get(name, "1") not in ("1", "") and not (of_step and TERMINAL in os.environ):
            return f"{name}={os.environ[name]}"
    return None


def check_group() -> None:
    """Raise ValueError if this is one of several processes and the variables do not say which rank of their group."""
    if not launched():
        if "RANK" in os.environ:
            raise ValueError(
                f"RANK={os.environ['RANK']} without WORLD_SIZE: torchrun sets both, unset it for a run without it"
            )
        if (several := one_of_several()) is not None:
            raise ValueError(
                f"{several} without RANK: each of several processes would be a run of its own; start them by torchrun, "
                f"or set RANK and WORLD_SIZE in each; for a run without it, unset {several.partition('=')[0]}"
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


def is_first_of_node() -> bool:
    """Return whether this process reports to the user what all processes of its node find."""
    local_rank = os.environ.get("LOCAL_RANK", "0")
    return not (launched() and local_rank.isdecimal() and int(local_rank) > 0)


def local_rank() -> int:
    """Return the index of this process on its host."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def local_ranks() -> int:
    """Return the number of processes on this host."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
