"""What a loop of one's own may do with checkpoints, and train.py never does."""

from __future__ import annotations

import math
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from pool import Pool
from torch import nn
from training_loops import params_of, sharded_net, train, unequal
from written_checkpoints import names

from dzero import AdamW, CheckpointConfig, Checkpointer, CheckpointError, ZeroConfig, make_mesh, shard


def resumed_beside_saves(rank: int, ranks: int, folder: Path) -> list[int | None]:
    """The steps that are found, by ranks of which one is late."""
    sharded = sharded_net(stage=3)
    optim = AdamW(sharded)
    train(sharded, optim, steps=1)
    found = []
    with Checkpointer(CheckpointConfig(folder=str(folder)), sharded, optim) as checkpoints:
        for step in range(1, 6):
            checkpoints.save(step, {})
            time.sleep(0.1 * rank)
            resumed = checkpoints.resume("auto")
            found.append(None if resumed is None else resumed.step)
    return found


def test_resume_waits_for_a_save_that_is_under_way(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(resumed_beside_saves, 2, tmp_path / "checkpoints") == [[1, 2, 3, 4, 5]] * 2


NUMBERS = {"best": math.inf, "worst": [-math.inf, {"none": math.nan}], "some": 1.5, "$float": "inf", "text": "nan"}


def with_numbers(rank: int, ranks: int, folder: Path) -> str:
    """What comes back of numbers that JSON lacks, in a group and beside the states."""
    sharded = sharded_net(stage=1)
    optim = AdamW(sharded)
    optim.param_groups[0]["patience"] = math.inf
    with Checkpointer(CheckpointConfig(folder=str(folder)), sharded, optim) as checkpoints:
        checkpoints.save(1, NUMBERS)
        optim.param_groups[0]["patience"] = 3
        resumed = checkpoints.resume("auto")
    assert resumed is not None
    return repr((dict(sorted(resumed.extra.items())), optim.param_groups[0]["patience"]))


def test_infinite_numbers_and_nan_come_back(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(with_numbers, 1, tmp_path / "checkpoints") == [repr((dict(sorted(NUMBERS.items())), math.inf))]


def resumed_with_nothing(rank: int, ranks: int, folder: Path) -> list[str]:
    """Rows that are too few for all ranks; names of parameters that did not come back."""

    def make(seed: int) -> tuple[dict[str, torch.Tensor], Checkpointer]:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(8, 1))
        sharded = shard(model, ZeroConfig(stage=3), mesh=make_mesh("cpu"))
        made = Checkpointer(CheckpointConfig(folder=str(folder)), sharded, AdamW(sharded))
        if seed:
            made.resume("auto")
        return params_of(sharded), made

    before, first = make(0)
    with first:
        first.save(0, {})
        first.finish()
    after, second = make(1)
    with second:
        dist.barrier()
    return unequal(before, after)


def test_a_rank_without_any_element_resumes(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(resumed_with_nothing, 2, tmp_path / "checkpoints") == [[], []]


UNCLOSED = """
import sys
import torch.distributed as dist
from torch import nn
import dzero

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
sharded = dzero.shard(nn.Linear(4, 4), stage=2, precision="fp32")
optim = dzero.AdamW(sharded)
checkpoints = dzero.Checkpointer(dzero.CheckpointConfig(folder=sys.argv[1], every=1), sharded, optim)
checkpoints.save(1, {})
checkpoints.finish()
dist.destroy_process_group()
"""


def ended(program: str, folder: Path) -> tuple[int, str]:
    """Exit status and errors of a program of one rank."""
    run = subprocess.run([sys.executable, "-c", program, str(folder)], capture_output=True, text=True, check=False)
    return run.returncode, run.stderr


@pytest.mark.full("tests/checkpoint/test_corners.py::test_a_program_that_ends_within_a_save_says_that_it_is_lost")
def test_a_program_that_closes_nothing_ends_quietly(tmp_path: Path) -> None:
    assert ended(UNCLOSED, tmp_path / "made") == (0, "")
    assert (tmp_path / "made" / "step_00000001" / "manifest.json").is_file()


def test_a_program_that_ends_within_a_save_says_that_it_is_lost(tmp_path: Path) -> None:
    status, told = ended(UNCLOSED.replace("checkpoints.finish()\n", ""), tmp_path / "lost")
    whole = (tmp_path / "lost" / "step_00000001" / "manifest.json").is_file()
    assert status == 0
    assert whole != ("the last checkpoint was not saved" in told)
    assert "Traceback" not in told


def closed_on_a_bad_save(rank: int, ranks: int, folder: Path) -> str:
    sharded = sharded_net(stage=1)
    checkpoints = Checkpointer(CheckpointConfig(folder=str(folder)), sharded, AdamW(sharded))
    checkpoints.begin()
    checkpoints.save(1, {})
    (folder / "step_00000001.partial").rename(folder / "gone")
    with pytest.raises(CheckpointError) as error:
        checkpoints.close()
    return str(error.value)


def test_closing_raises_the_error_of_the_last_save(pool: Pool, tmp_path: Path) -> None:
    assert "step_00000001" in pool.run(closed_on_a_bad_save, 1, tmp_path / "bad")[0]


HOST = socket.gethostname()


def seeing(rank: int, ranks: int, folder: Path) -> list[str]:
    """Of saving in folders of which ranks 2 and 3 have another, and of resuming from one that they do not have."""
    here = folder / ("one" if rank < 2 else "other")
    sharded, found = sharded_net(stage=3), list[str]()
    optim = AdamW(sharded)
    try:
        Checkpointer(CheckpointConfig(folder=str(here), every=1), sharded, optim)
    except CheckpointError as error:
        found.append(str(error))
    with Checkpointer(CheckpointConfig(folder=str(folder / "shared"), every=1), sharded, optim) as checkpoints:
        checkpoints.save(1, {})
        checkpoints.finish()
        if rank == 0:
            shutil.copytree(folder / "shared", folder / "one" / "copy")
        try:
            checkpoints.resume(str(here / "copy"))
        except CheckpointError as error:
            found.append(str(error))
        resumed = checkpoints.resume("auto")
        assert resumed is not None
        assert resumed.step == 1
    return found


def test_ranks_that_see_another_folder_are_named_with_their_machines(pool: Pool, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    seen = f"seen by ranks 0-1 on {HOST}, but not by ranks 2-3 on {HOST}: checkpoint.folder must name one folder that"
    for rank, (saving, resuming) in enumerate(pool.run(seeing, 4, tmp_path)):
        here = tmp_path / ("one" if rank < 2 else "other")
        assert saving.startswith(f"{here}: {seen} all nodes share")
        assert resuming.startswith(f"{here}/copy/step_00000001: {seen}")
    assert names(tmp_path / "one") == names(tmp_path / "other") == []
