"""What a process has more of after ten thousand steps, or after it made the same thing hundreds of times: nothing.

DZERO_STEPS=10000 DZERO_CYCLES=300 pytest -m slow tests/stress/test_soak.py
                                                writes benchmarks/results/soak.json and soak_cycles.json
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

import pytest
from made_anew import KINDS, cycles, of_process, resources
from made_anew import WHAT as OF_CYCLES
from pool import Pool
from rows import WAYS, count, per_1000, words, write_row
from small_runs import write_text
from train_runs import running

SOAKED = ("stage 0, device", "stage 2, host", "stage 3, everything on disk")
WHAT = ("descriptors", "threads", "rss_mib", "files")
MOST_RSS_MIB = 0.5
MOST_OF_CYCLES_MIB = 3.0
"""A process group that torch makes and destroys leaves 0.4 MiB per 1,000 times, and each Checkpointer has one."""


def sample(pid: int, folder: Path) -> list[float]:
    """What a process has now, and how many files there are below `folder`."""
    return [*of_process(pid), sum(len(files) for _, _, files in os.walk(folder))]


def grown_in(folder: Path, steps: int, way: str) -> dict[str, float]:
    """What a rank of a run has more of per 1,000 steps, for the rank that grows most; the run saves and evaluates."""
    (disk := folder / "disk").mkdir(parents=True)
    settings = [*words(way, disk), f"train.steps={steps}", "monitor.log_every_steps=50", "launch.workers=2"]
    settings += [f"checkpoint.folder={folder / 'checkpoints'}", f"checkpoint.every={max(1, steps // 50)}"]
    settings += [f"train.evaluate_every_steps={max(1, steps // 50)}", "train.evaluate_batches=2"]
    with running(folder, write_text(folder / "words.txt"), *settings) as run:
        run.until(r"^step=\d+ loss=")
        samples: dict[int, list[list[float]]] = {pid: [] for pid in run.workers()}
        while run.process.poll() is None:
            for pid, rows in samples.items():
                with suppress(FileNotFoundError, ProcessLookupError):  # it has ended
                    rows.append([run.steps[-1], *sample(pid, folder)])
            time.sleep(0.5)
        assert run.end() == 0, run.log
    assert len(samples) == 2
    most = dict.fromkeys(WHAT, float("-inf"))
    for rows in samples.values():
        for column, what in enumerate(WHAT, 1):
            grown = per_1000([int(row[0]) for row in rows], [row[column] for row in rows])
            most[what] = max(most[what], round(grown, 3))
    return most


@pytest.mark.slow
def test_nothing_grows_in_ten_thousand_steps(tmp_path: Path) -> None:
    steps = count("STEPS", 10_000)
    found = {WAYS[way]: grown_in(tmp_path / str(number), steps, way) for number, way in enumerate(SOAKED)}
    question = "What has a process more of per 1,000 steps, in the last quarter of a long run?"
    write_row("soak", question, __file__, {"STEPS": steps}, per_1000_steps=found)
    for way, grown in found.items():
        assert grown.pop("rss_mib") <= MOST_RSS_MIB, way
        assert max(grown.values()) <= 0.01, way


def grown(rank: int, ranks: int, kind: str, number: int, folder: Path) -> dict[str, float]:
    """What this rank has more of per 1,000 cycles, in the last quarter."""
    found = [resources(folder) for _ in cycles(kind, number, folder)]
    columns = zip(*found, strict=True)
    return {what: per_1000(range(1, number + 1), each) for what, each in zip(OF_CYCLES, columns, strict=True)}


@pytest.mark.slow
def test_nothing_grows_in_hundreds_of_cycles(pool: Pool, tmp_path: Path) -> None:
    number, found = count("CYCLES", 300), {}
    (warm := tmp_path / "warm").mkdir()
    pool.run(grown, 2, next(iter(KINDS)), number, warm, timeout_s=3600)  # what a new process loads and keeps
    for kind in KINDS:
        (folder := tmp_path / str(len(found))).mkdir()
        ranks = pool.run(grown, 2, kind, number, folder, timeout_s=3600)
        found[kind] = {what: round(max(rank[what] for rank in ranks), 3) for what in OF_CYCLES}
    question = "What has a process more of per 1,000 times that it makes something, in the last quarter?"
    write_row("soak_cycles", question, __file__, {"CYCLES": number}, per_1000_cycles=found)
    for kind, more in found.items():
        assert more.pop("rss_mib") <= MOST_OF_CYCLES_MIB, kind
        assert max(more.values()) <= 0.01, kind
