"""The search of gpu_offload.py --largest: how many layers of a llama do one GPU and its host train, all states counted?

    parent       bisects over the layers, touches no GPU, keeps what the candidates print
    candidate    a process of its own, so that what is out of memory ends alone (the kernel is told to end it first)

All of host_all's states lie on the host, which would leave most of the GPU empty. So both are filled: one fraction of
every state, parameters too, is on the host, by whole parameters (`fractions`), as large as the host's part of the
memory that is free. With little HBM beside the host it is near 1.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from offload_sides import HOST, Setting, dzero_side
from report import append_row, plot_bars, table, write_table
from workload import Batches, Workload

from dzero import AdamW
from dzero.hardware import device_memory_bytes, format_bytes, host_available_bytes, host_memory_bytes
from dzero.models.build import build, count

GOAL, BYTES_PER_PARAM, STEPS = 0.85, 16, 2
TOKENS = 512
RESERVED_BYTES = 6 << 30
"""Of each memory: activations, gathered units, the process."""
Found = dict[str, Any]


def largest(options: argparse.Namespace) -> None:
    """Search, and report."""
    tried: list[Found] = [_try(1, options)]
    if not tried[0]["fits"]:
        raise SystemExit(f"not even one layer: {tried[0]['why']}")
    first = tried[0]
    has = first["device_bytes"] + first["host_bytes"]
    bound = int((has / BYTES_PER_PARAM - first["params"]) / first["layer_params"]) + 1
    low, high = 1, min(bound, options.layers_max or bound) + 1
    middle = math.ceil((GOAL * has / BYTES_PER_PARAM - first["params"]) / first["layer_params"]) + 1
    while high - low > 1 and len(tried) <= options.tries:
        middle = middle if low < middle < high else (low + high) // 2  # the goal first
        tried.append(_try(middle, options))
        low, high = (middle, high) if tried[-1]["fits"] else (low, middle)
    for found in tried:
        found["params"] = first["params"] + (found["layers"] - 1) * first["layer_params"]
    best = next(found for found in tried if found["layers"] == low)
    share = best["params"] * BYTES_PER_PARAM / has
    finding = f"the largest model that trains has {best['params'] / 1e9:.2f} B parameters: its states are {share:.2f} "
    facts = {"part": "largest", "config": vars(options), "finding": f"{finding}of HBM and DRAM together"}
    append_row("gpu_offload", {**facts, "gpu": first["name"], "tried": tried, "share": share, "bound": GOAL})
    rows = [_line(found, has) for found in sorted(tried, key=lambda found: int(found["layers"]))]
    title = f"{first['name']}: {best['params'] / 1e9:.2f} G parameters, {share:.3f} of {format_bytes(has)}, "
    title += f"goal ≥ {GOAL}: {'met' if share >= GOAL else 'missed'}"
    header = ["layers", "G parameters", "of HBM + DRAM", "on the host", "arena", "device peak", "losses", "s", ""]
    write_table("gpu_offload_largest", f"{title}\n\n{table(header, rows)}")
    shares = {f"{found['layers']} layers": found["params"] * BYTES_PER_PARAM / has for found in tried if found["fits"]}
    plot_bars("gpu_offload_largest", title, {f"{BYTES_PER_PARAM} bytes per parameter, of HBM + DRAM": shares})


def _line(found: Found, has: int) -> list[object]:
    share = f"{found['params'] * BYTES_PER_PARAM / has:.3f}"
    if not found["fits"]:
        return [found["layers"], f"{found['params'] / 1e9:.2f}", share, *[""] * 4, "", found["why"]]
    losses = " ".join(f"{loss:.3f}" for loss in found["losses"])
    bytes_of = [format_bytes(found[key]) for key in ("arena_bytes", "peak_device_bytes")]
    size = [found["layers"], f"{found['params'] / 1e9:.2f}", share, f"{found['fraction']:.3f}"]
    return [*size, *bytes_of, losses, f"{found['seconds']:.0f}", "trains"]


def _try(layers: int, options: argparse.Namespace) -> Found:
    """What the candidate printed, or why it did not."""
    script = Path(__file__).with_name("gpu_offload.py")
    command = [sys.executable, str(script), *sys.argv[1:], "--candidate", str(layers)]
    settings = {"PYTORCH_ALLOC_CONF": "expandable_segments:True", **os.environ}
    try:
        ended = subprocess.run(command, capture_output=True, text=True, env=settings, timeout=options.timeout_s)
    except subprocess.TimeoutExpired:
        return _say({"layers": layers, "fits": False, "why": f"not done after {options.timeout_s:g} s"})
    if ended.returncode == 0:
        return _say(json.loads(ended.stdout.splitlines()[-1]))
    lines = ended.stderr.splitlines() if ended.returncode > 0 else ["killed: out of host memory?"]
    said = [line for line in lines if "Error" in line] or lines or ["said nothing"]
    if not re.search("memory|alloc|not finite", said[-1], re.IGNORECASE):
        raise SystemExit(f"{layers} layers failed, and not for lack of memory:\n{ended.stderr}")
    return _say({"layers": layers, "fits": False, "why": f"exit {ended.returncode}: {said[-1][:200]}"})


def _say(found: Found) -> Found:
    print(f"{found['layers']} layers: {'trains' if found['fits'] else found['why']}", flush=True)
    return found


def candidate(options: argparse.Namespace, setting: Setting) -> None:
    """Build, train, print one line of JSON. Raises where memory is short or a loss is not finite."""
    Path("/proc/self/oom_score_adj").write_text("1000")
    began, on_gpu = time.perf_counter(), setting.device.type == "cuda"
    config = replace(setting.config, layers=options.candidate)
    params, more = (count(build(replace(config, layers=options.candidate + extra))) for extra in (0, 1))
    cap = int(options.cap_mib * 2**20) if options.cap_mib else host_memory_bytes()
    device_bytes = device_memory_bytes(setting.device) if on_gpu else cap if options.cap_mib else 0
    free, reserved = min(host_available_bytes(), cap), RESERVED_BYTES if on_gpu else 0
    host_elems, device_elems = (free - reserved) / BYTES_PER_PARAM, (device_bytes - reserved) / BYTES_PER_PARAM
    fraction = host_elems / (host_elems + device_elems)
    if params * fraction * BYTES_PER_PARAM > free:
        raise MemoryError(f"{format_bytes(params * fraction * BYTES_PER_PARAM)} to build, {format_bytes(free)} free")
    fractions = {f"{kind}_fraction": fraction for kind in ("param", *HOST)}
    side = dzero_side(replace(setting, config=config), **HOST, param="host", overlap="forward", **fractions)
    assert isinstance(side.optim, AdamW)
    text = Batches(Workload(samples=1, tokens=min(TOKENS, options.tokens)))
    losses = [float(side.step(text.get(step, 0).to(setting.device))) for step in range(STEPS)]
    side.optim.synchronize()
    if not all(math.isfinite(loss) for loss in losses):
        raise FloatingPointError(f"losses {losses}: not finite")
    found = {
        "layers": options.candidate,
        "fits": True,
        "name": torch.cuda.get_device_name(setting.device) if on_gpu else "cpu",
        "params": params,
        "layer_params": more - params,
        "device_bytes": device_bytes,
        "host_bytes": min(host_memory_bytes(), cap),
        "fraction": fraction,
        "arena_bytes": side.optim.offload.schedule.host_bytes,
        "device_state_bytes": side.optim.state_bytes(),
        "peak_device_bytes": torch.cuda.max_memory_allocated() if on_gpu else 0,
        "losses": losses,
        "seconds": time.perf_counter() - began,
    }
    print(json.dumps(found))
