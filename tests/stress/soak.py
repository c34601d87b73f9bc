"""A long run, whose memory, descriptors, threads and files must not grow: python soak.py FOLDER STEPS SETTING...

    two ranks of a trainer, forked        a sample of each every `EVERY` steps: RSS, descriptors, threads, files
    this process                          compares the least of the last quarter with the least of the third

The last line is JSON: by what a rank has more per 1,000 steps, for the rank that grows most. Evaluation and checkpoints
are part of the run. Event files grow by design, up to 10,000 points, and are not written.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from kill_cases import Say, forked
from rows import per_1000
from small_runs import settled, write_text

from dzero.config import RunConfig
from dzero.monitor.sinks import Monitor
from dzero.trainer.trainer import Trainer

EVERY = 50
WHAT = ("rss_mib", "descriptors", "threads", "files")


def sample(folder: Path) -> list[float]:
    """What this process has now, and how many files there are below `folder`."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    counts = [len(os.listdir(f"/proc/self/{kind}")) for kind in ("fd", "task")]
    return [pages * os.sysconf("SC_PAGE_SIZE") / 2**20, *counts, sum(len(files) for _, _, files in os.walk(folder))]


def run_of(rank: int, config: RunConfig, store: str, folder: Path) -> Callable[[Say], None]:
    """A run that says what it has."""

    def work(say: Say) -> None:
        group = {"store": dist.FileStore(store, 2), "rank": rank, "world_size": 2}
        dist.init_process_group("gloo", timeout=timedelta(seconds=300), **group)
        torch.set_num_threads(1)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        trainer, step = Trainer(config, folder, torch.device("cpu")), Monitor.step

        def stepped(self: Monitor, record: Any) -> None:
            step(self, record)
            if record.step % EVERY == 0:
                say([record.step, *sample(folder)])

        Monitor.step = stepped  # type: ignore[method-assign]
        trainer.run()

    return work


def main() -> None:
    folder, steps = Path(sys.argv[1]), int(sys.argv[2])
    folder.mkdir(parents=True)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    settings = [*sys.argv[3:], f"train.steps={steps}", "monitor.tensorboard=false", "launch.workers=2"]
    saves = [f"checkpoint.folder={folder / 'checkpoints'}", f"checkpoint.every={max(1, steps // 50)}"]
    evaluates = [f"train.evaluate_every_steps={max(1, steps // 50)}", "train.evaluate_batches=2"]
    config = settled(write_text(folder / "words.txt"), *settings, *saves, *evaluates)
    ranks = [forked(run_of(rank, config, str(folder / "store"), folder)) for rank in range(2)]
    most = dict.fromkeys(WHAT, float("-inf"))
    for child, says in ranks:
        with os.fdopen(says) as lines:
            rows = [json.loads(line) for line in lines]
        os.waitpid(child, 0)
        if rows[-1][0] == "ended":
            sys.exit(rows[-1][1])
        for column, what in enumerate(WHAT, 1):
            most[what] = max(most[what], per_1000([row[0] for row in rows], [row[column] for row in rows]))
    print(json.dumps({"steps": steps, "per_1000_steps": {what: round(each, 3) for what, each in most.items()}}))


if __name__ == "__main__":
    main()
