"""What each test costs: seconds, processor time of all that it starts, Python processes, imports of torch.

    python benchmarks/suite_costs.py FILE [words for pytest]

runs the tests and appends a line of JSON per test to FILE. For that time a line in the environment's site-packages lets
every Python process that starts say so. Then it prints the sums by folder and the costliest files; without a run, for a
FILE that exists: `python benchmarks/suite_costs.py FILE --table`.

This file is the pytest plugin too. A worker of xdist has processes of its own, whose time is read from /proc when a
test ends; a process that outlives the test counts where its time passes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import time
from collections import defaultdict
from collections.abc import Generator
from pathlib import Path

TOLD = "DZERO_SUITE_COSTS"
HZ = os.sysconf("SC_CLK_TCK")
TOP = 40
HOOK = f"""
import os, sys
if "{TOLD}" in os.environ:
    class Told:
        def find_spec(self, name, path=None, target=None):
            if name == "torch":
                sys.meta_path.remove(self)
                tell("torch")
    def tell(what):
        test = os.environ.get("PYTEST_CURRENT_TEST", "").rsplit(" (", 1)[0]
        with open(os.environ["{TOLD}"] + ".starts", "a") as file:
            file.write(what + "\\t" + test + "\\n")
    tell("start")
    sys.meta_path.insert(0, Told())
"""


def processor_s(root: int) -> float:
    """User and system time of a process, of its living descendants, and of those they waited for."""
    children: dict[int, list[int]] = defaultdict(list)
    used: dict[int, float] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                words = Path("/proc", entry, "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            children[int(words[1])].append(int(entry))
            used[int(entry)] = sum(int(word) for word in words[11:15]) / HZ
    found, left = 0.0, [root]
    while left:
        pid = left.pop()
        found += used.get(pid, 0.0)
        left += children[pid]
    return found


def pytest_runtest_protocol(item: object, nextitem: object) -> Generator[None, object, object]:
    """Around each test, in the process that runs it."""
    before_s, began_s = processor_s(os.getpid()), time.monotonic()
    done = yield
    found = {
        "test": item.nodeid,  # type: ignore[attr-defined]
        "wall_s": round(time.monotonic() - began_s, 3),
        "processor_s": round(max(0.0, processor_s(os.getpid()) - before_s), 2),
    }
    with open(os.environ[TOLD], "a") as file:
        file.write(json.dumps(found) + "\n")
    return done


try:
    import pytest

    pytest_runtest_protocol = pytest.hookimpl(wrapper=True)(pytest_runtest_protocol)
except ImportError:
    pass


def table(file: Path) -> None:
    """Print sums by folder, and the costliest files."""
    tests = [json.loads(line) for line in file.read_text().splitlines()]
    starts: dict[tuple[str, str], int] = defaultdict(int)
    for line in Path(f"{file}.starts").read_text().splitlines():
        what, _, test = line.partition("\t")
        starts[what, test.partition("::")[0]] += 1
    for title, key in (("folder", lambda name: str(Path(name).parent)), ("file", lambda name: name)):
        sums: dict[str, list[float]] = defaultdict(lambda: [0.0] * 5)
        for test in tests:
            found = sums[key(test["test"].partition("::")[0])]
            found[0] += 1
            found[1] += test["wall_s"]
            found[2] += test["processor_s"]
        for (what, name), count in starts.items():
            sums[key(name) if name else "collection"][3 if what == "start" else 4] += count
        print(f"\n| {title} | tests | seconds | processor seconds | processes | imports of torch |")
        print("|---|---|---|---|---|---|")
        ordered = sorted(sums.items(), key=lambda each: -each[1][1])
        total = [sum(each[column] for _, each in ordered) for column in range(5)]
        for name, each in [("all", total), *ordered[:TOP]]:
            print(f"| {name} | {each[0]:.0f} | {each[1]:.0f} | {each[2]:.0f} | {each[3]:.0f} | {each[4]:.0f} |")


def main() -> None:
    file = Path(sys.argv[1]).absolute()
    if sys.argv[2:] == ["--table"]:
        return table(file)
    hook = Path(sysconfig.get_path("purelib"), "zz_suite_costs.pth")
    hook.write_text("import sys; exec(" + repr(HOOK) + ", {})\n")
    try:
        env = os.environ | {TOLD: str(file), "PYTHONPATH": str(Path(__file__).parent)}
        line = [sys.executable, "-m", "pytest", "-p", "suite_costs", *sys.argv[2:]]
        began_s = time.monotonic()
        subprocess.run(line, env=env, check=False)
        print(f"{time.monotonic() - began_s:.0f} s")
    finally:
        hook.unlink()
    table(file)
    return None


if __name__ == "__main__":
    main()
