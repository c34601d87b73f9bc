"""Run the tests marked `full`, file by file, for as long as there is time; begin where the last landings left off.

    python .ci/full.py MINUTES

The order rotates by commit, so that a few landings see all of them. What there was no time for is listed.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).parents[1]
AT_ONCE = 4
STEP = 5
"""Files by which the order moves on with each commit: as many as a landing surely has time for."""
LATE_S = 8 * 60
"""Seconds that files may take beyond the end: some take a quarter of an hour on a crowded machine."""
NOTHING_COLLECTED = 5
MARKS = re.compile(r"mark\.(full|product)\b")


PYTEST = [sys.executable, "-m", "pytest", "-n2", "--dist=loadfile", "-m", "full and not slow and not gpu"]


def run(line: list[str], until_s: float) -> int | None:
    """Return the exit code; None if there was no time to finish, and the process with all that it started was ended."""
    process = subprocess.Popen(line, cwd=ROOT, start_new_session=True)
    try:
        return process.wait(max(1.0, until_s - time.monotonic()))
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(10)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return None


def main() -> None:
    until_s = time.monotonic() + 60 * float(sys.argv[1])
    files = sorted(str(path) for path in (ROOT / "tests").rglob("test_*.py") if MARKS.search(path.read_text()))
    commits = int(subprocess.check_output(["git", "-C", str(ROOT), "rev-list", "--count", "HEAD"], text=True))
    start = STEP * commits % max(1, len(files))
    files = files[start:] + files[:start]
    failed, longest_s = False, 0.0
    while files and time.monotonic() + longest_s < until_s:
        began_s, now, files = time.monotonic(), files[:AT_ONCE], files[AT_ONCE:]
        print("full:", *(Path(each).name for each in now), flush=True)
        code = run([*PYTEST, *now], until_s + LATE_S)
        if code is None:
            files = now + files
            break
        failed |= code not in (0, NOTHING_COLLECTED)
        longest_s = max(longest_s, time.monotonic() - began_s)
    if files:
        print("no time for:", *(Path(each).name for each in files))
    sys.exit(failed)


if __name__ == "__main__":
    main()
