"""Is what `plan` predicts what a run then takes: bytes of the device's peak, host, disk and links; seconds of a step?

    python benchmarks/predicted_vs_measured.py --path DIR
    python benchmarks/predicted_vs_measured.py --smoke

Two real ranks per configuration: stages, accumulation, recomputation, precision, tiers, and shapes of the model. The
peak is the high-water mark in a step of the storages of all tensors since before the model was made, with host memory,
the same memory here; host is what the pool leased, disk the sizes of open scratch files
(benchmarks/simulator/measured_memory.py). `resident` beside it is how much the process grew from before the model to
its high-water mark in the steps. Rates are measured by the same processes before and after each configuration
(estimate/probes.py), since a shared machine drifts; times are predicted from nothing of a run, the mean of both rates'.

Goals: peak within 5 %, bytes exact, step time with a median error of at most 20 %.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
import torch.distributed as dist
from children import Children, process_group
from report import append_row, plot_pairs, table, write_table
from sides import ADAM
from simulator.measured_memory import MemoryCount
from torch import nn
from workload import loss_of

from dzero import AdamW, OffloadConfig, PrecisionConfig, Sharded, ZeroConfig, make_mesh, shard
from dzero.estimate.hardware_spec import HardwareConfig
from dzero.estimate.measure_hardware import combine, key_of
from dzero.estimate.memory import memory_of
from dzero.estimate.microbatch_costs import costs_of
from dzero.estimate.probes import Effort, probe
from dzero.estimate.step_time import pace_of
from dzero.estimate.transfers import moved_of
from dzero.hardware import give_back_freed_memory, peak_rss_bytes, reset_peak_rss, rss_bytes
from dzero.models.config import LlamaShape
from dzero.models.llama import Llama
from dzero.parallel.blocks import apply_blocks
from dzero.parallel.config import BlockConfig
from dzero.zero.cost_model import expected_traffic
from dzero.zero.offload_config import DiskConfig

RANKS, PEAK, TIME = 2, 0.05, 0.20
SHAPES = {
    "base": LlamaShape(vocab_size=4096, hidden_size=256, layers=6, heads=4, kv_heads=4, ffn_size=704),
    "wide": LlamaShape(vocab_size=2048, hidden_size=640, layers=2, heads=10, kv_heads=5, ffn_size=1728),
    "deep": LlamaShape(vocab_size=1024, hidden_size=128, layers=20, heads=4, kv_heads=2, ffn_size=352),
}
TIERS: dict[str, dict[str, str]] = {
    "device": {},
    "host": {"grad": "host", "master": "host", "moments": "host"},
    "host_all": {"param": "host", "grad": "host", "master": "host", "moments": "host"},
    "disk": {"grad": "host", "master": "disk", "moments": "disk"},
}
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Cell:
    """A configuration."""

    stage: int
    microbatches: int = 1
    recompute: str = "none"
    tier: str = "device"
    shape: str = "base"
    tokens: int = 256
    sequences: int = 2
    precision: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        words = [f"stage {self.stage}", f"M={self.microbatches}", self.recompute, self.tier, self.shape]
        return ", ".join([*words, f"{self.sequences}x{self.tokens}", *self.precision.values()])


CELLS = [
    *(Cell(stage, microbatches, keep) for stage in range(4) for microbatches in (1, 2) for keep in ("none", "full")),
    Cell(2, 2, shape="wide"),
    Cell(3, 1, "full", shape="wide", tokens=512),
    Cell(3, 2, shape="deep"),
    Cell(1, 2, "full", shape="deep", tokens=128, sequences=4),
    Cell(3, precision={"param": "fp32"}),
    Cell(2, 2, precision={"master": "remainder", "moments": "bf16"}),
    Cell(2, tier="host"),
    Cell(3, 2, "full", tier="host"),
    Cell(3, tier="host_all"),
    Cell(2, tier="disk", shape="wide"),
]


def loss(cell: Cell, model: nn.Module) -> torch.Tensor:
    """Of one microbatch of zeros."""
    return loss_of(model, torch.zeros(cell.sequences, cell.tokens + 1, dtype=torch.int64))


def block_of(cell: Cell) -> BlockConfig:
    """What its blocks recompute."""
    return BlockConfig(activation_checkpoint=cell.recompute, compile=False)


def sharded_for(cell: Cell, folder: str) -> Sharded:
    """Its model, on this rank."""
    model = Llama(SHAPES[cell.shape])
    apply_blocks(model, block_of(cell), "cpu")
    disk: dict[str, Any] = {"disk": DiskConfig(paths=[folder])} if cell.tier == "disk" else {}
    return shard(
        model,
        ZeroConfig(stage=cell.stage),
        precision=PrecisionConfig(**cell.precision),
        offload=OffloadConfig(**TIERS[cell.tier], **disk),  # type: ignore[arg-type]
        mesh=make_mesh("cpu", replicate=RANKS if cell.stage == 0 else 1),
        microbatches=cell.microbatches,
    )


def step(cell: Cell, sharded: Sharded, optim: AdamW) -> None:
    """A whole one."""
    for index in range(cell.microbatches):
        with sharded.microbatch(is_last=index == cell.microbatches - 1):
            (loss(cell, sharded.model) / cell.microbatches).backward()  # type: ignore[no-untyped-call]
    optim.step()


def answer(cell: Cell, folder: str, steps: int) -> dict[str, Any]:
    """(predicted, measured) by quantity; seconds are still to be predicted, from `plan`."""
    gc.collect()
    give_back_freed_memory()
    before = rss_bytes()
    with MemoryCount() as taking:
        sharded = sharded_for(cell, folder)
        optim = AdamW(sharded, **ADAM, threads=1)
        run: Callable[[], None] = partial(step, cell, sharded, optim)
        took = taking.taken(run, optim)
    del taking  # and its list of moments
    reset_peak_rss()
    times = [_timed(run) for _ in range(steps)]
    resident = peak_rss_bytes() - before
    optim.await_updates()
    optim.offload.take_use()
    sharded.ledger.take()
    run()
    optim.await_updates()
    use = {"out": 0, "back": 0, "read": 0, "written": 0}
    for lane, each in optim.offload.take_use().items():
        way = {"EVICT": "out", "FETCH": "back", "LOAD": "read", "SPILL": "written"}.get(lane.split(" ")[0])
        if way is not None:
            use[way] += each.moved_bytes
    sent = sum(traffic.sent_bytes for entry, traffic in sharded.ledger.take().items() if entry.phase != "control")
    layout, units = sharded.layout, sharded.shapes
    with torch.device("meta"):
        like = Llama(SHAPES[cell.shape]).to(layout.param.dtype)
    apply_blocks(like, block_of(cell), "cpu")
    costs = costs_of(like, partial(loss, cell))
    memory, moved = memory_of(layout, units, costs, "cpu"), moved_of(layout, units)
    planned = sum(traffic.sent_bytes for traffic in expected_traffic(layout, units).values())
    return {
        "peak": (memory.peak.total_bytes + memory.staging + sum(memory.host.values()), took.device + took.host),
        "resident": resident,
        "bytes": [
            (planned, sent),
            (sum(memory.host.values()), took.host),
            (sum(memory.disk.values()), took.disk),
            *((getattr(moved, way), count) for way, count in use.items()),
        ],
        "step_s": median(times),
        "plan": (layout, units, costs),
    }


def _timed(run: Callable[[], None]) -> float:
    dist.barrier()
    start = time.perf_counter()
    run()
    dist.barrier()
    return time.perf_counter() - start


def serve(pipe: Connection, rendezvous: str, folder: str, rank: int) -> None:
    """A rank: measures its rates when it is asked for none, a cell when it is asked for that."""
    torch.set_num_threads(1)
    with process_group(rank, RANKS, rendezvous):
        pipe.send(None)
        while (request := pipe.recv()) is not None:
            pipe.send(probe(CPU, [folder], request) if isinstance(request, Effort) else answer(*request))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", default=tempfile.gettempdir(), help="a directory on the disk")
    parser.add_argument("--steps", type=int, default=5, help="timed, per configuration")
    parser.add_argument("--smoke", action="store_true", help="two configurations; nothing is written")
    options = parser.parse_args()
    cells = [CELLS[0], CELLS[-1]] if options.smoke else CELLS
    found: list[tuple[Cell, dict[str, Any]]] = []
    with tempfile.TemporaryDirectory(dir=options.path) as folder:
        ranks = Children(RANKS, serve, str(Path(folder) / "rendezvous"), folder)
        try:
            after = rates(ranks)
            for cell in cells:
                before, each = after, ranks.ask((cell, folder, options.steps))[0]
                after = rates(ranks)
                found.append((cell, timed(each, before, after)))
                print(*found[-1], flush=True)
            ranks.tell(None)
        finally:
            ranks.close()
    text = report(found)
    if options.smoke:
        print(text)
    else:
        append_row("predicted_vs_measured", {"cells": [{"cell": asdict(cell), **each} for cell, each in found]})
        write_table("predicted_vs_measured", text)
        plot(found)


def rates(ranks: Children) -> HardwareConfig:
    """What the machine shows now."""
    return combine(key_of(RANKS), ranks.ask(Effort()), disk_bytes=1 << 40).hardware


def timed(each: dict[str, Any], *shown: HardwareConfig) -> dict[str, Any]:
    """With the seconds that are predicted, from what the machine showed around it."""
    plan = each.pop("plan")
    paces = [pace_of(*plan, hardware) for hardware in shown]
    step_s = mean(pace.step_s or 0.0 for pace in paces)
    seconds = {lane: mean(pace.seconds[lane] for pace in paces) for lane in paces[0].seconds}
    rows = {"seconds": seconds, "hardware": [asdict(hardware) for hardware in shown]}
    return {**each, "step_s": (step_s, each["step_s"]), **rows}


def report(found: list[tuple[Cell, dict[str, Any]]]) -> str:
    """A row per configuration, and the goals."""
    rows, peaks, times, exact = [], [], [], 0
    for cell, each in found:
        (peak, peak_found), (step_s, step_found) = each["peak"], each["step_s"]
        same = sum(predicted == measured for predicted, measured in each["bytes"])
        exact += same == len(each["bytes"])
        peaks.append(abs(peak / peak_found - 1))
        times.append(abs(step_s / step_found - 1))
        memory = [f"{peak / 1e6:.1f}", f"{peak_found / 1e6:.1f}", f"{peak / peak_found - 1:+.1%}"]
        pace = [f"{step_s * 1e3:.0f}", f"{step_found * 1e3:.0f}", f"{step_s / step_found - 1:+.0%}"]
        rows.append([str(cell), *memory, f"{each['resident'] / 1e6:.0f}", f"{same} of {len(each['bytes'])}", *pace])
    header = ["configuration", "peak, predicted MB", "measured", "", "resident MB", "bytes that are exact"]
    header += ["step, predicted ms", "measured", ""]
    lines = [
        f"Peak: {sum(each <= PEAK for each in peaks)} of {len(peaks)} within {PEAK:.0%}, the worst {max(peaks):.1%}.",
        f"Bytes of collectives, host, disk and their links: {exact} of {len(found)} configurations exact in all.",
        f"Step time: median error {median(times):.0%} (goal at most {TIME:.0%}), the worst {max(times):.0%}.",
    ]
    return "\n".join([table(header, rows), *(f"{line}\n" for line in lines)])


def plot(found: list[tuple[Cell, dict[str, Any]]]) -> None:
    """Peak and step of every configuration."""
    megabytes = [tuple(count / 1e6 for count in each["peak"]) for _, each in found]
    milliseconds = [tuple(1e3 * seconds for seconds in each["step_s"]) for _, each in found]
    panels = {"peak, MB": megabytes, "step, ms": milliseconds}
    title = f"{len(found)} configurations on two ranks"
    plot_pairs("predicted_vs_measured", title, panels, {"peak, MB": PEAK, "step, ms": TIME})


if __name__ == "__main__":
    main()
