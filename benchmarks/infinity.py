"""How close is a step with its optimizer states on disk to what disk and host can do, and to DeepSpeed's?

    python benchmarks/infinity.py --path DIR --rounds 11
    python benchmarks/infinity.py --smoke

    part 1: one update of a net of equal units, far larger than the host slots that units take turns in
    side        what is timed, from optimizer.step() until optimizer.synchronize()
    disk        gradients on the host, masters and moments on disk (offload=disk)
    host        all three on the host (offload=host)
    deepspeed   engine.step(): ZeRO-3, offload_optimizer.device=nvme, pipelined both ways, a sub-group per unit
    transfer    the store alone: the bytes of `disk`, the same pieces, blocks and threads, in and out side by side
    load, spill one way alone

    part 2: tokens/s of a llama; the device is the CPU, which offload takes time from and gives no memory to
    compute     forward and backward, no optimizer
    device      all states on the device
    host, disk  as above
    all_disk    parameters, gradients, masters and moments on disk (offload=infinity, stage 3)

Goal of part 1: disk / max(transfer, host) at most 1.15. A disk that serves one request after the other cannot be faster
than `one by one`: bytes in over the bandwidth of load, plus bytes out over that of spill.

Efficiency is compute / step. Beside the measured one stands what ZeRO-Infinity (section 4) gives without any overlap:
ait * bw / (ait * bw + peak). ait: operations per byte, 6 per parameter and token over what the side moves to and from
disk, tokens / 4 for fp32 masters and moments. bw: the disk's bandwidth (`transfer`). peak: the operations per second
that the device reached in forward and backward.

Sides take turns in shuffled order within a round, the first round is left out. Every group of sides has processes of
its own, one per rank; a time is that of the slower rank. Batch 1 makes part 1's forward and backward short on purpose.
DeepSpeed compiles its AsyncIO extension at first use (libaio's headers, a C++ compiler, minutes); where it cannot, its
side is left out with a note.
"""

from __future__ import annotations

import argparse
import multiprocessing as mp
import random
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

from infinity_sides import DEEPSPEED_AIO, Found, LeftOutError, Setting, serve
from report import append_row, table, write_table
from stats import ratio_of_medians

BOUND = 1.15
FLOPS_PER_PARAM = 6
GOOD = 0.9
Series = dict[str, dict[str, list[Any]]]
"""By side and quantity, one number per round."""


class Group:
    """The processes of one group of sides, one per rank."""

    def __init__(self, name: str, setting: Setting, ranks: int, folder: Path) -> None:
        context, rendezvous = mp.get_context("spawn"), str(folder / f"{name}_{ranks}")
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(ranks):
            ours, theirs = context.Pipe()
            args = (theirs, name, setting, rank, ranks, rendezvous)
            self._processes.append(context.Process(target=serve, args=args, daemon=True))
            self._processes[-1].start()
            theirs.close()
            self._pipes.append(ours)
        try:
            self.sides: list[str] = self._receive()[0]
        except BaseException:
            self.close()
            raise

    def turn(self, side: str) -> Found:
        """Times of the slower rank; bytes and operations of all."""
        found = self._ask(side)
        return {key: _over_ranks(key, [each[key] for each in found]) for key in found[0]}

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.join(timeout=10)
            process.kill()

    def finish(self) -> None:
        """Give back what the sides took."""
        self._ask(None)
        self.close()

    def _ask(self, side: str | None) -> list[Any]:
        for pipe in self._pipes:
            pipe.send(side)
        return self._receive()

    def _receive(self) -> list[Any]:
        answers = [pipe.recv() for pipe in self._pipes]
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        return answers


def _over_ranks(key: str, values: list[Any]) -> Any:
    return sum(values) if key.endswith(("bytes", "flops")) else max(values)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", default=tempfile.gettempdir(), help="a directory on the disk")
    parser.add_argument("--units", type=int, default=16)
    parser.add_argument("--elems", type=int, default=8 << 20, help="parameters per unit")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="of part 1; 1 is needed")
    parser.add_argument("--threads", type=int, default=2, help="of kernels, all ranks together")
    parser.add_argument("--block-mib", type=int, default=16)
    parser.add_argument("--io-threads", type=int, default=8)
    parser.add_argument("--samples", type=int, default=4, help="of a step of part 2")
    parser.add_argument("--tokens", type=int, default=256, help="of a sample")
    parser.add_argument("--steps", type=int, default=2, help="of part 2, on the clock, per turn")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--smoke", action="store_true", help="seconds: tiny, without DeepSpeed, nothing is written")
    options = parser.parse_args()
    if options.smoke:
        small = {"units": 5, "elems": 1 << 16, "rounds": 2, "block_mib": 1, "samples": 1, "tokens": 32, "steps": 1}
        vars(options).update(small)
    with tempfile.TemporaryDirectory(dir=options.path) as folder:
        setting = Setting(
            path=folder,
            units=options.units,
            elems=options.elems,
            threads=options.threads,
            block_bytes=options.block_mib << 20,
            io_threads=options.io_threads,
            tokens=options.tokens,
            samples=options.samples,
            steps=options.steps,
            small_llama=options.smoke,
        )
        texts, bandwidth = [], 0.0
        for ranks in sorted(options.ranks):
            peer = ["deepspeed"] if ranks == 1 and not options.smoke else []
            series, notes = measure(["update", *peer], setting, ranks, options.rounds)
            if ranks == 1:
                bandwidth = _bandwidth(series)
                notes += ["deepspeed left out: smoke"] if options.smoke else []
            texts.append(report_update(series, notes, setting, ranks, options))
        series, _ = measure(["train"], setting, 1, options.rounds)
        texts.append(report_train(series, bandwidth, setting, options))
    if options.smoke:
        print("\n".join(texts))
    else:
        write_table("infinity", "\n".join(texts))


def measure(names: Sequence[str], setting: Setting, ranks: int, rounds: int) -> tuple[Series, list[str]]:
    """All sides of these groups in turn, and notes on groups left out."""
    setting, notes, groups = replace(setting, threads=max(1, setting.threads // ranks)), [], list[Group]()
    with tempfile.TemporaryDirectory() as folder:
        try:
            for name in names:
                try:
                    groups.append(Group(name, setting, ranks, Path(folder)))
                except LeftOutError as error:
                    notes.append(f"left out: {error}")
            of = {side: group for group in groups for side in group.sides}
            series: Series = {side: {} for side in of}
            shuffle = random.Random(0)
            for done in range(rounds + 1):
                for side in shuffle.sample([*of], len(of)):
                    found = of[side].turn(side)
                    for key, value in found.items() if done else ():
                        series[side].setdefault(key, []).append(value)
                print(f"{'+'.join(names)}, {ranks} ranks: round {done}/{rounds}", flush=True)
            for group in groups:
                group.finish()
            return series, notes
        finally:
            for group in groups:
                group.close()


def _bandwidth(series: Series) -> float:
    """Bytes per second of the store alone, both ways together."""
    return float(series["transfer"]["bytes"][0] / median(series["transfer"]["update_s"]))


def report_update(series: Series, notes: list[str], setting: Setting, ranks: int, options: argparse.Namespace) -> str:
    """Row and table of part 1."""
    update_s = {side: found["update_s"] for side, found in series.items() if "update_s" in found}
    middle = {side: median(seconds) for side, seconds in update_s.items()}
    bound_by = max(("transfer", "host"), key=lambda side: middle[side])
    one_by_one_s = middle["load"] + middle["spill"]
    # What a step without its update takes; the same work on both of dzero's sides.
    compute_s = median(step - up for step, up in zip(series["host"]["step_s"], update_s["host"], strict=True))
    moved = {side: series[side]["bytes"][0] for side in ("transfer", "load", "spill")}
    moved["disk"] = sum(series["disk"][f"{lane} bytes"][0] for lane in ("LOAD", "SPILL"))
    rows, results = [], {}
    for side, seconds in update_s.items():
        over = ratio_of_medians(seconds, update_s[bound_by])
        speed = f"{moved[side] / middle[side] / 1e9:.2f}" if side in moved else ""
        shown = ["", ""]
        if side in ("disk", "deepspeed"):
            bound = _efficiency_bound(setting.params, 1, moved["disk"], _bandwidth(series), compute_s)
            shown = [f"{bound:.2f}", f"{compute_s / (compute_s + middle[side]):.2f}"]
        step = f"{median(series[side]['step_s']) * 1e3:.0f}" if "step_s" in series[side] else ""
        lanes = ", ".join(f"{lane} {_busy(series[side], lane) / middle[side]:.2f}" for lane in _lanes(series[side]))
        rows.append([side, f"{middle[side] * 1e3:.0f}", speed, over, lanes, *shown, step])
        results[side] = series[side]
    goal = ratio_of_medians(update_s["disk"], update_s[bound_by])
    met = goal.value <= BOUND
    goals = [{"what": f"disk / {bound_by}", **asdict(goal), "bound": BOUND, "met": met}]
    peers = {}
    if "deepspeed" in update_s:
        peers = {
            "update": ratio_of_medians(update_s["deepspeed"], update_s["disk"]),
            "forward, backward, update": ratio_of_medians(series["deepspeed"]["step_s"], series["disk"]["step_s"]),
        }
    peak = median(series["matmul"]["flops"])
    enough = GOOD / (1 - GOOD) * peak / _bandwidth(series) * moved["disk"] / FLOPS_PER_PARAM / setting.params
    if not options.smoke:
        row: dict[str, Any] = {"part": "update", "config": _config(options) | {"ranks": ranks}, "sides": results}
        row |= {
            "deepspeed_aio": DEEPSPEED_AIO,
            "one_by_one_s": one_by_one_s,
            "tokens_for_0.9": enough,
            "goals": goals,
            "notes": notes,
        }
        append_row("infinity", row | {"deepspeed_over_dzero": {what: asdict(ratio) for what, ratio in peers.items()}})
    size = f"{setting.units} units of {setting.elems / 1e6:.1f} M parameters"
    title = f"Update, {size}, {ranks} {'ranks' if ranks > 1 else 'rank'}, {options.rounds} rounds"
    header = ["side", "ms", "GB/s", f"over {bound_by}", "lanes busy", "efficiency bound", "measured", "step, ms"]
    lines = [
        f"disk / max(transfer, host) = {goal}, goal at most {BOUND}: {'met' if met else 'missed'}.",
        f"One by one: {one_by_one_s * 1e3:.0f} ms.",
        f"Efficiency {GOOD} by the formula: from {enough:,.0f} tokens per step on, at the {peak / 1e9:.0f} GFLOP/s of "
        "a bf16 matrix product.",
        *(f"DeepSpeed's time over dzero's, {what}: {ratio}." for what, ratio in peers.items()),
        *notes,
    ]
    return "\n".join([title, "", table(header, rows), *(f"{line}\n" for line in lines)])


def _lanes(found: dict[str, list[Any]]) -> list[str]:
    return [key.removesuffix(" busy_s") for key in found if key.endswith(" busy_s")]


def _busy(found: dict[str, list[Any]], lane: str) -> float:
    return float(median(found[f"{lane} busy_s"]))


def _efficiency_bound(params: int, tokens: int, moved_bytes: float, bandwidth: float, compute_s: float) -> float:
    """ZeRO-Infinity's, without overlap."""
    flops = FLOPS_PER_PARAM * params * tokens
    ait, peak = flops / moved_bytes, flops / compute_s
    return ait * bandwidth / (ait * bandwidth + peak)


def report_train(series: Series, bandwidth: float, setting: Setting, options: argparse.Namespace) -> str:
    """Row and table of part 2. Raises RuntimeError where a tier changes the losses."""
    for side in ("host", "disk", "all_disk"):
        if series[side]["losses"] != series["device"]["losses"]:
            raise RuntimeError(f"the losses of {side} are not those of device")
    step_s = {side: found["step_s"] for side, found in series.items()}
    tokens, params, compute_s = setting.samples * setting.tokens, series["compute"]["params"][0], step_s["compute"]
    rows, results = [], {}
    for side, seconds in step_s.items():
        moved = median(series[side].get("bytes", [0]))
        measured = ratio_of_medians(compute_s, seconds)
        bound = _efficiency_bound(params, tokens, moved, bandwidth, median(compute_s)) if moved else 1.0
        waited = median(series[side].get("waited_s", [0.0])) * 1e3
        speeds = [f"{tokens / median(seconds):,.0f}", ratio_of_medians(step_s["device"], seconds)]
        rows.append([side, *speeds, f"{moved / 1e6:.0f}", f"{waited:.0f}", f"{bound:.2f}", measured])
        results[side] = {**series[side], "efficiency": measured.value, "efficiency_bound": bound}
    if not options.smoke:
        append_row("infinity", {"part": "train", "device": "cpu", "config": _config(options), "sides": results})
    title = f"Training on the CPU as the device, {params / 1e6:.0f} M parameters, {tokens} tokens per step, 1 rank"
    header = ["states", "tokens/s", "over device", "MB to and from disk", "waited, ms"]
    header += ["efficiency bound", "measured"]
    return "\n".join([f"{title}, {options.rounds} rounds; the same losses on every tier", "", table(header, rows)])


def _config(options: argparse.Namespace) -> dict[str, Any]:
    return {key: value for key, value in vars(options).items() if key not in ("path", "smoke")}


if __name__ == "__main__":
    main()
