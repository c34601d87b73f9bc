"""A pool of worker processes that outlives a test: importing torch costs seconds, a group milliseconds.

    parent                         worker (one per rank; pool_worker.py)
    start a process         -->    a fork of the warm server          -->    idle
    send (sys.path, call)   -->    new gloo group, run the call       -->    outcome: result or traceback
    release                 -->    destroy the group, collect garbage -->    idle

A group is destroyed only when every rank has its outcome, so no rank sees a neighbour leave early. If one fails,
the others get `GRACE_S` to report too; who has not by then hangs in a collective, is killed, and is replaced at
the next run. When the parent dies its pipes close, which ends the workers.
"""

from __future__ import annotations

import os
import pickle
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import warm_python
from pool_worker import IDLE, RELEASE, Call, Outcome, dumps
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but torch leaves it out of __all__

from dzero.utils import torch_internals

GRACE_S = 1.0
START_S = 120.0
SETTLE_S = 20.0
TOLERATED = 0 if torch_internals.RELEASE >= (2, 13) else 60
"""Threads of groups with which a worker is used again. Before torch 2.13 many operations of DTensor, of which `detach`
is one, keep their mesh and so its group for ever, and every worker would have to be replaced; no run is named then."""


class WorkerError(RuntimeError):
    """A rank failed; the message holds its number and its own traceback."""


@dataclass(frozen=True, eq=False)
class Worker:
    process: warm_python.Popen
    pipe: Connection

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self.pipe.close()


class Pool:
    """Workers 0, 1, … started when first needed. `run` is not reentrant."""

    def __init__(self) -> None:
        self._environ = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}  # of today, for all workers
        self._workers: list[Worker] = []
        self._store: TCPStore | None = None
        self._runs = 0
        self.kept: list[str] = []

    def run(self, fn: Callable[..., Any], ranks: int, *args: Any, timeout_s: float = 120.0) -> list[Any]:
        """`fn(rank, ranks, *args)` on `ranks` processes in a fresh gloo group; the results in rank order.

        `fn` is a module-level function of an importable module. Arguments and results are anything that
        pickles; plain tensors travel as bytes (strides and shared storage are lost). Each run has seed 0.
        Raises WorkerError for the rank that failed first (one that died is the cause, whoever noticed it sooner),
        TimeoutError when `timeout_s` have passed.

        Workers in which the run's groups outlive it are not used again: the threads of a group wake up a hundred times
        a second. `kept` names such runs; those that leave a backward half done are among them. See also `TOLERATED`.
        """
        self._runs += 1
        messages = [dumps((sys.path, dumps(self._call(fn, args, rank, ranks)))) for rank in range(ranks)]
        workers = self._ready(ranks)
        try:
            for worker, message in zip(workers, messages, strict=True):
                worker.pipe.send_bytes(message)
            outcomes = collect(workers, timeout_s)
        except BaseException:  # an interrupt, or a result that does not unpickle: nobody knows where the ranks are
            self._drop(workers)
            raise
        self._drop([worker for rank, worker in enumerate(workers) if rank not in outcomes])
        self._release([worker for rank, worker in enumerate(workers) if rank in outcomes])
        found = results(outcomes, ranks, timeout_s)
        if keeping := [worker for worker in workers if keeps_groups(worker)]:
            self._drop(keeping)
            if TOLERATED == 0:
                self.kept.append(fn.__qualname__)
        return found

    @property
    def pids(self) -> list[int | None]:
        """Process ids of the workers, in rank order."""
        return [worker.process.pid for worker in self._workers]

    def close(self) -> None:
        """End every worker: a closed pipe ends an idle one, what is left is killed."""
        for worker in self._workers:
            worker.pipe.close()
        for worker in self._workers:
            with suppress(subprocess.TimeoutExpired):
                worker.process.wait(5.0)
            worker.kill()
        self._workers, self._store = [], None

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _call(self, fn: Callable[..., Any], args: tuple[Any, ...], rank: int, ranks: int) -> Call:
        module, qualname = fn.__module__, fn.__qualname__
        if "<" in qualname or module == "__main__":
            raise ValueError(f"fn={module}.{qualname}: workers import it by name; define it at module level")
        if self._store is None:  # in the parent, on a port the system chose: no clash, and no worker takes it along
            self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        return Call(module, qualname, args, rank, ranks, self._runs, self._store.port)

    def _ready(self, ranks: int) -> list[Worker]:
        self._drop([worker for worker in self._workers if not worker.is_alive])
        fresh: list[Worker] = []
        for _ in range(ranks - len(self._workers)):
            ours, theirs = socket.socketpair()
            with theirs:
                line = [sys.executable, "-c", "import pool_worker; pool_worker.serve()"]
                process = warm_python.Popen(line, stdin=theirs, env=self._environ)
            fresh.append(Worker(process, Connection(ours.detach())))
        self._workers += fresh
        if late := not_idle(fresh, START_S):
            self._drop(late)
            raise TimeoutError(f"{len(late)} workers died at their start, or took longer than {START_S} s")
        return self._workers[:ranks]

    def _release(self, workers: list[Worker]) -> None:
        alive = [worker for worker in workers if worker.is_alive]
        for worker in alive:
            worker.pipe.send_bytes(RELEASE)
        self._drop([worker for worker in workers if worker not in alive] + not_idle(alive, SETTLE_S))

    def _drop(self, workers: Sequence[Worker]) -> None:
        for worker in workers:
            worker.kill()
        self._workers = [worker for worker in self._workers if worker not in workers]


def keeps_groups(worker: Worker) -> bool:
    """Whether groups outlived their run by a second; another thread may hold one until it next looks around."""
    until_s = time.monotonic() + 1.0
    while threads_of_groups(worker) > TOLERATED:
        if time.monotonic() > until_s:
            return True
        time.sleep(0.02)
    return False


def threads_of_groups(worker: Worker) -> int:
    """How many of gloo's threads run in an idle worker."""
    names = []
    for thread in Path(f"/proc/{worker.process.pid}/task").glob("*"):
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            names.append((thread / "comm").read_text().strip())
    return names.count("pt_gloo_runloop")


def collect(workers: Sequence[Worker], timeout_s: float) -> dict[int, Outcome]:
    """Outcomes by rank: all of them, or those that came in time, or within `GRACE_S` of the first failure."""
    outcomes: dict[int, Outcome] = {}
    until_s = time.monotonic() + timeout_s
    waiting = {worker.pipe: rank for rank, worker in enumerate(workers)}
    while waiting and (left_s := until_s - time.monotonic()) > 0:
        for pipe in wait(list(waiting), left_s):
            assert isinstance(pipe, Connection)
            rank = waiting.pop(pipe)
            outcomes[rank] = outcome = receive(workers[rank])
            if outcome.error is not None:
                until_s = min(until_s, time.monotonic() + GRACE_S)
    return outcomes


def receive(worker: Worker) -> Outcome:
    try:
        outcome: Outcome = pickle.loads(worker.pipe.recv_bytes())  # noqa: S301 (our own child's bytes)
    except (EOFError, ConnectionResetError):
        code = worker.process.wait()
        return Outcome(at_s=0.0, error=f"the process died with exit code {code}")  # before what others say of it
    return outcome


def results(outcomes: dict[int, Outcome], ranks: int, timeout_s: float) -> list[Any]:
    """The results in rank order, or the error of the rank that failed first."""
    unfinished = [rank for rank in range(ranks) if rank not in outcomes]
    failed = {rank: outcome for rank, outcome in outcomes.items() if outcome.error is not None}
    if failed:
        first = min(failed, key=lambda rank: failed[rank].at_s)
        note = f"\n(ranks {unfinished} did not return and were killed)" if unfinished else ""
        raise WorkerError(f"rank {first} of {ranks}: {failed[first].error}{note}")
    if unfinished:
        raise TimeoutError(f"ranks {unfinished} of {ranks} did not return within {timeout_s} s and were killed")
    return [outcomes[rank].result for rank in range(ranks)]


def not_idle(workers: list[Worker], timeout_s: float) -> list[Worker]:
    """The workers that died or did not say they are idle within `timeout_s`."""
    until_s = time.monotonic() + timeout_s
    late = []
    for worker in workers:
        try:
            idle = worker.pipe.poll(max(0.0, until_s - time.monotonic())) and worker.pipe.recv_bytes() == IDLE
        except (EOFError, OSError):
            idle = False
        if not idle:
            late.append(worker)
    return late
