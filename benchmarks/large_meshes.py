"""Does a 70 B llama fit on dp 64 x tp 8, and one of 1 T on dp 32 x pp 16 x tp 8, and what would their ranks send?

    python benchmarks/large_meshes.py

Each row is one rank of a fake group, simulated in a process of its own: bf16, microbatches of one sequence of 4,096
tokens, blocks recomputed. Of the pipeline its first part, one in the middle, and the last. Goal: under 80 GB.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from report import append_row, table, write_table

CONF = Path(__file__).parent.parent / "conf" / "model"
BOUND_BYTES, TOKENS = 80_000_000_000, 4096


@dataclass(frozen=True)
class Run:
    """Of `model` on a mesh of so many ranks along each axis, `accumulate` microbatches; `part`: of its pipeline."""

    model: str
    dp: int
    tp: int
    stage: int
    accumulate: int
    pp: int = 1
    part: int = 0


RUNS = [
    Run("llama_70b", dp=64, tp=8, stage=3, accumulate=2),
    *(Run("llama_1t", dp=32, tp=8, pp=16, stage=2, accumulate=16, part=part) for part in (0, 7, 15)),
]


def main() -> None:
    if len(sys.argv) > 1:
        print(json.dumps(simulated(RUNS[int(sys.argv[1])])))
        return
    rows = []
    for number, run in enumerate(RUNS):
        done = subprocess.run([sys.executable, __file__, str(number)], stdout=subprocess.PIPE, text=True, check=True)
        rows.append({**asdict(run), **json.loads(done.stdout.splitlines()[-1])})
        print(rows[-1], flush=True)
    append_row("large_meshes", {"config": {"tokens": TOKENS}, "rows": rows})
    axes = [*dict.fromkeys(axis for row in rows for axis in row["sent_bytes"])]
    header = ["model", "mesh", "ranks", "stage", "part", "peak, GiB", "fits 80 GB", *(f"{a}, GiB" for a in axes), "s"]
    write_table("large_meshes", f"what one rank holds, and sends in a step\n\n{table(header, cells(rows, axes))}")


def cells(rows: list[dict[str, Any]], axes: list[str]) -> list[list[Any]]:
    """A line for each row; `axes`: phases and axes along which anything is sent."""
    return [
        [
            row["model"],
            f"dp {row['dp']} x tp {row['tp']}" + (f" x pp {row['pp']}" if row["pp"] > 1 else ""),
            f"{row['dp'] * row['tp'] * row['pp']:,}",
            row["stage"],
            row["part"],
            f"{row['peak_bytes'] / 2**30:.1f}",
            "yes" if row["peak_bytes"] < BOUND_BYTES else "no",
            *(f"{row['sent_bytes'].get(axis, 0) / 2**30:.2f}" for axis in axes),
            f"{row['wall_s']:.0f}",
        ]
        for row in rows
    ]


def simulated(run: Run) -> dict[str, Any]:
    """In this process, which imports only now what it then simulates with."""
    import yaml
    from simulator.scenario import Scenario
    from simulator.simulate import simulate

    from dzero.mesh_config import MeshConfig
    from dzero.models.config import ModelConfig
    from dzero.parallel.config import BlockConfig
    from dzero.zero.config import ZeroConfig

    began = time.perf_counter()
    scenario = Scenario(
        model=ModelConfig(**yaml.safe_load((CONF / f"{run.model}.yaml").read_text())),
        ranks=run.dp * run.tp * run.pp,
        sequences=1,
        tokens=TOKENS,
        accumulate=run.accumulate,
        zero=ZeroConfig(stage=run.stage),
        mesh=MeshConfig(dp=run.dp, tp=run.tp, pp=run.pp),
        block=BlockConfig(activation_checkpoint="full"),
    )
    found = simulate(scenario, part=run.part)
    sent: Counter[str] = Counter()
    for entry, traffic in found.traffic.items():
        sent[f"{entry.phase} {entry.axis}"] += traffic.sent_bytes
    return {"peak_bytes": found.peak.total, "sent_bytes": dict(sent), "wall_s": time.perf_counter() - began}


if __name__ == "__main__":
    main()
