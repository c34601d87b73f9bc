"""What does each factoring of four ranks cost, against the same built by hand from torch's APIs?

    python benchmarks/parallel.py
    python benchmarks/parallel.py --smoke

Four gloo ranks of one thread each: dp x tp of 4 x 1, 2 x 2 and 1 x 4, at stages 2 and 3. The sides:
benchmarks/parallel_sides.py; how they are interleaved: benchmarks/harness.py. More ranks than cores share them, so the
seconds say who does more, not how fast four machines would be. Ranks of tp read the same batch: a step of dp ranks has
dp of them.

Goal: seconds and peak memory at most 1.02 of what is built by hand.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import asdict
from statistics import median

from harness import Measured, measure
from parallel_sides import FACTORINGS, NAMES, RANKS, parts_of
from report import append_row, plot_bars, table, write_table
from stats import ratio_of_medians
from workload import Workload

BOUND, HEADS = 1.02, 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=2, help="per side and round")
    parser.add_argument("--samples", type=int, default=2, help="sequences per data-parallel rank and step")
    parser.add_argument("--smoke", action="store_true", help="one factoring, two rounds; nothing is written")
    options = parser.parse_args()
    workload = Workload(samples=options.samples, heads=HEADS)
    rounds = 2 if options.smoke else options.rounds
    results: dict[str, Measured] = {}
    for dp, tp in FACTORINGS[1:2] if options.smoke else FACTORINGS:  # one by one: so many processes fit no memory
        names = [name for name in NAMES if parts_of(name)[2:] == (dp, tp)]
        results |= measure(names, workload, rounds=rounds, steps=options.steps, ranks=RANKS, module="parallel_sides")
    text = _text(workload, results)
    if options.smoke:
        print(text)
        return
    config = {**asdict(workload), "ranks": RANKS, "threads": 1, "clipping": None, "steps": options.steps}
    append_row("parallel", {"config": config, "sides": {side: asdict(each) for side, each in results.items()}})
    write_table("parallel", text)
    plot_bars(
        "parallel",
        f"{workload.model}, four gloo ranks on {os.cpu_count()} cores",
        {
            "tokens/s": {side: _tokens_per_s(workload, each) for side, each in results.items()},
            "peak memory added, MiB per rank": {side: each.peak_bytes / 2**20 for side, each in results.items()},
        },
    )


def _tokens_per_s(workload: Workload, each: Measured) -> float:
    return parts_of(each.side)[2] * workload.step_tokens / median(each.step_s)


def _text(workload: Workload, results: dict[str, Measured]) -> str:
    header = [
        "stage",
        "dp x tp",
        "tokens/s",
        "by hand",
        "seconds, of those by hand",
        "peak MiB",
        "by hand",
        "of it",
        "met",
    ]
    rows = []
    for side, own in results.items():
        by, stage, dp, tp = parts_of(side)
        if by != "dzero":
            continue
        hand = results[side.replace("dzero", "hand")]
        ratio, memory = ratio_of_medians(own.step_s, hand.step_s), own.peak_bytes / hand.peak_bytes
        rows.append(
            [
                stage,
                f"{dp} x {tp}",
                f"{_tokens_per_s(workload, own):.0f}",
                f"{_tokens_per_s(workload, hand):.0f}",
                ratio,
                f"{own.peak_bytes / 2**20:.0f}",
                f"{hand.peak_bytes / 2**20:.0f}",
                f"{memory:.2f}",
                "yes" if max(ratio.value, memory) <= BOUND else "no",
            ]
        )
    return table(header, rows)


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    main()
