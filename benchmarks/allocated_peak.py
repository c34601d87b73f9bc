"""Exact peak of the tensors that a call allocates, from the profiler's events: too slow for training."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from dzero import streams


def allocated_peak_bytes(run: Callable[[], object], device: torch.device) -> int:
    """Return the peak bytes of tensors allocated on `device` during `run()`, above what was allocated before.

    On the CPU this is exact for the calling thread and autograd's threads. Freeing memory that was allocated before
    `run` does not lower the count, so for code that does this the result is an upper bound.
    """
    if device.type == "cuda":
        streams.synchronize_device(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        streams.synchronize_device(device)
        return torch.cuda.max_memory_allocated(device) - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        run()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiled.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    changes = sorted((e["ts"], e["args"]["Bytes"]) for e in events if _is_cpu_allocation(e))
    allocated = peak = 0
    for _, change_bytes in changes:
        allocated += change_bytes
        peak = max(peak, allocated)
    return peak


def _is_cpu_allocation(event: dict[str, object]) -> bool:
    args = event.get("args")
    return event.get("name") == "[memory]" and isinstance(args, dict) and args.get("Device Type") == 0
