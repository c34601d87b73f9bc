"""How close is a step with its optimizer states on disk to what disk and host can do, and to DeepSpeed's?

    python benchmarks/infinity.py --path DIR --rounds 11
    python benchmarks/infinity.py --path DIR --ranks        # the net with a large unit alone
    python benchmarks/infinity.py --smoke

One update of a net of equal units, far larger than the host slots that units take turns in. infinity_train.py: a llama.

    side        what is timed, from optimizer.step() until optimizer.synchronize()
    disk        gradients on the host, masters and moments on disk (offload=disk)
    host        all three on the host (offload=host)
    deepspeed   engine.step(): ZeRO-3, offload_optimizer.device=nvme, pipelined both ways, a sub-group per unit
    transfer    the store alone: the bytes of `disk`, the same pieces, blocks and threads, in and out side by side
    load, spill one way alone

Once more with a first unit as large as LARGE others: `whole`, and in as many tiles (`dzero.tile`), which bound the host
slots that units take turns in.

Goals: disk / max(transfer, host), and tiles / max(transfer, host), at most 1.15; slots of tiles at most those of equal
units. A disk that serves one request after the other cannot be faster
than `one by one`: bytes in over the bandwidth of load, plus bytes out over that of spill.

Beside the efficiency reached, compute / step, stands what ZeRO-Infinity (section 4) gives without any overlap: see
infinity_rounds.py, which also gives the sides their turns. Batch 1 makes forward and backward short on purpose.
DeepSpeed compiles its AsyncIO extension at first use (libaio's headers, a C++ compiler, minutes); where it cannot, its
side is left out with a note.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import asdict
from statistics import median
from typing import Any

from infinity_rounds import BOUND, FLOPS_PER_PARAM, STATES, Series, Setting, efficiency_bound, measure, slots_report
from infinity_sides import DEEPSPEED_AIO, bandwidth, deepspeed_sides, large_sides, update_sides
from report import append_row, table, write_table
from stats import ratio_of_medians

from dzero import OffloadConfig

LARGE = 8
GOOD = 0.9
TURNS = 1 + OffloadConfig().prefetch_units


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", default=tempfile.gettempdir(), help="a directory on the disk")
    parser.add_argument("--units", type=int, default=16)
    parser.add_argument("--elems", type=int, default=8 << 20, help="parameters per unit")
    parser.add_argument("--large", type=int, default=LARGE, help="units that the large one is as large as")
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2], help="each count in a run of its own")
    parser.add_argument("--threads", type=int, default=2, help="of kernels, all ranks together")
    parser.add_argument("--block-mib", type=int, default=16)
    parser.add_argument("--io-threads", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--smoke", action="store_true", help="seconds: tiny, without DeepSpeed, nothing is written")
    options = parser.parse_args()
    if options.smoke:
        vars(options).update({"units": 5, "elems": 1 << 16, "rounds": 2, "block_mib": 1})
    with tempfile.TemporaryDirectory(dir=options.path) as folder:
        setting = Setting(
            path=folder,
            units=options.units,
            elems=options.elems,
            threads=options.threads,
            large=options.large,
            block_bytes=options.block_mib << 20,
            io_threads=options.io_threads,
        )
        texts = []
        for ranks in sorted(options.ranks):
            peer = {"deepspeed": deepspeed_sides} if ranks == 1 and not options.smoke else {}
            series, notes = measure({"update": update_sides} | peer, setting, ranks, options.rounds)
            texts.append(report_update(series, notes, setting, ranks, options))
        series, _ = measure({"large": large_sides}, setting, 1, options.rounds)
        large = report_large(series, setting, options)
    if options.smoke:
        print("\n".join([*texts, large]))
        return
    if texts:
        write_table("infinity", "\n".join(texts))
    write_table("infinity_large", large)


def report_update(series: Series, notes: list[str], setting: Setting, ranks: int, options: argparse.Namespace) -> str:
    """Row and table."""
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
            bound = efficiency_bound(setting.params, 1, moved["disk"], bandwidth(series), compute_s)
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
    enough = GOOD / (1 - GOOD) * peak / bandwidth(series) * moved["disk"] / FLOPS_PER_PARAM / setting.params
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


def report_large(series: Series, setting: Setting, options: argparse.Namespace) -> str:
    """Row and table of the net with a large unit."""
    goals, lines = slots_report(series, "tiles", TURNS * STATES * setting.elems)
    if not options.smoke:
        append_row("infinity", {"part": "large", "config": _config(options), "sides": series, "goals": goals})
    others = f"{setting.units - 1} units of {setting.elems / 1e6:.1f} M parameters"
    title = f"Update, {others} and one of {setting.large} times as many, 1 rank, {options.rounds} rounds"
    return "\n".join([title, "", *lines])


def _lanes(found: dict[str, list[Any]]) -> list[str]:
    return [key.removesuffix(" busy_s") for key in found if key.endswith(" busy_s")]


def _busy(found: dict[str, list[Any]], lane: str) -> float:
    return float(median(found[f"{lane} busy_s"]))


def _config(options: argparse.Namespace) -> dict[str, Any]:
    return {key: value for key, value in vars(options).items() if key not in ("path", "smoke")}


if __name__ == "__main__":
    main()
