"""Real training runs that are killed at random and resumed: python kill_runs.py FOLDER KILLS SEED.

    this process                    two ranks of a trainer, forked
    imports, starts no thread
    waits for the first word  <--   a gloo group; resume=auto; "resumed" at which step
    sleeps a while                  a step, a save: "loss" of each step, "saved" for each checkpoint
    SIGKILL to one, or both   -->   the other is told, or is killed after it
    what is left: does every checkpoint with a name verify, and would a run resume from what was reported as saved?

Every way of training (rows.py) has a folder of its own, keep=2. A step that is made twice must have the same loss. The
last line is JSON: the kills, where they fell, and in `wrong` every promise that was broken.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from kill_cases import Say, forked, heard, left_in
from rows import SMALL, WAYS, words
from small_runs import settled, write_text

from dzero.checkpoint.reader import Checkpoint
from dzero.checkpoint.selection import candidates, step_of
from dzero.checkpoint.store import CheckpointStore
from dzero.config import RunConfig
from dzero.monitor.sinks import Monitor
from dzero.trainer.trainer import Trainer

DEADLINE_S, SPAN_S, STEPS = 300.0, 2.0, 100_000
STARTING = 0.2
"""Part of the kills that fall anywhere after the start; the others fall after a first step."""


@dataclass
class Told:
    """What a way of training is known to have done, over all its runs."""

    saved: int = 0
    losses: dict[int, float] = field(default_factory=dict)


def run_of(rank: int, config: RunConfig, store: str, folder: Path) -> Callable[[Say], None]:
    """A run that goes on for ever, and says what it does."""

    def work(say: Say) -> None:
        timeout = timedelta(seconds=DEADLINE_S)
        dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2, timeout=timeout)
        torch.set_num_threads(1)
        silence = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silence, 1)
        say(["began"])
        trainer, step = Trainer(config, folder, torch.device("cpu")), Monitor.step
        say(["resumed", trainer.done_steps])

        def note(_: Monitor, at: int, message: str) -> None:
            if message.startswith("saved "):
                say(["saved", step_of(message.rpartition("/")[2])])
            elif "NOT SAVED" in message or "PASSED OVER" in message:
                say(["wrong", message])

        def stepped(self: Monitor, record: Any) -> None:
            say(["loss", record.step, record.loss])
            step(self, record)

        Monitor.note, Monitor.step = note, stepped  # type: ignore[method-assign]
        trainer.run()

    return work


def until(pipe: int, word: str) -> list[Any]:
    """What a child says until it says `word`; all of it where it ends before."""
    data = b""
    while f'["{word}"'.encode() not in data or not data.endswith(b"\n"):
        if not (more := os.read(pipe, 65536)):
            break
        data += more
    return [json.loads(line) for line in data.splitlines(keepends=True) if line.endswith(b"\n")]


def ended(child: int, seconds: float) -> bool:
    """Whether it has ended by itself in time."""
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s:
        if os.waitpid(child, os.WNOHANG)[0]:
            return True
        time.sleep(0.005)
    return False


def left_whole(shelf: Path) -> Callable[[Say], None]:
    """Read every checkpoint that has a name; say what a run would resume from."""

    def work(say: Say) -> None:
        for name in CheckpointStore(shelf).names():
            with Checkpoint(shelf / name) as checkpoint:
                assert sum(checkpoint.verify()) > 0
        notes: list[str] = []
        names = candidates(CheckpointStore(shelf), notes)
        say(["whole", step_of(names[0]) if names else 0, len(names), notes])

    return work


def kill(way: str, told: Told, root: Path, text: Path, draw: random.Random) -> tuple[str, set[str], list[str]]:
    """One kill of a run of `way`: when it fell, what it left, what is wrong."""
    shelf, wrong = root / f"way_{[*WAYS].index(way)}", list[str]()
    of_way = [*words(way, root), "checkpoint.keep=2", f"checkpoint.folder={shelf}", "resume=auto"]
    config = settled(text, *SMALL, *of_way, f"train.steps={STEPS}", "train.evaluate_every_steps=100000")
    with tempfile.TemporaryDirectory() as stores:
        ranks = [forked(run_of(rank, config, f"{stores}/store", root)) for rank in range(2)]
        first = "began" if draw.random() < STARTING else "loss"
        heard_first = until(ranks[0][1], first)
        time.sleep(draw.uniform(0, SPAN_S))
        victims = draw.choice([[0], [1], [0, 1]])
        for rank in victims:
            os.kill(ranks[rank][0], signal.SIGKILL)
        for rank, (child, _) in enumerate(ranks):
            if not ended(child, 0.5 if rank not in victims else DEADLINE_S):
                os.kill(child, signal.SIGKILL)  # as a launcher does with those that wait for the dead
                os.waitpid(child, 0)
        said, _ = (heard(pipe) for _, pipe in ranks)
        said = heard_first + said
        if first not in {words[0] for words in heard_first}:
            wrong.append(f"rank 0 ended before its first {first}: {said}")
    moment = "while it started"
    for kind, *values in said:
        if kind == "resumed":
            moment = "while it trained"
            if values[0] < told.saved:
                wrong.append(f"went on from {values[0]}, {told.saved} was reported as saved")
        elif kind == "loss":
            if told.losses.setdefault(values[0], values[1]) != values[1]:
                wrong.append(f"step {values[0]} has loss {values[1]}, before {told.losses[values[0]]}")
        elif kind == "saved":
            told.saved = max(told.saved, values[0])
        elif kind == "wrong" or (
            kind == "ended" and not any(e in values[0] for e in ("RankUnavailable", "RuntimeError"))
        ):
            wrong.append(str(values[0]))
    reader, pipe = forked(left_whole(shelf))
    (words_of,) = heard(pipe)
    os.waitpid(reader, 0)
    if words_of[0] != "whole" or words_of[1] < told.saved or words_of[3]:
        wrong.append(f"step {told.saved} was reported as saved, and then {words_of}")
    if told.saved > 1 and words_of[2] < 2:
        wrong.append(f"keep=2, and {words_of[2]} are left")
    return moment, left_in(shelf), [f"{way}: {each}" for each in wrong]


def main(root: Path, kills: int, seed: int) -> dict[str, Any]:
    root.mkdir(parents=True, exist_ok=True)
    draw, text, began_s = random.Random(seed), write_text(root / "words.txt"), time.monotonic()
    told = {way: Told() for way in WAYS}
    moments, left, wrong, by_way = Counter[str](), Counter[str](), list[str](), Counter[str]()
    for number in range(kills):
        way = [*WAYS][number % len(WAYS)]
        moment, found, broken = kill(way, told[way], root, text, draw)
        moments[moment] += 1
        by_way[way] += 1
        left.update(found)
        wrong += [f"kill {number}: {each}" for each in broken]
    return {
        "seed": seed,
        "kills": kills,
        "lost_checkpoints": sum("reported as saved" in each for each in wrong),
        "wrong": wrong,
        "fell": dict(moments),
        "left": dict(left),
        "ways": dict(by_way),
        "steps_saved": {way: each.saved for way, each in told.items()},
        "seconds": round(time.monotonic() - began_s, 1),
    }


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))), flush=True)
