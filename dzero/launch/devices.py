"""Device type and number of workers for a launch on this machine."""

from __future__ import annotations

import torch

from dzero.hardware import available_cores
from dzero.launch.config import LauncherConfig

LEAST_WORKERS, WORKERS_OF_A_CORE = 64, 16


def device_type(config: LauncherConfig) -> str:
    """Return `cpu` or `cuda`, as configured or found; raises ValueError if cuda is configured without a GPU."""
    found = "cuda" if torch.cuda.is_available() else "cpu"
    if config.device == "cuda" and found != "cuda":
        raise ValueError("launch.device=cuda: torch sees no CUDA device here; take launch.device=cpu")
    return found if config.device == "auto" else config.device


def worker_count(config: LauncherConfig) -> int:
    """Return the number of workers to launch here; raises ValueError for more workers than GPUs."""
    if device_type(config) != "cuda":
        return config.workers or 2
    gpus = torch.cuda.device_count()
    if (config.workers or gpus) > gpus:
        raise ValueError(f"launch.workers={config.workers}: this machine has {gpus} GPUs, and each worker takes one")
    return config.workers or gpus


def check_workers(workers: int) -> None:
    """Raise ValueError if this machine has too few cores for `workers`."""
    cores = available_cores()
    most = max(LEAST_WORKERS, WORKERS_OF_A_CORE * cores)
    if workers > most:
        raise ValueError(
            f"{workers} workers on this machine of {cores} cores: at most {most} are started here; lower "
            "launch.workers or the degrees of mesh, or start ranks on several nodes with torchrun (dzero plan shows "
            "what such a run needs)"
        )
