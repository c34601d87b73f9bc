"""How long is the host's Adam update of offloaded states: bf16 gradient in, fp32 state, bf16 weight out?

    python benchmarks/host_adam.py --rounds 15
    python benchmarks/host_adam.py --device cuda --threads 1 4 8 16 --beside nothing copies

    side          what it runs                                                              bytes moved per element
    dzero         one pass of our kernel: fp32 master and moments                           28
    dzero_early   one pass that writes the new states beside the old ones                   28
    dzero_small   the pass of dzero, master as 16-bit remainder, moments in bf16            18
    torch_fused   gradient to fp32; torch.optim.AdamW(fused=True); parameter to bf16        40 = 6 + 28 + 6
    deepspeed     gradient to fp32; DeepSpeedCPUAdam(adamw_mode=True); parameter to bf16    40

Bytes are what the route must read and write. The casts are copies into tensors made beforehand; DeepSpeed 0.19's kernel
needs them as torch's does: it reads the gradient as the parameter's dtype (a bf16 gradient of an fp32 parameter is not
refused but read as fp32, past its end) and no longer writes a 16-bit copy. Casting parameter by parameter around its
update took the same time. The extension is compiled at first use; where that fails, the side is left out with a note.

One process, one set of threads: torch and the extension share an OpenMP runtime, so torch.set_num_threads holds for
both; `cores busy` is processor time over clock. OpenMP's workers spin for about 10 ms after their last region, so each
side starts after a pause. The roof is that of optimizer.py: the time in which a += b * s would move a side's bytes, in
the same round. One thread of that loop need not fill the memory: a share above 1 says so.

`--beside copies`: meanwhile a thread moves blocks of 64 MiB both ways, as gradients and weights move beside the update:
over a GPU's link from page-locked memory, on a CPU within host memory. The table says how many bytes a second it moved.
They take their share of the memory's roof, which is measured beside them as well.

Before the clock starts, one update from equal states must give equal results (`TOLERANCES`), or the run stops.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import threading
import time
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any

import torch
from devices import Device
from optimizer import OPTIONS, PARAM_ELEMS, Run, _stream
from report import append_row, plot_bars, table, write_table
from stats import Goal, judge, ratio_of_medians
from torch.testing import assert_close

from dzero.optim.adamw_math import Coefficients
from dzero.optim.flat_update import AdamWUpdater, ParamStates, ParamUpdate
from dzero.zero.rounding import join, split

GOALS = (
    Goal("speed", "dzero", "torch_fused", 1.5),
    Goal("speed", "dzero", "deepspeed", 1.5),
    Goal("speed", "dzero", "roof", 0.95),
    Goal("speed", "dzero_early", "dzero", 0.8),
    Goal("speed", "dzero_small", "dzero", 1.4),
)
# (rtol, atol) of a state against dzero's. The peers contract multiply-adds: some places of fp32, of the lr-sized step
# where a master nears 0, and so a weight may be the next bf16. dzero_small computes the same master and weight, to the
# bit; its moments are rounded up or down to a bf16.
PEER = {"master": (1e-6, 1e-8), "m": (1e-6, 1e-9), "v": (1e-6, 0), "weight": (2**-7, 1e-8)}
SMALL = {"master": (0, 0), "m": (2**-7, 0), "v": (2**-7, 0), "weight": (0, 0)}
SAME = dict.fromkeys(PEER, (0, 0))
TOLERANCES = {"dzero_early": SAME, "dzero_small": SMALL, "torch_fused": PEER, "deepspeed": PEER}
PAUSE_S = 0.03
COPIED_BYTES = 64 << 20
SIDES = ("dzero", *TOLERANCES)
State = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Side:
    """One update of all parameters, the bytes it must move per element, and parameter i's master, m, v, bf16 weight."""

    run: Run
    moved_bytes: int
    state: Callable[[int], State]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elems", type=int, default=1 << 26, help=f"parameters; rounded to {PARAM_ELEMS}")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cpu", help="whose link copies take")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=[*SIDES], help="dzero is always among them")
    parser.add_argument("--beside", nargs="+", choices=["nothing", "copies"], default=["nothing"])
    options = parser.parse_args()
    params, device = max(1, options.elems // PARAM_ELEMS), Device(options.device)
    for threads in options.threads:
        torch.set_num_threads(threads)
        sides, notes = _sides(params, threads, {"dzero", *options.sides})
        for beside in options.beside:
            with Copies(device, running=beside == "copies") as copies:
                _compare(sides, notes, copies, params, threads, options.rounds)


class Copies:
    """A thread that copies both ways between host memory and the device while inside, if `running`."""

    def __init__(self, device: Device, *, running: bool) -> None:
        self._device, self.running = device, running
        self._begun, self._over = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._copy)
        self.bytes, self.seconds = 0, 0.0

    def __enter__(self) -> Copies:
        if self.running:
            self._thread.start()
            self._begun.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self.running:
            self._thread.join()

    @property
    def bytes_per_s(self) -> float:
        """Bytes of both directions together, so far."""
        return self.bytes / self.seconds if self.seconds else 0.0

    def _copy(self) -> None:
        try:
            self._copy_until_over()
        finally:
            self._begun.set()

    def _copy_until_over(self) -> None:
        on_gpu, start = self._device.on_gpu, time.perf_counter()
        host, back = (torch.zeros(COPIED_BYTES, dtype=torch.uint8, pin_memory=on_gpu) for _ in range(2))
        there = torch.zeros(COPIED_BYTES, dtype=torch.uint8, device=self._device.torch)
        streams = [torch.cuda.Stream(), torch.cuda.Stream()] if on_gpu else []
        other = torch.zeros_like(there)
        while not self._over.is_set():
            if on_gpu:
                with torch.cuda.stream(streams[0]):
                    there.copy_(host, non_blocking=True)
                with torch.cuda.stream(streams[1]):
                    back.copy_(other, non_blocking=True)
                for stream in streams:
                    stream.synchronize()
            else:
                there.copy_(host)
                back.copy_(other)
            self.bytes, self.seconds = self.bytes + 2 * COPIED_BYTES, time.perf_counter() - start
            self._begun.set()


def _compare(sides: dict[str, Side], notes: list[str], copies: Copies, params: int, threads: int, rounds: int) -> None:
    stream = _stream(params, threads)
    stream()
    seconds, cpu_seconds = _measure({"stream": stream, **{name: side.run for name, side in sides.items()}}, rounds)
    roofs = {name: [s * side.moved_bytes / 12 for s in seconds["stream"]] for name, side in sides.items()}
    peers = [name for name in ("torch_fused", "deepspeed") if name in sides]
    rows, results = [], {}
    for name, side in sides.items():
        share = ratio_of_medians(roofs[name], seconds[name])
        busy = median(cpu / clock for cpu, clock in zip(cpu_seconds[name], seconds[name], strict=True))
        speeds = [ratio_of_medians(seconds[peer], seconds[name]) for peer in peers]
        middle, least = (f"{pick(seconds[name]) * 1e3:.1f}" for pick in (median, min))
        rows.append([name, side.moved_bytes, middle, least, *speeds, share, f"{busy:.2f}"])
        times = {"seconds": seconds[name], "cpu_seconds": cpu_seconds[name]}
        results[name] = {**times, "moved_bytes": side.moved_bytes, "share_of_roof": share.value}
    verdicts = [v for goal in GOALS if (v := judge(goal, {**seconds, "roof": roofs["dzero"]}, {}))]
    elems, bandwidth = params * PARAM_ELEMS, 12 * params * PARAM_ELEMS / median(seconds["stream"])
    beside = "copies" if copies.running else "nothing"
    config = {"elems": elems, "threads": threads, "rounds": rounds, "beside": beside}
    row = {"sides": results, "stream_bytes_per_s": bandwidth, "goals": [v.row() for v in verdicts], "notes": notes}
    name = f"host_adam_{threads}_threads" + ("_beside_copies" if copies.running else "")
    title = f"{elems / 1e6:.0f} M parameters, {threads} threads, stream {bandwidth / 1e9:.1f} GB/s"
    title += f", beside copies of {copies.bytes_per_s / 1e9:.1f} GB/s" if copies.running else ""
    found = [f"{side} {results[side]['share_of_roof']:.2f}" for side in sides]
    row |= {"finding": f"{title}; of the roof: {', '.join(found)}", "copied_bytes_per_s": copies.bytes_per_s}
    append_row("host_adam", {"config": config, **row})
    speed_over = [f"speed over {peer}" for peer in peers]
    header = ["side", "bytes", "ms", "least ms", *speed_over, "share of the roof", "cores busy"]
    judged = [[f"{v.goal.side} / {v.goal.peer}", v.goal.bound, v.ratio, "met" if v.met else "missed"] for v in verdicts]
    goals = table(["goal: speed of", "at least", "measured", ""], judged)
    write_table(name, "\n".join([title, "", table(header, rows), goals, *notes]))
    plot_bars(name, title, {"ms": {side: median(seconds[side]) * 1e3 for side in sides}})


def _measure(runs: dict[str, Run], rounds: int) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Clock and processor seconds per side and round; sides take turns in shuffled order."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    cpu_seconds: dict[str, list[float]] = {name: [] for name in runs}
    shuffle = random.Random(0)
    for _ in range(rounds):
        for name in shuffle.sample(list(runs), len(runs)):
            time.sleep(PAUSE_S)
            start, cpu_start = time.perf_counter(), time.process_time()
            runs[name]()
            seconds[name].append(time.perf_counter() - start)
            cpu_seconds[name].append(time.process_time() - cpu_start)
    return seconds, cpu_seconds


def _check(sides: dict[str, Side], params: int) -> None:
    """Raises AssertionError, naming side and state, where the first update differs from dzero's by too much."""
    for index, name in itertools.product(range(params), sides.keys() & TOLERANCES.keys()):
        pairs = zip(sides[name].state(index), sides["dzero"].state(index), strict=True)
        for (part, (rtol, atol)), (found, expected) in zip(TOLERANCES[name].items(), pairs, strict=True):
            message = f"{name}, parameter {index}, {part}: not what dzero has after one update\n{{}}".format
            assert_close(found.float(), expected.float(), rtol=rtol, atol=atol, msg=message)


def _sides(params: int, threads: int, asked: set[str]) -> tuple[dict[str, Side], list[str]]:
    """The sides asked for, after an update from equal states with the same gradients; notes on those left out."""
    grads, notes = [_initial(index)[3] for index in range(params)], list[str]()
    builds: dict[str, Callable[[], Side]] = {
        "dzero": lambda: _dzero(grads, threads),
        "dzero_early": lambda: _dzero(grads, threads, early=True),
        "dzero_small": lambda: _dzero(grads, threads, small=True),
        "torch_fused": lambda: _with_casts(grads, partial(torch.optim.AdamW, fused=True), torch.tensor(0.0)),
        "deepspeed": lambda: _deepspeed(grads),
    }
    sides = {}
    for name in (name for name in builds if name in asked):
        try:
            sides[name] = builds[name]()
        except (ImportError, OSError, RuntimeError) as error:
            if name != "deepspeed":
                raise
            notes.append(f"deepspeed left out: {type(error).__name__}: {error}")
    for side in sides.values():
        side.run()  # compiles, touches pages
    _check(sides, params)
    return sides, notes


def _deepspeed(grads: list[torch.Tensor]) -> Side:
    os.environ["DS_ACCELERATOR"] = "cpu"
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    return _with_casts(grads, partial(DeepSpeedCPUAdam, adamw_mode=True), 0)


def _initial(seed: int) -> State:
    """fp32 weight, m, v (fp32 values that bf16 holds) and bf16 gradient, [PARAM_ELEMS] each."""
    generator = torch.Generator().manual_seed(seed)
    weight, m, v, grad = (torch.randn(PARAM_ELEMS, generator=generator) for _ in range(4))
    m, v = (x.bfloat16().float() for x in (m * 1e-3, 1e-6 * (1 + v.square())))
    return weight * 0.02, m, v, (grad * 1e-3).bfloat16()


def _dzero(grads: list[torch.Tensor], threads: int, *, small: bool = False, early: bool = False) -> Side:
    updater = AdamWUpdater(threads)
    coefficients = Coefficients.of(step=1, scale=1.0, **OPTIONS)
    states = []
    for index in range(len(grads)):
        master, m, v, _ = _initial(index)
        if small:
            work, remainder = split(master)
            states.append(ParamStates(f"p{index}", 0, work, None, remainder, m.bfloat16(), v.bfloat16()))
        else:
            targets = (None, torch.empty_like(master), None, torch.empty_like(m), torch.empty_like(v))
            own = ParamStates(f"p{index}", 0, master.bfloat16(), master, None, m, v)
            states.append(replace(own, targets=targets) if early else own)
    updates = [ParamUpdate(state, grad, coefficients, 1) for state, grad in zip(states, grads, strict=True)]

    def state(index: int) -> State:
        s = states[index]
        if early:
            _, master, _, m, v = s.targets
            return master, m, v, s.work
        return join(s.work, s.remainder) if s.master is None else s.master, s.m, s.v, s.work

    before_piece = (lambda: True) if early else None
    return Side(lambda: updater.run(updates, before_piece), 18 if small else 28, state)


def _with_casts(grads: list[torch.Tensor], build: Callable[..., torch.optim.Optimizer], step: Any) -> Side:
    """An optimizer of fp32 parameters between the two casts; its states start as dzero's. step: 0, in its own type."""
    initial = [_initial(index) for index in range(len(grads))]
    weights = [torch.nn.Parameter(weight) for weight, *_ in initial]
    optimizer, copies = build(weights, **OPTIONS), [weight.detach().bfloat16() for weight in weights]
    for weight, (_, m, v, _) in zip(weights, initial, strict=True):
        weight.grad = torch.empty_like(weight)
        optimizer.state[weight] = {"step": deepcopy(step), "exp_avg": m, "exp_avg_sq": v}

    @torch.no_grad()
    def run() -> None:
        for weight, grad in zip(weights, grads, strict=True):
            weight.grad.copy_(grad)
        optimizer.step()
        for low, weight in zip(copies, weights, strict=True):
            low.copy_(weight)

    def state(index: int) -> State:
        held = optimizer.state[weights[index]]
        return weights[index].detach(), held["exp_avg"], held["exp_avg_sq"], copies[index]

    return Side(run, 40, state)


if __name__ == "__main__":
    main()
