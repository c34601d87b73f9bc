"""Torch profiler traces of chosen steps, one per rank, for Perfetto, chrome://tracing or TensorBoard's profile plugin.

    step            1 ... start-2   start-1    start ... start+steps-1    later
    profiler        off             warms up   records                    off

Files in `<run folder>/profile`:
    rank0.pt.trace.json.gz          spans are torch's own and the `record_function` names of dzero (`ProfilerStep#k`
                                    counts from 0: it is step k + 1). The process is named after its rank. Threads have
                                    names: `training`, and those of the offload lanes: `FETCH`, `EVICT`, `COMPUTE`,
                                    `LOAD states`, `SPILL states`, and so on
    rank0.memory_snapshot.pickle    CUDA only: every allocation of the same steps, for https://pytorch.org/memory_viz
"""

from __future__ import annotations

import gzip
import json
import os
import re
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from dzero.compatibility import check_compatible
from dzero.monitor.config import ProfileConfig
from dzero.utils.rules import Settings
from dzero.utils.torch_internals import dump_allocations, profile_every_thread, record_allocations

TRACES, SNAPSHOTS = "profile/rank*.pt.trace.json.gz", "profile/rank*.memory_snapshot.pickle"
"""Files of all ranks, in the run's folder."""
SNAPSHOT_EVENTS = 100_000
LANE = "offload "
"""Prefix of the offload threads' names (`offload/executor.py`)."""
PROCESS = '"name": "process_name"'
EVENTS = '"traceEvents": ['
THREAD = {"ph": "M", "name": "thread_name", "ts": 0}
NAME = re.compile(r'^(\s*"name": )"(?:thread (\d+) \()?(.*?)\)?"$')
"""Pattern of a line of torch's trace that names a process, or a thread by its number."""


class Profiler:
    """Context that traces the steps that its config selects; call `step()` after every step. If disabled, does nothing.

    ValueError is raised if a run of `run_steps` steps ends before the trace, or for a memory snapshot without CUDA.
    """

    def __init__(
        self, config: ProfileConfig, run_folder: Path, *, rank: int, device: torch.device, run_steps: int
    ) -> None:
        self.trace_path = run_folder / TRACES.replace("*", str(rank))
        self.snapshot_path: Path | None = None
        self._first = config.start_step
        self._last = config.start_step + config.steps - 1
        self._step = 1
        self._rank, self._tracks = rank, dict[int, str]()
        self._stack = ExitStack()
        self._profile: profile | None = None
        if not config.enabled:
            return
        config.check(run_steps)
        check_compatible(Settings.of(profile=config).having({"device": device.type}))
        if device.type == "cuda" and config.memory_snapshot is not False:
            self.snapshot_path = run_folder / SNAPSHOTS.replace("*", str(rank))
        self.trace_path.parent.mkdir(parents=True, exist_ok=True)
        self._profile = profile(
            activities=[ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda"),
            schedule=schedule(wait=self._first - 2, warmup=1, active=config.steps, repeat=1),
            on_trace_ready=self._write,
            experimental_config=profile_every_thread(),
        )

    def __enter__(self) -> Self:
        if self._profile is not None:
            self._stack.enter_context(self._profile)
        return self

    def step(self) -> None:
        """Mark the end of a step and the start of the next."""
        if self._profile is None or self._step > self._last:
            return
        self._step += 1
        self._tracks |= track_names()
        if self.snapshot_path and self._step == self._first:
            record_allocations(SNAPSHOT_EVENTS)
        self._profile.step()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the trace; a run that ends within the traced steps leaves a trace of those that were made."""
        self._stack.close()

    def _write(self, traced: profile) -> None:
        """Write the trace and the snapshot; a failure is reported on stderr, and training continues."""
        try:
            as_torch_names_it = self.trace_path.with_suffix("")
            traced.export_chrome_trace(str(as_torch_names_it))
            with as_torch_names_it.open() as lines, gzip.open(self.trace_path, "wt") as file:
                file.writelines(named(lines, f"rank {self._rank}", self._tracks | track_names()))
            as_torch_names_it.unlink()
            if self.snapshot_path:
                dump_allocations(str(self.snapshot_path))
                record_allocations(None)
        except (OSError, RuntimeError) as error:
            print(f"the trace in {self.trace_path.parent} was not written: {error}", file=sys.stderr)


def track_names() -> dict[int, str]:
    """Return the name in the trace of each thread of this process, by its native id.

    The calling thread is `training`. Its id comes from the system, because the one that Python stores is that of the
    parent process after a fork.
    """
    others = (each for each in threading.enumerate() if each is not threading.current_thread())
    known = {each.native_id: _track_name(each) for each in others if each.native_id is not None}
    return known | {threading.get_native_id(): "training"}


def _track_name(thread: threading.Thread) -> str:
    """Return `FETCH` for the thread of that offload lane, `LOAD states (2)` for the second thread of a lane."""
    name, underscore, number = thread.name.removeprefix(LANE).rpartition("_")
    if not (underscore and number.isdigit()):
        return thread.name
    return name if number == "0" else f"{name} ({int(number) + 1})"


def named(trace: Iterable[str], process: str, tracks: Mapping[int, str]) -> Iterator[str]:
    """Yield the lines of a trace, one field per line as torch writes it, with names for process and threads.

    A trace may be larger than memory and is never read as a whole. `process` is put before the names of processes;
    threads that are not in `tracks` keep torch's names.
    """
    of_process = False
    for line in trace:
        found = NAME.match(line)
        if found and found[2] and (name := tracks.get(int(found[2]))):
            line = f"{found[1]}{json.dumps(name)}\n"
        elif found and of_process:
            line, of_process = f"{found[1]}{json.dumps(f'{process} ({found[3]})')}\n", False
        of_process = of_process or PROCESS in line
        yield line
        if EVENTS in line:  # torch itself names only some of the threads
            for thread, name in tracks.items():
                yield json.dumps({**THREAD, "pid": os.getpid(), "tid": thread, "args": {"name": name}}) + ",\n"
