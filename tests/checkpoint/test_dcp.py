"""PyTorch's loader fills state dicts from our checkpoints: an independent reading of what was saved, by other cuts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import small_decoders
import torch
import torch.distributed.checkpoint as dcp
from parity_cells import whole
from pool import Pool
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException, DefaultLoadPlanner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, empty
from training_loops import masters_of, params_of, sharded_net, train, unequal
from written_checkpoints import data_name, flip, in_rows, write

from dzero import AdamW, CheckpointConfig, Checkpointer, CheckpointError, DcpReader


def states_of(sharded: Any, optim: AdamW) -> dict[str, Tensor]:
    """Whole masters and moments, by the names that they are stored under."""
    found = {f"master.{name}": value for name, value in masters_of(sharded, optim).items()}
    for name, param in sharded.named_params().items():
        found |= {f"{key}.{name}": whole(optim.state[param][key]).clone() for key in ("exp_avg", "exp_avg_sq")}
    return found


def saved(rank: int, ranks: int, folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    sharded = sharded_net("uneven", stage=3, param="bf16", master="remainder")
    optim = AdamW(sharded, lr=3e-3)
    train(sharded, optim, "uneven", steps=2)
    with Checkpointer(CheckpointConfig(folder=str(folder)), sharded, optim) as checkpoints:
        checkpoints.save(2, {})
        checkpoints.finish()
    return states_of(sharded, optim), params_of(sharded)


@pytest.fixture(scope="module")
def held(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor], dict[str, Tensor]]:
    """A checkpoint of two ranks, its states, and its working copies."""
    folder = tmp_path_factory.mktemp("saved")
    return folder, *pool.run(saved, 2, folder)[0]


def read_both_ways(rank: int, ranks: int, folder: Path, shapes: dict[str, torch.Size]) -> list[dict[str, Tensor]]:
    """Masters and moments by torch's loader, for several placements; and by ours."""
    mesh = init_device_mesh("cpu", (2, ranks // 2))
    found = []
    for cut in ((Replicate(), Shard(0)), (Shard(-1), Shard(0)), (Shard(0), Replicate())):
        asked = {name: placed(shape, mesh, cut) for name, shape in shapes.items()}
        dcp.load(asked, storage_reader=DcpReader(folder))
        found.append({name: whole(value) for name, value in asked.items()})
    sharded = sharded_net("uneven", stage=1, param="bf16", seed=5)
    optim = AdamW(sharded, lr=3e-3)
    with Checkpointer(CheckpointConfig(folder=str(folder)), sharded, optim) as checkpoints:
        checkpoints.resume("auto")
    return [*found, states_of(sharded, optim)]


def placed(shape: torch.Size, mesh: Any, cut: tuple[Placement, Placement]) -> DTensor:
    """Filled with what no state is, so that nothing stays unread unnoticed. One dim is cut once."""
    last = len(shape) - 1
    first, second = (Shard(last) if each == Shard(-1) else each for each in cut)
    return empty(*shape, device_mesh=mesh, placements=[first, Replicate() if first == second else second]).fill_(-77.0)


@pytest.mark.full("tests/checkpoint/test_dcp.py::test_a_program_without_dzero_gets_the_working_copies_to_the_bit")
def test_torchs_loader_and_ours_read_the_same_bits_for_any_cut(pool: Pool, held: Any) -> None:
    folder, want, _ = held
    for of_rank in pool.run(read_both_ways, 4, folder, {name: value.shape for name, value in want.items()}):
        assert [unequal(found, want) for found in of_rank] == [[]] * 4


def plain_program(rank: int, ranks: int, folder: Path) -> dict[str, Tensor]:
    """FSDP2 without dzero, in bf16."""
    model = small_decoders.build("uneven", seed=9).bfloat16()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    dcp.load(model.state_dict(), storage_reader=DcpReader(folder))
    return {name: whole(value) for name, value in model.state_dict().items()}


def test_a_program_without_dzero_gets_the_working_copies_to_the_bit(pool: Pool, held: Any) -> None:
    folder, _, want = held
    for found in pool.run(plain_program, 3, folder):
        assert unequal(found, want) == []


def test_what_cannot_be_read_is_refused_and_named(tmp_path: Path) -> None:
    tensors = {"master.a": torch.arange(12.0).view(4, 3), "buffer.n": torch.arange(4), "param.b": torch.ones(2)}
    reader = DcpReader(write(tmp_path / "ck", in_rows(tensors, 2)))

    def load(**asked: Any) -> None:
        dcp.load(asked, storage_reader=reader, no_dist=True)

    asked = {name.partition(".")[2]: torch.zeros_like(value) for name, value in tensors.items()}
    load(**asked)
    assert all(torch.equal(asked[name.partition(".")[2]], value) for name, value in tensors.items())
    with pytest.raises(CheckpointException, match=r"a is torch.float32: it cannot become torch.int64"):
        load(a=torch.zeros(4, 3, dtype=torch.int64))
    with pytest.raises(CheckpointException, match="Size mismatch"):
        load(a=torch.zeros(3, 4))
    with pytest.raises(CheckpointException, match="Missing key in checkpoint state_dict: c"):
        load(a=torch.zeros(4, 3), c=torch.zeros(1))
    with pytest.raises(CheckpointException):
        load(a={"no": "tensor"})
    asked = {"a": torch.zeros(4, 3), "c": torch.ones(1)}
    dcp.load(asked, storage_reader=reader, planner=DefaultLoadPlanner(allow_partial_load=True), no_dist=True)
    assert torch.equal(asked["a"], tensors["master.a"])
    flip(tmp_path / "ck" / data_name(1), -8 * 25)  # of master.a, which lies first, before 16 bytes of n and 4 of b
    with pytest.raises(CheckpointException, match=r"rank_00001.safetensors: block 1, .* is not what was written"):
        load(a=torch.zeros(4, 3))
    with pytest.raises(CheckpointError, match="no checkpoint"):
        DcpReader(tmp_path)
    twice = write(tmp_path / "twice", in_rows({"master.w": torch.ones(1), "master.master.w": torch.ones(1)}, 1))
    with pytest.raises(CheckpointError, match=r"master.w is both a parameter and the state master.w: rename it"):
        DcpReader(twice)
