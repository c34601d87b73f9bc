"""How much memory does fragmentation take in a training step, and would an arena (ZeRO section 6.3) save any of it?

    python benchmarks/fragmentation.py
    python benchmarks/fragmentation.py --smoke

A model of CUDA's caching allocator (`simulator/caching_allocator.py`) replays what rank 0 of 64 allocates and frees in
simulated steps: the real code on fake tensors, two microbatches of one sequence per step, bf16 parameters, fp32 masters
and moments. No GPU takes part. `live` is the most that is allocated at once: no allocator needs less.

    side             what is replayed
    native           segments of fixed size, torch's default
    expandable       expandable segments, which dzero's launcher sets
    + activations    what forward keeps for backward is in an arena: one allocation, made before the first step
    + gradients      reduced gradients are in an arena
    + both           each of them is in an arena

    figure           meaning
    reserved         the most that the allocator takes if the device has more than enough, over live
    device           the smallest device on which all steps succeed, over live; for that cached memory is given back
    give-backs       how many times, of all steps together, which each time waits for the device

    lengths          tokens of a sequence: 4096 in every microbatch; or varied, drawn from 1,024 to 4,096, one 4,096
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from report import append_row, table, write_table
from simulator.allocations import (
    ARENA,
    Allocation,
    Trace,
    is_activation,
    is_reduced_grad,
    record,
    replay,
    smallest_device,
    with_arena,
)
from simulator.scenario import Scenario

from dzero.models.config import ModelConfig
from dzero.parallel.config import BlockConfig
from dzero.zero.config import ZeroConfig

CONF = Path(__file__).parent.parent / "conf" / "model"
LLAMA_7B = {"vocab_size": 32000, "hidden_size": 4096, "layers": 32, "heads": 32, "ffn_size": 11008, "max_tokens": 4096}
MODELS = ("llama_1b", "llama_7b")
ARENAS: dict[str, tuple[Callable[[Allocation], bool], ...]] = {
    "": (),
    " + activations": (is_activation,),
    " + gradients": (is_reduced_grad,),
    " + both": (is_activation, is_reduced_grad),
}
SIDES = [*product(("native", "expandable"), ARENAS)]
CASE = ("model", "stage", "recompute", "lengths")
RANKS, MICROBATCHES, SHORTEST, LONGEST = 64, 2, 1024, 4096
CONSTANT_STEPS, VARIED_STEPS = 2, 3
PRECISION = 0.005
"""Of the smallest device, over live."""
WORTH = 0.01
"""Saving, over live, below which an arena is not worth its code."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["llama_7b"])
    parser.add_argument("--stages", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--recompute", nargs="+", default=["full", "none"], help="activation checkpoints of blocks")
    parser.add_argument("--lengths", nargs="+", choices=["4096", "varied"], default=["4096", "varied"])
    parser.add_argument("--layers", type=int, help="instead of the model's")
    parser.add_argument("--seed", type=int, default=0, help="of the lengths")
    parser.add_argument("--processes", type=int, default=2, help="that share the cases")
    parser.add_argument("--smoke", action="store_true", help="seconds: two layers, nothing is written")
    options = parser.parse_args()
    if options.smoke:
        small: dict[str, Any] = {"models": ["llama_1b"], "stages": [3], "recompute": ["full"], "layers": 2}
        vars(options).update(small | {"lengths": ["varied"]})
    cases = [*product(options.models, options.stages, options.recompute, options.lengths)]
    if options.smoke:
        print(report([measured(options, case) for case in cases]))
        return
    with ProcessPoolExecutor(options.processes) as pool:
        rows = [*pool.map(partial(measured, options), cases)]
    config = {key: value for key, value in vars(options).items() if key not in ("smoke", "processes")}
    append_row("fragmentation", {"config": config | {"ranks": RANKS, "microbatches": MICROBATCHES}, "rows": rows})
    write_table("fragmentation", report(rows))


def measured(options: argparse.Namespace, case: tuple[str, int, str, str]) -> dict[str, Any]:
    """Row of one case."""
    model, stage, recompute, lengths = case
    settings: Any = LLAMA_7B if model == "llama_7b" else OmegaConf.to_container(OmegaConf.load(CONF / f"{model}.yaml"))
    if options.layers:
        settings["layers"] = options.layers
    scenario = Scenario(
        model=ModelConfig(**settings),
        ranks=RANKS,
        sequences=1,
        tokens=LONGEST,
        accumulate=MICROBATCHES,
        zero=ZeroConfig(stage=stage),
        block=BlockConfig(activation_checkpoint=recompute),
    )
    trace = record(scenario, steps_of(lengths, options.seed))
    sides = {allocator + arena: figures(trace, allocator == "expandable", arena) for allocator, arena in SIDES}
    return {**dict(zip(CASE, case, strict=True)), "events": len(trace.events), "live": trace.peak, "sides": sides}


def figures(trace: Trace, expandable: bool, arena: str) -> dict[str, int]:
    """Bytes of one side."""
    step = int(trace.peak * PRECISION)
    for chosen in ARENAS[arena]:
        trace = with_arena(trace, chosen)
    roomy = replay(trace, expandable=expandable)
    device, give_backs = smallest_device(trace, expandable=expandable, step=step)
    return {
        "arenas": sum(each.allocation.bytes for each in trace.events if each.allocation.kind == ARENA),
        "allocated": roomy.peak_allocated,
        "reserved": roomy.peak_reserved,
        "unused": roomy.unused_at_peak,
        "device": device,
        "give_backs": give_backs,
    }


def steps_of(lengths: str, seed: int) -> list[list[int]]:
    """Tokens of the microbatches of each step."""
    if lengths != "varied":
        return [[int(lengths)] * MICROBATCHES] * CONSTANT_STEPS
    drawn = random.Random(seed)
    steps = [[drawn.randint(SHORTEST, LONGEST) for _ in range(MICROBATCHES)] for _ in range(VARIED_STEPS)]
    steps[VARIED_STEPS // 2][0] = LONGEST
    return steps


def report(rows: list[dict[str, Any]]) -> str:
    """Tables, and what arenas save at most."""
    sides = [allocator + arena for allocator, arena in SIDES]
    over_live = {"Reserved over live": "reserved", "Smallest device over live": "device"}
    texts = []
    for title, figure in over_live.items():
        cells = [
            [*(row[key] for key in CASE), f"{row['live'] / 2**30:.2f}"]
            + [f"{row['sides'][side][figure] / row['live']:.3f}" for side in sides]
            for row in rows
        ]
        texts.append(f"{title}\n\n{table([*CASE, 'live, GiB', *sides], cells)}")
    cells = [[*(row[key] for key in CASE), *(row["sides"][side]["give_backs"] for side in sides)] for row in rows]
    texts.append(f"Give-backs on the smallest device\n\n{table([*CASE, *sides], cells)}")
    return "\n".join([*texts, *(saved(rows, figure) for figure in over_live.values())])


def saved(rows: list[dict[str, Any]], figure: str) -> str:
    """What the best arena saves of expandable segments, in the case where it saves most."""
    gains = []
    for row in rows:
        sides = {side: each[figure] / row["live"] for side, each in row["sides"].items() if "expandable" in side}
        plain = sides.pop("expandable")
        best = min(sides, key=lambda side: sides[side])
        gains.append((plain - sides[best], best, ", ".join(str(row[key]) for key in CASE)))
    gain, side, case = max(gains)
    worth = sum(each > WORTH for each, *_ in gains)
    return (
        f"Beside expandable segments, the best arena saves of {figure} at most {gain:.1%} of live ({side}: {case}); "
        f"more than {WORTH:.0%} in {worth} of {len(gains)} cases.\n"
    )


if __name__ == "__main__":
    main()
