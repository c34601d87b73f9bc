"""Whatever happens to a rank, the user is told which and where, and the run goes on from its last checkpoint."""

from __future__ import annotations

import os
import re
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest
from pool import Pool
from small_runs import settled, train
from train_runs import SECONDS, SMALLEST, TORCHRUN, running

BEAT_S = 1.0
"""How often a rank shows that it is alive."""
EXIT_SAVED = 75
"""The exit code that the guide promises of a run that was stopped and is saved."""

HERE = (*TORCHRUN, "--standalone", "--nproc-per-node=2")
LONG = ("zero.stage=3", "train.steps=100000")


SAVING = ("zero.stage=3", "train.accumulate=2", "launch.threads=1", "schedule.kind=constant", "schedule.warmup_steps=0")


def in_pool(pool: Pool, folder: Path, data: Path, steps: int, *settings: str) -> dict[str, bytes]:
    """Run to a step by processes that are there already; the tensors' files of its checkpoint, by name."""
    there = [*SMALLEST, *SAVING, f"train.steps={steps}", "checkpoint.every=1000", *settings]
    pool.run(train, 2, settled(data, *there, f"checkpoint.folder={folder}/checkpoints"), folder, timeout_s=SECONDS)
    return saved(folder)


def saved(folder: Path) -> dict[str, bytes]:
    """The tensors' files of the newest checkpoint of a run, by name."""
    newest = max((folder / "checkpoints").glob("step_*"))
    files = {f"{newest.name}/{path.name}": path.read_bytes() for path in newest.glob("*.safetensors")}
    assert files
    return files


STOPPED = "tests/comm/test_watchdog.py::test_a_loop_of_ones_own_that_stalls_says_who_waits_where"
KILLED = "tests/trainer/test_faults.py::test_a_killed_rank_is_named_and_all_are_gone"
SAVED = "tests/trainer/test_faults.py::test_sigterm_saves_the_step_and_a_resumed_run_has_the_bits_of_one_never_stopped"

# Dead and hung ranks


@pytest.mark.full(STOPPED)
@pytest.mark.parametrize("launcher", [(), pytest.param(HERE, marks=pytest.mark.slow)], ids=["plain", "torchrun"])
def test_a_stopped_rank_is_named_at_the_timeout_with_the_last_collective_of_each(
    text: Path, tmp_path: Path, launcher: tuple[str, ...]
) -> None:
    with running(tmp_path, text, *LONG, "launch.timeout_s=5", launcher=launcher) as run:
        run.until(r"^step=3 ")
        time.sleep(2 * BEAT_S)  # the steps may be made before the first beat
        os.kill(run.workers()[1], signal.SIGSTOP)
        run.until(r"rank 0 got no answer in #\d+ .* over shard \[.*within launch\.timeout_s=5: rank 1 \(pid")
        for rank in (0, 1):
            place = rf"^  rank {rank}: #\d+ (all_gather|reduce_scatter) of \S+ over shard \[\d+ x \w+\]"
            assert re.search(place, run.log, re.MULTILINE), run.log
        if not launcher:  # torchrun itself waits 30 s for the stopped one
            assert run.end() == 1
            assert run.log.count("got no answer") == 1


@pytest.mark.full(STOPPED)
def test_a_stopped_rank_of_a_pipeline_is_named_too(text: Path, tmp_path: Path) -> None:
    """What others wait for then is torch's own, between the parts."""
    with running(tmp_path, text, *LONG, "mesh.pp=2", "train.accumulate=2", "launch.timeout_s=5") as run:
        run.until(r"^step=3 ")
        time.sleep(2 * BEAT_S)  # the steps may be made before the first beat
        os.kill(run.workers()[1], signal.SIGSTOP)
        run.until(r"rank 0 got no answer in #\d+ .* within launch\.timeout_s=5: rank 1 \(pid .* no sign of life")
        assert run.end() == 1


@pytest.mark.product(keep=1)
@pytest.mark.parametrize("launcher", [(), HERE], ids=["plain", "torchrun"])
def test_a_killed_rank_is_named_and_all_are_gone(text: Path, tmp_path: Path, launcher: tuple[str, ...]) -> None:
    with running(tmp_path, text, *LONG, launcher=launcher) as run:
        run.until(r"^step=3 ")
        pid = run.workers()[1]
        os.kill(pid, signal.SIGKILL)
        by_us, by_torchrun = (
            rf"rank 1 \(pid {pid}\) was killed by SIGKILL",
            rf"exitcode +: -9 \(pid: {pid}\) +\(SIGKILL\)",
        )
        run.until(by_torchrun if launcher else by_us)
        assert run.end() == 1
        assert run.left() == []


# Signals


@pytest.mark.full(SAVED)
def test_ctrl_c_reaches_the_run_as_what_it_is(text: Path, tmp_path: Path) -> None:
    with running(tmp_path, text, *LONG, "checkpoint.every=100000") as run:
        run.until(r"^step=5 ")
        os.killpg(run.process.pid, signal.SIGINT)  # as a terminal does
        assert run.end() == EXIT_SAVED, run.log
        assert re.search(r"SIGINT: stopped after step \d+, which is saved; resume=auto goes on", run.log), run.log
        assert "stopped by SIGINT; the run is saved" in run.log


@pytest.mark.product(keep=1)
@pytest.mark.parametrize("launcher", [(), HERE], ids=["plain", "torchrun"])
def test_sigterm_saves_the_step_and_a_resumed_run_has_the_bits_of_one_never_stopped(
    pool: Pool, text: Path, tmp_path: Path, launcher: tuple[str, ...]
) -> None:
    settings = [*SAVING, "train.steps=100000", "checkpoint.every=1000"]
    with running(tmp_path / "cut", text, *settings, launcher=launcher) as cut:
        cut.until(r"^step=3 ")
        os.kill(cut.process.pid, signal.SIGTERM)
        assert cut.end() == (1 if launcher else EXIT_SAVED), cut.log  # torchrun has codes of its own
        stopped = re.search(r"SIGTERM: stopped after step (\d+), which is saved; resume=auto", cut.log)
        assert stopped is not None, cut.log
        assert cut.log.count("stopped by SIGTERM; the run is saved") == (not launcher)
    steps = int(stopped[1]) + 3
    resumed = in_pool(pool, tmp_path / "cut", text, steps, "resume=auto")
    assert resumed == in_pool(pool, tmp_path / "whole", text, steps)


@pytest.mark.full(SAVED)
def test_sigterm_to_every_process_saves_as_one_to_the_launcher_does(text: Path, tmp_path: Path) -> None:
    """As schedulers and service managers end a job; before, the store in which ranks meet is lost to a stray kill."""
    with running(tmp_path, text, *LONG, "checkpoint.every=100000") as run:
        run.until(r"^step=5 ")
        os.kill(run.named("dzero store"), signal.SIGKILL)
        run.until("the store in which workers meet was killed: a rank that hangs will not be named")
        for pid in run.left():
            with suppress(ProcessLookupError):  # one leaves as soon as another has gone
                os.kill(pid, signal.SIGTERM)
        assert run.end() == EXIT_SAVED, run.log
        assert "SIGTERM: stopped after step" in run.log
        assert run.left() == []


@pytest.mark.full(SAVED)
def test_a_signal_to_one_rank_stops_all_after_the_same_step(text: Path, tmp_path: Path) -> None:
    with running(tmp_path, text, *LONG, "checkpoint.every=100000", launcher=HERE) as run:
        run.until(r"^step=5 ")
        os.kill(run.workers()[1], signal.SIGHUP)  # torchrun passes it on when its terminal is closed
        assert run.end() == 1
        assert re.search(rf"rank +: [01].*\n +exitcode +: {EXIT_SAVED} ", run.log)
        assert re.search(r"stopped after step \d+, which is saved", run.log), run.log


@pytest.mark.full(STOPPED)
def test_a_second_signal_ends_at_once_and_so_does_the_deadline(text: Path, tmp_path: Path) -> None:
    """A rank that is stopped keeps the other in its step."""
    saving = [*LONG, "checkpoint.every=100000", "launch.timeout_s=100"]
    with (
        running(tmp_path / "twice", text, *saving) as twice,
        running(tmp_path / "late", text, *saving, "checkpoint.deadline_s=2") as late,
    ):
        for run in (twice, late):
            run.until(r"^step=5 ")
            os.kill(run.workers()[1], signal.SIGSTOP)
            os.kill(run.process.pid, signal.SIGTERM)
        late.until("not saved within checkpoint.deadline_s=2")
        os.kill(twice.process.pid, signal.SIGTERM)
        for run in (twice, late):
            assert run.end() == 128 + signal.SIGTERM
            assert "stopped by SIGTERM; the workers were ended" in run.log


@pytest.mark.full(SAVED)
def test_a_closed_terminal_saves_a_run_and_nohup_keeps_it_going(text: Path, tmp_path: Path) -> None:
    saving = [*LONG, "checkpoint.every=100000", "launch.workers=1"]
    with (
        running(tmp_path / "plain", text, *saving) as plain,
        running(tmp_path / "nohup", text, *saving, prefix="nohup") as nohup,
    ):
        for run in (plain, nohup):
            run.until(r"^step=2 ")
            os.kill(run.process.pid, signal.SIGHUP)
        assert plain.end() == EXIT_SAVED, plain.log
        assert re.search(r"stopped after step \d+, which is saved", plain.log), plain.log
        assert "stopped by SIGHUP; the run is saved" in plain.log
        nohup.until(rf"^step={nohup.steps[-1] + 5} ")
        os.kill(nohup.process.pid, signal.SIGTERM)
        assert nohup.end() == EXIT_SAVED, nohup.log
        assert "stopped by SIGTERM; the run is saved" in nohup.log
        assert "SIGHUP" not in nohup.log


# Restarts


@pytest.mark.full(KILLED)
def test_torchrun_restarts_after_a_kill_and_ends_with_the_same_bits(pool: Pool, text: Path, tmp_path: Path) -> None:
    again, steps = (*HERE, "--max-restarts=2"), 50
    settings = [*SAVING, f"train.steps={steps}", "checkpoint.every=10", "resume=auto"]
    with running(tmp_path / "cut", text, *settings, launcher=again) as cut:
        cut.until(r"saved checkpoints/step_00000010")
        os.kill(cut.workers()[1], signal.SIGKILL)
        cut.until(r"resumed from checkpoints/step_\d+, after step [1234]0")
        assert cut.end() == 0, cut.log
    assert saved(tmp_path / "cut") == in_pool(pool, tmp_path / "whole", text, steps)
