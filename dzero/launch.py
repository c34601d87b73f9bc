"""Workers for a plain `python train.py`: torch's elastic launcher, one worker per GPU, or gloo workers on a CPU.

The launcher runs in this process and spawns the workers. Under torchrun (RANK is set) nothing is launched: the process
joins the group it is given.

    what happens               what the user sees          how it ends
    a worker raises            its traceback, once; of a   it leaves a report before it leaves the group: the earliest
                               RunError the message        report is the cause; the launcher ends the rest
    a worker is killed         its rank and the signal     the launcher ends the rest
    a worker hangs             its rank, and where all     the others report (watch.py); the launcher kills it
                               ranks are
    Ctrl-C, SIGTERM            the signal, and what was    the workers get SIGTERM: those that save finish the step
                               saved                      and do so (stopping.py); a second one ends all
    SIGHUP, SIGQUIT            the signal                  the launcher ends all
    the launcher is killed     nothing                     the kernel kills the workers

Ctrl-C reaches no worker. Under torchrun a worker prints its own message, and leaves it in torchrun's summary.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import torch
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from dzero.endings import POLL_S, LauncherSignals, explain, hung_workers_killed, reported, to_launcher, to_torchrun
from dzero.errors import RunError
from dzero.hardware import available_cores
from dzero.mesh import local_rank, local_ranks, process_group
from dzero.stopping import EXIT_SAVED, UNWIND_S

PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, kw_only=True)
class LauncherConfig:
    """`workers` on this machine: None takes one per GPU, or two on a machine without. `device`: auto, cpu or cuda.

    `threads`: CPU threads of each worker, None for cores / workers. `timeout_s`: of any collective; who does not come
    is then named. `check_collectives`: ranks compare every collective before it moves data, to find where the
    ranks of a model diverge; it costs a small gather each. `check_memory`: refuse a run that cannot fit this machine
    before it starts (fitting.py); false starts it all the same.
    """

    workers: int | None = None
    device: str = "auto"
    threads: int | None = None
    timeout_s: float = 120.0
    check_collectives: bool = False
    check_memory: bool = True

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
    def launch(self) -> LauncherConfig:
        """How many workers, on what, and how long they wait for each other."""


Entry = Callable[[Any, Path, torch.device], None]
"""`entry(config, run_folder, device)`: what every worker runs, inside the process group."""


def launched() -> bool:
    """Whether this process is a worker already (torchrun's or ours)."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def start(entry: Entry, config: RunConfig, run_folder: Path, *, workers: int | None = None) -> None:
    """Run `entry(config, run_folder, device)` here where this is a worker already, else in workers of our own.

    workers: how many; None for launch.workers, or as many as devices.

    Raises RunError that says what failed, SystemExit (128 + signal, as shells do) where a signal ended it.
    """
    if launched():
        with reported(to_torchrun), _group(config.launch) as device, reported(to_torchrun):
            entry(config, run_folder, device)
        return
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # one machine: no other interface is needed
    with tempfile.TemporaryDirectory(prefix="dzero-launch-") as private, _quiet(), LauncherSignals() as signals:
        launcher = elastic_launch(_launch_config(workers or config.launch.worker_count, private), _worker)
        try:
            with hung_workers_killed(Path(private)):
                launcher(entry, config, run_folder, Path(private), os.getpid())
        except ChildFailedError as failed:
            if signals.first is None:
                raise RunError(explain(failed, Path(private))) from None
            saved = any(failure.exitcode == EXIT_SAVED for failure in failed.failures.values())
            signals.leave(signals.first, saved=saved)
        except SignalException as stop:
            signals.leave(stop.sigval, saved=False)


def _launch_config(workers: int, private: str) -> LaunchConfig:
    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=workers,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        max_restarts=0,
        monitor_interval=POLL_S,
        signals_to_handle="SIGHUP,SIGQUIT",  # SIGINT and SIGTERM are `LauncherSignals`'s
        logs_specs=DefaultLogsSpecs(log_dir=private, redirects=dict.fromkeys(range(1, workers), Std.ALL)),
    )


@contextmanager
def _group(config: LauncherConfig) -> Iterator[torch.device]:
    """This worker's device, with the group joined; also sets the current CUDA device and the number of CPU threads."""
    torch.set_num_threads(config.threads or max(1, available_cores() // local_ranks()))
    device = torch.device("cpu")
    if config.device_type == "cuda":
        device = torch.device("cuda", local_rank())
        torch.cuda.set_device(device)
    with process_group(device, timeout=config.timeout):
        yield device


def _worker(entry: Entry, config: RunConfig, run_folder: Path, private: Path, launcher_pid: int) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher_pid:
        os._exit(1)
    signal.signal(signal.SIGTERM, _unwind)
    # Reported outside for what fails in joining, and inside so that the report is older than those of the ranks that
    # see this one leave.
    report = partial(to_launcher, private)
    with reported(report), _group(config.launch) as device, reported(report):
        entry(config, run_folder, device)


def _unwind(number: int, _: FrameType | None) -> None:
    """Leave through every `finally`, so that files are flushed and the terminal is whole; but leave."""
    signal.signal(number, signal.SIG_IGN)
    signal.alarm(int(UNWIND_S))
    sys.exit(128 + number)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the elastic launcher from logging what is told here once and better."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)
