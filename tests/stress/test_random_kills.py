"""SIGKILL at random moments of real training runs: no checkpoint that was reported as saved is ever lost.

DZERO_KILLS=100 pytest -m slow tests/stress/test_random_kills.py
                                                writes benchmarks/results/checkpoint_random_kills.json
"""

from __future__ import annotations

import os
import random
import re
import signal
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from in_process import dzero as command
from rows import SMALL, WAYS, count, words, write_row
from small_runs import write_text
from train_runs import running
from written_checkpoints import names

SEED, SPAN_S, STARTING = 0, 2.0, 0.2
"""`STARTING`: part of the kills that fall anywhere after the start; the others fall after a first step."""


@dataclass
class Told:
    """What a way of training is known to have done, over all its runs."""

    saved: int = 0
    losses: dict[str, str] = field(default_factory=dict)


def kill(way: str, told: Told, folder: Path, text: Path, draw: random.Random) -> tuple[str, list[str]]:
    """Start `train.py`, and kill its launcher, rank 0 or rank 1: whom, and what is wrong with what is left."""
    shelf = folder.parent / f"way_{[*WAYS].index(way)}"
    saving = ["train.steps=100000", "checkpoint.keep=2", "resume=auto", f"checkpoint.folder={shelf}"]
    wrong: list[str] = []
    with running(folder, text, *SMALL, *words(way, folder.parent), *saving) as run:
        if draw.random() >= STARTING:
            run.until(r"^step=\d+ loss=")
        time.sleep(draw.uniform(0, SPAN_S))
        victim = draw.choice([run.process.pid, *run.workers()])
        whom = "the launcher" if victim == run.process.pid else "a rank"
        os.kill(victim, signal.SIGKILL)
        run.end()
        log = run.log
    if resumed := re.search(r"resumed from .*, after step (\d+)", log):
        if int(resumed[1]) < told.saved:
            wrong.append(f"went on from {resumed[1]}, {told.saved} was reported as saved")
    elif told.saved and re.search(r"^step=", log, re.MULTILINE):
        wrong.append(f"began anew, {told.saved} was reported as saved")
    for step, loss in re.findall(r"^step=(\d+) loss=(\S+)", log, re.MULTILINE):
        if told.losses.setdefault(step, loss) != loss:
            wrong.append(f"step {step} has loss {loss}, before {told.losses[step]}")
    wrong += [text for text in ("PASSED OVER", "NOT SAVED") if text in log]
    told.saved = max([told.saved, *(int(step) for step in re.findall(r"saved .*/step_(\d+)", log))])
    if names(shelf) and (found := command("inspect", shelf, "--verify")).returncode:
        wrong.append(found.stderr)
    if told.saved > 1 and len(names(shelf)) < 2:
        wrong.append(f"keep=2, and {names(shelf)} are left")
    return whom, [f"{way}: {each}" for each in wrong]


@pytest.mark.slow
def test_no_kill_loses_a_checkpoint_that_was_reported_as_saved(tmp_path: Path) -> None:
    kills, draw, text = count("KILLS", 100), random.Random(SEED), write_text(tmp_path / "words.txt")
    told, whom, wrong = {way: Told() for way in WAYS}, Counter[str](), list[str]()
    for number in range(kills):
        way = [*WAYS][number % len(WAYS)]
        victim, broken = kill(way, told[way], tmp_path / str(number), text, draw)
        whom[victim] += 1
        wrong += [f"kill {number}: {each}" for each in broken]
    question = "Does a training run that is killed at any moment lose a checkpoint that it had reported as saved?"
    saved = {way: each.saved for way, each in told.items()}
    figures = {"seed": SEED, "killed": dict(whom), "wrong": wrong, "steps_saved": saved}
    write_row("checkpoint_random_kills", question, __file__, {"KILLS": kills}, **figures)
    assert wrong == []
