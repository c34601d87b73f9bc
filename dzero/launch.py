"""Workers for a plain `python train.py`: torch's elastic launcher, one worker per GPU, or gloo workers on a CPU.

The launcher runs in this process and spawns the workers. Under torchrun (RANK is set) nothing is launched: the process
joins the group it is given.

    what happens               what the user sees          how it ends
    a worker raises            its traceback, once; of a   it leaves a report before it leaves the group: the earliest
                               RunError the message        report is the cause; the launcher ends the rest
    a worker is killed         its rank and the signal     the launcher ends the rest
    Ctrl-C, SIGTERM, SIGHUP    the signal                  the launcher ends all; Ctrl-C reaches no worker
    the launcher is killed     nothing                     the kernel kills the workers
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import resource_tracker
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import torch
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from dzero.errors import RunError
from dzero.hardware import available_cores
from dzero.mesh import local_rank, local_ranks, process_group

POLL_S = 0.1
LINGER_S = 0.5  # a worker that failed because another was killed must outlive the poll that finds the killed one
UNWIND_S = 3
PR_SET_PDEATHSIG = 1


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
    def launch(self) -> LauncherConfig:
        """How many workers, on what, and how long they wait for each other."""


Entry = Callable[[Any, Path, torch.device], None]
"""`entry(config, run_folder, device)`: what every worker runs, inside the process group."""


def launched() -> bool:
    """Whether this process is a worker already (torchrun's or ours)."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def start(entry: Entry, config: RunConfig, run_folder: Path) -> None:
    """Run `entry(config, run_folder, device)` here where this is a worker already, else in workers of our own.

    Raises RunError that says what failed, SystemExit (128 + signal, as shells do) where a signal ended it.
    """
    if launched():
        with _group(config.launch) as device:
            entry(config, run_folder, device)
        return
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # one machine: no other interface is needed
    with tempfile.TemporaryDirectory(prefix="dzero-launch-") as private, _quiet(), _sole_receiver_of_interrupts():
        launcher = elastic_launch(_launch_config(config.launch.worker_count, private), _worker)
        try:
            launcher(entry, config, run_folder, Path(private), os.getpid())
        except ChildFailedError as failed:
            raise RunError(_explain(failed, Path(private))) from None
        except (KeyboardInterrupt, SignalException) as stop:
            ended_by = stop.sigval if isinstance(stop, SignalException) else signal.SIGINT
            print(f"stopped by {signal.Signals(ended_by).name}; the workers were ended", file=sys.stderr)
            sys.exit(128 + ended_by)


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
        signals_to_handle="SIGTERM,SIGHUP,SIGQUIT",  # not SIGINT, which it would pass on and workers do not take
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
    with _reported(private), _group(config.launch) as device, _reported(private):
        entry(config, run_folder, device)


def _unwind(number: int, _: FrameType | None) -> None:
    """Leave through every `finally`, so that files are flushed and the terminal is whole; but leave."""
    signal.alarm(UNWIND_S)
    sys.exit(128 + number)


@contextmanager
def _reported(private: Path) -> Iterator[None]:
    """On an exception write why, and leave at once: what runs at exit could wait for ranks that never come."""
    try:
        yield
    except Exception as error:
        rank = os.environ["RANK"]
        text = None if isinstance(error, RunError) else traceback.format_exc()
        report = {"rank": rank, "time_ns": time.time_ns(), "message": str(error), "traceback": text}
        (private / f"failed-{rank}.json").write_text(json.dumps(report))
        sys.stdout.flush()
        sys.stderr.flush()
        time.sleep(LINGER_S)
        os._exit(1)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the elastic launcher from logging what is told here once and better."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


@contextmanager
def _sole_receiver_of_interrupts() -> Iterator[None]:
    """A terminal sends Ctrl-C to this process and to its workers; only this one shall answer, by ending them.

    Processes inherit the signals that the thread which starts them blocks. So the main thread blocks it, another thread
    takes the delivery, and Python runs the handler in the main thread all the same.
    """
    resource_tracker.ensure_running()  # multiprocessing's own helper, whose start would unblock the signal again
    over = threading.Event()
    threading.Thread(target=over.wait, daemon=True).start()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        over.set()


def _explain(failed: ChildFailedError, private: Path) -> str:
    """The cause: a worker killed by a signal, else the earliest report."""
    for rank, failure in sorted(failed.failures.items()):
        if failure.exitcode < 0 and failure.exitcode != -signal.SIGTERM:  # SIGTERM is how the launcher ends the others
            name = signal.Signals(-failure.exitcode).name
            hint = " (the system does that when memory runs out)" if name == "SIGKILL" else ""
            return f"rank {rank} (pid {failure.pid}) was killed by {name}{hint}; the other workers were ended"
    reports = [json.loads(path.read_text()) for path in private.glob("failed-*.json")]
    if not reports:
        codes = {rank: failure.exitcode for rank, failure in failed.failures.items()}
        return f"workers ended without a report; exit codes by rank: {codes}"
    first = min(reports, key=lambda report: int(report["time_ns"]))
    if first["traceback"] is None:
        return str(first["message"])
    return f"rank {first['rank']} failed; the other workers were ended\n{first['traceback']}"
