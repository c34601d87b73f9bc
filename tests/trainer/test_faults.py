"""Whatever happens to a rank or a save, the user is told which and where, and the run goes on from its last checkpoint,
but not from what another program saved."""

from __future__ import annotations

import os
import re
import shutil
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from pool import Pool, WorkerError
from small_runs import ran, settled, train
from torch import nn
from train_runs import SECONDS, SMALLEST, TORCHRUN, running

import dzero

BEAT_S = 1.0
"""How often a rank shows that it is alive."""
EXIT_SAVED = 75
"""The exit code that the guide promises of a run that was stopped and is saved."""

HERE = (*TORCHRUN, "--standalone", "--nproc-per-node=2")
LONG = ("zero.stage=3", "train.steps=100000")
SAFE = (*LONG, "checkpoint.every=100000")
"""Saved when they are stopped."""
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
SAVED = "tests/trainer/test_faults.py::test_a_stopped_run_resumes_to_the_bit"

# Dead and hung ranks


@pytest.mark.full(STOPPED)
@pytest.mark.parametrize("mesh", ["", "mesh.pp=2 train.accumulate=2"], ids=["shards", "pipeline"])
def test_a_stopped_rank_is_named_with_the_last_collective_of_each(text: Path, tmp_path: Path, mesh: str) -> None:
    """In a pipeline the others wait for an operation of torch's own, between the parts."""
    with running(tmp_path, text, *LONG, *mesh.split(), "launch.timeout_s=5") as run:
        run.until(r"^step=3 ")
        time.sleep(2 * BEAT_S)  # the steps may be made before the first beat
        os.kill(run.workers()[1], signal.SIGSTOP)
        run.until(r"rank 0 got no answer in #\d+ .*within launch\.timeout_s=5: rank 1 \(pid .* no sign of life")
        for rank in (0, 1) if not mesh else ():
            place = rf"^  rank {rank}: #\d+ (all_gather|reduce_scatter) of \S+ over shard \[\d+ x \w+\]"
            assert re.search(place, run.log, re.MULTILINE), run.log
        assert run.end() == 1
        assert run.log.count("got no answer") == 1


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


@pytest.mark.product(keep=1)
@pytest.mark.parametrize("launcher", [(), HERE], ids=["plain", "torchrun"])
def test_a_stopped_run_resumes_to_the_bit(pool: Pool, text: Path, tmp_path: Path, launcher: tuple[str, ...]) -> None:
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
def test_ctrl_c_saves_as_sigterm_to_every_process_does(text: Path, tmp_path: Path) -> None:
    """As a terminal, and as schedulers and service managers end a job; before, the store in which ranks meet is lost to
    a stray kill."""
    with running(tmp_path / "typed", text, *SAFE) as typed, running(tmp_path / "all", text, *SAFE) as told:
        typed.until(r"^step=5 ")
        os.killpg(typed.process.pid, signal.SIGINT)
        told.until(r"^step=5 ")
        os.kill(told.named("dzero store"), signal.SIGKILL)
        told.until("the store in which workers meet was killed: a rank that hangs will not be named")
        for pid in told.left():
            with suppress(ProcessLookupError):  # one leaves as soon as another has gone
                os.kill(pid, signal.SIGTERM)
        for run, name in ((typed, "SIGINT"), (told, "SIGTERM")):
            assert run.end() == EXIT_SAVED, run.log
            assert re.search(rf"{name}: stopped after step \d+, which is saved; resume=auto goes on", run.log), run.log
        assert told.left() == []
        assert "stopped by SIGINT; the run is saved" in typed.log


@pytest.mark.full(SAVED)
def test_a_signal_to_one_rank_stops_all_after_the_same_step(text: Path, tmp_path: Path) -> None:
    with running(tmp_path, text, *SAFE, launcher=HERE) as run:
        run.until(r"^step=5 ")
        os.kill(run.workers()[1], signal.SIGHUP)  # torchrun passes it on when its terminal is closed
        assert run.end() == 1
        assert re.search(rf"rank +: [01].*\n +exitcode +: {EXIT_SAVED} ", run.log)
        assert re.search(r"stopped after step \d+, which is saved", run.log), run.log


@pytest.mark.full(STOPPED)
def test_a_second_signal_ends_at_once_and_so_does_the_deadline(text: Path, tmp_path: Path) -> None:
    """A rank that is stopped keeps the other in its step."""
    saving = [*SAFE, "launch.timeout_s=100"]
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
    saving = [*SAFE, "launch.workers=1"]
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


# Failed saves, and those of others

FAILED = r"NOT SAVED, training goes on \(checkpoint\.on_error=warn\): .*checkpoints"


def blocked(folder: Path) -> None:
    """Put a file in the place of a folder, though a save may be making it anew."""
    while not folder.is_file():
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            folder.touch()


@pytest.mark.product(keep=1)
@pytest.mark.parametrize("on_error", ["warn", "stop"])
def test_a_failed_save_is_told_loudly_and_the_next_one_succeeds(text: Path, tmp_path: Path, on_error: str) -> None:
    saving = ["train.steps=100000", "checkpoint.every=2", f"checkpoint.on_error={on_error}", "launch.workers=1"]
    with running(tmp_path, text, *saving) as run:
        run.until(r"saved checkpoints/step_\d+")
        blocked(tmp_path / "checkpoints")
        if on_error == "stop":
            assert run.end() == 1
            assert run.log.count("error: ") == 1, run.log
            assert "checkpoints" in run.log.partition("error: ")[2]
            return
        run.until(FAILED)
        (tmp_path / "checkpoints").unlink()
        (tmp_path / "checkpoints").mkdir()
        run.until(rf"{FAILED}(.|\n)*saved checkpoints/step_\d+")


class Wrapped(nn.Module):
    """A model under the names that train.py gives one of transformers."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.model(input_ids=tokens, labels=tokens).loss
        return loss


def own_loop(rank: int, ranks: int, model: Path, folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    whole = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    sharded = dzero.shard(Wrapped(whole), stage=2, precision="fp32")
    optim = dzero.AdamW(sharded, lr=1e-3)
    sharded.model(torch.arange(8).view(1, 8)).backward()
    optim.step()
    with dzero.Checkpointer(dzero.CheckpointConfig(folder=str(folder)), sharded, optim) as checkpoints:
        checkpoints.save(1, {})


def test_a_checkpoint_of_another_loop_is_refused_by_name(pool: Pool, model: Path, tmp_path: Path) -> None:
    """It says nothing of the data."""
    from published import FIXED, words  # which need transformers

    pool.run(own_loop, 2, model, tmp_path / "saved")
    given = words(model, tmp_path, *FIXED, "train.steps=2", f"resume.source={tmp_path / 'saved'}")
    with pytest.raises(WorkerError, match=r"step_00000001: it lacks .*stream: it was not saved by train\.py"):
        pool.run(ran, 2, given, tmp_path)
