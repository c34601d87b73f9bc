"""Several sides in one run: every side lives in its own pair of processes, and rounds visit them in turn.

    parent                                   rank r of side s
    start, one side after another    -->     import, join the side's group, warm the libraries, note the memory
                                             build, train `WARM_STEPS`, note the peak of construction, start a new peak
    for each round, in shuffled order -->    barrier, train `steps` steps, report seconds and losses
    finish                           -->     report peak memory, leave the group

So a slow minute of the machine hits every side, ratios are taken within the run, and peak memory is a side's own. Only
one side computes at a time: the others wait on a pipe. Seconds of a round are those of the slower rank.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from children import Children, process_group

RANKS = 2
WARM_STEPS = 2


@dataclass(frozen=True)
class Measured:
    """One side: seconds per step of each round, mean loss over ranks of each step, bytes of the worst rank.

    `step_s`: the slower rank's clock. `cpu_s`: processor time, mean of the ranks: less disturbed by other programs, but
    blind to waiting. `peak_bytes`: highest resident memory while training, over that after imports; `rest_bytes`:
    between steps; `build_bytes`: highest until the end of the warm-up.
    """

    side: str
    step_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    peak_bytes: int = 0
    rest_bytes: int = 0
    build_bytes: int = 0


def measure(
    sides: Sequence[str],
    workload: Any,
    *,
    rounds: int,
    steps: int,
    ranks: int = RANKS,
    module: str = "sides",
    serve: Callable[..., None] | None = None,
) -> dict[str, Measured]:
    """Run all `sides` interleaved; `workload`: `workload.Workload`. module: that has them, as sides.py does.

    serve: what a rank runs in place of this file's loop.
    """
    with tempfile.TemporaryDirectory() as folder:
        pairs = {}
        try:
            for side in sides:
                pairs[side] = _Side(side, workload, Path(folder), ranks, module, serve or _serve)
            results = {side: Measured(side, losses=list(pair.warm_losses)) for side, pair in pairs.items()}
            order, shuffle = list(sides), random.Random(0)
            for done in range(rounds):
                shuffle.shuffle(order)
                for side in order:
                    pairs[side].round(steps, results[side])
                print(f"round {done + 1}/{rounds}", flush=True)
            return {side: pair.finish(results[side]) for side, pair in pairs.items()}
        finally:
            for pair in pairs.values():
                pair.close()


class _Side(Children):
    """A side's processes."""

    def __init__(
        self, side: str, workload: Any, folder: Path, ranks: int, module: str, serve: Callable[..., None]
    ) -> None:
        super().__init__(ranks, serve, side, workload, str(folder / side), ranks, module)
        self._ranks = ranks
        self.warm_losses = _mean_by_step(self.first)

    def round(self, steps: int, into: Measured) -> None:
        """Train `steps` steps and add what they took."""
        seconds, cpu_s, losses = zip(*self.ask(steps), strict=True)
        into.step_s.append(max(seconds) / steps)
        into.cpu_s.append(sum(cpu_s) / self._ranks / steps)
        into.losses.extend(_mean_by_step(losses))

    def finish(self, measured: Measured) -> Measured:
        """Add the worst rank's memory and end the processes."""
        memories = self.ask(None)
        worst = {key: max(memory[key] for memory in memories) for key in memories[0]}
        return replace(measured, **worst)


def _mean_by_step(by_rank: Sequence[list[float]]) -> list[float]:
    return [sum(losses) / len(losses) for losses in zip(*by_rank, strict=True)]


def _serve(pipe: Connection, side: str, workload: Any, rendezvous: str, ranks: int, module: str, rank: int) -> None:
    """A child process: rank `rank` of `side`."""
    try:
        with process_group(rank, ranks, rendezvous):
            _train(pipe, side, workload, module, rank)
    except BaseException as error:
        pipe.send(RuntimeError(f"{side}, rank {rank}: {type(error).__name__}: {error}"))
        raise


def _train(pipe: Connection, side: str, workload: Any, module: str, rank: int) -> None:
    import torch
    import torch.distributed as dist
    from workload import Batches

    from dzero.hardware import peak_rss_bytes, reset_peak_rss, rss_bytes

    torch.set_num_threads(1)
    sides = importlib.import_module(module)
    sides.warm_libraries(side)
    batches, baseline, done, reader = Batches(workload), rss_bytes(), 0, sides.reader_of(side, rank)
    step = sides.build(side, workload.build(), samples=workload.samples)

    def run(count: int) -> list[float]:
        nonlocal done
        losses = [step(batches.get(done + index, reader)) for index in range(count)]
        done += count
        return [float(loss) for loss in losses]

    losses = run(WARM_STEPS)
    built = peak_rss_bytes()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    if not reset_peak_rss():
        raise RuntimeError("this kernel cannot restart the high-water mark (/proc/self/clear_refs)")
    pipe.send(losses)
    while (count := pipe.recv()) is not None:
        dist.barrier()
        start, cpu_start = time.perf_counter(), time.process_time()
        losses = run(count)
        pipe.send((time.perf_counter() - start, time.process_time() - cpu_start, losses))
    memory = {"peak_bytes": peak_rss_bytes(), "rest_bytes": rss_bytes(), "build_bytes": built}
    pipe.send({key: value - baseline for key, value in memory.items()})
