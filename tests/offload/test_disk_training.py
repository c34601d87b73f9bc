"""Training with states on disk when something goes wrong: told with its place, nothing left behind, no wrong weight."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import small_decoders
import torch
from pool import Pool
from training_loops import backward, params_of, sharded_net, snapshot, train, unequal

from dzero import AdamW, DiskConfig, DiskError, OffloadConfig, OffloadError
from dzero.offload.schedule import ActionKey, ActionKind
from dzero.offload.scratch_dir import holders
from dzero.zero.init_on_disk import SpilledTensor
from dzero.zero.offload_config import KINDS


def everything(paths: list[str], **changes: Any) -> OffloadConfig:
    """Every state on disk, but for `changes`; units of few blocks."""
    return OffloadConfig(disk=DiskConfig(paths=paths, block_bytes=8192), **(dict.fromkeys(KINDS, "disk") | changes))


def flip(fd: int, at: int) -> None:
    """A bit of a byte, through the page cache, as a stranger would."""
    with open(f"/proc/self/fd/{fd}", "r+b", buffering=0) as file:
        (byte,) = os.pread(file.fileno(), 1, at)
        os.pwrite(file.fileno(), bytes([byte ^ 16]), at)


def flipped(rank: int, ranks: int, path: str, piece: str) -> dict[str, Any]:
    """A bit of a piece that is read again, and was not loaded ahead, turns over between two steps."""
    sharded = sharded_net("even", stage=3, offload=everything([path]))
    optim = AdamW(sharded, lr=1e-2)
    train(sharded, optim, steps=2)
    optim.synchronize()
    store = optim.offload.staging.store
    assert store is not None
    block = store.striping.pieces[piece][-1]
    flip(store.files[block.path].fd, block.offset + block.count // 2)
    told: list[str] = []
    causes = []
    for step in range(2):
        try:
            train(sharded, optim, steps=1, seed=step)
            optim.synchronize()
        except OffloadError as error:
            told.append(str(error))
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, DiskError):
                cause = cause.__cause__
            causes.append(cause)
    optim.offload.executor.close()
    assert isinstance(causes[0], DiskError)
    return {"told": told, "piece": causes[0].piece, "offset": causes[0].offset == block.offset, "path": path}


@pytest.mark.parametrize("piece", ["disk master layers.0", "disk moments layers.0", "disk param layers.2"])
def test_a_flipped_bit_stops_the_step_with_its_place(pool: Pool, tmp_path: Path, piece: str) -> None:
    (seen,) = pool.run(flipped, 1, str(tmp_path), piece)
    assert len(seen["told"]) == 2, "and no later step goes on"
    for text in seen["told"]:
        assert "is not what was written" in text
        assert str(tmp_path) in text
    assert (seen["piece"], seen["offset"]) == (piece, True)


def repaired(rank: int, ranks: int, offload: OffloadConfig | None) -> dict[str, torch.Tensor]:
    """Evaluation, blocks in another order or left out, a step without some blocks: the order is learned again."""
    sharded = sharded_net("even", stage=3, offload=offload)
    optim = AdamW(sharded, lr=1e-2)
    layers = sharded.model.get_submodule("layers")
    orders = [[0, 1, 2], [2, 0], [1], [0, 2, 1], [0, 1, 2], [0, 1, 2]]
    whole, kept = [*layers], {}
    for step, order in enumerate(orders):
        batch = small_decoders.batches("even", steps=1, ranks=ranks, microbatches=1, seed=step)[0][rank]
        layers._modules.clear()
        layers._modules.update({str(index): whole[index] for index in order})
        backward(sharded, optim, batch)
        optim.step()
        with torch.no_grad():
            kept[f"loss {step}"] = small_decoders.loss_fn(sharded.model, batch[0]).clone()
    layers._modules.clear()
    layers._modules.update({str(index): layer for index, layer in enumerate(whole)})
    optim.synchronize()
    kept |= {**snapshot(sharded, optim), **{f"whole {name}": value for name, value in params_of(sharded).items()}}
    optim.offload.executor.close()
    return kept


@pytest.mark.parametrize("ranks", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_another_order_of_units_changes_no_bit(pool: Pool, tmp_path: Path, ranks: int) -> None:
    want = pool.run(repaired, ranks, None)
    for prefetch in (1, 3):
        got = pool.run(repaired, ranks, everything([str(tmp_path)], prefetch_units=prefetch))
        for ours, theirs in zip(got, want, strict=True):
            assert unequal(ours, theirs) == []


def partly(rank: int, ranks: int, offload: OffloadConfig | None, param: str, left_out: str) -> dict[str, torch.Tensor]:
    """An optimizer of some parameters; the others stay as they are."""
    sharded = sharded_net("even", stage=3, offload=offload, param=param)
    left = [shape.name for unit in sharded.shapes if left_out == unit.name for shape in unit.params]
    named = sharded.named_params().items()
    optim = AdamW(sharded, [p for name, p in named if name.endswith("weight") and name not in left], lr=1e-2)
    train(sharded, optim, steps=2)
    optim.synchronize()
    kept = {**snapshot(sharded, optim), **{f"whole {name}": value for name, value in params_of(sharded).items()}}
    optim.offload.executor.close()
    return kept


@pytest.mark.parametrize(
    ("param", "left_out"),
    [
        pytest.param(param, left_out, marks=[] if (index + other) % 2 else pytest.mark.slow)
        for index, param in enumerate(("fp32", "bf16"))
        for other, left_out in enumerate(("no unit", "layers.0", "layers.2", "root"))
    ],
)
def test_an_optimizer_of_some_parameters_leaves_the_others_alone(
    pool: Pool, tmp_path: Path, param: str, left_out: str
) -> None:
    want = pool.run(partly, 2, None, param, left_out)
    got = pool.run(partly, 2, everything([str(tmp_path)]), param, left_out)
    for ours, theirs in zip(got, want, strict=True):
        assert unequal(ours, theirs) == []


def flipped_first_value(rank: int, ranks: int, offload: OffloadConfig, kind: str) -> str:
    """One bit of what waits on disk for the optimizer turns over."""
    sharded = sharded_net("even", stage=3, offload=offload)
    unit = sharded.units[1]
    home = next(iter(unit.origin.values())) if kind == "master" else next(iter(unit.offloaded.values())).storage
    assert isinstance(home, SpilledTensor)
    (byte,) = os.pread(home.room.fd, 1, home.offset + 1)
    os.pwrite(home.room.fd, bytes([byte ^ 0x40]), home.offset + 1)
    with pytest.raises(DiskError) as told:
        AdamW(sharded)
    return f"{told.value} {told.value.errno}"


@pytest.mark.parametrize("kind", ["master", "param"])
def test_a_flipped_bit_of_a_first_value_stops_the_start(pool: Pool, tmp_path: Path, kind: str) -> None:
    (said,) = pool.run(flipped_first_value, 1, everything([str(tmp_path)]), kind)
    assert "the first values of layers.1." in said
    assert str(tmp_path) in said
    assert said.endswith(f" {errno.EBADMSG}")


def without_some(rank: int, ranks: int, offload: OffloadConfig | None) -> tuple[dict[str, torch.Tensor], list[int]]:
    """Steps in which some parameters get no gradient; one is skipped. Counts early updates kept and taken back."""
    sharded = sharded_net("even", stage=3, offload=offload)
    optim = AdamW(sharded, lr=1e-2, max_norm=30.0)
    undo, counts = optim.offload.undo, [0, 0]
    commit, rollback = undo.commit, undo.rollback

    def counted(index: int, method: Callable[[str], None], unit: str) -> None:
        counts[index] += 1
        method(unit)

    undo.commit, undo.rollback = partial(counted, 0, commit), partial(counted, 1, rollback)  # type: ignore[method-assign]
    norm = sharded.model.get_submodule("layers.1.norm2")
    for step in range(8):
        if step % 3 == 1:
            norm.forward = lambda x: x
        batch = small_decoders.batches("even", steps=1, ranks=ranks, microbatches=1, seed=step)[0][rank]
        with sharded.microbatch():
            loss = small_decoders.loss_fn(sharded.model, batch[0]) * (float("nan") if step == 5 else 1.0)
            loss.backward()  # type: ignore[no-untyped-call]
        norm.__dict__.pop("forward", None)
        optim.step()
    optim.synchronize()
    kept = {**snapshot(sharded, optim), **{f"whole {name}": value for name, value in params_of(sharded).items()}}
    optim.offload.executor.close()
    return kept, counts


@pytest.mark.parametrize("ranks", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_parameters_without_gradients_keep_their_values(pool: Pool, tmp_path: Path, ranks: int) -> None:
    want = pool.run(without_some, ranks, None)
    for changes in ({}, {"overlap": "backward"}, {"master": "host"}, {"moments": "disk", "param": "device"}):
        got = pool.run(without_some, ranks, everything([str(tmp_path)], **changes))
        for (ours, (kept, undone)), (theirs, _) in zip(got, want, strict=True):
            assert unequal(ours, theirs) == [], changes
            early = "overlap" in changes
            assert (kept > 0) == (undone > 0) == early, "early updates are kept in spare places, and taken back"


def loaded(rank: int, ranks: int, path: str, folder: Path) -> list[str]:
    """Optimizer states saved from disk, loaded into memory and back, in files and from one's own state dict."""
    far = sharded_net("uneven", stage=3, offload=everything([path]))
    optim = AdamW(far, lr=1e-2)
    train(far, optim, "uneven", steps=3)
    torch.save(optim.state_dict(), folder / f"{rank}.pt")
    torch.save(far.model.state_dict(), folder / f"{rank}.model.pt")
    ends = []
    for offload in (None, everything([path])):
        near = sharded_net("uneven", stage=3, offload=offload, seed=5)
        other = AdamW(near, lr=1e-2)
        near.model.load_state_dict(torch.load(folder / f"{rank}.model.pt", weights_only=True))
        other.load_state_dict(torch.load(folder / f"{rank}.pt", weights_only=True))
        train(near, other, "uneven", steps=2, seed=9)
        other.synchronize()
        ends.append(snapshot(near, other))
        other.offload.executor.close()
    optim.load_state_dict(optim.state_dict())
    train(far, optim, "uneven", steps=2, seed=9)
    optim.synchronize()
    ends.append(snapshot(far, optim))
    optim.offload.executor.close()
    return unequal(ends[0], ends[1]) + unequal(ends[0], ends[2])


def test_optimizer_states_are_saved_and_loaded_like_any_others(pool: Pool, tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir()
    assert pool.run(loaded, 2, str(tmp_path / "scratch"), tmp_path) == [[], []]


DYING = """
import json, os, sys, time
import torch.distributed as dist
sys.path[:0] = json.loads(sys.argv[4])
import small_decoders
from training_loops import sharded_net, train
from dzero import AdamW, OffloadConfig
from dzero.zero.offload_config import KINDS, DiskConfig

rank, folder, path = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("gloo", store=dist.FileStore(folder + "/meet", 2), rank=rank, world_size=2)
offload = OffloadConfig(**dict.fromkeys(KINDS, "disk"), disk=DiskConfig(paths=[path], block_bytes=8192))
sharded = sharded_net("even", stage=3, offload=offload)
optim = AdamW(sharded)
train(sharded, optim, steps=2)
optim.synchronize()

def spilling(key):
    if key.kind == "SPILL" and key.what == "states":
        open(f"{folder}/spilling{rank}", "w").close()
        time.sleep(60 if rank else 0.0)

optim.offload.executor.before = spilling
train(sharded, optim, steps=1000)
"""


@pytest.mark.full
def test_a_rank_killed_while_it_spills_ends_the_run_and_the_next_start_cleans_up(pool: Pool, tmp_path: Path) -> None:
    path = tmp_path / "scratch"
    path.mkdir()
    tests = json.dumps([entry for entry in sys.path if entry.startswith(str(Path(__file__).parent.parent))])
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", DYING, str(rank), str(tmp_path), str(path), tests],
            stderr=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for rank in range(2)
    ]
    until = time.monotonic() + 120
    while not (tmp_path / "spilling1").exists():
        assert time.monotonic() < until, [rank.communicate()[1] for rank in ranks if rank.poll() is not None]
        time.sleep(0.05)
    assert len(holders(str(path))) == 2
    ranks[1].send_signal(signal.SIGKILL)
    _, told = ranks[0].communicate(timeout=120)
    ranks[1].communicate(timeout=60)
    assert ranks[1].returncode == -signal.SIGKILL
    assert ranks[0].returncode not in (0, None)
    assert b"Error" in told
    left = os.listdir(path)
    assert len(left) == 1, "rank 0 ended by itself, rank 1 could not"
    pool.run(flawless, 2, str(path))
    assert os.listdir(path) == []


def flawless(rank: int, ranks: int, path: str) -> None:
    sharded = sharded_net("even", stage=3, offload=everything([path]))
    optim = AdamW(sharded)
    train(sharded, optim, steps=1)
    optim.synchronize()
    optim.offload.executor.close()


def slowly(rank: int, ranks: int, offload: OffloadConfig | None, slow: str) -> dict[str, torch.Tensor]:
    """A disk that takes its time, in one direction."""
    sharded = sharded_net("even", stage=3, offload=offload, microbatches=2)
    optim = AdamW(sharded, lr=1e-2, max_norm=0.5)

    def before(key: ActionKey) -> None:
        time.sleep(0.03 if key.kind == ActionKind[slow] else 0.0)

    optim.offload.executor.before = before
    train(sharded, optim, steps=3)
    optim.synchronize()
    kept = {**snapshot(sharded, optim), **params_of(sharded)}
    optim.offload.executor.close()
    return kept


@pytest.mark.parametrize(
    ("slow", "overlap"),
    [
        ("LOAD", "forward"),
        ("SPILL", "backward"),
        pytest.param("LOAD", "backward", marks=pytest.mark.slow),
        pytest.param("SPILL", "forward", marks=pytest.mark.slow),
    ],
)
def test_a_slow_disk_changes_no_bit(pool: Pool, tmp_path: Path, slow: str, overlap: str) -> None:
    want = pool.run(slowly, 2, None, slow)
    got = pool.run(slowly, 2, everything([str(tmp_path)], overlap=overlap), slow)
    for ours, theirs in zip(got, want, strict=True):
        assert unequal(ours, theirs) == []


def refused(rank: int, ranks: int, offload: OffloadConfig) -> str:
    try:
        AdamW(sharded_net("even", stage=3, offload=offload))
    except (OSError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_paths_that_cannot_be_used_are_told_before_the_first_step(pool: Pool, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "file").write_text("")
    missing = "must exist and be writable: make it, or name another in offload.disk.paths"
    for path, told in (
        (tmp_path / "link", "symbolic link"),
        (tmp_path / "none" / "deep", missing),
        (tmp_path / "file", "a scratch path must be a directory that exists: make it, or name another"),
    ):
        offload = everything([str(path)])
        (text,) = pool.run(refused, 1, replace(offload, param="host", grad="host"))
        assert told in text
        assert str(path) in text
        (text,) = pool.run(refused, 1, offload)
        assert told in text
        assert str(path) in text
    assert os.listdir(tmp_path / "real") == []
