"""Runs that save again and again and are killed: python kill_cases.py FOLDER, or FOLDER KILLS SEED.

    this process                    ranks of a run, forked
    imports, starts no thread
    waits for `resumed`     <--     a group; resume=auto: which step, whether its bits are right, what was left lying
    sleeps a while                  begun 1, finished 1, begun 2 …
    SIGKILL to one, or both -->     the other is told, and ends

With KILLS, two ranks die at random. Without, one rank dies before each call in turn that changes the folder in a save,
until a save has no more of them. Prints as its last line, in JSON: the kills, and in `wrong` every broken promise.
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
from in_process import dzero as command
from torch import nn
from written_checkpoints import LATEST, LOCK, MANIFEST, body_of, names, raw

import dzero
from dzero import CheckpointConfig, Checkpointer

DEADLINE_S, SPAN_S = 120.0, 0.3
CHANGES = ("pwritev", "write", "fsync", "rename", "unlink", "rmdir")
Say = Callable[[Any], None]


def states(step: int, rank: int) -> torch.Tensor:
    """What a rank saves of a step: int32, more than a block of staging."""
    return torch.arange(150_000, dtype=torch.int32) + 1_000_003 * step + rank


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


def run_of(rank: int, ranks: int, folder: Path, store: str, dies_at: int | None = None) -> Callable[[Say], None]:
    """Resume, and save the next steps for ever; with `dies_at`, the next one, and die before that call."""

    def work(say: Say) -> None:
        timeout = timedelta(seconds=DEADLINE_S / 2)
        group = {"store": dist.FileStore(store, ranks), "rank": rank, "world_size": ranks}
        dist.init_process_group("gloo", timeout=timeout, **group)
        sharded = dzero.shard(nn.Linear(2, 2), stage=1, precision="fp32")
        config = CheckpointConfig(folder=str(folder), keep=1, staging_bytes=1 << 20)
        with Checkpointer(config, sharded, dzero.AdamW(sharded)) as checkpoints:
            resumed, step, wrong = checkpoints.resume("auto"), 0, list[str]()
            checkpoints.begin()
            if resumed is not None:
                step, wrong = resumed.step, [*resumed.notes]
                assert resumed.local is not None
                wrong += ["other bits"] if raw(resumed.local["a"]) != raw(states(step, rank)) else []
            if rank == 0 and step:
                wrong += [f"left: {each}" for each in {*os.listdir(folder)} - {LOCK, LATEST, *names(folder)}]
                verified = command("inspect", folder, "--verify")
                wrong += [verified.stderr] if verified.returncode else []
            say(["resumed", step, wrong])
            die_before(dies_at)
            for following in count(step + 1):
                say(["begun", following])
                checkpoints.save(following, {}, {"a": states(following, rank)})
                checkpoints.finish()
                say(["finished", following])
                if dies_at is not None:
                    return

    return work


def die_before(number: int | None) -> None:
    """Have this process be killed before that call, of those that change files."""
    calls = count(1)

    def instead(really: Any) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            at = args[0] if isinstance(args[0], str | os.PathLike) else os.readlink(f"/proc/self/fd/{args[0]}")
            if not str(at).startswith("pipe:") and next(calls) == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return really(*args, **kwargs)

        return call

    for name in CHANGES if number is not None else ():
        setattr(os, name, instead(getattr(os, name)))


def heard(pipe: int) -> list[Any]:
    """All that a child said and will say."""
    with os.fdopen(pipe, "rb") as lines:
        return [json.loads(line) for line in lines if line.endswith(b"\n")]


def ended(child: int) -> bool:
    """Whether it ends by itself in time; else it is killed."""
    until_s = time.monotonic() + DEADLINE_S
    while time.monotonic() < until_s:
        if os.waitpid(child, os.WNOHANG)[0]:
            return True
        time.sleep(0.002)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False


def left_in(folder: Path) -> set[str]:
    """What a kill left behind, in words."""
    found = set()
    for name in os.listdir(folder) if folder.exists() else []:
        if name.startswith("step_") and name.endswith(".partial"):
            found.add("all but a name" if (folder / name / MANIFEST).exists() else "half a checkpoint")
        elif name.endswith(".going"):
            found.add("half of an old one")
        elif name == f"{LATEST}.partial":
            found.add("half a pointer")
    there = names(folder)
    if there and (not (folder / LATEST).exists() or body_of(folder / LATEST)["name"] != there[-1]):
        found.add("a checkpoint that is not the latest yet")
    return found or {"nothing"}


def killed(folder: Path, draw: random.Random | None, number: int) -> tuple[list[int], list[list[Any]], list[str]]:
    """Whom a kill hit, what each rank said before, and what is wrong."""
    ranks, wrong = 1 if draw is None else 2, list[str]()
    with tempfile.TemporaryDirectory() as stores:
        dies_at = number if draw is None else None
        children = [forked(run_of(rank, ranks, folder, f"{stores}/store", dies_at)) for rank in range(ranks)]
        victims, first = [0], b""
        if draw is not None:
            first = os.read(children[0][1], 1 << 16)
            time.sleep(draw.uniform(0, SPAN_S))
            victims = draw.choice([[0], [1], [0, 1], [1, 0]])
            for rank in victims:
                os.kill(children[rank][0], signal.SIGKILL)
        hung = [rank for rank, (child, _) in enumerate(children) if not ended(child)]
        wrong += [f"rank {rank} did not end" for rank in hung]
        said = [heard(pipe) for _, pipe in children]
        said[0] = [json.loads(line) for line in first.splitlines()] + said[0]
    for rank, of_rank in enumerate(said):
        expected = () if rank in victims else ("CheckpointError", "RankUnavailable")
        wrong += [w[1] for w in of_rank if w[0] == "ended" and not any(name in w[1] for name in expected)]
        wrong += [each for words in of_rank if words[0] == "resumed" for each in words[2]]
    return victims, said, wrong


def main(folder: Path, kills: int | None, seed: int) -> dict[str, Any]:
    threads = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("Threads:"))
    assert threads.split() == ["Threads:", "1"], "a process with threads must not be forked"
    draw, wrong, left = None if kills is None else random.Random(seed), list[str](), Counter[str]()
    finished = begun = died = 0
    for number in count(1):
        victims, said, told = killed(folder, draw, number)
        steps = [words[1] for words in said[0] if words[0] == "resumed"]
        if steps and not finished <= steps[0] <= begun:
            told.append(f"steps to {finished} had finished, {begun} had begun, and a run resumed from {steps[0]}")
        if not steps:
            told.append(f"rank 0 did not begin: {said[0]}")
        wrong += [f"kill {number} of {victims}: {each}" for each in told]
        finished = max([finished, *(words[1] for words in said[0] if words[0] == "finished")])
        begun = max([begun, *(words[1] for words in said[0] if words[0] == "begun")])
        left.update(left_in(folder))
        if wrong or number == kills or (kills is None and said[0][-1][0] == "finished"):
            break
        died = number
    return {"kills": died if kills is None else kills, "steps": finished, "left": dict(left), "wrong": wrong}


if __name__ == "__main__":
    kills, seed = (int(sys.argv[2]), int(sys.argv[3])) if len(sys.argv) > 2 else (None, 0)
    print(json.dumps(main(Path(sys.argv[1]), kills, seed)), flush=True)
