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
from small_runs import Told, settled, train, write_text
from train_runs import SECONDS, SMALLEST, TORCHRUN, running

from dzero.comm.watchdog import BEAT_S
from dzero.launch.signals import EXIT_SAVED

HERE = (*TORCHRUN, "--standalone", "--nproc-per-node=2")
LONG = ("zero.stage=3", "train.steps=100000")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("data") / "words.txt")


STEPS = 50
SAVING = ("zero.stage=3", f"train.steps={STEPS}", "checkpoint.every=10", "train.accumulate=2", "launch.threads=1")


def in_pool(pool: Pool, folder: Path, data: Path, *settings: str) -> Told:
    """The same run by processes that are there already; the checkpoints are in `folder`/checkpoints."""
    there = [*SMALLEST, *settings, f"checkpoint.folder={folder}/checkpoints"]
    told: list[Told] = pool.run(train, 2, settled(data, *there), folder, timeout_s=SECONDS)
    return told[0]


@pytest.fixture(scope="module")
def never_stopped(pool: Pool, text: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What the last checkpoint of a run with `SAVING` holds."""
    folder = tmp_path_factory.mktemp("whole")
    in_pool(pool, folder, text, *SAVING)
    return saved(folder)


def saved(folder: Path) -> dict[str, bytes]:
    """The tensors' files of the newest checkpoint of a run, by name."""
    newest = max((folder / "checkpoints").glob("step_*"))
    files = {f"{newest.name}/{path.name}": path.read_bytes() for path in newest.glob("*.safetensors")}
    assert files
    return files


# Dead and hung ranks


@pytest.mark.parametrize("launcher", [(), pytest.param(HERE, marks=pytest.mark.slow)], ids=["plain", "torchrun"])
def test_a_stopped_rank_is_named_at_the_timeout_with_the_last_collective_of_each(
    text: Path, tmp_path: Path, launcher: tuple[str, ...]
) -> None:
    with running(tmp_path, text, *LONG, "launch.timeout_s=5", launcher=launcher) as run:
        run.until(r"^step=10 ")
        time.sleep(2 * BEAT_S)  # ten steps may be made before the first beat
        os.kill(run.workers()[1], signal.SIGSTOP)
        run.until(r"rank 0 got no answer in #\d+ .* over shard \[.*within launch\.timeout_s=5: rank 1 \(pid", 5 + 20)
        for rank in (0, 1):
            place = rf"^  rank {rank}: #\d+ (all_gather|reduce_scatter) of \S+ over shard \[\d+ x \w+\]"
            assert re.search(place, run.log, re.MULTILINE), run.log
        if not launcher:  # torchrun itself waits 30 s for the stopped one
            assert run.end() == 1
            assert run.log.count("got no answer") == 1


@pytest.mark.full
def test_a_stopped_rank_of_a_pipeline_is_named_too(text: Path, tmp_path: Path) -> None:
    """What others wait for then is torch's own, between the parts."""
    with running(tmp_path, text, *LONG, "mesh.pp=2", "train.accumulate=2", "launch.timeout_s=5") as run:
        run.until(r"^step=10 ")
        time.sleep(2 * BEAT_S)  # ten steps may be made before the first beat
        os.kill(run.workers()[1], signal.SIGSTOP)
        run.until(
            r"rank 0 got no answer in #\d+ .* within launch\.timeout_s=5: rank 1 \(pid .* no sign of life", 5 + 20
        )
        assert run.end() == 1


@pytest.mark.full
def test_a_killed_rank_is_named_by_torchrun_and_the_others_end(text: Path, tmp_path: Path) -> None:
    with running(tmp_path, text, *LONG, launcher=HERE) as run:
        run.until(r"^step=10 ")
        os.kill(run.workers()[1], signal.SIGKILL)
        took_s = run.until(r"exitcode +: -9 \(pid: \d+\) +\(SIGKILL\)", 20)
        assert run.end() == 1
        assert run.left() == []
        print(f"told after {took_s:.1f} s")


def test_a_killed_rank_is_named_and_all_are_gone(text: Path, tmp_path: Path) -> None:
    """Within 5 s on an idle machine; told apart from load by what the launcher itself waits for, 2 s and a poll."""
    with running(tmp_path, text, *LONG) as run:
        run.until(r"^step=10 ")
        pid, began_s = run.workers()[1], time.monotonic()
        os.kill(pid, signal.SIGKILL)
        assert run.end() == 1
        took_s = time.monotonic() - began_s
        assert f"rank 1 (pid {pid}) was killed by SIGKILL" in run.log
        assert run.left() == []
        print(f"gone after {took_s:.1f} s")
        assert took_s < 5 * max(1.0, os.getloadavg()[0] / 2)


# Signals


@pytest.mark.full
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
    pool: Pool, text: Path, tmp_path: Path, never_stopped: dict[str, bytes], launcher: tuple[str, ...]
) -> None:
    settings = [*SAVING, "checkpoint.every=1000"]
    with running(tmp_path / "cut", text, *settings, launcher=launcher) as cut:
        cut.until(r"^step=5 ")
        os.kill(cut.process.pid, signal.SIGTERM)
        assert cut.end() == (1 if launcher else EXIT_SAVED), cut.log  # torchrun has codes of its own
        stopped = re.search(r"SIGTERM: stopped after step (\d+), which is saved; resume=auto", cut.log)
        assert stopped is not None, cut.log
        assert 5 <= int(stopped[1]) < STEPS
        assert cut.log.count("stopped by SIGTERM; the run is saved") == (not launcher)
    resumed = in_pool(pool, tmp_path / "cut", text, *settings, "resume=auto")
    assert len(resumed.losses) == STEPS - int(stopped[1])
    assert saved(tmp_path / "cut") == never_stopped


@pytest.mark.full
def test_sigterm_to_every_process_saves_as_one_to_the_launcher_does(text: Path, tmp_path: Path) -> None:
    """As schedulers and service managers end a job; before, the store in which ranks meet is lost to a stray kill."""
    with running(tmp_path, text, *LONG, "checkpoint.every=100000") as run:
        run.until(r"^step=5 ")
        os.kill(run.named("dzero store"), signal.SIGKILL)
        run.until("the store in which workers meet was killed: a rank that hangs will not be named")
        for pid in run.left():
            with suppress(ProcessLookupError):  # one leaves as soon as another has gone
                os.kill(pid, signal.SIGTERM)
        assert run.end(30) == EXIT_SAVED, run.log
        assert "SIGTERM: stopped after step" in run.log
        assert run.left() == []


@pytest.mark.full
def test_a_signal_to_one_rank_stops_all_after_the_same_step(text: Path, tmp_path: Path) -> None:
    with running(tmp_path, text, *LONG, "checkpoint.every=100000", launcher=HERE) as run:
        run.until(r"^step=5 ")
        os.kill(run.workers()[1], signal.SIGHUP)  # torchrun passes it on when its terminal is closed
        assert run.end() == 1
        assert re.search(rf"rank +: [01].*\n +exitcode +: {EXIT_SAVED} ", run.log)
        assert re.search(r"stopped after step \d+, which is saved", run.log), run.log


@pytest.mark.full
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
        late.until("not saved within checkpoint.deadline_s=2", 15)
        os.kill(twice.process.pid, signal.SIGTERM)
        for run in (twice, late):
            assert run.end(20) == 128 + signal.SIGTERM
            assert "stopped by SIGTERM; the workers were ended" in run.log


@pytest.mark.full
def test_a_closed_terminal_saves_a_run_and_nohup_keeps_it_going(text: Path, tmp_path: Path) -> None:
    saving = [*LONG, "checkpoint.every=100000", "launch.workers=1"]
    with (
        running(tmp_path / "plain", text, *saving) as plain,
        running(tmp_path / "nohup", text, *saving, prefix="nohup") as nohup,
    ):
        for run in (plain, nohup):
            run.until(r"^step=2 ")
            os.kill(run.process.pid, signal.SIGHUP)
        assert plain.end(60) == EXIT_SAVED, plain.log
        assert re.search(r"stopped after step \d+, which is saved", plain.log), plain.log
        assert "stopped by SIGHUP; the run is saved" in plain.log
        nohup.until(rf"^step={nohup.steps[-1] + 5} ")
        os.kill(nohup.process.pid, signal.SIGTERM)
        assert nohup.end(60) == EXIT_SAVED, nohup.log
        assert "stopped by SIGTERM; the run is saved" in nohup.log
        assert "SIGHUP" not in nohup.log


# Restarts


@pytest.mark.full
def test_torchrun_restarts_after_a_kill_and_ends_with_the_same_bits(
    text: Path, tmp_path: Path, never_stopped: dict[str, bytes]
) -> None:
    again = (*HERE, "--max-restarts=2")
    with running(tmp_path / "cut", text, *SAVING, "resume=auto", launcher=again) as cut:
        cut.until(r"saved checkpoints/step_00000010")
        began_s = time.monotonic()
        os.kill(cut.workers()[1], signal.SIGKILL)
        cut.until(r"resumed from checkpoints/step_\d+, after step [1234]0")
        print(f"going on after {time.monotonic() - began_s:.1f} s")
        assert cut.end() == 0, cut.log
    assert saved(tmp_path / "cut") == never_stopped
