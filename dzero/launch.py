"""Workers for a plain `python train.py`: torch's elastic launcher, one worker per GPU, or gloo workers on a CPU.

The launcher runs in this process and spawns the workers. A worker that fails leaves its traceback in a private file
with the time of failure; the earliest one is the cause (the others only see a closed connection) and is shown once.
Under torchrun (RANK is set) nothing is launched: the process joins the group it is given.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
import traceback
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from dzero.hardware import available_cores


@dataclass(frozen=True, kw_only=True)
class LauncherConfig:
    """`workers` on this machine: None takes one per GPU, or two on a machine without. `device`: auto, cpu or cuda.

    `threads`: CPU threads of each worker, None for cores / workers. `timeout_s`: of any collective.
    """

    workers: int | None = None
    device: str = "auto"
    threads: int | None = None
    timeout_s: float = 120.0

    def __post_init__(self) -> None:
        if self.device not in ("auto", "cpu", "cuda"):
            raise ValueError(f"launch.device={self.device!r}: choose auto, cpu or cuda")
        for key in ("workers", "threads"):
            value = getattr(self, key)
            if value is not None and value < 1:
                raise ValueError(f"launch.{key}={value}: must be ≥ 1, or null to choose by the machine")
        if self.timeout_s <= 0:
            raise ValueError(f"launch.timeout_s={self.timeout_s}: must be > 0 seconds")

    @property
    def device_type(self) -> str:
        """cpu or cuda, as asked or as found."""
        found = "cuda" if torch.cuda.is_available() else "cpu"
        if self.device == "cuda" and found != "cuda":
            raise ValueError("launch.device=cuda: torch sees no CUDA device here; take launch.device=cpu")
        return found if self.device == "auto" else self.device

    @property
    def worker_count(self) -> int:
        """Workers to launch on this machine. Raises ValueError for more workers than GPUs."""
        if self.device_type != "cuda":
            return self.workers or 2
        gpus = torch.cuda.device_count()
        if (self.workers or gpus) > gpus:
            raise ValueError(f"launch.workers={self.workers}: this machine has {gpus} GPUs, and each worker takes one")
        return self.workers or gpus

    @property
    def timeout(self) -> timedelta:
        """Of any collective."""
        return timedelta(seconds=self.timeout_s)


class RunConfig(Protocol):
    """What a launch needs to know of a run; the rest is the workers' business."""

    @property
    def launch(self) -> LauncherConfig: ...
    def check_ranks(self, ranks: int) -> None: ...


Entry = Callable[[Any, Path], None]


def launched() -> bool:
    """Whether this process is a worker already (torchrun's or ours)."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def worker_device(config: LauncherConfig) -> torch.device:
    """This worker's device; also sets the current CUDA device and the number of CPU threads."""
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    torch.set_num_threads(config.threads or max(1, available_cores() // local_ranks))
    if config.device_type == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


def quiet_hydra() -> list[str]:
    """Overrides with which workers other than rank 0 keep Hydra from making output folders of their own."""
    if os.environ.get("RANK", "0") == "0":
        return []
    return ["hydra.run.dir=.", "hydra.output_subdir=null", "hydra/job_logging=none", "hydra/hydra_logging=none"]


def start(entry: Entry, config: RunConfig, run_folder: Path) -> int:
    """Run `entry(config, run_folder)` here where this is a worker already, else in workers of our own.

    Returns the exit code, after telling what failed. Raises ValueError for settings that do not fit the ranks.
    """
    if launched():
        entry(config, run_folder)
        return 0
    workers = config.launch.worker_count
    config.check_ranks(workers)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # one machine: no other interface is needed
    with tempfile.TemporaryDirectory(prefix="dzero-launch-") as private:
        quiet = {rank: Std.ALL for rank in range(1, workers)}
        launcher = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=workers,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="127.0.0.1:0",
            local_addr="127.0.0.1",
            max_restarts=0,
            monitor_interval=0.1,
            logs_specs=DefaultLogsSpecs(log_dir=private, redirects=quiet),
        )
        try:
            elastic_launch(launcher, _worker)(entry, config, run_folder, Path(private))
        except ChildFailedError as failed:
            print(_explain(failed, Path(private)), file=sys.stderr)
            return 1
    return 0


def _worker(entry: Entry, config: RunConfig, run_folder: Path, private: Path) -> None:
    try:
        entry(config, run_folder)
    except BaseException:
        rank = os.environ["RANK"]
        report = {"rank": rank, "time_ns": time.time_ns(), "traceback": traceback.format_exc()}
        (private / f"failed-{rank}.json").write_text(json.dumps(report))
        raise


def _explain(failed: ChildFailedError, private: Path) -> str:
    """The cause: a worker killed by a signal, else the earliest traceback."""
    for rank, failure in sorted(failed.failures.items()):
        # The launcher itself ends the remaining workers with SIGTERM.
        if failure.exitcode < 0 and failure.exitcode != -signal.SIGTERM:
            name = signal.Signals(-failure.exitcode).name
            return f"rank {rank} (pid {failure.pid}) was killed by {name}; the other workers were ended"
    reports = [json.loads(path.read_text()) for path in private.glob("failed-*.json")]
    if not reports:
        return f"a worker failed without a report: {failed}"
    first = min(reports, key=lambda report: int(report["time_ns"]))
    return f"rank {first['rank']} failed; the other workers were ended\n{first['traceback']}"
