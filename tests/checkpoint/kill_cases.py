"""Runs that save again and again and are killed at random: python kill_cases.py FOLDER KILLS SEED.

    this process                    two ranks of a run, forked             a reader, forked
    imports, starts no thread
    waits for `opening`     <--     a gloo group; the folder is taken
    sleeps a while                  begun 1, finished 1, begun 2 …
    SIGKILL to one, or both -->     the other is told, and ends
    notes what is left                                                     what a run would resume from, bit by bit;
                                                                           so is all that has a checkpoint's name
    next                            what was left is gone before a save

Prints as its last line, in JSON: the kills, what each left, and in `wrong` every promise that was broken.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from shelves import entry, raw

from dzero import CheckpointConfig
from dzero.checkpoint.box import Box
from dzero.checkpoint.format import MANIFEST
from dzero.checkpoint.lineage import Lineage
from dzero.checkpoint.rank_consensus import RankConsensus
from dzero.checkpoint.reader import Checkpoint
from dzero.checkpoint.saver import Saver
from dzero.checkpoint.selection import candidates
from dzero.checkpoint.store import LATEST, LOCK, CheckpointStore, manifest_at

RANKS, ROWS, SAVES, DEADLINE_S = 2, 1000, 12, 60.0
Say = Callable[[Any], None]


def states(step: int) -> torch.Tensor:
    """What step `step` holds: int32 [ROWS, 301], of which a rank has half the rows; 3 blocks in all."""
    return (torch.arange(ROWS * 301, dtype=torch.int32) + 1_000_003 * step).view(ROWS, 301)


def forked(work: Callable[[Say], None]) -> tuple[int, int]:
    """A child that does `work`; its number, and where what it says can be read, a line of JSON each."""
    ours, theirs = os.pipe()
    if (child := os.fork()) == 0:
        os.close(ours)

        def say(what: Any) -> None:
            os.write(theirs, json.dumps(what).encode() + b"\n")

        try:
            work(say)
        except BaseException:
            say(["ended", traceback.format_exc()])
        finally:
            os._exit(0)
    os.close(theirs)
    return child, ours


def run_of(rank: int, folder: Path, store: str, start: int, name: str = "") -> Callable[[Say], None]:
    """Save the steps from `start` on, for ever, as a run that resumed from the checkpoint `name`."""

    def work(say: Say) -> None:
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(store, RANKS),
            rank=rank,
            world_size=RANKS,
            timeout=timedelta(seconds=DEADLINE_S),
        )
        agreement = RankConsensus(str(folder))
        agreement.agree()
        say(["opening"])
        with Saver(CheckpointConfig(folder=str(folder), staging_bytes=1 << 20), agreement) as saver:
            manifest = manifest_at(folder / name) if name else None
            lineage = Lineage().resumed(0) if manifest is None else manifest.origin.resumed(manifest.step)
            saver.claim(lineage, folder / name if name else None)
            if rank == 0 and (
                left := [
                    name for name in os.listdir(folder) if name not in (LOCK, LATEST, *CheckpointStore(folder).names())
                ]
            ):
                say(["left", left])
            for step in count(start):
                say(["begun", step])
                part, tensor = entry("a", states(step), Box((rank * ROWS // RANKS, 0), (ROWS // RANKS, 301)))
                saver.save(step, lambda part=part: {"a": part}, lambda put, tensor=tensor: put("a", tensor), {})  # type: ignore[misc]
                saver.finish()
                say(["finished", step])

    return work


def reader_of(folder: Path) -> Callable[[Say], None]:
    """Say which step a run would resume from; read every checkpoint that has a name."""

    def work(say: Say) -> None:
        shelf, notes, steps = CheckpointStore(folder), list[str](), {"": 0}
        for name in shelf.names():
            with Checkpoint(folder / name) as checkpoint:
                steps[name] = checkpoint.manifest.step
                assert sum(checkpoint.verify()) == sum(index.file_bytes for index in checkpoint.indexes)
                assert raw(checkpoint.read("a", Box.whole((ROWS, 301)))) == raw(states(steps[name])), name
        name = [*candidates(shelf, notes), ""][0]
        say(["resumes", steps[name], notes, name])

    return work


def heard(pipe: int) -> list[Any]:
    """All that a child said and will say."""
    with os.fdopen(pipe, "rb") as lines:
        return [json.loads(line) for line in lines if line.endswith(b"\n")]


def held_up(child: int) -> str:
    """Where it is if it does not end by itself in time, and is killed; nothing if it does."""
    until_s = time.monotonic() + DEADLINE_S
    while time.monotonic() < until_s:
        if os.waitpid(child, os.WNOHANG)[0]:
            return ""
        time.sleep(0.002)
    threads = sorted(Path(f"/proc/{child}/task").iterdir())
    where = [f"{(each / 'comm').read_text()[:-1]}: {(each / 'wchan').read_text()}" for each in threads]
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return ", ".join(where)


def left_in(folder: Path) -> set[str]:
    """What a kill left behind, in words."""
    shelf, found = CheckpointStore(folder), set()
    for name in os.listdir(folder) if folder.exists() else []:
        if name.startswith("step_") and name.endswith(".partial"):
            found.add("all but a name" if (folder / name / MANIFEST).exists() else "half a checkpoint")
        elif name.endswith(".going"):
            found.add("half of an old one")
        elif name == f"{LATEST}.partial":
            found.add("half a pointer")
    names = shelf.names()
    if names and names[-1] != shelf.latest():
        found.add("a checkpoint that is not the latest yet")
    return found or {"nothing"}


def span_of(saves: int) -> float:
    """Seconds that a run needs for so many, at the pace that this machine has now."""
    with tempfile.TemporaryDirectory() as alone:
        ranks = [forked(run_of(rank, Path(alone) / "shelf", f"{alone}/store", 1)) for rank in range(RANKS)]
        began_s = 0.0
        with os.fdopen(ranks[0][1], "rb") as lines:
            for words in map(json.loads, lines):
                if words == ["opening"]:
                    began_s = time.monotonic()
                elif words == ["finished", saves]:
                    break
            took_s = time.monotonic() - began_s
        for child, _ in ranks:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        os.close(ranks[1][1])
    return took_s


def killed(
    folder: Path, draw: random.Random, done: int, name: str, span_s: float
) -> tuple[str, set[str], int, str, list[str]]:
    """One kill of a run that resumed from step `done`, the checkpoint `name`.

    Whom, what was left, the step and the checkpoint to resume from, what is wrong.
    """
    wrong: list[str] = []
    with tempfile.TemporaryDirectory() as stores:
        ranks = [forked(run_of(rank, folder, f"{stores}/store", done + 1, name)) for rank in range(RANKS)]
        first = os.read(ranks[0][1], len(b'["opening"]\n'))
        if first != b'["opening"]\n':
            wrong.append(f"rank 0 did not begin: {first!r}")
        time.sleep(draw.uniform(0, span_s))
        victims = draw.choice([[0], [1], [0, 1], [1, 0]])
        for rank in victims:
            os.kill(ranks[rank][0], signal.SIGKILL)
        where = [held_up(child) for child, _ in ranks]
        wrong += [f"rank {n} did not end after a kill of {victims}; {at}" for n, at in enumerate(where) if at]
        said, other = (heard(pipe) for _, pipe in ranks)
    left = left_in(folder)
    finished = max([done, *(words[1] for words in said if words[0] == "finished")])
    begun = max([done, *(words[1] for words in said if words[0] == "begun")])
    wrong += [f"a new run found {words[1]}" for words in said + other if words[0] == "left"]
    for rank, each in enumerate((said, other)):
        texts = [words[1] for words in each if words[0] == "ended"]
        expected = ("CheckpointError", "RankUnavailable")
        wrong += [f"rank {rank}: {t}" for t in texts if rank in victims or not any(name in t for name in expected)]
    reader, pipe = forked(reader_of(folder))
    (words,) = heard(pipe)
    os.waitpid(reader, 0)
    if words[0] != "resumes" or words[2] or not finished <= words[1] <= begun:
        wrong.append(f"steps to {finished} had finished, {begun} had begun, and then {words}")
        return "", left, done, name, wrong
    return "one rank" if len(victims) == 1 else "all ranks", left, words[1], words[3], wrong


def main(folder: Path, kills: int, seed: int) -> dict[str, Any]:
    draw, step, name, wrong = random.Random(seed), 0, "", list[str]()
    whom, what, start_s = Counter[str](), Counter[str](), time.monotonic()
    threads = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("Threads:"))
    assert threads.split() == ["Threads:", "1"], "a process with threads must not be forked"
    span_s = span_of(SAVES)
    for number in range(kills):
        victims, left, step, name, told = killed(folder, draw, step, name, span_s)
        whom[victims] += 1
        what.update(left)
        wrong += [f"kill {number}: {each}" for each in told]
    return {
        "kills": kills,
        "steps": step,
        "killed": dict(whom),
        "left": dict(what),
        "wrong": wrong,
        "span_s": round(span_s, 2),
        "s": round(time.monotonic() - start_s, 1),
    }


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))), flush=True)
