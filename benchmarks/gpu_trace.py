"""How a GPU spends three steps of a 1 B model: its busy share, its gaps, what the update launches, what is compiled."""

from __future__ import annotations

import argparse
import gzip
import json
import os
import tempfile
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from devices import Device
from gpu_1b import SIZE, llama_step
from gpu_findings import Findings
from gpu_loss import train_steps
from torch.profiler import ProfilerActivity, profile

STEPS, MOST_BYTES, SHOWN = 3, 15 << 20, 12
UPDATE = "step update"
"""Span of the optimizer's update."""
GPU_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCHES = ("cuda_runtime", "cuda_driver")
Event = dict[str, Any]


def settings(device: Device) -> argparse.Namespace:
    """Return what gpu_1b.py takes for one of its combinations."""
    samples, tokens = (4, 2048) if device.on_gpu else (1, 32)
    return argparse.Namespace(samples=samples, tokens=tokens, checkpoint="none")


def trace(device: Device, found: Findings, out: Path) -> None:
    """Profile steps of train.py with its own loss, stage 0, blocks compiled, and keep the trace in `out`."""
    kinds = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * device.on_gpu
    sizes = {"samples": 8, "tokens": 2048} if device.on_gpu else {"samples": 32, "tokens": 32}
    with (
        device.group(),
        tempfile.TemporaryDirectory() as folder,
        train_steps(device, Path(folder), **sizes, steps=2 * STEPS, tiles=None) as (step, _),
    ):
        for _ in range(STEPS):
            step()
        device.synchronize()
        with profile(activities=kinds) as profiled:
            for _ in range(STEPS):
                step()
            device.synchronize()
    plain = out / "profile.json"
    profiled.export_chrome_trace(str(plain))
    events = [event for event in json.loads(plain.read_text())["traceEvents"] if event.get("ph") == "X"]
    if not device.on_gpu:
        found.stand_in("operators on the CPU are counted as kernels")
    found.note(steps=STEPS, trace_bytes=keep(plain))
    work = [event for event in events if event.get("cat") in (GPU_WORK if device.on_gpu else ("cpu_op",))]
    if not work:
        raise SystemExit("the profiler saw no work on the device: is it allowed to trace it (CUPTI)?")
    figures = busy(work)
    figures["update"] = launched_in(events, UPDATE, on_gpu=device.on_gpu)
    found.note(**figures)
    kernels, of_update = figures["kernels"] / STEPS, figures["update"]["kernels"] / STEPS
    found.find(
        f"{SIZE[device.on_gpu]}, stage 0, {sizes['samples']} sequences, train.py's own loss: the device is busy "
        f"{figures['busy_share']:.1%} of {STEPS} steps, {kernels:.0f} kernels a step, {of_update:.0f} of them in the "
        f"update, {figures['gaps_over_10us'] / STEPS:.0f} gaps over 10 us"
    )


def keep(plain: Path) -> int:
    """Write the trace compressed, without the host's operators where it is too large with them; return its bytes."""
    small = plain.with_suffix(".json.gz")
    whole = json.loads(plain.read_text())
    for dropped in ((), ("cpu_op",), ("cpu_op", *LAUNCHES, "ac2g")):
        kept = [event for event in whole["traceEvents"] if event.get("cat") not in dropped]
        small.write_bytes(gzip.compress(json.dumps({**whole, "traceEvents": kept}).encode()))
        if small.stat().st_size <= MOST_BYTES:
            break
    else:
        os.unlink(small)
    os.unlink(plain)
    return small.stat().st_size if small.exists() else 0


def busy(work: Sequence[Event]) -> dict[str, Any]:
    """Return how much of the time from the first to the last piece of work some piece ran, and where none did."""
    ordered = sorted(work, key=lambda event: float(event["ts"]))
    until, covered, gaps = float(ordered[0]["ts"]), 0.0, list[tuple[float, str, str]]()
    before, begin = "", until
    for event in ordered:
        start, end = float(event["ts"]), float(event["ts"]) + float(event["dur"])
        if start > until:
            gaps.append((start - until, before, event["name"]))
        covered += max(0.0, end - max(start, until))
        if end > until:
            until, before = end, event["name"]
    longest = [{"us": us, "after": after[:80], "before": then[:80]} for us, after, then in sorted(gaps)[::-1][:SHOWN]]
    spent: Counter[str] = Counter()
    for event in work:
        spent[event["name"][:80]] += round(float(event["dur"]), 1)  # type: ignore[assignment]
    return {
        "kernels": len(work),
        "span_us": until - begin,
        "busy_share": covered / max(until - begin, 1e-9),
        "gaps": len(gaps),
        "gaps_over_10us": sum(us > 10 for us, _, _ in gaps),
        "longest_gaps": longest,
        "longest_kernels_us": dict(spent.most_common(SHOWN)),
    }


def launched_in(events: Sequence[Event], span: str, *, on_gpu: bool) -> dict[str, float]:
    """Return the kernels that the host launched inside the spans of that name, their time and that of the spans."""
    spans = [(event["ts"], event["ts"] + event["dur"], event["tid"]) for event in events
             if event["name"] == span and event.get("cat") == "user_annotation"]  # fmt: skip

    def inside(event: Event) -> bool:
        return any(begin <= event["ts"] < end and event["tid"] == thread for begin, end, thread in spans)

    if on_gpu:
        launches = {
            event.get("args", {}).get("correlation")
            for event in events
            if event.get("cat") in LAUNCHES and inside(event)
        }
        work = [
            event
            for event in events
            if event.get("cat") in GPU_WORK and event.get("args", {}).get("correlation") in launches
        ]
    else:
        work = [event for event in events if event.get("cat") == "cpu_op" and inside(event)]
    host_us = sum(end - begin for begin, end, _ in spans)
    return {"kernels": len(work), "device_us": sum(float(event["dur"]) for event in work), "host_us": host_us}


def recompiles(device: Device, found: Findings) -> None:
    """Count the graphs that each of four steps compiles: after the first there should be none."""
    from torch._dynamo.utils import counters

    torch._logging.set_logs(recompiles=True, graph_breaks=True)
    compiled, graphs = torch.compile, list[int]()
    if not device.on_gpu:
        found.stand_in("blocks are traced, and run by torch.compile's eager backend")
        compiled = partial(torch.compile, backend="eager")
    with device.group(), patch.object(torch, "compile", compiled):
        step, _ = llama_step(device, settings(device), 2, True)
        for _ in range(1 + STEPS):
            step()
            graphs.append(int(counters["stats"]["unique_graphs"]))
    device.synchronize()
    later = graphs[-1] - graphs[0]
    breaks = {str(reason)[:200]: number for reason, number in counters["graph_break"].items()}
    found.note(graphs_after_each_step=graphs, graph_breaks=breaks)
    found.find(
        f"{graphs[0]} graphs in the first step, {later} more in {STEPS} steps, {sum(breaks.values())} graph breaks"
    )
