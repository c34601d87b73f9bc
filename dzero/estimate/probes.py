"""Performance figures of one rank, measured while the other ranks do the same; see `estimate/measure_hardware.py`.

    figure           measured with                                                           ranks at a time
    <dtype>_flops    square matrix products, the largest that are short enough               all
    operators        attention, other operators by call and byte (`decoder_probe.py`)       all
    link             copy between host and device (without a GPU: within the host)           first alone, then all
    exchange         gathers and reductions of sharded units (`decoder_probe.py`)         all
    update           AdamW on the host: fp32 states, then the smallest states                all
    disk             transfers of the scratch store                                          first alone

Each figure is a median of several rounds after a warm-up, on data too large for caches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
import torch.distributed as dist

from dzero.estimate.decoder_probe import ExchangeRates, OperatorRates, exchange_rates, operator_rates
from dzero.estimate.hardware_spec import FLOPS
from dzero.estimate.medians import median_of_rounds, seconds_of
from dzero.hardware import cores_of_rank, device_memory_bytes, dtype_of, rss_bytes
from dzero.offload.disk_speed import measure as measure_disk
from dzero.optim import adamw_math
from dzero.optim.flat_update import AdamWUpdater, ParamStates, ParamUpdate
from dzero.utils.launched import local_rank, local_ranks
from dzero.zero.offload_config import DiskConfig

T = TypeVar("T")
UPDATE_BYTES = 2 + 2 * 4 + 4 * 4 + 2
"""Bytes per parameter: gradient read, fp32 master and moments read and written, working copy written."""


@dataclass(frozen=True, kw_only=True)
class Effort:
    """Size of the measurement: seconds of each timed loop, largest side of a matrix, rounds of collectives."""

    seconds: float = 0.4
    matrix: int = 8192
    copy_bytes: int = 128 << 20
    tokens: int = 512
    update_elems: int = 4 << 20
    disk_bytes: int = 64 << 20
    rounds: int = 7


@dataclass(frozen=True, kw_only=True)
class RankFigures:
    """Figures of one rank in bytes/s, FLOP/s and elements/s.

    Figures that this rank did not measure, and those that need several ranks, are None.
    """

    bf16_flops: float
    fp16_flops: float
    fp32_flops: float
    operators: OperatorRates
    link: float
    link_alone: float | None
    exchange: ExchangeRates
    update_bandwidth: float
    update_elems_per_s: float
    disk_read: float | None
    disk_write: float | None
    device_bytes: int
    reserved_bytes: int


def probe(device: torch.device, disks: Sequence[str], effort: Effort) -> RankFigures:
    """Measure all figures of this rank, of disks their sum; a collective call of all ranks of the default group."""
    first = dist.get_rank() == 0
    before = _in_use_bytes(device)
    flops = {name: _together(partial(matmul_flops, device, dtype_of(name), effort)) for name in FLOPS}
    tokens, budget_s = effort.tokens, effort.seconds
    operators = _together(partial(operator_rates, device, flops["bf16"], tokens=tokens, budget_s=budget_s))
    alone = _together(lambda: link_rate(device, effort) if first else None)
    link = _together(partial(link_rate, device, effort))
    exchange = exchange_rates(device, rounds=effort.rounds)
    update = _together(partial(update_rate, effort))
    smallest = _together(partial(update_rate, effort, smallest=True))
    speeds = measure_disk(DiskConfig(paths=[*disks]), sample_bytes=effort.disk_bytes, rounds=2) if first else []
    return RankFigures(
        **{f"{name}_flops": each for name, each in flops.items()},
        operators=operators,
        link=link,
        link_alone=alone,
        exchange=exchange,
        update_bandwidth=update * UPDATE_BYTES,
        update_elems_per_s=max(update, smallest),
        disk_read=sum(speed.read_bytes_per_s for speed in speeds) if first else None,
        disk_write=sum(speed.write_bytes_per_s for speed in speeds) if first else None,
        device_bytes=device_memory_bytes(device) // (1 if device.type == "cuda" else local_ranks()),
        reserved_bytes=before if device.type == "cpu" else _in_use_bytes(device) - torch.cuda.memory_reserved(device),
    )


def matmul_flops(device: torch.device, dtype: torch.dtype, effort: Effort) -> float:
    """Return the FLOP/s of a square product, whose side doubles until one product takes 1/20 of the time budget."""
    side = min(256, effort.matrix)
    while True:
        a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
        product = partial(torch.matmul, a, b)
        if side * 2 > effort.matrix or median_of_rounds(product, device, 1) > effort.seconds / 20:
            return 2 * side**3 / seconds_of(product, device, effort.seconds)
        side *= 2


def link_rate(device: torch.device, effort: Effort) -> float:
    """Return the bytes/s between pinned host memory and the device in the slower direction.

    On a CPU it is the rate of a copy within host memory.
    """
    on_gpu = device.type == "cuda"
    host = torch.ones(effort.copy_bytes, dtype=torch.uint8, pin_memory=on_gpu)
    there = torch.ones(effort.copy_bytes, dtype=torch.uint8, device=device)
    ways = [lambda: there.copy_(host, non_blocking=True)]
    if on_gpu:
        ways.append(lambda: host.copy_(there, non_blocking=True))
    return effort.copy_bytes / max(seconds_of(way, device, effort.seconds) for way in ways)


def update_rate(effort: Effort, *, smallest: bool = False) -> float:
    """Return the parameters per second that this rank's host cores update, as the host tier does.

    Gradients and working copies are bf16. With fp32 states the limit is memory, and each parameter moves
    `UPDATE_BYTES`. With the smallest states (remainders and bf16 moments) the rate is closer to the limit of the cores.
    """
    elems = effort.update_elems
    work, grad = (torch.full((elems,), 0.01, dtype=torch.bfloat16) for _ in range(2))
    master = None if smallest else torch.full((elems,), 0.01)
    remainder = torch.zeros(elems, dtype=torch.int16) if smallest else None
    m, v = (torch.zeros(elems, dtype=torch.bfloat16 if smallest else torch.float32) for _ in range(2))
    states = ParamStates("probe", 0, work, master, remainder, m, v)
    betas = (0.9, 0.95)
    steps = adamw_math.Coefficients.of(step=1, lr=1e-3, betas=betas, eps=1e-8, weight_decay=0.1, scale=1.0)
    updater = AdamWUpdater(len(cores_of_rank(local_rank(), local_ranks())))
    update = [ParamUpdate(states, grad, steps, 1)]
    return elems / seconds_of(lambda: updater.run(update), torch.device("cpu"), effort.seconds)


def _together(measure: Callable[[], T]) -> T:
    """Measure between two barriers, so that ranks start together and none goes on while another measures."""
    dist.barrier()
    figure = measure()
    dist.barrier()
    return figure


def _in_use_bytes(device: torch.device) -> int:
    """Return the device memory in use by all processes, or on a CPU the resident memory of this process."""
    if device.type != "cuda":
        return rss_bytes()
    free, total = torch.cuda.mem_get_info(device)
    return int(total - free)
