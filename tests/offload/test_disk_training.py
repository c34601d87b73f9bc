"""Training with states on disk when something goes wrong: told with its place, nothing left behind, no wrong weight."""

from __future__ import annotations

import errno
import itertools
import os
import re
import time
from contextlib import suppress
from pathlib import Path

import offload_lanes
import pytest
import small_decoders
import torch
from offload_parity import end_of, everything, has_the_bits_of_the_device
from pool import Pool
from small_runs import write_text
from torch import Tensor
from train_runs import SECONDS, running
from training_loops import backward, sharded_net, train
from typed_commands import refused, typed

from dzero import AdamW, DiskError, OffloadConfig, OffloadError, shard

FLIPPED = "tests/offload/test_disk_training.py::test_flipped_bits_stop_the_step_with_their_place"


def scratch_files(pid: int | str, path: Path | str) -> list[Path]:
    """A process's open files in the folder `path` that have no name any more, as scratch files."""
    found = []
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # it was closed meanwhile
            if re.fullmatch(rf"{path}/.* \(deleted\)", os.readlink(link)):
                found.append(link)
    return found


def flip(path: str) -> None:
    """Turn over a bit in each 512 bytes of own scratch files, through the page cache, as a stranger would."""
    files = scratch_files("self", path)
    assert files
    for link in files:
        with link.open("r+b", buffering=0) as file:
            content = bytearray(file.read())
            for at in range(1, len(content), 512):
                content[at] ^= 16
            file.seek(0)
            file.write(content)


def flipped(rank: int, ranks: int, path: str) -> list[tuple[str, str]]:
    """What two steps raise after it, with their causes."""
    sharded = sharded_net("even", stage=3, offload=everything(path))
    optim = AdamW(sharded, lr=1e-2)
    train(sharded, optim, steps=2)
    optim.synchronize()
    flip(path)
    told = []
    for _ in range(2):
        with pytest.raises(OffloadError) as error:
            end_of(sharded, optim, steps=1)
        cause: BaseException | None = error.value
        while cause is not None and not isinstance(cause, DiskError):
            cause = cause.__cause__
        assert cause is not None
        told.append((str(error.value), cause.piece))
    return told


def test_flipped_bits_stop_the_step_with_their_place(pool: Pool, tmp_path: Path) -> None:
    """And no later step goes on."""
    (told,) = pool.run(flipped, 1, str(tmp_path))
    for text, piece in told:
        assert re.search(rf"{tmp_path}: block \d+ of piece '{piece}', .* is not what was written", text), text


def flipped_first_values(rank: int, ranks: int, path: str) -> tuple[str, int | None]:
    """Of parameters that wait on disk for the optimizer."""
    sharded = sharded_net("even", stage=3, offload=everything(path))
    flip(path)
    with pytest.raises(DiskError) as told:
        AdamW(sharded)
    return str(told.value), told.value.errno


def test_flipped_bits_of_first_values_stop_the_start(pool: Pool, tmp_path: Path) -> None:
    ((said, code),) = pool.run(flipped_first_values, 1, str(tmp_path))
    assert "the first values of " in said
    assert str(tmp_path) in said
    assert code == errno.EBADMSG


@pytest.mark.full(FLIPPED)
def test_a_run_whose_scratch_file_is_damaged_names_path_and_block(tmp_path: Path) -> None:
    """It ends on all ranks, with one line."""
    disk = tmp_path / "disk"
    disk.mkdir()
    # Of two layers all states stay in host memory; of eight they are read again in every step.
    settings = ["offload=disk", f"offload.disk.paths=[{disk}]", "train.steps=9999", "model.layers=8"]
    with running(tmp_path / "run", write_text(tmp_path / "text.txt"), *settings) as run:
        run.until(r"^step=3 ")
        victim = run.workers()[1]
        until_s = time.monotonic() + SECONDS
        while run.process.poll() is None and time.monotonic() < until_s:
            with suppress(OSError):  # files are closed, and the worker ends, meanwhile
                for link in scratch_files(victim, disk):
                    size = link.stat().st_size
                    with link.open("r+b", buffering=0) as file:
                        file.write(os.urandom(size))
        assert run.end(1.0) == 1
        assert "Traceback" not in run.log, run.log
        (line,) = [line for line in run.log.splitlines() if line.startswith("error: ")]
        assert re.search(rf"{disk}: block \d+ of piece '.*', .* is not what was written", line), line
        assert not run.left()


class Ordered(small_decoders.Decoder):
    """Runs its blocks in an order that may leave some out."""

    order = (0, 1, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.embed(tokens) + self.position(torch.arange(tokens.shape[1]))
        for index in self.order:
            x = self.layers[index](x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def reordered(rank: int, ranks: int, offload: OffloadConfig | None) -> dict[str, Tensor]:
    """Evaluation, blocks in another order or left out, a step without some blocks: the order is learned again."""
    torch.manual_seed(0)
    net = Ordered(small_decoders.SHAPES["even"])
    sharded = shard(net, stage=3, offload=offload)
    optim = AdamW(sharded, lr=1e-2)
    kept = {}
    for step, net.order in enumerate(((0, 1, 2), (2, 0), (1,), (0, 2, 1), (0, 1, 2), (0, 1, 2))):  # type: ignore[assignment]
        batch = small_decoders.batches("even", steps=1, ranks=ranks, microbatches=1, seed=step)[0][rank]
        backward(sharded, optim, batch)
        optim.step()
        with torch.no_grad():
            kept[f"loss {step}"] = small_decoders.loss_fn(net, batch[0]).clone()
    return kept | end_of(sharded, optim)


@pytest.mark.product(keep=1)
@pytest.mark.parametrize(("ranks", "prefetch"), [(1, 1), (2, 3)])
def test_another_order_of_units_changes_no_bit(pool: Pool, tmp_path: Path, ranks: int, prefetch: int) -> None:
    has_the_bits_of_the_device(pool, reordered, ranks, everything(tmp_path, prefetch_units=prefetch))


def partly(rank: int, ranks: int, offload: OffloadConfig | None, param: str, left_out: str) -> dict[str, Tensor]:
    """An optimizer of some parameters; the others stay as they are."""
    sharded = sharded_net("even", stage=3, offload=offload, param=param)
    left = [shape.name for unit in sharded.shapes if left_out == unit.name for shape in unit.params]
    named = sharded.named_params().items()
    optim = AdamW(sharded, [p for name, p in named if name.endswith("weight") and name not in left], lr=1e-2)
    train(sharded, optim, steps=2)
    return end_of(sharded, optim)


@pytest.mark.product(keep=1)
@pytest.mark.parametrize("left_out", ["layers.0", "no unit", "layers.2", "root"])
@pytest.mark.parametrize("param", ["bf16", "fp32"])
def test_an_optimizer_of_some_parameters_leaves_the_others_alone(
    pool: Pool, tmp_path: Path, param: str, left_out: str
) -> None:
    has_the_bits_of_the_device(pool, partly, 2, everything(tmp_path), param, left_out)


def without_some(rank: int, ranks: int, offload: OffloadConfig | None) -> dict[str, Tensor]:
    """Steps in which parameters of a unit get no gradient, or are in no group yet; one step is skipped."""
    sharded = sharded_net("even", stage=3, offload=offload)
    named = sharded.named_params()
    late = [param for name, param in named.items() if name in ("layers.0.out.weight", "layers.2.up.bias")]
    first = [param for param in named.values() if all(param is not each for each in late)]
    optim = AdamW(sharded, first, lr=1e-2, max_norm=30.0)
    early: list[str] = []
    offload_lanes.before(optim, lambda action: early.append(action) if " ahead " in action else None)
    norm = sharded.model.get_submodule("layers.1.norm2")
    for step in range(8):
        if step == 4:
            optim.add_param_group({"params": late})
        if step % 3 == 1:
            norm.forward = lambda x: x
        batch = small_decoders.batches("even", steps=1, ranks=ranks, microbatches=1, seed=step)[0][rank]
        with sharded.microbatch():
            loss = small_decoders.loss_fn(sharded.model, batch[0]) * (float("nan") if step == 5 else 1.0)
            loss.backward()  # type: ignore[no-untyped-call]
        norm.__dict__.pop("forward", None)
        optim.step()
    assert optim.skipped_steps == 1
    assert bool(early) == (offload is not None and offload.overlap == "backward")
    return end_of(sharded, optim)


@pytest.mark.product(keep=1)
@pytest.mark.parametrize(
    ("changes", "ranks"),
    [
        ({"overlap": "backward"}, 2),
        ({"overlap": "backward", "param": "device"}, 1),
        ({}, 1),
        ({"master": "host"}, 2),
        ({"param": "device"}, 2),
    ],
    ids=str,
)
def test_parameters_without_gradients_or_in_no_group_keep_their_values(
    pool: Pool, tmp_path: Path, changes: dict[str, str], ranks: int
) -> None:
    has_the_bits_of_the_device(pool, without_some, ranks, everything(tmp_path, **changes))


def unusable(rank: int, ranks: int, offload: OffloadConfig) -> str:
    with pytest.raises((OSError, ValueError)) as told:
        AdamW(sharded_net("even", stage=3, offload=offload))
    return str(told.value)


def test_paths_that_cannot_be_used_are_told_before_the_first_step(pool: Pool, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "file").write_text("")
    wrong = {
        tmp_path / "link": "symbolic link",
        tmp_path / "none" / "deep": "must exist and be writable: make it, or name another in offload.disk.paths",
        tmp_path / "file": "a scratch path must be a directory that exists: make it, or name another",
    }
    for changes, (path, told) in itertools.product(({}, {"param": "host", "grad": "host"}), wrong.items()):
        (text,) = pool.run(unusable, 1, everything(path, **changes))
        assert told in text
        assert str(path) in text
    assert list((tmp_path / "real").iterdir()) == []


def test_the_command_line_prints_speeds_and_tells_a_wrong_path_in_one_line(tmp_path: Path) -> None:
    ran = typed("-m", "dzero", "disk-bench", "--mib=1", "--rounds=1", tmp_path, cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines()[-1].startswith("settings: offload.disk.block_bytes=")
    assert list(tmp_path.iterdir()) == []
    wrong = tmp_path / "no"
    refused(typed("-m", "dzero", "disk-bench", wrong, cwd=tmp_path), f"{wrong}: a scratch path must be a directory")
