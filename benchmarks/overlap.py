"""How much of the host's update hides behind the device's work, by overlap mode? On a SIMULATED device: not a speed.

    python benchmarks/overlap.py --rounds 8
    python benchmarks/overlap.py --rounds 8 --slower-host 1 --ratios 2 3 4 --name overlap_full_speed

    side       a step                                                             at best, in C (compute), U (update)
    compute    forward and backward, no optimizer                                 C
    resident   everything on the device, updated there (by our kernel, unslowed)
    step       offloaded; the step waits for all updates                          C + U
    forward    offloaded; each unit waits for its own in the next forward         2/3 C + max(1/3 C, U)
    backward   as forward; updates start as gradients come, newest first          max(C + U of the first block, U)
    delayed    as forward, one step later                                         max(C, U)

The device is a sleep: of `block_s` per block in forward, 2 `block_s` in backward. FSDP2's copies and the norm, which a
GPU would do, cost processor time here; a block's sleep is shorter by what its thread spent on them. They take as long
as the update itself, so C cannot be small beside a host at full speed: with `--slower-host 4` every piece of an update
really runs, then rests for three times the processor time that it took. `--slower-host 1` is right for ratios C : U
from 2 on. FSDP2's copies also take bandwidth of the memory from updates beside them, so `host busy` may be above U.

One process, one gloo rank; kernels of one thread. Sides take turns in shuffled order. A turn: 2 steps that fill the
pipeline, then `--steps` on the clock, which stops with updates under way as it started. C is the step of `compute`, U
what the host's lane worked in a step of `step`, where nothing else computes. Goal: step / max(C, U) at most 1.1. A mode
whose best is above that cannot meet it at this ratio, however fast its code. `waited`: for updates and the copies
around them; `rest`: of the step, neither C nor waited; `host busy`: in its lane.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from report import append_row, plot_bars, table, write_table
from stats import ratio_of_medians
from torch import nn

from dzero import AdamW, OffloadConfig, ZeroConfig, shard

BOUND = 1.1
FILL_STEPS, TRIALS = 2, 5
NOT_CLIPPED = 1e9
AT_BEST: dict[str, Callable[[float, float, float], float]] = {
    "step": lambda c, u, first: c + u,
    "forward": lambda c, u, first: 2 / 3 * c + max(c / 3, u),
    "backward": lambda c, u, first: max(c + first, u),
    "delayed": lambda c, u, first: max(c, u),
}
SIDES = ("compute", "resident", *AT_BEST)
JUDGED = ("forward", "backward", "delayed")
Series = dict[str, list[float]]
"""Of a side at one ratio, one number per turn, of a step: `step_s`; `<lane> busy_s`, `<lane> waited_s`."""


@dataclass
class Device:
    """Busy without needing a processor. `block_s`: of a block's forward."""

    block_s: float = 0.0
    _spent: float = 0.0
    _over: float = 0.0

    def begin(self) -> None:
        """A forward starts: what the thread did since the last backward is not the device's work."""
        self._spent, self._over = time.thread_time(), 0.0

    def work(self, seconds: float) -> None:
        """Sleep for what is left of `seconds`; what was too long is taken from the next block."""
        left = seconds - self._over - (time.thread_time() - self._spent)
        began = time.perf_counter()
        if left > 0:
            time.sleep(left)
        self._over = time.perf_counter() - began - left
        self._spent = time.thread_time()


DEVICE = Device()


class Busy(torch.autograd.Function):
    """x, as if computed with `weight`; the weight's gradient is dense and costs one fill."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, blocks: int) -> torch.Tensor:
        ctx.shape, ctx.dtype, ctx.blocks = weight.shape, weight.dtype, blocks
        DEVICE.work(blocks * DEVICE.block_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        DEVICE.work(ctx.blocks * 2 * DEVICE.block_s)
        return grad, torch.full(ctx.shape, 1e-3, dtype=ctx.dtype), None


class Block(nn.Module):
    """A unit that is as large as `blocks` blocks of `elems` parameters."""

    def __init__(self, elems: int, blocks: int) -> None:
        super().__init__()
        self.weight, self._blocks = nn.Parameter(torch.ones(blocks * elems // 1024, 1024)), blocks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Busy.apply(x, self.weight, self._blocks)


class Side:
    """A model of its own, offloaded as `name` says."""

    def __init__(self, name: str, options: argparse.Namespace) -> None:
        host: dict[str, Any] = {"grad": "host", "master": "host", "moments": "host", "overlap": name}
        host |= {"delay_warmup_steps": 0} if name == "delayed" else {}
        sizes = [1] * (options.blocks - 1) + [options.last]
        net = nn.Sequential(*(Block(options.elems, size) for size in sizes))
        self._sharded = shard(net, ZeroConfig(stage=2), offload=OffloadConfig(**host) if name in AT_BEST else None)
        self._optim = None if name == "compute" else AdamW(self._sharded, threads=1, max_norm=NOT_CLIPPED)
        if self._optim is not None and name in AT_BEST:
            slow_down(self._optim, options.slower_host)

    def turn(self, steps: int) -> dict[str, float]:
        """One number of each series."""
        for _ in range(FILL_STEPS):
            self._step()
        if self._optim is not None:
            self._optim.offload.take_use()
        began = time.perf_counter()
        for _ in range(steps):
            self._step()
        seconds = {"step_s": time.perf_counter() - began}
        if self._optim is not None:
            for lane, use in self._optim.offload.take_use().items():
                seconds |= {f"{lane} busy_s": use.busy_s, f"{lane} waited_s": use.waited_s}
            self._optim.synchronize()
        return {key: value / steps for key, value in seconds.items()}

    def _step(self) -> None:
        DEVICE.begin()
        self._sharded.model(torch.zeros(1)).sum().backward()
        if self._optim is not None:
            self._optim.step()
        else:
            self._sharded.model.zero_grad()


def slow_down(optim: AdamW, times: float) -> None:
    """Every piece of an update takes `times` the processor time that it needs; the rest of that is sleep."""
    workers = optim._updater._workers
    each, over = workers.each, 0.0

    def slowed(do: Callable[[Any], None], pieces: Sequence[Any]) -> None:
        nonlocal over
        began = time.thread_time()
        each(do, pieces)
        rest_s = (times - 1) * (time.thread_time() - began)
        began = time.perf_counter()
        time.sleep(max(0.0, rest_s - over))
        over += time.perf_counter() - began - rest_s  # a sleep is too long; the next one makes up for it

    workers.each = slowed  # type: ignore[method-assign]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=16)
    parser.add_argument("--last", type=int, default=1, help="how many times larger the last block is, as a head is")
    parser.add_argument("--elems", type=int, default=1 << 22, help="parameters per block")
    parser.add_argument("--ratios", type=float, nargs="+", default=[0.5, 1, 1.8], help="compute : host update")
    parser.add_argument("--slower-host", type=float, default=4, help="how many times slower than it is")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=2, help="on the clock, per turn")
    parser.add_argument("--name", default="overlap", help="of table and plot")
    options = parser.parse_args()
    options.units = options.blocks - 1 + options.last
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        report(options, measure(options))
    finally:
        dist.destroy_process_group()


def measure(options: argparse.Namespace) -> dict[float, dict[str, Series]]:
    """Series by ratio and side."""
    sides = {name: Side(name, options) for name in SIDES}
    block_s, updates_s = dict.fromkeys(options.ratios, 1e-3), {ratio: [] for ratio in options.ratios}
    around_s: dict[float, list[float]] = {ratio: [] for ratio in options.ratios}
    for ratio in [*options.ratios] * TRIALS:  # the update is not equally fast beside every device
        DEVICE.block_s = block_s[ratio]
        updates_s[ratio].append(sides["step"].turn(options.steps)["COMPUTE busy_s"])
        around_s[ratio].append(sides["compute"].turn(options.steps)["step_s"] - 3 * options.units * block_s[ratio])
        asked_s = ratio * median(updates_s[ratio]) - median(around_s[ratio])
        block_s[ratio] = max(0.0, asked_s) / (3 * options.units)
    series: dict[float, dict[str, Series]] = {ratio: {name: {} for name in SIDES} for ratio in options.ratios}
    shuffle = random.Random(0)
    for _ in range(options.rounds):
        for ratio in options.ratios:
            DEVICE.block_s = block_s[ratio]
            for name in shuffle.sample(SIDES, len(SIDES)):
                for key, value in sides[name].turn(options.steps).items():
                    series[ratio][name].setdefault(key, []).append(value)
    return series


def report(options: argparse.Namespace, series: dict[float, dict[str, Series]]) -> None:
    """Row, table and plot."""
    rows, goals, panels = [], [], {}
    for asked, sides in series.items():
        compute_s, update_s = sides["compute"]["step_s"], sides["step"]["COMPUTE busy_s"]
        c, u = median(compute_s), median(update_s)
        bars = panels[f"step / max(C, U), C : U = {asked:g} ({c / u:.2f})"] = {}
        for name in SIDES[1:]:
            found = ratio_of_medians(sides[name]["step_s"], compute_s if c >= u else update_s)
            best = AT_BEST[name](c, u, u / options.units) / max(c, u) if name in AT_BEST else None
            bars[name], met = found.value, found.value <= BOUND
            if name in JUDGED:
                goal = {"side": name, "asked_ratio": asked, "compute_s": c, "update_s": u, "at_best": best}
                goals.append({**goal, **vars(found), "bound": BOUND, "met": met})
            shown = [f"{best:.2f}" if best else "", ("yes" if met else "no") if name in JUDGED else ""]
            point = f"{c * 1e3:.0f} : {u * 1e3:.0f} = {c / u:.2f}"
            rows.append([point, name, *_parts(sides[name], c), found, *shown])
    config = {key: value for key, value in vars(options).items() if key != "name"}
    by_ratio = {str(asked): sides for asked, sides in series.items()}
    append_row("overlap", {"device": "simulated (sleep)", "config": config, "sides": by_ratio, "goals": goals})
    speed = "at full speed" if options.slower_host == 1 else f"{options.slower_host:g} times slower than it is"
    net = f"{options.blocks} blocks of {options.elems / 1e6:.1f} M parameters"
    net += f", the last {options.last} times as large" if options.last > 1 else ""
    title = f"simulated device: not a speed; {net}, the host {speed}"
    header = ["C : U, ms", "side", "step, ms", "waited", "rest", "host busy"]
    header += ["step / max(C, U)", "at best", f"met (≤ {BOUND})"]
    write_table(options.name, f"{title}\n\n{table(header, rows)}")
    plot_bars(options.name, title, panels)


def _parts(side: Series, compute_s: float) -> list[str]:
    """Milliseconds of a step: all, waited for the offload, neither C nor waited; and at work in the host's lane."""
    step_s = median(side["step_s"])
    waited_s = sum(median(values) for key, values in side.items() if key.endswith("waited_s"))
    busy_s = median(side.get("COMPUTE busy_s", [0.0]))
    return [f"{seconds * 1e3:.1f}" for seconds in (step_s, waited_s, step_s - compute_s - waited_s, busy_s)]


if __name__ == "__main__":
    main()
