"""What do a unit's sums of squares cost on one GPU?

    python benchmarks/gpu_sums.py --rounds 15

Units of a Llama of 1 B and shards of it, in fp32 and bf16. Sides: dzero's kernels, one `vector_norm` in fp64 per
gradient (as the sums were made before), and `torch._foreach_norm` in the gradients' dtype (what torch's clipping calls;
it rounds to fp32 or bf16, so it is no substitute, but the least that anyone pays). For each the device's time per call,
from events around calls that are enqueued behind other work, and the host's time to enqueue one. Calls stand for units
of one step, so each has tables of its own. `--device cpu` lets Triton interpret the kernels on tiny units to see that
the code runs (TRITON_INTERPRET=1 must be set), and leaves no results.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
from devices import Device
from report import append_row, results_kept, table, write_table

from dzero.optim.cuda_sums import CudaSums

BLOCK = (2048 * 2048, 2048 * 512, 2048 * 512, 2048 * 2048, 2048 * 8192, 2048 * 8192, 2048 * 8192, 2048, 2048)
CALLS = 20


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--rounds", type=int, default=15, help="timings of each side, taken in turns")
    options.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu tries the code, tiny")
    given = options.parse_args()
    device, rows = Device(given.device), []
    block, ranks_tried, embedding = (BLOCK, (1, 8, 64), 128_256 * 2048) if device.on_gpu else ((5,), (1,), 5)
    for dtype in (torch.float32, torch.bfloat16):
        for ranks in ranks_tried:
            sizes = [-(-size // ranks) for size in block]
            rows += _measure(f"block / {ranks}", sizes, dtype, given.rounds, device)
        rows += _measure("embedding", [embedding], dtype, given.rounds, device)
    heads = ["unit", "dtype", "side", "device us", "GB/s", "host us"]
    keys = ["unit", "dtype", "side", "device_us", "gb_per_s", "host_us"]
    shown = table(heads, [[row[key] for key in keys] for row in rows])
    write_table("gpu_sums", shown)
    speeds = [row["gb_per_s"] for row in rows if row["side"] == "dzero"]
    finding = f"sums of squares of a unit of 1 B run at {min(speeds)} to {max(speeds)} GB/s"
    append_row("gpu_sums", {"device": device.name, "rounds": given.rounds, "finding": finding, "rows": rows})


def _measure(unit: str, sizes: Sequence[int], dtype: torch.dtype, rounds: int, device: Device) -> list[dict[str, Any]]:
    grads = [torch.randn(size, device=device.torch).to(dtype) for size in sizes]
    sums = [CudaSums() for _ in range(_calls(device))]
    sides: dict[str, Callable[[int], object]] = {
        "dzero": lambda call: sums[call].sum_squares(grads),
        "vector_norm fp64": lambda _: torch.stack([torch.linalg.vector_norm(g, dtype=torch.float64) for g in grads]),
        "_foreach_norm": lambda _: torch._foreach_norm(grads),
    }
    timed = {name: [_time(side, device)] for name, side in sides.items()}  # compiles, and makes the tables
    for _ in range(rounds):
        for name, side in sides.items():
            timed[name].append(_time(side, device))
    size = sum(sizes) * grads[0].element_size()
    rows = []
    for name, each in timed.items():
        device, host = median(d for d, _ in each[1:]), median(h for _, h in each[1:])
        rows.append(
            {
                "unit": unit,
                "dtype": str(dtype).removeprefix("torch."),
                "side": name,
                "device_us": round(device * 1e6, 1),
                "gb_per_s": round(size / device / 1e9),
                "host_us": round(host * 1e6, 1),
            }
        )
    return rows


def _time(side: Callable[[int], object], device: Device) -> tuple[float, float]:
    """Return seconds per call on the device and on the host, which enqueues the calls while the device is busy."""
    device.synchronize()
    device.keep_busy(50_000_000)
    begin, started = device.mark(), time.perf_counter()
    calls = _calls(device)
    for call in range(calls):
        side(call)
    host, end = time.perf_counter() - started, device.mark()
    device.synchronize()
    return device.seconds_between(begin, end) / calls, host / calls


def _calls(device: Device) -> int:
    return CALLS if device.on_gpu else 1


if __name__ == "__main__":
    with results_kept(sys.argv[1:]):
        main()
