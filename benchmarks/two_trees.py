"""Is this tree as fast as another one? The same steps, of both by turns.

    git worktree add ../before v0.1
    python benchmarks/two_trees.py ../before --rounds 20

Four pairs of processes (two gloo ranks of one thread each, stages 2 and 3, of either tree) are kept, and make two steps
in turn; every other round runs the other way round. Prints a table, and adds a row: seconds per step, the ratio of
medians, processor time, and the last loss, which is the same where the numbers are.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import IO

RANKS, STAGES, STEPS = 2, (2, 3), 2
HERE = Path(__file__).resolve().parent.parent
Reading = tuple[float, float, float]
"""Seconds, processor seconds, and loss of a step."""


class Side:
    """The ranks of one tree at one stage, which stand still between turns."""

    def __init__(self, tree: Path, stage: int, port: int) -> None:
        self._ranks = []
        for rank in range(RANKS):
            command = [sys.executable, __file__, "--rank", str(rank), "--stage", str(stage), "--port", str(port)]
            paths = {"PYTHONPATH": f"{tree}:{tree}/benchmarks", "OMP_NUM_THREADS": "1"}
            streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            self._ranks.append(subprocess.Popen([*command, str(tree)], env=os.environ | paths, text=True, **streams))
        for process in self._ranks:
            assert out_of(process.stdout).readline() == "ready\n", f"{tree}: a rank did not start"
        self.readings: list[Reading] = []

    def turn(self, *, counts: bool = True) -> None:
        """Make `STEPS` steps."""
        for process in self._ranks:
            into = out_of(process.stdin)
            into.write("go\n")
            into.flush()
        told = [[float(word) for word in out_of(process.stdout).readline().split()] for process in self._ranks]
        if counts:
            self.readings.append((told[0][0], sum(each[1] for each in told) / RANKS, told[0][2]))

    def end(self) -> None:
        for process in self._ranks:
            out_of(process.stdin).close()
            process.wait()


def out_of(stream: IO[str] | None) -> IO[str]:
    assert stream is not None
    return stream


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path, help="the other tree, e.g. a worktree of an older commit")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--port", type=int, default=29700)
    for name in ("--rank", "--stage"):
        parser.add_argument(name, type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        run_rank(options.other, options.rank, options.stage, options.port)
        return
    trees = {"other": options.other.resolve(), "this": HERE}
    places = [(name, stage) for stage in STAGES for name in trees]
    sides = {key: Side(trees[key[0]], key[1], options.port + index) for index, key in enumerate(places)}
    for side in sides.values():
        side.turn(counts=False)
    for number in range(options.rounds):
        for key in places if number % 2 else reversed(places):
            sides[key].turn()
    for side in sides.values():
        side.end()
    tell(sides)


def tell(sides: dict[tuple[str, int], Side]) -> None:
    from report import append_row, table

    rows, found = [], {}
    for stage in STAGES:
        other, this = (
            [median(each) for each in zip(*sides[name, stage].readings, strict=True)] for name in ("other", "this")
        )
        last = [sides[name, stage].readings[-1][2] for name in ("other", "this")]
        found[f"stage {stage}"] = {
            "other_s": other[0],
            "this_s": this[0],
            "tokens_per_s_ratio": other[0] / this[0],
            "cpu_ratio": other[1] / this[1],
            "same_loss": last[0] == last[1],
        }
        rows.append([f"stage {stage}", *(f"{value:.4g}" for value in found[f"stage {stage}"].values())])
    print(table(["", "other, s", "this, s", "tokens/s", "1 / processor time", "same loss"], rows))
    append_row("two_trees", {"config": {"ranks": RANKS, "threads": 1, "model": "21m", "tokens": 256}, "stages": found})


def run_rank(tree: Path, rank: int, stage: int, port: int) -> None:
    import torch
    import torch.distributed as dist
    from sides import SIDES
    from workload import Batches, Workload

    import dzero

    assert Path(dzero.__file__).is_relative_to(tree.resolve()), f"{dzero.__file__} is not of {tree}"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS)
    workload = Workload(samples=1, tokens=256)
    step, batches, made = SIDES[f"dzero_{stage}"](workload.build()), Batches(workload), 0
    print("ready", flush=True)
    for _ in sys.stdin:
        began_s, cpu_s = time.perf_counter(), time.process_time()
        for _ in range(STEPS):
            loss = step(batches.get(made, rank))
            made += 1
        dist.barrier()
        print((time.perf_counter() - began_s) / STEPS, (time.process_time() - cpu_s) / STEPS, loss.item(), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
