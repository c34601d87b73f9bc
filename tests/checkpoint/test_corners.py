"""What a loop of one's own may do with checkpoints, and train.py never does."""

from __future__ import annotations

import math
import shutil
import socket
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from pool import Pool
from torch import nn
from training_loops import params_of, sharded_net, train, unequal
from typed_commands import typed
from written_checkpoints import names

from dzero import AdamW, CheckpointConfig, Checkpointer, CheckpointError, shard

NUMBERS = {"best": math.inf, "worst": [-math.inf, {"none": math.nan}], "some": 1.5, "$float": "inf", "text": "nan"}


def resumed_beside_saves(rank: int, ranks: int, folder: Path) -> list[tuple[int, str]]:
    """The steps that are found by ranks of which one is late; numbers that JSON lacks, in a group and beside states."""
    sharded = sharded_net(stage=3)
    optim = AdamW(sharded)
    train(sharded, optim, steps=1)
    found = []
    with Checkpointer(CheckpointConfig(folder=str(folder)), sharded, optim) as checkpoints:
        for step in range(1, 6):
            optim.param_groups[0]["patience"] = math.inf
            checkpoints.save(step, NUMBERS)
            optim.param_groups[0]["patience"] = 3
            time.sleep(0.1 * rank)
            resumed = checkpoints.resume("auto")
            assert resumed is not None
            numbers = (dict(sorted(resumed.extra.items())), optim.param_groups[0]["patience"])
            found.append((resumed.step, repr(numbers)))
    return found


def test_resume_waits_for_a_save_that_is_under_way_and_brings_numbers_that_json_lacks(
    pool: Pool, tmp_path: Path
) -> None:
    numbers = repr((dict(sorted(NUMBERS.items())), math.inf))
    assert pool.run(resumed_beside_saves, 2, tmp_path / "shelf") == [[(step, numbers) for step in range(1, 6)]] * 2


def resumed_with_nothing(rank: int, ranks: int, folder: Path) -> list[str]:
    """Rows that are too few for all ranks; names of parameters that did not come back."""
    ends = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        sharded = shard(nn.Sequential(nn.Linear(8, 1)), stage=3)
        with Checkpointer(CheckpointConfig(folder=str(folder)), sharded, AdamW(sharded)) as checkpoints:
            if seed:
                checkpoints.resume("auto")
            else:
                checkpoints.save(0, {})
        dist.barrier()
        ends.append(params_of(sharded))
    return unequal(*ends)


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
checkpoints = dzero.Checkpointer(dzero.CheckpointConfig(folder="lost", every=1), sharded, optim)
checkpoints.save(1, {})
dist.destroy_process_group()
"""


def test_a_program_that_ends_its_group_within_a_save_says_that_it_is_lost(tmp_path: Path) -> None:
    ended = typed("-c", UNCLOSED, cwd=tmp_path)
    whole = (tmp_path / "lost" / "step_00000001" / "manifest.json").is_file()
    assert ended.returncode == 0
    assert whole != ("the last checkpoint was not saved" in ended.stderr)
    assert "Traceback" not in ended.stderr


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
    sharded = sharded_net(stage=3)
    optim = AdamW(sharded)
    with pytest.raises(CheckpointError) as saving:
        Checkpointer(CheckpointConfig(folder=str(here), every=1), sharded, optim)
    with Checkpointer(CheckpointConfig(folder=str(folder / "shared"), every=1), sharded, optim) as checkpoints:
        checkpoints.save(1, {})
        checkpoints.finish()
        if rank == 0:
            shutil.copytree(folder / "shared", folder / "one" / "copy")
        with pytest.raises(CheckpointError) as resuming:
            checkpoints.resume(str(here / "copy"))
        resumed = checkpoints.resume("auto")
        assert resumed is not None
        assert resumed.step == 1
    return [str(saving.value), str(resuming.value)]


def test_ranks_that_see_another_folder_are_named_with_their_machines(pool: Pool, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    seen = f"seen by ranks 0-1 on {HOST}, but not by ranks 2-3 on {HOST}: checkpoint.folder must name one folder that"
    for rank, (saving, resuming) in enumerate(pool.run(seeing, 4, tmp_path)):
        here = tmp_path / ("one" if rank < 2 else "other")
        assert saving.startswith(f"{here}: {seen} all nodes share")
        assert resuming.startswith(f"{here}/copy/step_00000001: {seen}")
    assert names(tmp_path / "one") == names(tmp_path / "other") == []
