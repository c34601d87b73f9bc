"""What do ZeRO++'s payloads and routes bring where nodes are joined by a slow link? Against DeepSpeed too.

    DS_ACCELERATOR=cpu python benchmarks/slow_links.py      # as root, on Linux, with iproute2

Two nodes of two gloo ranks each, which are network namespaces of this machine (benchmarks/network_nodes.py), joined by
a link of 100, 300 and 1,000 Mbit/s each way. Stage 3 in bf16 of a decoder of 8.2 M parameters, one microbatch of 128
tokens per rank and step. All sides train in turn at each rate in each round (benchmarks/slow_links_sides.py). Bytes are
those that the link counted, both ways, with the headers of packets; beside them what the formulas say without headers.
DeepSpeed keeps parameters of fewer than 100,000 elements whole by default; one side shards these too.
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median

from children import Children
from network_nodes import crossed_bytes, throttle, two_nodes
from report import append_row, plot_bars, table, write_table
from slow_links_sides import RANKS, SIDES, Decoder, serve
from stats import ratio_of_medians

RATES = (100, 300, 1000)
BASE = SIDES[0]
MB = 1e6


@dataclass
class Measured:
    """One side. By rate in Mbit/s: seconds per step and bytes per step of each round; losses of all steps in turn.

    Attributes:
        formula_bytes: Bytes of parameters and gradients that all ranks send to other nodes in a step, if known.
        error: First line of the error that ended the side.
    """

    formula_bytes: int | None = None
    error: str | None = None
    step_s: dict[int, list[float]] = field(default_factory=lambda: {rate: [] for rate in RATES})
    link_bytes: dict[int, list[float]] = field(default_factory=lambda: {rate: [] for rate in RATES})
    losses: list[float] = field(default_factory=list)

    @property
    def crossed(self) -> float:
        """Bytes per step that the link counted."""
        return median(each for counts in self.link_bytes.values() for each in counts)


def measure(names: list[str], workload: Decoder, rounds: int, steps: int) -> dict[str, Measured]:
    """Train all sides by turns."""
    found, started, order = {name: Measured() for name in names}, dict[str, Children](), random.Random(0)
    with tempfile.TemporaryDirectory() as folder, two_nodes() as nodes:
        try:
            for name in names:
                try:
                    started[name] = Children(RANKS, serve, nodes, name, workload, str(Path(folder) / name))
                except RuntimeError as error:
                    found[name].error = str(error).strip().splitlines()[0]
                    print(f"{name}: {found[name].error}", flush=True)
                    continue
                crossing = started[name].first
                found[name].formula_bytes = None if crossing[0] is None else sum(crossing)
            for done in range(rounds):
                for rate in order.sample(RATES, len(RATES)):
                    throttle(nodes, rate)
                    for name in order.sample([*started], len(started)):
                        before = crossed_bytes(nodes)
                        seconds, losses = zip(*started[name].ask(steps), strict=True)
                        found[name].link_bytes[rate].append((crossed_bytes(nodes) - before) / steps)
                        found[name].step_s[rate].append(max(seconds) / steps)
                        found[name].losses += [sum(each) / RANKS for each in zip(*losses, strict=True)]
                print(f"round {done + 1}/{rounds}", flush=True)
            for each in started.values():
                each.tell(None)
        finally:
            for each in started.values():
                each.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=2, help="per side, rate and round")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=[*SIDES], metavar="SIDE")
    options, workload = parser.parse_args(), Decoder()
    found = measure(options.sides, workload, options.rounds, options.steps)
    config = asdict(workload) | {"ranks": RANKS, "nodes": 2, "threads": 1, "steps": options.steps}
    append_row("slow_links", {"config": config, "sides": {name: asdict(each) for name, each in found.items()}})
    write_table("slow_links", text(found, workload))
    ran = {name: each for name, each in found.items() if each.error is None}
    panels = {"MB between nodes per step": {name: each.crossed / MB for name, each in ran.items()}}
    panels |= {
        f"tokens/s at {rate} Mbit/s": {name: tokens_per_s(workload, each, rate) for name, each in ran.items()}
        for rate in RATES
    }
    plot_bars("slow_links", "two nodes of two ranks, 8.2 M parameters, stage 3 in bf16", panels)


def tokens_per_s(workload: Decoder, measured: Measured, rate: int) -> float:
    return RANKS * workload.step_tokens / median(measured.step_s[rate])


def text(found: dict[str, Measured], workload: Decoder) -> str:
    """The table; ratios are to the first side, those of speed with their interval."""
    base = found.get(BASE)
    header = ["side", "MB between nodes per step", "by formula", "of exact's"]
    header += [f"tokens/s at {rate} Mbit/s" for rate in RATES] + ["loss of the first measured step", "of the last"]
    rows, errors = [], []
    for name, each in found.items():
        if each.error is not None:
            errors.append(f"{name}: {each.error}\n")
            continue
        formula = "-" if each.formula_bytes is None else f"{each.formula_bytes / MB:.2f}"
        row = [name, f"{each.crossed / MB:.2f}", formula, f"{each.crossed / base.crossed:.3f}" if base else "-"]
        for rate in RATES:
            ratio = f" ({ratio_of_medians(base.step_s[rate], each.step_s[rate])})" if base and each is not base else ""
            row.append(f"{tokens_per_s(workload, each, rate):.0f}{ratio}")
        rows.append([*row, f"{each.losses[0]:.4f}", f"{each.losses[-1]:.4f}"])
    return "\n".join([table(header, rows), *errors])


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    main()
