"""What the launcher's tests launch: `python launch_cases.py <case> ... <folder>` starts each case in turn.

A case is an entry, run by two workers. The launcher's exceptions are printed as one line of JSON per case.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path

import torch
import torch.distributed as dist

from dzero import RunError
from dzero.launch.config import LauncherConfig
from dzero.launch.launcher import start
from dzero.launch.warm_process import WarmProcess


@dataclass(frozen=True, kw_only=True)
class Case:
    launch: LauncherConfig = field(default_factory=lambda: LauncherConfig(workers=2, threads=1, device="cpu"))


def leave_pid(folder: Path) -> None:
    (folder / f"rank{dist.get_rank()}.pid").write_text(str(os.getpid()))


def wait_for_each_other(_: Case, folder: Path, __: torch.device) -> None:
    """Collectives for as long as a test may take."""
    leave_pid(folder)
    try:
        until_s = time.monotonic() + 60
        while time.monotonic() < until_s:
            dist.all_reduce(torch.zeros(1))
            time.sleep(0.001)
    finally:
        (folder / f"rank{dist.get_rank()}.unwound").touch()


def rank_1_raises(_: Case, folder: Path, __: torch.device) -> None:
    dist.barrier()  # while ranks still connect to each other, gloo logs a rank that ends
    if dist.get_rank() == 1:
        raise ValueError("the cause")
    dist.all_reduce(torch.zeros(1))


def rank_1_is_killed(_: Case, folder: Path, __: torch.device) -> None:
    dist.barrier()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.zeros(1))


def all_refuse(_: Case, folder: Path, __: torch.device) -> None:
    dist.barrier()
    raise RunError("mend this")


def succeed(_: Case, folder: Path, device: torch.device) -> None:
    total = torch.ones(1)
    dist.all_reduce(total)
    (folder / f"rank{dist.get_rank()}.sum").write_text(f"{total.item()} {torch.get_num_threads()} {device}")


if __name__ == "__main__":
    launch_cases = import_module("launch_cases")  # workers import it by this name too
    *names, folder = sys.argv[1:]
    with WarmProcess(["torch.distributed.tensor"]) as warm:
        for name in names:
            error = None
            try:
                start(getattr(launch_cases, name), launch_cases.Case(), Path(folder), workers=2, warm=warm)
            except RunError as failure:
                error = str(failure)
            print(json.dumps({"case": name, "error": error}), flush=True)
