"""The tests that need a GPU, with what came of each kept as it comes."""

from __future__ import annotations

import os
import signal
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from devices import Device
from gpu_findings import Findings

ROOT = Path(__file__).parent.parent
TEST_S, MOST_FAILURES, TEXT_CHARS = 90, 40, 4000
FIRST = ("test_inside_gpu_kernels.py",)
"""Of tests/gpu: what all others build on."""
RANKS = "test_four_ranks.py"
"""The others' process would wait for them, should they hang: so they have one of their own."""


def tests(device: Device, found: Findings) -> None:
    """Run those of one rank. Raises SystemExit where one failed or none ran."""
    words = [*map(str, paths()), "-m", "gpu", *side_by_side()]
    if not device.on_gpu:
        found.stand_in(
            "tests/gpu/test_one_gpu.py skips itself, and tests/estimate/test_forecast_nodes.py stands for the others"
        )
        words = [
            str(ROOT / "tests" / "gpu" / "test_one_gpu.py"),
            str(ROOT / "tests" / "estimate" / "test_forecast_nodes.py"),
            "-m",
            "not slow",
        ]
    _run(words, found)


def side_by_side() -> list[str]:
    """Return the words that let several processes share the GPU, where pytest-xdist is there and cores are many.

    Tests in other processes have no limit of `TEST_S` each: one that hangs ends with the step.
    """
    workers = min(7, (os.cpu_count() or 1) // 2)
    return ["-n", str(workers)] if workers > 1 and find_spec("xdist") is not None else []


def ranks(device: Device, found: Findings) -> None:
    """Run those of four ranks on one GPU. Raises SystemExit where one failed or none ran."""
    words = [str(ROOT / "tests" / "gpu" / RANKS), "-m", "gpu"]
    if not device.on_gpu:
        found.stand_in("four ranks of a staged group exchange CPU tensors, and train none")
        words = [str(ROOT / "tests" / "gpu" / "test_staged_group.py"), "-k", "every_collective"]
    _run(words, found)


def _run(words: list[str], found: Findings) -> None:
    os.chdir(ROOT)
    heard = Heard(found)
    words += [f"--rootdir={ROOT}", "-v", "-p", "no:cacheprovider", "-o", f"faulthandler_timeout={TEST_S + 30}"]
    code = pytest.main(words, plugins=[heard])
    heard.running = ""
    heard.tell()
    if code != 0:
        raise SystemExit(f"pytest ended with {code!r}")


def paths() -> list[Path]:
    """Return the files with tests that need a GPU, in the order in which they run; without those of four ranks."""
    marked = [path for path in sorted((ROOT / "tests").rglob("test_*.py")) if "pytest.mark.gpu" in path.read_text()]
    rank = {name: index for index, name in enumerate(FIRST)}
    return sorted((path for path in marked if path.name != RANKS), key=lambda path: rank.get(path.name, len(FIRST)))


class Heard:
    """A plugin of pytest that counts outcomes, keeps the text of failures, and ends what takes `TEST_S` here."""

    def __init__(self, found: Findings) -> None:
        self._found, self.running = found, ""
        self._counts: Counter[str] = Counter()
        self._failures: list[dict[str, str]] = []
        self._slowest: list[tuple[float, str]] = []

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """A test begins."""
        self.running = nodeid
        self.tell()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Any:
        """Raise in a test that takes too long; where it waits inside of C, it goes on, and the step is ended."""

        def late(number: int, frame: FrameType | None) -> None:
            raise TimeoutError(f"the test took more than {TEST_S} s")

        before = signal.signal(signal.SIGALRM, late)
        signal.alarm(TEST_S)
        try:
            return (yield)
        finally:
            signal.alarm(0)
            signal.signal(signal.SIGALRM, before)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A file that cannot be imported is a failure."""
        if report.failed:
            self._fail("error", report.nodeid, report.longreprtext)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A phase of a test has ended."""
        if report.failed:
            self._fail("failed" if report.when == "call" else "error", report.nodeid, report.longreprtext)
        elif report.when == "call" or report.skipped:
            self._counts[report.outcome] += 1
        if report.when == "call":
            self._slowest = sorted([*self._slowest, (report.duration, report.nodeid)])[-10:]

    def _fail(self, outcome: str, name: str, text: str) -> None:
        self._counts[outcome] += 1
        if len(self._failures) < MOST_FAILURES:
            self._failures.append({"test": name, "outcome": outcome, "text": text[-TEXT_CHARS:]})
        self.tell()

    def tell(self) -> None:
        """Keep what is known so far."""
        self._found.figures |= {"counts": dict(self._counts), "failures": self._failures, "running": self.running}
        self._found.figures["slowest_s"] = {name: round(seconds, 2) for seconds, name in reversed(self._slowest)}
        counts = ", ".join(f"{number} {outcome}" for outcome, number in sorted(self._counts.items())) or "none ran"
        self._found.finding = counts + (f"; in {self.running}" if self.running else "")
        self._found.write()
