"""What do a unit's sums of squares cost on one GPU?

    python benchmarks/gpu_sums.py --rounds 15

Units of a Llama of 1 B and shards of it, in fp32 and bf16. Sides: dzero's kernels, one `vector_norm` in fp64 per
gradient (as the sums were made before), and `torch._foreach_norm` in the gradients' dtype (what torch's clipping calls;
it rounds to fp32 or bf16, so it is no substitute, but the least that anyone pays). For each the device's time per call,
from events around calls that are enqueued behind other work, and the host's time to enqueue one. Calls stand for units
of one step, so each has tables of its own. Needs CUDA.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from statistics import median

import torch
from report import append_row, table, write_table

from dzero.optim.cuda_sums import CudaSums

BLOCK = (2048 * 2048, 2048 * 512, 2048 * 512, 2048 * 2048, 2048 * 8192, 2048 * 8192, 2048 * 8192, 2048, 2048)
CALLS = 20


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--rounds", type=int, default=15, help="timings of each side, taken in turns")
    rounds = options.parse_args().rounds
    if not torch.cuda.is_available():
        raise SystemExit("gpu_sums.py measures a CUDA GPU and torch finds none here")
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        for ranks in (1, 8, 64):
            sizes = [-(-size // ranks) for size in BLOCK]
            rows += _measure(f"block / {ranks}", sizes, dtype, rounds)
        rows += _measure("embedding", [128_256 * 2048], dtype, rounds)
    heads = ["unit", "dtype", "side", "device us", "GB/s", "host us"]
    keys = ["unit", "dtype", "side", "device_us", "gb_per_s", "host_us"]
    shown = table(heads, [[row[key] for key in keys] for row in rows])
    write_table("gpu_sums", shown)
    append_row("gpu_sums", {"device": torch.cuda.get_device_name(), "rounds": rounds, "rows": rows})


def _measure(unit: str, sizes: Sequence[int], dtype: torch.dtype, rounds: int) -> list[dict[str, object]]:
    grads, sums = [torch.randn(size, device="cuda").to(dtype) for size in sizes], [CudaSums() for _ in range(CALLS)]
    sides: dict[str, Callable[[int], object]] = {
        "dzero": lambda call: sums[call].sum_squares(grads),
        "vector_norm fp64": lambda _: torch.stack([torch.linalg.vector_norm(g, dtype=torch.float64) for g in grads]),
        "_foreach_norm": lambda _: torch._foreach_norm(grads),
    }
    timed = {name: [_time(side)] for name, side in sides.items()}  # compiles, and makes the tables
    for _ in range(rounds):
        for name, side in sides.items():
            timed[name].append(_time(side))
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


def _time(side: Callable[[int], object]) -> tuple[float, float]:
    """Return seconds per call on the device and on the host, which enqueues the calls while the device is busy."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    torch.cuda._sleep(50_000_000)
    begin.record()
    started = time.perf_counter()
    for call in range(CALLS):
        side(call)
    host = time.perf_counter() - started
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1e3 / CALLS, host / CALLS


if __name__ == "__main__":
    main()
