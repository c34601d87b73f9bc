"""How much of the host's update hides behind the device's work, by overlap mode? On a SIMULATED device: not a speed.

    python benchmarks/overlap.py --rounds 15
    python benchmarks/overlap.py --rounds 15 --slower-host 1 --ratios 2 4 --name overlap_full_speed

    side       a step                                                             at best, in C (compute), U (update)
    compute    forward and backward, no optimizer                                 C
    resident   everything on the device, whose update is as slow as the host's    C + U
    step       offloaded; the step waits for all updates                          C + U
    forward    offloaded; each unit waits for its own in the next forward         2/3 C + max(1/3 C, U)
    backward   as forward; updates start as gradients come, last unit first       1/3 C + max(2/3 C, U)
    delayed    as forward, one step later                                         max(C, U)

The device is a sleep: of `block_s` per block in forward, 2 `block_s` in backward. FSDP2's copies and the norm, which a
GPU would do, cost processor time here; a block's sleep is shorter by what its thread spent on them. They take as long
as the update itself, so C cannot be small beside a host at full speed: with `--slower-host 4` every piece of the host's
work really runs, then rests three times as long. `--slower-host 1` is right for ratios C : U from 2 on.

One process, one gloo rank; kernels of one thread. Sides take turns in shuffled order. A turn: 2 steps that fill the
pipeline, then `--steps` on the clock, which stops with updates under way as it started. C is the step of `compute`, U
what the host's lane worked in a step of `step`, where nothing else runs. Goal: step / max(C, U) at most 1.1. A mode
whose best is above that cannot meet it at this ratio, however fast its code.
"""

from __future__ import annotations

import argparse
import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from report import append_row, plot_bars, table, write_table
from stats import Ratio, ratio_of_medians
from torch import nn

from dzero import AdamW, OffloadConfig, Sharded, ZeroConfig, shard

BOUND = 1.1
FILL_STEPS = 2
WIDTH = 1024
NOTE = "simulated device: not a speed"
AT_BEST: dict[str, Callable[[float, float], float]] = {
    "resident": lambda c, u: c + u,
    "step": lambda c, u: c + u,
    "forward": lambda c, u: 2 / 3 * c + max(c / 3, u),
    "backward": lambda c, u: c / 3 + max(2 / 3 * c, u),
    "delayed": lambda c, u: max(c, u),
}
JUDGED = ("forward", "backward", "delayed")


@dataclass
class Device:
    """Busy without needing a processor. `block_s`: of a block's forward."""

    block_s: float = 0.0
    _spent: float = 0.0
    _over: float = 0.0

    def begin(self) -> None:
        """A forward starts: what the thread did since the last step's end is not the device's work."""
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


class _Busy(torch.autograd.Function):
    """x, as if computed with `weight`; the weight's gradient is dense and costs one fill."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.shape, ctx.dtype = weight.shape, weight.dtype
        DEVICE.work(DEVICE.block_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        DEVICE.work(2 * DEVICE.block_s)
        return grad, torch.full(ctx.shape, 1e-3, dtype=ctx.dtype)


class _Block(nn.Module):
    def __init__(self, elems: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(elems // WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Busy.apply(x, self.weight)  # type: ignore[no-any-return, no-untyped-call]


class _Net(nn.Module):
    def __init__(self, blocks: int, elems: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Block(elems) for _ in range(blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        DEVICE.begin()
        for block in self.blocks:
            x = block(x)
        return x


@dataclass
class Turns:
    """Of a side at one ratio, per step and turn: seconds; by lane seconds at work and seconds waited for."""

    step_s: list[float] = field(default_factory=list)
    busy_s: dict[str, list[float]] = field(default_factory=dict)
    waited_s: dict[str, list[float]] = field(default_factory=dict)


class Side:
    """A model of its own, offloaded as `name` says."""

    def __init__(self, name: str, blocks: int, elems: int, slower_host: float) -> None:
        self._sharded, self._optim = _build(name, blocks, elems), None
        if name != "compute":
            self._optim = AdamW(self._sharded, threads=1)
            _slow_down(self._optim, slower_host)

    def turn(self, steps: int, turns: Turns) -> None:
        for _ in range(FILL_STEPS):
            self._step()
        self._take_use()
        began = time.perf_counter()
        for _ in range(steps):
            self._step()
        turns.step_s.append((time.perf_counter() - began) / steps)
        for lane, use in self._take_use().items():
            turns.busy_s.setdefault(lane, []).append(use.busy_s / steps)
            turns.waited_s.setdefault(lane, []).append(use.waited_s / steps)
        if self._optim is not None:
            self._optim.synchronize()

    def _step(self) -> None:
        self._sharded.model(torch.zeros(1)).sum().backward()
        if self._optim is not None:
            self._optim.step()
        else:
            for param in self._sharded.named_params().values():
                param.grad = None

    def _take_use(self) -> dict[str, Any]:
        return {} if self._optim is None else self._optim.offload.take_use()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=16)
    parser.add_argument("--elems", type=int, default=1 << 20, help="parameters per block")
    parser.add_argument("--ratios", type=float, nargs="+", default=[0.5, 1, 2], help="compute : host update")
    parser.add_argument("--slower-host", type=float, default=4, help="times")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=3, help="on the clock, per turn")
    parser.add_argument("--name", default="overlap", help="of table and plot")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        block_s, turns = _measure(options)
    finally:
        dist.destroy_process_group()
    _report(options, block_s, turns)


def _measure(options: argparse.Namespace) -> tuple[dict[float, float], dict[float, dict[str, Turns]]]:
    """Each ratio's `block_s`, and its turns by side."""
    names = ["compute", *AT_BEST]
    sides = {name: Side(name, options.blocks, options.elems, options.slower_host) for name in names}
    block_s = {}
    for ratio in options.ratios:
        DEVICE.block_s, trial = 1e-3, Turns()
        for _ in range(4):  # the update is not equally fast beside every device
            sides["step"].turn(options.steps, trial)
            DEVICE.block_s = ratio * trial.busy_s["COMPUTE"][-1] / (3 * options.blocks)
        block_s[ratio] = ratio * median(trial.busy_s["COMPUTE"][1:]) / (3 * options.blocks)
    turns = {ratio: {name: Turns() for name in names} for ratio in options.ratios}
    shuffle = random.Random(0)
    for _ in range(options.rounds):
        for ratio in options.ratios:
            DEVICE.block_s = block_s[ratio]
            for name in shuffle.sample(names, len(names)):
                sides[name].turn(options.steps, turns[ratio][name])
    return block_s, turns


def _build(name: str, blocks: int, elems: int) -> Sharded:
    extra: dict[str, Any] = {"delay_warmup_steps": 0} if name == "delayed" else {}
    offload = None
    if name not in ("compute", "resident"):
        offload = OffloadConfig(grad="host", master="host", moments="host", overlap=name, **extra)
    return shard(_Net(blocks, elems), ZeroConfig(stage=2), offload=offload)


def _slow_down(optim: AdamW, times: float) -> None:
    """Whatever the host works on, resident updates too, takes `times` as long; the rest of that is sleep."""

    def slowed(work: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            began = time.perf_counter()
            result = work(*args)
            time.sleep((times - 1) * (time.perf_counter() - began))
            return result

        return run

    start = optim.offload.compute
    optim.offload.compute = lambda what, unit, work: start(what, unit, slowed(work))  # type: ignore[method-assign]
    if not optim.offload.schedule.actions:
        optim._updater.run = slowed(optim._updater.run)  # type: ignore[method-assign]


def _report(options: argparse.Namespace, block_s: dict[float, float], turns: dict[float, dict[str, Turns]]) -> None:
    rows, goals, panels = [], [], {}
    for ratio, sides in turns.items():
        compute_s, update_s = sides["compute"].step_s, sides["step"].busy_s["COMPUTE"]
        c, u = median(compute_s), median(update_s)
        bars = {}
        for name, at_best in AT_BEST.items():
            found = ratio_of_medians(sides[name].step_s, compute_s if c >= u else update_s)
            met = found.value <= BOUND if name in JUDGED else None
            best, bars[name] = at_best(c, u) / max(c, u), found.value
            rows.append(_row(f"{c * 1e3:.0f} : {u * 1e3:.0f} = {c / u:.2f}", name, sides[name], found, best, met))
            if met is not None:
                of = {"side": name, "ratio": c / u, "asked_ratio": ratio, "bound": BOUND, "at_best": best, "met": met}
                goals.append({**of, **vars(found)})
        panels[f"step / max(C, U) at C : U = {c / u:.2f}"] = bars
    config = {k: v for k, v in vars(options).items() if k != "name"}
    results = [{"asked_ratio": r, "block_s": block_s[r], **{n: vars(t) for n, t in turns[r].items()}} for r in turns]
    append_row("overlap", {"device": "simulated (sleep)", "config": config, "ratios": results, "goals": goals})
    host = f"a host {options.slower_host:g} times slower" if options.slower_host != 1 else "the host at full speed"
    title = f"{NOTE}. {options.blocks} blocks of {options.elems / 1e6:.1f} M parameters, {host}, {options.rounds} rounds"
    header = ["C : U, ms", "side", "step, ms", "step / max(C, U)", "at best", f"≤ {BOUND}"]
    lanes = ["update busy", "waited for update", "for copies in", "for copies out"]
    write_table(options.name, f"{title}\n\n{table([*header, *(f'{lane}, ms' for lane in lanes)], rows)}")
    plot_bars(options.name, title, panels)


def _row(point: str, name: str, of: Turns, found: Ratio, best: float, met: bool | None) -> list[str]:
    used = [of.busy_s.get("COMPUTE"), *(of.waited_s.get(lane) for lane in ("COMPUTE", "FETCH", "EVICT"))]
    shown = [f"{median(seconds) * 1e3:.1f}" if seconds else "" for seconds in used]
    asked = "" if met is None else "yes" if met else "no"
    return [point, name, f"{median(of.step_s) * 1e3:.1f}", str(found), f"{best:.2f}", asked, *shown]


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    main()
