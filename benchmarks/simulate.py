"""How long, and how much memory, does it take to simulate one rank of a very large run?

    python benchmarks/simulate.py
    python benchmarks/simulate.py --ranks 1024 --models llama_70b

Each row is a process of its own: a 70 B and a 1 T llama on 1,024 and 16,384 ranks, bf16, blocks recomputed. Seconds are
those of the whole process, imports included, and of them the processor's; memory is its high-water mark (VmHWM).
Goal: under 60 s and 4 GiB. `peak` is what the simulation found for the rank, and when.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from report import append_row, table, write_table

BOUND_S, BOUND_BYTES = 60.0, 4 << 30
CONF = Path(__file__).parent.parent / "conf" / "model"
# 1.0 T parameters, as ZeRO-Infinity's table 1: 128 layers of 25,600 features and 160 heads.
ONE_T = {"vocab_size": 51200, "hidden_size": 25600, "layers": 128, "heads": 160, "ffn_size": 68096}
MODELS = ("llama_70b", "llama_1t")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=[*MODELS])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1024, 16384])
    parser.add_argument("--stage", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=4096, help="of the one sequence of a microbatch")
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--one", nargs=2, metavar=("MODEL", "RANKS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(simulated(options, options.one[0], int(options.one[1]))))
        return
    rows = [in_a_process(model, ranks) for model in options.models for ranks in options.ranks]
    config = {key: value for key, value in vars(options).items() if key != "one"}
    append_row("simulate", {"config": config, "rows": rows, "bound_s": BOUND_S, "bound_bytes": BOUND_BYTES})
    header = ["model", "ranks", "seconds", "of the processor", "memory, GiB", "within", "peak, GiB", "when"]
    cells = [
        [
            row["model"],
            f"{row['ranks']:,}",
            f"{row['wall_s']:.1f}",
            f"{row['cpu_s']:.1f}",
            f"{row['memory_bytes'] / 2**30:.2f}",
            "yes" if row["met"] else "no",
            f"{row['peak_bytes'] / 2**30:.1f}",
            row["when"],
        ]
        for row in rows
    ]
    title = f"stage {options.stage}, {options.accumulate} microbatches of {options.tokens} tokens, blocks recomputed"
    write_table("simulate", f"{title}\n\n{table(header, cells)}")


def in_a_process(model: str, ranks: int) -> dict[str, Any]:
    """One row; the arguments of this process hold there too."""
    began = time.perf_counter()
    command = [sys.executable, __file__, *sys.argv[1:], "--one", model, str(ranks)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    wall_s = time.perf_counter() - began
    row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return {**row, "wall_s": wall_s, "met": wall_s < BOUND_S and row["memory_bytes"] < BOUND_BYTES}


def simulated(options: argparse.Namespace, model: str, ranks: int) -> dict[str, Any]:
    """In this process, which imports only now what it then simulates with."""
    from omegaconf import OmegaConf
    from simulator.scenario import Scenario
    from simulator.simulate import simulate
    from simulator.storage_meter import KINDS

    from dzero.hardware import peak_rss_bytes
    from dzero.models.config import ModelConfig
    from dzero.parallel.config import BlockConfig
    from dzero.zero.config import ZeroConfig

    settings: Any = ONE_T if model == "llama_1t" else OmegaConf.to_container(OmegaConf.load(CONF / f"{model}.yaml"))
    result = simulate(
        Scenario(
            model=ModelConfig(**settings),
            ranks=ranks,
            sequences=1,
            tokens=options.tokens,
            accumulate=options.accumulate,
            zero=ZeroConfig(stage=options.stage),
            block=BlockConfig(activation_checkpoint="full"),
        )
    )
    return {
        "model": model,
        "ranks": ranks,
        "params": sum(param.elems for unit in result.shapes for param in unit.params),
        "cpu_s": sum(os.times()[:2]),
        "memory_bytes": peak_rss_bytes(),
        "peak_bytes": result.peak.total,
        "when": str(result.peak.where),
        "kinds": dict(zip(KINDS, result.peak.bytes, strict=True)),
        "actions": len(result.actions),
    }


if __name__ == "__main__":
    main()
