"""How fast is a step, and how much memory does it take, against hand-written loops and DeepSpeed?

    python benchmarks/step_time.py --model 21m --rounds 15
    python benchmarks/step_time.py --model 118m --samples 1 --sides dzero_3 fsdp2_3 deepspeed_3

Two gloo ranks of one thread each. The sides: benchmarks/sides.py; how they are interleaved: benchmarks/harness.py.
Nobody clips; all reduce once per step (one microbatch), so dzero_1 is dzero_2 by the table.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import asdict
from statistics import median

from harness import RANKS, Measured, measure
from report import append_row, plot_bars, table, write_table
from sides import SIDES
from stats import Verdict, goals, judge
from workload import Workload

DEFAULT_SIDES = [
    *("ddp", "ddp_bf16", "fsdp2_2", "fsdp2_3", "fsdp2_2_bf16", "fsdp2_3_bf16"),
    *(f"deepspeed_{stage}" for stage in range(4)),
    *(f"dzero_{stage}" for stage in range(4)),
    *("dzero_2_remainder", "dzero_2_native", "dzero_3_native"),
]


def main() -> None:
    options = _options()
    workload = Workload(model=options.model, samples=options.samples, tokens=options.tokens)
    results = measure(options.sides, workload, rounds=options.rounds, steps=options.steps)
    step_s = {side: m.step_s for side, m in results.items()}
    peaks = {side: m.peak_bytes for side, m in results.items()}
    verdicts = [v for goal in goals() if (v := judge(goal, step_s, peaks)) is not None]
    append_row(
        "step_time",
        {
            "config": {**asdict(workload), "ranks": RANKS, "threads": 1, "clipping": None, "steps": options.steps},
            "sides": {side: asdict(measured) for side, measured in results.items()},
            "goals": [verdict.row() for verdict in verdicts],
        },
    )
    name = options.name or f"step_time_{options.model}_{workload.step_tokens}"
    write_table(name, _text(workload, results, verdicts))
    plot_bars(
        name,
        f"{options.model}, {workload.step_tokens} tokens per rank and step, {RANKS} gloo ranks",
        {
            "tokens/s": {side: _tokens_per_s(workload, m) for side, m in results.items()},
            "peak memory added, MiB per rank": {side: m.peak_bytes / 2**20 for side, m in results.items()},
        },
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=["21m", "118m"], default="21m")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=2, help="per side and round")
    parser.add_argument("--samples", type=int, default=4, help="sequences per rank and step")
    parser.add_argument("--tokens", type=int, default=256, help="per sequence")
    parser.add_argument("--name", help="of table and plot; default: step_time_<model>_<tokens per rank and step>")
    parser.add_argument("--sides", nargs="+", choices=list(SIDES), default=DEFAULT_SIDES, metavar="SIDE")
    return parser.parse_args()


def _tokens_per_s(workload: Workload, measured: Measured) -> float:
    return RANKS * workload.step_tokens / median(measured.step_s)


def _text(workload: Workload, results: dict[str, Measured], verdicts: list[Verdict]) -> str:
    header = ["side", "tokens/s", "s per step", "CPU s per step", "peak MiB", "rest MiB", "first loss", "last loss"]
    sides = table(header, [_side_row(workload, measured) for measured in results.values()])
    header = ["goal", "side", "against", "measured", "asked", "met"]
    return f"{sides}\n{table(header, [_goal_row(verdict) for verdict in verdicts])}"


def _side_row(workload: Workload, m: Measured) -> list[str]:
    return [
        m.side,
        f"{_tokens_per_s(workload, m):.0f}",
        f"{median(m.step_s):.3f}",
        f"{median(m.cpu_s):.3f}",
        f"{m.peak_bytes / 2**20:.0f}",
        f"{m.rest_bytes / 2**20:.0f}",
        f"{m.losses[0]:.4f}",
        f"{m.losses[-1]:.4f}",
    ]


def _goal_row(verdict: Verdict) -> list[str]:
    goal = verdict.goal
    asked = f"{'≤' if goal.what == 'memory' else '≥'} {goal.bound:.2f}"
    return [goal.what, goal.side, goal.peer, str(verdict.ratio), asked, "yes" if verdict.met else "no"]


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    main()
