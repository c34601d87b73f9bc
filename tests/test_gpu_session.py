"""benchmarks/gpu_session.py, as a user types it: on a CPU, all of its code."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from processes import new_tag, tagged

ROOT = Path(__file__).parents[1]
SESSION = ROOT / "benchmarks" / "gpu_session.py"
MOST_FILES, MOST_BYTES = 8, 16 << 20
STEPS = (
    "loss_8 loss_4 loss_16 profile host_adam gpu_offload fractions tests fetch gpu_plan largest facts ranks syncs "
    "recompiles train gpu_1b gpu_sums"
)
BENCHMARKS = {"gpu_1b", "gpu_loss", "gpu_offload", "gpu_plan", "gpu_sums", "host_adam"}
SECONDS = 600.0  # of a crowded machine; an idle one takes a minute


def start(folder: Path, *words: str | Path, tag: dict[str, str] | None = None) -> subprocess.Popen[str]:
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | (tag or {})
    line = [sys.executable, str(SESSION), "--rehearse", *map(str, words)]
    return subprocess.Popen(line, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def told(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "session.json").read_text())
    return found


def figures(session: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {step["name"]: step["figures"] for step in session["steps"]}


@pytest.mark.full("tests/test_gpu_session.py::test_a_session_that_is_told_to_end_writes_what_it_has_and_leaves_nobody")
def test_a_rehearsal_runs_every_step_and_goes_on_past_one_that_fails_and_one_that_hangs(tmp_path: Path) -> None:
    tag, out = new_tag(), tmp_path / "out"
    with start(tmp_path, "--budget-s", str(SECONDS), "--inject", "fail", "hang", "--out", out, tag=tag) as running:
        said, _ = running.communicate(timeout=SECONDS)
    session = told(out)
    outcomes = {step["name"]: step["outcome"] for step in session["steps"]}
    log = (out / "session.log").read_text()
    assert outcomes == {"fail": "failed", "hang": "timed out", **dict.fromkeys(STEPS.split(), "ok")}, log
    assert running.returncode == 1
    assert all(f"| {name} | {outcome} |" in said for name, outcome in outcomes.items())
    assert tagged(tag) == []  # what the step that hangs had started, too
    assert "RuntimeError: this step fails, as it was asked to" in log

    found = figures(session)
    assert all(step["finding"] and step["stand_ins"] for step in session["steps"] if step["name"] in STEPS.split())
    assert {"link_gb_per_s", "pinning", "device_bytes_per_s", "bf16_matmul_flops"} <= found["facts"].keys()
    assert set(found["tests"]["counts"]) == {"passed", "skipped"}
    assert found["tests"]["failures"] == found["ranks"]["failures"] == []
    lines = [line for case in found["syncs"]["syncs_by_line"].values() for line in case]
    assert lines
    assert all(line.startswith("dzero/") for line in lines)
    assert 0 < found["profile"]["busy_share"] <= 1
    assert found["profile"]["kernels"] > found["profile"]["update"]["kernels"] > 0
    assert len(found["recompiles"]["graphs_after_each_step"]) == 4
    assert (found["train"]["first"]["steps"], found["train"]["resumed"]["steps"]) == ([1, 2, 3, 4], [5, 6])
    assert session["rows"].keys() == BENCHMARKS
    assert session["tables"].keys() >= BENCHMARKS - {"host_adam"}
    assert {"host_adam_1_threads", "host_adam_1_threads_beside_copies"} <= session["tables"].keys()

    files = [*out.iterdir()]
    assert len(files) <= MOST_FILES
    assert all(file.is_file() and file.stat().st_size < MOST_BYTES for file in files)
    assert json.loads(gzip.decompress((out / "profile.json.gz").read_bytes()))["traceEvents"]
    kept = subprocess.run([sys.executable, str(SESSION), "--keep", str(out)], capture_output=True, text=True)
    assert kept.returncode != 0
    assert "rehearsal" in kept.stderr


@pytest.mark.full("tests/test_gpu_session.py::test_no_session_writes_over_another")
def test_what_the_budget_does_not_reach_is_listed(tmp_path: Path) -> None:
    with start(tmp_path, "--budget-s", "9", "--inject", "hang", "--from", "gpu_1b") as running:
        running.communicate(timeout=SECONDS)
    (out,) = (tmp_path / "outputs").iterdir()
    ended = {step["name"]: step["outcome"] for step in told(out)["steps"]}
    assert ended == {"hang": "timed out", "gpu_1b": "not reached", "gpu_sums": "not reached"}


def test_no_session_writes_over_another(tmp_path: Path) -> None:
    (tmp_path / "session.json").write_text("of another")
    with start(tmp_path, "--out", tmp_path) as running:
        said, _ = running.communicate(timeout=SECONDS)
    assert running.returncode == 1
    assert "is not empty" in said
    assert (tmp_path / "session.json").read_text() == "of another"


def test_a_session_that_is_told_to_end_writes_what_it_has_and_leaves_nobody(tmp_path: Path) -> None:
    tag, out = new_tag(), tmp_path / "out"
    with start(tmp_path, "--only", "gpu_sums", "--inject", "fail", "hang", "--out", out, tag=tag) as running:
        assert running.stdout is not None
        for line in running.stdout:
            if line.startswith("hang: a hang"):
                break
        time.sleep(0.5)
        running.send_signal(signal.SIGTERM)
        running.communicate(timeout=SECONDS)
    ended = {step["name"]: step["outcome"] for step in told(out)["steps"]}
    assert ended == {"fail": "failed", "hang": "ended by SIGTERM", "gpu_sums": "not reached"}
    assert tagged(tag) == []


def test_what_a_gpu_measured_is_kept_as_rows(tmp_path: Path) -> None:
    """In a copy of the benchmarks' files, so that none of this tree's results are touched."""
    copy, out = tmp_path / "benchmarks", tmp_path / "out"
    for folder in (copy, out):
        folder.mkdir()
    for name in ("gpu_session", "gpu_steps", "gpu_findings", "report"):
        (copy / f"{name}.py").write_text((ROOT / "benchmarks" / f"{name}.py").read_text())
    where = {"date": "2027-01-02T03:04:05+00:00", "commit": "ab", "hardware": {"gpu": {"name": "H100"}}}
    step = {"name": "facts", "outcome": "ok", "seconds": 1.0, "finding": "fast", "figures": {"circumstances": where}}
    session = {"rehearsal": False, "words": [], "circumstances": {}, "steps": [step]}
    session |= {"rows": {"gpu_sums": [{"finding": "a"}]}, "tables": {"gpu_sums": "a table\n"}}
    (out / "session.json").write_text(json.dumps(session))
    for _ in range(2):  # rows are appended
        subprocess.run([sys.executable, str(copy / "gpu_session.py"), "--keep", str(out)], check=True)
    rows = [json.loads(line) for line in (copy / "results" / "gpu_session.jsonl").read_text().splitlines()]
    assert [row["hardware"] for row in rows] == [{"gpu": {"name": "H100"}}] * 2
    assert rows[0]["date"] == where["date"]
    assert rows[0]["finding"] == "1 of 1 steps ended well: facts"
    assert (copy / "results" / "gpu_sums.jsonl").read_text() == '{"finding": "a"}\n' * 2
    assert (copy / "results" / "gpu_sums.md").read_text() == "a table\n"
