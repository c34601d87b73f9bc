"""Worker: a fork of the warm process, or a process of torchrun, that joins the group and runs its part of a run.

A worker that fails reports the reason before it leaves the group. Hence its report is older than the reports of ranks
that only see it leave.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but not in __all__
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from dzero.errors import ReportedElsewhere, RunError, user_errors
from dzero.hardware import available_cores
from dzero.launch.config import LauncherConfig
from dzero.launch.devices import device_type
from dzero.launch.signals import UNWIND_S, pass_over
from dzero.launch.warm_process import PASSED_ON, WorkerFailure, found
from dzero.mesh import process_group
from dzero.utils.launched import local_rank, local_ranks

LINGER_S = 0.5
"""Seconds by which a failed worker delays its exit.

If the failure was caused by the death of another worker, the launcher must learn of that death first.
"""

Entry = Callable[[Any, Path, torch.device], None]
"""Signature `entry(config, run_folder, device)` of the function that every worker runs inside the process group."""


def run(entry: str, config: Any, run_folder: Path, say: Callable[[WorkerFailure], None]) -> None:
    """Run a worker of the launcher: join the group, call the entry `module:function`, and send a failure by `say`."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _unwind)
    for number in (signal.SIGHUP, signal.SIGQUIT):  # the launcher passes them on as SIGTERM
        signal.signal(number, signal.SIG_IGN)
    report = partial(_to_launcher, say)
    with reported(report), group(config.launch) as device, reported(report):
        found(entry)(config, run_folder, device)


def join(entry: Entry, config: Any, run_folder: Path) -> None:
    """Run a worker of torchrun: as `run`, but report failures to the user and to torchrun."""
    with reported(to_torchrun), group(config.launch) as device, reported(to_torchrun):
        entry(config, run_folder, device)


def host_store(address: str, say: Callable[[int], None]) -> None:
    """Host the rendezvous store for the workers of this machine and send its port; runs until it is killed.

    It listens at `address` only: torch by itself lets everyone who reaches the machine read and write it.
    """
    for number in PASSED_ON:  # it runs while any worker needs it, then the launcher kills it
        signal.signal(number, signal.SIG_IGN)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listening = socket.create_server((address, 0), family=family, backlog=socket.SOMAXCONN)
    port = listening.getsockname()[1]
    store = TCPStore(
        address,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(days=1),
        master_listen_fd=listening.detach(),
    )
    say(store.port)
    while True:
        signal.pause()


@contextmanager
def group(config: LauncherConfig) -> Iterator[torch.device]:
    """Join the group and yield this worker's device; also set the current CUDA device and the number of CPU threads."""
    torch.set_num_threads(config.threads or max(1, available_cores() // local_ranks()))
    device = torch.device("cpu")
    if device_type(config) == "cuda":
        choose_allocator()
        device = torch.device("cuda", local_rank())
        torch.cuda.set_device(device)
    with ExitStack() as joined:
        with user_errors():
            joined.enter_context(process_group(device, timeout=config.timeout))
        yield device


ALLOCATOR_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Names that torch reads allocator settings from; the second, older one works in all supported releases."""


def choose_allocator() -> None:
    """Let segments of CUDA memory grow in place, unless the user has settings; call it before the first allocation.

    At ZeRO stage 3, units of several sizes are gathered and freed. With segments of fixed size, a large unit finds only
    gaps that are too small. (torchtitan has the same setting.)
    """
    if not any(name in os.environ for name in ALLOCATOR_SETTINGS):
        os.environ[ALLOCATOR_SETTINGS[-1]] = "expandable_segments:True"


@contextmanager
def reported(report: Callable[[Exception], None]) -> Iterator[None]:
    """Pass an exception to `report` and exit at once, because exit handlers could wait for ranks that never come.

    A RunError in another thread is handled alike: the main thread may be blocked in a wait for a device.
    """

    def leave(error: Exception) -> None:
        report(error)
        sys.stdout.flush()
        sys.stderr.flush()
        time.sleep(LINGER_S)
        os._exit(1)

    def in_thread(told: threading.ExceptHookArgs) -> None:
        if isinstance(told.exc_value, RunError):
            leave(told.exc_value)
        before(told)

    before, threading.excepthook = threading.excepthook, in_thread
    try:
        yield
    except Exception as error:
        leave(error)
    finally:
        threading.excepthook = before


def to_torchrun(error: Exception) -> None:
    """Print the error to stderr at once, and record it for torchrun's summary."""
    get_error_handler().record_exception(error)
    if not isinstance(error, ReportedElsewhere):
        print(f"error: {error}" if isinstance(error, RunError) else traceback.format_exc(), file=sys.stderr)


def _to_launcher(say: Callable[[WorkerFailure], None], error: Exception) -> None:
    text = None if isinstance(error, RunError) else traceback.format_exc()
    say(WorkerFailure(int(os.environ["RANK"]), time.time_ns(), str(error), text))


def _unwind(number: int, _: FrameType | None) -> None:
    """Exit through every `finally`, so that files are flushed and the terminal is restored, within a time limit."""
    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, pass_over)
    signal.alarm(int(UNWIND_S))
    sys.exit(128 + number)
