"""How long is it from Enter to the first step, to --help and to --cfg job?

    python benchmarks/startup.py --before COMMIT --rounds 7

Both sides run the same commands, in turn and shuffled within a round, after one round that is not counted: the tree of
another commit, from an archive in a temporary folder, and this tree. `first step` is the time until the line of step 1
arrives in a pipe; the run is then ended. `cold` is this tree's first step with an empty cache of compiled kernels. The
breakdown comes from one process that does what launcher, warm process and worker do, one after the other, with a model
of its own for one rank; there the launcher's part and the warm process's import overlap in a run.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from statistics import median

from report import append_row, table, write_table
from stats import ratio_of_medians

ROOT = Path(__file__).parents[1]
FIRST, HELP, CFG = "first step", "--help", "--cfg job"
COMMANDS = {FIRST: ["zero.stage=3", "train.steps=20"], HELP: ["--help"], CFG: ["--cfg", "job"]}
GOALS_S = {FIRST: 10.0, HELP: 2.0, CFG: 2.0}
LAPS = Path(__file__).parent / "startup_laps.py"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", required=True, metavar="COMMIT", help="the commit to compare with")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="dzero-startup-") as folder:
        trees = {"before": archived(options.before, Path(folder, "before")), "now": ROOT}
        took = rounds_of(trees, options.rounds, Path(folder))
        cold = [seconds(ROOT, FIRST, Path(folder), {"XDG_CACHE_HOME": f"{folder}/cold{each}"}) for each in range(3)]
        laps = breakdown(Path(folder))
    rows = [row_of(command, took, options.rounds) for command in COMMANDS]
    config = {"before": options.before, "rounds": options.rounds, "settings": COMMANDS[FIRST]}
    append_row("startup", {"config": config, "seconds": took, "cold_s": cold, "breakdown": laps, "rows": rows})
    header = ["command", "before, s", "now, s", "now / before", "goal, s", "met"]
    cells = [[str(row[key]) for key in ("command", "before", "now", "ratio", "goal", "met")] for row in rows]
    cells.append(["first step, kernels not compiled yet", "", f"{median(cold):.1f}", "", "", ""])
    cells += [[f"of it: {name}", "", f"{lap['wall_s']:.2f}", "", "", ""] for name, lap in laps.items()]
    title = "from Enter, medians; two gloo ranks on this machine's cores"
    write_table("startup", f"{title}\n\n{table(header, cells)}")


def archived(commit: str, folder: Path) -> Path:
    """Return a folder with the tree of a commit."""
    folder.mkdir()
    archive = subprocess.run(["git", "archive", commit], cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout
    subprocess.run(["tar", "x", "-C", str(folder)], input=archive, check=True)
    return folder


def rounds_of(trees: Mapping[str, Path], rounds: int, folder: Path) -> dict[str, dict[str, list[float]]]:
    """Return the seconds of every round, by command and side; the first round fills caches and is left out."""
    took: dict[str, dict[str, list[float]]] = {command: defaultdict(list) for command in COMMANDS}
    order = [(command, side) for command in COMMANDS for side in trees]
    shuffle = random.Random(0)
    for done in range(rounds + 1):
        shuffle.shuffle(order)
        for command, side in order:
            measured = seconds(trees[side], command, folder)
            if done:
                took[command][side].append(measured)
        print(f"round {done}/{rounds}", flush=True)
    return took


def seconds(tree: Path, command: str, folder: Path, env: Mapping[str, str] | None = None) -> float:
    """Return the seconds until the command has shown what it is asked for."""
    kept = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    began_s = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, str(tree / "train.py"), *COMMANDS[command]],
        cwd=folder,
        env={**kept, "PYTHONPATH": str(tree), **(env or {})},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if command == FIRST and line.startswith("step=1 "):
            took_s = time.perf_counter() - began_s
            process.send_signal(signal.SIGTERM)
            process.stdout.read()
            process.wait()
            return took_s
    if command == FIRST or process.wait() != 0:
        raise RuntimeError(f"{command} of {tree} failed")
    return time.perf_counter() - began_s


def breakdown(folder: Path) -> dict[str, dict[str, float]]:
    """Return wall and processor seconds of each part of a start, from a process of its own; the better of two."""
    found = []
    for _ in range(2):
        line = [sys.executable, str(LAPS), *COMMANDS[FIRST]]
        kept = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
        told = subprocess.run(line, cwd=folder, env=kept, check=True, stdout=subprocess.PIPE, text=True).stdout
        found.append(json.loads(told.splitlines()[-1]))
    best: dict[str, dict[str, float]] = min(found, key=lambda laps: sum(lap["wall_s"] for lap in laps.values()))
    return best


def row_of(command: str, took: Mapping[str, Mapping[str, list[float]]], rounds: int) -> dict[str, object]:
    before, now = took[command]["before"], took[command]["now"]
    ratio = str(ratio_of_medians(now, before)) if rounds > 1 else ""
    return {
        "command": command,
        "before": f"{median(before):.1f}",
        "now": f"{median(now):.1f}",
        "ratio": ratio,
        "goal": GOALS_S[command],
        "met": "yes" if median(now) <= GOALS_S[command] else "no",
    }


if __name__ == "__main__":
    main()
