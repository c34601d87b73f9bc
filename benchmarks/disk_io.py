"""How fast does the scratch store move bytes against fio on the same disk, and what do its checksums cost?

    python benchmarks/disk_io.py --path DIR --rounds 15

    side          what it runs
    dzero         DiskStore: one piece of --mib, blocks of 16 MiB, 8 threads, a checksum (xxh3) per block
    unchecked     the same without checksums
    fio_psync     fio --ioengine=psync, the same blocks, 8 jobs, each on its own eighth of the file
    fio_io_uring  fio --ioengine=io_uring, one job, --iodepth=8

All of it is direct I/O over files that have been written once before, from huge pages: fio has no option for them, so
its malloc is told (GLIBC_TUNABLES); without, it is half as fast. Within a round every side writes, then every side
reads, in shuffled order. fio's seconds are those that it reports for the transfer itself, without its start (whole ms);
ours are clock time from the call to the future's end. `CPU s` is our processor time per GB: the checksum shows there
even where the disk hides it. The goal is against the faster of fio's two engines, way by way.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from statistics import median
from typing import NamedTuple

import torch
from report import append_row, table, write_table
from stats import Goal, judge, ratio_of_medians

from dzero.offload.direct_io import Direction
from dzero.offload.disk import DiskStore
from dzero.offload.memory_pool import HostMemoryPool
from dzero.zero.offload_config import DiskConfig

GOALS = (
    Goal("speed", "dzero", "fio", 0.95),
    Goal("speed", "dzero", "unchecked", 0.95),
)
BLOCK_BYTES = 16 << 20
THREADS = 8
WAYS = tuple(Direction)


class Cost(NamedTuple):
    """Of one transfer of the sample."""

    clock_s: float
    cpu_s: float | None
    """Of this process; None for fio."""


Run = Callable[[Direction], Cost]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", default=tempfile.gettempdir(), help="a directory on the disk")
    parser.add_argument("--mib", type=int, default=1024, help=f"a multiple of {THREADS * BLOCK_BYTES >> 20}")
    parser.add_argument("--rounds", type=int, default=11)
    options = parser.parse_args()
    if shutil.which("fio") is None:
        sys.exit("fio is missing: apt-get install fio")
    count = options.mib << 20
    data = HostMemoryPool(count).lease(count, "sample").data
    data.view(torch.int64).random_()
    with tempfile.TemporaryDirectory(dir=options.path) as folder:
        config = DiskConfig(paths=[folder], block_bytes=BLOCK_BYTES, threads=THREADS)
        unchecked = DiskConfig(paths=[folder], block_bytes=BLOCK_BYTES, threads=THREADS, checksum=False)
        with DiskStore(config, {"sample": count}) as ours, DiskStore(unchecked, {"sample": count}) as without:
            if not ours.files[0].is_direct:
                sys.exit(f"{options.path} has no direct I/O: nothing to compare")
            sides: dict[str, Run] = {
                "dzero": lambda way: _ours(ours, data, way),
                "unchecked": lambda way: _ours(without, data, way),
                "fio_psync": lambda way: _fio(folder, count, way, "psync"),
                "fio_io_uring": lambda way: _fio(folder, count, way, "io_uring"),
            }
            costs = _measure(sides, options.rounds)
    _report(costs, count, options)


def _measure(sides: dict[str, Run], rounds: int) -> dict[Direction, dict[str, list[Cost]]]:
    """By way and side, round by round; the first, in which files get their data, is left out."""
    costs: dict[Direction, dict[str, list[Cost]]] = {way: {name: [] for name in sides} for way in WAYS}
    shuffle = random.Random(0)
    for turn in range(rounds + 1):
        for way in WAYS:
            for name in shuffle.sample(list(sides), len(sides)):
                cost = sides[name](way)
                if turn:
                    costs[way][name].append(cost)
    return costs


def _ours(store: DiskStore, data: torch.Tensor, way: Direction) -> Cost:
    start, cpu_start = time.perf_counter(), time.process_time()
    (store.write if way is Direction.WRITE else store.read)("sample", data).result()
    return Cost(time.perf_counter() - start, time.process_time() - cpu_start)


def _fio(folder: str, count: int, way: Direction, engine: str) -> Cost:
    jobs = THREADS if engine == "psync" else 1
    command = ["fio", "--name=peer", f"--filename={folder}/fio", f"--rw={way}", f"--bs={BLOCK_BYTES}", "--direct=1"]
    command += [f"--ioengine={engine}", f"--iodepth={1 if engine == 'psync' else THREADS}", f"--numjobs={jobs}"]
    command += [f"--size={count // jobs}", f"--offset_increment={count // jobs}", "--thread", "--group_reporting"]
    command += ["--mem=malloc", "--iomem_align=2m", "--output-format=json"]
    huge_pages = os.environ | {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
    said = subprocess.run(command, check=True, capture_output=True, text=True, env=huge_pages).stdout
    job = json.loads(said[said.index("{") :])["jobs"][0]
    if job["error"] or job[way]["io_bytes"] != count:
        raise RuntimeError(f"fio {engine} {way}: error {job['error']}, {job[way]['io_bytes']} of {count} bytes")
    return Cost(job[way]["runtime"] / 1e3, None)


def _report(costs: dict[Direction, dict[str, list[Cost]]], count: int, options: argparse.Namespace) -> None:
    rows, judged, verdicts, results = [], [], [], {}
    for way in WAYS:
        clock = {name: [cost.clock_s for cost in found] for name, found in costs[way].items()}
        # The better of fio's engines here, by its median: the goal is against that one.
        best = min((name for name in clock if name.startswith("fio")), key=lambda name: median(clock[name]))
        for name, seconds in clock.items():
            cpu = [cost.cpu_s for cost in costs[way][name] if cost.cpu_s is not None]
            cpu_per_gb = f"{median(cpu) / count * 1e9:.3f}" if cpu else ""
            speed = f"{count / median(seconds) / 1e9:.2f}"
            rows.append([way, name, speed, ratio_of_medians(clock[best], seconds), cpu_per_gb])
            results[f"{way} {name}"] = {"clock_s": seconds, "cpu_s": cpu}
        for goal in GOALS:
            if verdict := judge(goal, {**clock, "fio": clock[best]}, {}):
                verdicts.append({"way": way, **verdict.row()})
                told = f"{way}: {goal.side} / {best if goal.peer == 'fio' else goal.peer}"
                judged.append([told, goal.bound, verdict.ratio, "met" if verdict.met else "missed"])
    config = {"bytes": count, "rounds": options.rounds, "block_bytes": BLOCK_BYTES, "threads": THREADS}
    append_row("disk_io", {"config": config, "sides": results, "goals": verdicts, "fio": _fio_version()})
    title = f"{count / 2**20:.0f} MiB per transfer, {options.rounds} rounds, blocks of {BLOCK_BYTES >> 20} MiB"
    text = table(["way", "side", "GB/s", "speed over fio's best", "CPU s per GB"], rows)
    goals = table(["goal: speed of", "at least", "measured", ""], judged)
    write_table("disk_io", "\n".join([title, "", text, goals]))


def _fio_version() -> str:
    return subprocess.run(["fio", "--version"], capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    main()
