"""How long is one AdamW update, how much memory does it need besides the states, and how far is the memory's own speed?

    python benchmarks/optimizer.py --rounds 15

    side                 states of one parameter (bytes)                             bytes moved per update
    torch_fused          fp32 parameter, gradient, moments (16)                      28
    fp32                 the same, by dzero                                          28
    bf16                 bf16 parameter and gradient, fp32 master and moments (16)   28
    bf16_remainder       the same, master as 16-bit remainder (14)                   26
    bf16_moments         as bf16, moments in bf16 too (12)                           20

One process; sides take turns within a round. The roof is the time in which a += b * s (12 bytes per element; in place
as the update is, so that no line is read only to be overwritten), on the same threads and in the same round, would move
a side's bytes. Temporaries are the rise of the high-water mark of resident memory during one update.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from statistics import median
from typing import Any

import numba
import numpy as np
import torch
from report import append_row, plot_bars, table, write_table
from stats import ratio_of_medians

from dzero.hardware import peak_rss_bytes, reset_peak_rss, rss_bytes
from dzero.optim.adamw_math import Coefficients
from dzero.optim.flat_update import AdamWUpdater, ParamStates, ParamUpdate

PARAM_ELEMS = 1 << 22
OPTIONS: dict[str, Any] = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
Run = Callable[[], object]


@dataclass(frozen=True)
class Kind:
    """Dtypes of a side and the bytes that one update must move per element."""

    work: torch.dtype
    moments: torch.dtype
    remainder: bool
    moved_bytes: int


KINDS = {
    "fp32": Kind(torch.float32, torch.float32, False, 28),
    "bf16": Kind(torch.bfloat16, torch.float32, False, 28),
    "bf16_remainder": Kind(torch.bfloat16, torch.float32, True, 26),
    "bf16_moments": Kind(torch.bfloat16, torch.bfloat16, False, 20),
}
MOVED_BYTES = {"torch_fused": 28, **{name: kind.moved_bytes for name, kind in KINDS.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elems", type=int, default=1 << 26, help=f"parameters; rounded to {PARAM_ELEMS}")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    options = parser.parse_args()
    params = max(1, options.elems // PARAM_ELEMS)
    for threads in options.threads:
        torch.set_num_threads(threads)
        _compare(params, threads, options.rounds)


def _compare(params: int, threads: int, rounds: int) -> None:
    runs = {name: _dzero(params, kind, threads) for name, kind in KINDS.items()}
    runs = {"stream": _stream(params, threads), "torch_fused": _torch_fused(params), **runs}
    for run in runs.values():
        run()  # compiles, touches pages
    temporaries = {name: _temporary_bytes(run) for name, run in runs.items()}
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - start)
    elems = params * PARAM_ELEMS
    rows, results = [], {}
    for name, moved in MOVED_BYTES.items():
        against = ratio_of_medians(seconds[name], seconds["torch_fused"])
        roof = ratio_of_medians(seconds[name], [s * moved / 12 for s in seconds["stream"]])
        rows.append([name, f"{median(seconds[name]) * 1e3:.1f}", against, roof, f"{temporaries[name] / 2**20:.1f}"])
        results[name] = {"seconds": seconds[name], "temporary_bytes": temporaries[name], "over_roof": roof.value}
    bandwidth = 12 * elems / median(seconds["stream"])
    append_row(
        "optimizer",
        {"config": {"elems": elems, "threads": threads}, "sides": results, "stream_bytes_per_s": bandwidth},
    )
    name = f"optimizer_{threads}_threads"
    header = ["side", "ms", "time over torch fused", "time over the roof", "temporaries, MiB"]
    title = f"{elems / 1e6:.0f} M parameters, {threads} threads, stream {bandwidth / 1e9:.1f} GB/s"
    write_table(name, f"{title}\n\n{table(header, rows)}")
    plot_bars(name, title, {"ms": {side: median(seconds[side]) * 1e3 for side in MOVED_BYTES}})


def _temporary_bytes(run: Run) -> int:
    reset_peak_rss()
    before = rss_bytes()
    run()
    return max(0, peak_rss_bytes() - before)


def _dzero(params: int, kind: Kind, threads: int) -> Run:
    updater = AdamWUpdater(threads)
    coefficients = Coefficients.of(step=1, scale=1.0, **OPTIONS)
    updates = [ParamUpdate(_states(f"p{i}", kind), _grad(i).to(kind.work), coefficients, 1) for i in range(params)]
    return lambda: updater.run(updates)


def _states(name: str, kind: Kind) -> ParamStates:
    own = kind.work == torch.float32
    work = torch.ones(PARAM_ELEMS, dtype=kind.work)
    master = work if own else None if kind.remainder else torch.ones(PARAM_ELEMS)
    remainder = torch.ones(PARAM_ELEMS, dtype=torch.int16) if kind.remainder else None
    m, v = (torch.full((PARAM_ELEMS,), 1e-3, dtype=kind.moments) for _ in range(2))
    return ParamStates(name, 0, work, master, remainder, m, v)


def _torch_fused(params: int) -> Run:
    weights = [torch.nn.Parameter(torch.ones(PARAM_ELEMS)) for _ in range(params)]
    for index, weight in enumerate(weights):
        weight.grad = _grad(index)
    optimizer = torch.optim.AdamW(weights, fused=True, **OPTIONS)
    return lambda: optimizer.step()


def _grad(seed: int) -> torch.Tensor:
    return torch.randn(PARAM_ELEMS, generator=torch.Generator().manual_seed(seed))


@numba.njit(nogil=True, fastmath=True)
def _add_scaled(a, b, scale):  # type: ignore[no-untyped-def]
    for i in range(a.size):
        a[i] += b[i] * scale


def _stream(params: int, threads: int) -> Run:
    pool, scale = ThreadPoolExecutor(threads), np.float32(0.5)
    # Torch's memory, as the sides have: NumPy would ask the system for huge pages.
    a, b = (torch.ones(params * 4, PARAM_ELEMS // 4).numpy() for _ in range(2))
    return lambda: list(pool.map(lambda row: _add_scaled(a[row], b[row], scale), range(len(a))))


if __name__ == "__main__":
    main()
