"""The first ten minutes on a GPU: what decides most, in one command, within a budget of time.

    python benchmarks/gpu_session.py                      all steps, in the order of gpu_steps.py
    python benchmarks/gpu_session.py --from profile       that step and those behind it, where time ran out before
    python benchmarks/gpu_session.py --only tests syncs   these
    python benchmarks/gpu_session.py --rehearse           all of its code on a CPU, tiny: figures mean nothing
    python benchmarks/gpu_session.py --keep FOLDER        put what such a run measured into benchmarks/results

Each step is a process of its own under its own limit of time, and what is left of `--budget-s`. One that fails, hangs
or crashes stops no other. The folder `--out` gets, after every step:

    session.json      every step's outcome, seconds, finding and figures; rows and tables of the benchmarks
    session.log       what the steps printed, the last MiB of each
    profile.json.gz   the trace, for https://ui.perfetto.dev
    *.png             pictures
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Any

import report
from gpu_findings import read
from gpu_steps import FINDINGS, INJECTED, RESULTS, STEPS
from report import append_row, circumstances, table

HERE = Path(__file__).parent
LEAST_S, GRACE_S, LOG_BYTES, MOST_PICTURES = 3.0, 3.0, 1 << 20, 4
REHEARSED = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "TRITON_INTERPRET": "1"}
"""Settings of a rehearsal's processes: several may share two cores, and no kernel runs but interpreted."""
PATIENCE = 4
"""Times a step's limit that its rehearsal may take, beside others on two cores and with kernels interpreted."""
Told = dict[str, Any]


class Ended(Exception):
    """A signal ends the session."""


def main() -> None:
    """Run the steps, or keep what a session found."""
    options = _options()
    if options.keep is not None:
        keep(options.keep)
        return
    out = _folder(options.out)
    with signals_end():
        told = session(options, out)
    print(f"\n{_table(told['steps'])}\n{out}")
    sys.exit(0 if all(step["outcome"] == "ok" for step in told["steps"]) else 1)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="a folder that is new or empty; default: one below outputs/")
    parser.add_argument("--budget-s", type=float, default=540, help="of all steps together")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--from", dest="first", choices=[*STEPS], help="begin with this step")
    which.add_argument("--only", nargs="+", choices=[*STEPS], help="run these steps")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, tiny")
    parser.add_argument(
        "--keep", type=Path, metavar="FOLDER", help="append its rows to benchmarks/results, run nothing"
    )
    parser.add_argument("--commit", default="", help="of this tree, where it is a copy without git's history")
    parser.add_argument("--inject", nargs="+", choices=[*INJECTED], default=[], help=argparse.SUPPRESS)
    return parser.parse_args()


def _folder(asked: Path | None) -> Path:
    """Return the output folder, which is this run's alone. Raises SystemExit where there is something in it."""
    out = asked or Path("outputs") / f"gpu_session-{datetime.now(UTC):%Y-%m-%d-%H-%M-%S-%f}"
    out.mkdir(parents=True, exist_ok=asked is not None)
    if any(out.iterdir()):
        raise SystemExit(f"--out {out} is not empty: name a new folder, so that no run writes over another's results")
    return out.resolve()


@contextmanager
def signals_end() -> Iterator[None]:
    """Raise `ForkExit` inside where the session is told to end, so that it still writes what it has."""

    def end(number: int, frame: FrameType | None) -> None:
        raise Ended(signal.Signals(number).name)

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def session(options: argparse.Namespace, out: Path) -> Told:
    """Run the steps that were asked for within the budget; write after each one."""
    names = list(options.only or STEPS)
    names = names[names.index(options.first) :] if options.first else names
    steps = [(name, {**STEPS, **INJECTED}[name]) for name in [*options.inject, *names]]
    report.COMMIT = options.commit
    told: Told = {"rehearsal": options.rehearse, "words": sys.argv[1:], "budget_s": options.budget_s}
    told |= {"circumstances": circumstances(), "steps": [], "rows": {}, "tables": {}}
    until, over = time.monotonic() + options.budget_s, ""
    with tempfile.TemporaryDirectory(prefix="dzero-gpu-session-") as work:
        for name, step in steps:
            limit_s = min(step.limit_s * (PATIENCE if options.rehearse else 1), until - time.monotonic() - GRACE_S)
            ended: Told = {"outcome": "not reached", "seconds": 0.0}
            if not over and limit_s >= LEAST_S:
                print(f"{name}: {step.question} (at most {limit_s:.0f} s)", flush=True)
                try:
                    ended = run(name, limit_s, Path(work), out, options)
                except Ended as signalled:
                    over = str(signalled)
                    ended = {"outcome": f"ended by {over}", "seconds": 0.0}
            found = read(Path(work) / name / FINDINGS)
            if not found["finding"]:  # what it said last, for want of a better
                found["finding"] = next(iter(reversed(ended.get("end", "").split("\n")[:-1])), "")[:200]
            told["steps"].append({"name": name, "question": step.question, **ended, **found})
            _collect(name, Path(work), out, told)
            last = told["steps"][-1]
            if last["outcome"] != "not reached":
                print(f"{name}: {last['outcome']} after {last['seconds']:.1f} s. {last['finding']}", flush=True)
            (out / "session.new").write_text(json.dumps(told, indent=1))
            os.replace(out / "session.new", out / "session.json")
    return told


def run(name: str, limit_s: float, work: Path, out: Path, options: argparse.Namespace) -> Told:
    """Run one step in a process group of its own, of which nothing is left; return how it ended, and after how long."""
    line = [sys.executable, str(HERE / "gpu_steps.py"), name, "--out", str(work / name), "--commit", options.commit]
    line += ["--device", "cpu" if options.rehearse else "cuda"]
    paths = os.pathsep.join(filter(None, [str(HERE.parent), os.environ.get("PYTHONPATH", "")]))
    env = {**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONPATH": paths, **(REHEARSED if options.rehearse else {})}
    log, start = work / f"{name}.log", time.monotonic()
    with log.open("wb") as written:
        process = subprocess.Popen(line, cwd=work, env=env, stdout=written, stderr=written, start_new_session=True)
    try:
        code = _wait(process, limit_s)
    finally:
        _end(process)
        _append(out / "session.log", name, log)
    outcome = "timed out" if code is None else "ok" if code == 0 else "failed"
    return {"outcome": outcome, "seconds": round(time.monotonic() - start, 2), "exit_code": code, "end": _end_of(log)}


def _wait(process: subprocess.Popen[bytes], limit_s: float) -> int | None:
    """Return the exit code, None where there is none within the limit. A process that ended is not reaped yet."""
    until = time.monotonic() + limit_s
    while time.monotonic() < until:
        ended = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is not None:
            return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
        time.sleep(0.05)
    return None


def _end(process: subprocess.Popen[bytes]) -> None:
    """End what is left of the process's group; its number is nobody else's until the process is reaped."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
        if _wait(process, GRACE_S) is None or _others(process.pid):
            os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _others(group: int) -> bool:
    """Whether processes of this group are alive beside its first, which has ended."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _, member = stat.read_text().rpartition(")")[2].split()[:3]
            if member == str(group) and state != "Z":
                return True
    return False


def _end_of(log: Path, count: int = 1500) -> str:
    return log.read_bytes()[-count:].decode(errors="replace")


def _append(whole: Path, name: str, log: Path) -> None:
    with whole.open("ab") as file:
        file.write(f"\n======== {name} ========\n".encode())
        file.write(log.read_bytes()[-LOG_BYTES:])


def _collect(name: str, work: Path, out: Path, told: Told) -> None:
    """Take over what a step left: rows and tables into the session's file, pictures and the trace into the folder."""
    for path in sorted((work / name / RESULTS).glob("*")):
        if path.suffix == ".jsonl":
            told["rows"].setdefault(path.stem, []).extend(map(json.loads, path.read_text().splitlines()))
        elif path.suffix == ".md":
            told["tables"][path.stem] = path.read_text()
        elif path.suffix == ".gz" or (path.suffix == ".png" and len([*out.glob("*.png")]) < MOST_PICTURES):
            shutil.copyfile(path, out / path.name)


def keep(folder: Path) -> None:
    """Append a session's rows to benchmarks/results, and put its tables and pictures there."""
    told = json.loads((folder / "session.json").read_text())
    if told["rehearsal"]:
        raise SystemExit(f"{folder} is a rehearsal on a CPU: its figures mean nothing, and are not kept")
    used = next((step["figures"]["circumstances"] for step in told["steps"] if step["figures"]), told["circumstances"])
    steps = [{key: step[key] for key in ("name", "outcome", "seconds", "finding", "figures")} for step in told["steps"]]
    ok = [step["name"] for step in steps if step["outcome"] == "ok"]
    finding = f"{len(ok)} of {len(steps)} steps ended well: {', '.join(ok)}"
    append_row("gpu_session", {**used, "words": told["words"], "finding": finding, "steps": steps})
    for question, rows in told["rows"].items():
        with (report.RESULTS / f"{Path(question).name}.jsonl").open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    for name, text in told["tables"].items():
        (report.RESULTS / f"{Path(name).name}.md").write_text(text)
    for picture in folder.glob("*.png"):
        shutil.copyfile(picture, report.RESULTS / picture.name)
    print(f"kept in {report.RESULTS}; now run `python docs/scripts/gpu_page.py`")


def _table(steps: Sequence[Told]) -> str:
    rows = [[step["name"], step["outcome"], f"{step['seconds']:.1f}", step["finding"]] for step in steps]
    return table(["step", "outcome", "s", "finding"], rows)


if __name__ == "__main__":
    main()
