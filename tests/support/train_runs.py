"""Real runs of train.py to be hurt: started in a session of their own, watched through their log, ended for certain."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from processes import listen, new_tag, tagged
from small_runs import ROOT, SMALL

SECONDS = 240.0  # of a crowded machine; an idle one takes a 20th
SMALLEST = [*SMALL.split(), "train.evaluate_batches=1", "monitor.tensorboard=false", "monitor.log_every_steps=1"]
TORCHRUN = ("-m", "torch.distributed.run")


class Run:
    """`python [launcher] train.py settings` in `folder`; `log`: all it wrote so far."""

    def __init__(self, folder: Path, data: Path, settings: Sequence[str], launcher: Sequence[str], prefix: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._log = folder / "log.txt"
        env = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "HYDRA_FULL_ERROR")}
        self._tag = new_tag()
        line = [*prefix.split(), sys.executable, *launcher, str(ROOT / "train.py")]
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                [*line, *SMALLEST, f"data.path={data}", *settings],
                cwd=folder,
                env=env | self._tag,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=listen if launcher or prefix else None,  # then it starts cold
            )

    @property
    def log(self) -> str:
        return self._log.read_text()

    @property
    def steps(self) -> list[int]:
        """In the log, in its order."""
        return [int(step) for step in re.findall(r"^step=(\d+) loss=", self.log, re.MULTILINE)]

    def workers(self) -> list[int]:
        """Process ids, in the order of local ranks."""
        return [
            each.pid
            for each in tagged(self._tag)
            if each.name.startswith("dzero rank ") or (each.parent == self.process.pid and "train.py" in each.words)
        ]

    def until(self, pattern: str, seconds: float = SECONDS) -> float:
        """Wait for a line of the log; the seconds it took."""
        began_s = time.monotonic()
        while not re.search(pattern, self.log, re.MULTILINE):
            ended = self.process.poll() is not None and not re.search(pattern, self.log, re.MULTILINE)
            assert not ended, f"ended with {self.process.returncode} before {pattern!r}:\n{self.log}"
            assert time.monotonic() - began_s < seconds, f"no {pattern!r} within {seconds} s:\n{self.log}"
            time.sleep(0.02)
        return time.monotonic() - began_s

    def end(self, seconds: float = SECONDS) -> int:
        """The exit code."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"did not end within {seconds} s:\n{self.log}") from None

    def named(self, name: str) -> int:
        """The process with this name."""
        (pid,) = [each.pid for each in tagged(self._tag) if each.name == name]
        return pid

    def left(self) -> list[int]:
        """What is left of all that it started."""
        return [each.pid for each in tagged(self._tag)]


@contextmanager
def running(folder: Path, data: Path, *settings: str, launcher: Sequence[str] = (), prefix: str = "") -> Iterator[Run]:
    """A run, of which nothing is left afterwards."""
    run = Run(folder, data, settings, launcher, prefix)
    try:
        yield run
    finally:
        for pid in run.left():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        run.process.wait(SECONDS)
