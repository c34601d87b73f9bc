"""What does each factoring of four ranks cost, against the same built by hand from torch's APIs?

    python benchmarks/parallel.py
    python benchmarks/parallel.py --only dp2.tp2 pp4
    python benchmarks/parallel.py --smoke

Four gloo ranks of one thread each, cut over dp, cp, tp, pp and ep (parallel_sides.py), each factoring by itself with
its sides interleaved (harness.py). More ranks than cores share them, so the seconds say who does more, not how fast
four machines would be. Ranks that share their sequences read the same batch: a step of dp ranks has dp of them. With
pp a batch is as many microbatches as it has sequences. Those by hand of ep train the same mixture.

Goal: seconds and peak memory at most 1.02 of what is built by hand.
"""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import asdict, replace
from pathlib import Path
from statistics import mean, median
from typing import Any

from harness import Measured, measure
from parallel_sides import FACTORINGS, RANKS, SIDES
from report import append_row, plot_bars, table, write_table
from stats import ratio_of_medians
from workload import Workload

BOUND, HEADS = 1.02, 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=2, help="per side and round")
    parser.add_argument("--samples", type=int, default=4, help="sequences per data-parallel rank and step")
    parser.add_argument("--tokens", type=int, default=128, help="of a sequence")
    parser.add_argument(
        "--only",
        nargs="+",
        choices=[str(each) for each in FACTORINGS],
        help="these factorings; the table keeps the others",
    )
    parser.add_argument("--smoke", action="store_true", help="two rounds; nothing is written")
    options = parser.parse_args()
    workload = Workload(samples=options.samples, tokens=options.tokens, heads=HEADS)
    rounds = 2 if options.smoke else options.rounds
    config = {
        **asdict(workload),
        "ranks": RANKS,
        "threads": 1,
        "clipping": None,
        "grad": "bf16",
        "steps": options.steps,
    }
    for cut in FACTORINGS:  # one by one: so many processes fit no memory
        if options.only and str(cut) not in options.only:
            continue
        print(cut, flush=True)
        names = [side.name for side in SIDES.values() if side.cut == cut]
        own = replace(workload, model="moe") if cut.ep > 1 else workload
        results = measure(names, own, rounds=rounds, steps=options.steps, ranks=RANKS, module="parallel_sides")
        if options.smoke:
            print(_text(workload, results))
        else:
            sides = {side: asdict(each) for side, each in results.items()}
            _show(workload, append_row("parallel", {"config": config, "sides": sides}), config)


def _show(workload: Workload, rows: Path, config: dict[str, Any]) -> None:
    """Table and plot of all that was measured so far."""
    results = _latest(rows, config)
    write_table("parallel", _text(workload, results))
    plot_bars(
        "parallel",
        f"four gloo ranks on {os.cpu_count()} cores",
        {
            "tokens/s": {side: _tokens_per_s(workload, each) for side, each in results.items()},
            "peak memory added, MiB per rank": {side: each.peak_bytes / 2**20 for side, each in results.items()},
        },
    )


def _latest(rows: Path, config: dict[str, Any]) -> dict[str, Measured]:
    """Of every side what was measured last with this configuration; pairs are always of one run."""
    found: dict[str, Any] = {}
    for row in map(json.loads, rows.read_text().splitlines()):
        if row["config"] == config:
            found |= row["sides"]
    return {name: Measured(**found[name]) for name in SIDES if name in found}


def _tokens_per_s(workload: Workload, each: Measured) -> float:
    return SIDES[each.side].cut.dp * workload.step_tokens / median(each.step_s)


def _text(workload: Workload, results: dict[str, Measured]) -> str:
    header = ["ranks", "stage", "tokens/s", "by hand", "seconds, of those by hand", "processor time", "peak MiB",
              "by hand", "of it", "last losses", "by hand", "met"]  # fmt: skip
    rows = []
    for name, own in results.items():
        side = SIDES[name]
        if side.by == "hand":
            continue
        hand = results[replace(side, by="hand").name]
        ratio, memory = ratio_of_medians(own.step_s, hand.step_s), own.peak_bytes / hand.peak_bytes
        rows.append(
            [
                str(side.cut).replace(".", " "),
                side.stage,
                f"{_tokens_per_s(workload, own):.0f}",
                f"{_tokens_per_s(workload, hand):.0f}",
                ratio,
                f"{median(own.cpu_s) / median(hand.cpu_s):.2f}",
                f"{own.peak_bytes / 2**20:.0f}",
                f"{hand.peak_bytes / 2**20:.0f}",
                f"{memory:.2f}",
                f"{mean(own.losses[-4:]):.3f}",
                f"{mean(hand.losses[-4:]):.3f}",
                "yes" if max(ratio.value, memory) <= BOUND else "no",
            ]
        )
    return table(header, rows)


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    main()
