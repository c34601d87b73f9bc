"""How fast one rank is, measured while the others do the same: what `plan/measure.py` runs on every rank.

    figure              probe                                                           ranks at a time
    <dtype>_flops       square matrix products, the largest that are short enough       all
    copy                a copy in the device's memory, read and written bytes           all
    link                a copy between host and device (without GPU: within the host)   first alone, then all
    all_gather,         dzero's own exchange over the real group, bf16 in,              all
    reduce_scatter      fp32 sums out; and the time of a small one
    update              AdamW on the host: bf16 gradient and copy, fp32 states          all
    disk                the scratch store's own transfers                               first alone

Medians of several rounds after a warm-up; large enough that caches do not hold the data.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import TypeVar

import torch
import torch.distributed as dist

from dzero.comm.collectives import is_exact
from dzero.comm.exchange import Exact, Exchange, Native
from dzero.hardware import cores_of_rank, device_memory_bytes, dtype_of, rss_bytes
from dzero.mesh import local_rank, local_ranks
from dzero.offload.disk_speed import measure as measure_disk
from dzero.optim import rules
from dzero.optim.update import AdamWUpdater, ParamStates, Update
from dzero.plan.machine import FLOPS
from dzero.zero.tiers import DiskConfig

T = TypeVar("T")
LEAST_ROUNDS, MOST_ROUNDS = 5, 1000


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How much is measured. seconds: of each timed loop. The others: bytes, elements, side of a matrix."""

    seconds: float = 0.4
    matrix: int = 8192
    copy_bytes: int = 128 << 20
    collective_bytes: int = 8 << 20
    update_elems: int = 4 << 20
    disk_bytes: int = 64 << 20
    rounds: int = 5


@dataclass(frozen=True, kw_only=True)
class RankFigures:
    """What one rank measured; bytes/s, FLOP/s, elements/s. None: not by this rank, or with one rank alone."""

    bf16_flops: float
    fp16_flops: float
    fp32_flops: float
    copy: float
    link: float
    link_alone: float | None
    all_gather: float | None
    reduce_scatter: float | None
    latency_s: float
    update_elems_per_s: float
    disk_read: float | None
    disk_write: float | None
    device_bytes: int
    reserved_bytes: int


def probe(device: torch.device, disk: str, effort: Effort) -> RankFigures:
    """All figures of this rank. A collective: every rank of the default group calls it."""
    first = dist.get_rank() == 0
    before = _in_use_bytes(device)
    flops = {name: _together(partial(matmul_flops, device, dtype_of(name), effort)) for name in FLOPS}
    copy = _together(partial(copy_rate, device, effort))
    alone = _together(lambda: link_rate(device, effort) if first else None)
    link = _together(partial(link_rate, device, effort))
    gather, reduce, latency_s = _together(partial(collective_rates, device, effort))
    update = _together(partial(update_rate, effort))
    speeds = measure_disk(DiskConfig(paths=[disk]), sample_bytes=effort.disk_bytes, rounds=2) if first else []
    return RankFigures(
        bf16_flops=flops["bf16"],
        fp16_flops=flops["fp16"],
        fp32_flops=flops["fp32"],
        copy=copy,
        link=link,
        link_alone=alone,
        all_gather=gather,
        reduce_scatter=reduce,
        latency_s=latency_s,
        update_elems_per_s=update,
        disk_read=speeds[0].read_bytes_per_s if first else None,
        disk_write=speeds[0].write_bytes_per_s if first else None,
        device_bytes=device_memory_bytes(device) // (1 if device.type == "cuda" else local_ranks()),
        reserved_bytes=before if device.type == "cpu" else _in_use_bytes(device) - torch.cuda.memory_reserved(device),
    )


def matmul_flops(device: torch.device, dtype: torch.dtype, effort: Effort) -> float:
    """FLOP/s of a square product; its side doubles until one takes an eighth of the time there is."""
    side = min(256, effort.matrix)
    while True:
        a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
        product = partial(torch.matmul, a, b)
        if side * 2 > effort.matrix or _rounds(product, device, 1) > effort.seconds / 8:
            return 2 * side**3 / _seconds_of(product, device, effort.seconds)
        side *= 2


def copy_rate(device: torch.device, effort: Effort) -> float:
    """Bytes/s read and written by a copy within the device's memory."""
    source = torch.ones(effort.copy_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * effort.copy_bytes / _seconds_of(lambda: target.copy_(source), device, effort.seconds)


def link_rate(device: torch.device, effort: Effort) -> float:
    """Bytes/s between page-locked host memory and the device, of the slower way; on a CPU of a copy in host memory."""
    on_gpu = device.type == "cuda"
    host = torch.ones(effort.copy_bytes, dtype=torch.uint8, pin_memory=on_gpu)
    there = torch.ones(effort.copy_bytes, dtype=torch.uint8, device=device)
    ways = [lambda: there.copy_(host, non_blocking=True)]
    if on_gpu:
        ways.append(lambda: host.copy_(there, non_blocking=True))
    return effort.copy_bytes / max(_seconds_of(way, device, effort.seconds) for way in ways)


def collective_rates(device: torch.device, effort: Effort) -> tuple[float | None, float | None, float]:
    """Bytes/s that each rank sends in an all-gather and a reduce-scatter, and the seconds of a small one of them.

    As FSDP2's units move: bf16 over the wire, reduced gradients in fp32 (zero.reduction=auto). None with one rank.
    """
    group = dist.group.WORLD
    assert group is not None, "inside the process group"
    ranks = group.size()
    if ranks == 1:
        return None, None, 0.0
    exchange: Exchange = Exact(group) if is_exact("auto", device.type) else Native(group)

    def seconds(count: int, rounds: int) -> tuple[float, float]:
        """Medians of gathering and of reducing `count` elements of each rank; the same rounds on every rank."""
        part = torch.ones(count, dtype=torch.bfloat16, device=device)
        whole, reduced = part.repeat(ranks), torch.empty(count, device=device)

        def gather() -> None:
            for work in exchange.all_gather(whole, part):
                work.wait()

        def reduce() -> None:
            exchange.reduce_scatter(reduced, whole, torch.bfloat16)

        return _rounds(gather, device, rounds), _rounds(reduce, device, rounds)

    sent = (ranks - 1) * effort.collective_bytes
    gather_s, reduce_s = seconds(effort.collective_bytes // 2, effort.rounds)
    return sent / gather_s, sent / reduce_s, median(seconds(32, 10 * effort.rounds))


def update_rate(effort: Effort) -> float:
    """Parameters per second that this rank's share of the host's cores updates, as the host tier does."""
    elems = effort.update_elems
    work, grad = (torch.full((elems,), 0.01, dtype=torch.bfloat16) for _ in range(2))
    master, m, v = torch.full((elems,), 0.01), torch.zeros(elems), torch.zeros(elems)
    states = ParamStates("probe", 0, work, master, None, m, v)
    betas = (0.9, 0.95)
    steps = rules.Coefficients.of(step=1, lr=1e-3, betas=betas, eps=1e-8, weight_decay=0.1, scale=1.0)
    updater = AdamWUpdater(len(cores_of_rank(local_rank(), local_ranks())))
    update = [Update(states, grad, steps, 1)]
    return elems / _seconds_of(lambda: updater.run(update), torch.device("cpu"), effort.seconds)


def _together(measure: Callable[[], T]) -> T:
    """Begin when every rank does, and let none go on while another measures."""
    dist.barrier()
    figure = measure()
    dist.barrier()
    return figure


def _seconds_of(do: Callable[[], object], device: torch.device, budget_s: float) -> float:
    """The median time of `do`, for about `budget_s` in all, after a first call."""
    first_s = _rounds(do, device, 1)
    return _rounds(do, device, min(MOST_ROUNDS, max(LEAST_ROUNDS, math.ceil(budget_s / max(first_s, 1e-6)))))


def _rounds(do: Callable[[], object], device: torch.device, rounds: int) -> float:
    """The median time of `rounds` calls, after one more."""
    times = []
    for _ in range(rounds + 1):
        _wait(device)
        start = time.perf_counter()
        do()
        _wait(device)
        times.append(time.perf_counter() - start)
    return median(times[1:])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _in_use_bytes(device: torch.device) -> int:
    """Of the device's memory, by this process or another; on a CPU of this process alone."""
    if device.type != "cuda":
        return rss_bytes()
    free, total = torch.cuda.mem_get_info(device)
    return int(total - free)
