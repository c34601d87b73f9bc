"""Checkpoints do not know of tiles: model and optimizer load from any tiles, stage and ranks into any other."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from on_ranks import on_ranks
from parity_cells import whole
from pool import Pool
from tiled_models import assert_close, batch, llama, reference_loss, sharded_llama
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor, Shard

from dzero import AdamW, Sharded, shard, tile
from dzero.parallel.tiling.state_dicts import cut_optimizer, join_optimizer

TILED = {"tiles": 3, "loss_tiles": 4, "embedding_tiles": 2}


@on_ranks(4)
def test_a_sharded_state_dict_is_the_untiled_models(rank: int, ranks: int) -> None:
    """A joined tensor is a DTensor as the untiled one is: shape, placement and rows; each rank has its own only."""
    plain, tiled = sharded_llama(), sharded_llama(TILED)
    ours, theirs = tiled.model.state_dict(), plain.model.state_dict()
    assert [*ours] == [*theirs]
    for name, want in theirs.items():
        got = ours[name]
        assert isinstance(got, DTensor)
        assert got.placements == (Shard(0),), name
        assert (got.shape, got.stride()) == (want.shape, want.stride()), name
        assert torch.equal(got.to_local(), want.to_local()), name
        assert got.to_local().untyped_storage().nbytes() <= 4 * -(-want.shape[0] // ranks) * want[0].numel(), name
    other = sharded_llama(seed=1)
    tiled.model.load_state_dict(other.model.state_dict())
    plain.model.load_state_dict(tiled.model.state_dict())
    for name, value in other.model.state_dict().items():
        assert torch.equal(plain.model.state_dict()[name].to_local(), value.to_local()), name


def reset(part: nn.Module) -> None:
    """Values as torch draws them: their deviation may depend on a width that a tile has less of."""
    for each in part.modules():
        if any(param.is_meta for param in each.parameters(recurse=False)):
            torch.manual_seed(5)
            each.to_empty(device="cpu", recurse=False)
            each.reset_parameters()  # type: ignore[operator]


@on_ranks(2)
def test_whole_state_dicts_load_into_tiles(rank: int, ranks: int) -> None:
    """torch's helpers, with whole tensors on every rank; values drawn tile by tile are the untiled model's."""
    options = StateDictOptions(full_state_dict=True)
    for module in (nn.Linear(5, 9, device="meta"), nn.Embedding(9, 5, padding_idx=6, device="meta")):
        untiled, model = copy.deepcopy(module), nn.Sequential(tile(module, 4))
        reset(untiled)
        shard(model, stage=3, precision="fp32", init=reset)
        assert_close(get_model_state_dict(model[0], options=options), untiled.state_dict(), rtol=0, atol=0)
    tiled, other = sharded_llama(TILED).model, llama(seed=1).state_dict()
    assert_close(get_model_state_dict(tiled, options=options), llama().state_dict(), rtol=0, atol=0)
    set_model_state_dict(tiled, copy.deepcopy(other), options=options)
    assert_close(get_model_state_dict(tiled, options=options), other, rtol=0, atol=0)
    del other["layers.1.ffn.down.weight"]
    with pytest.raises(RuntimeError, match=r"layers\.1\.ffn\.down\.weight"):
        set_model_state_dict(tiled, other, options=options)


def packed(sharded: Sharded, optim: AdamW) -> dict[str, Any]:
    return {
        "model": get_model_state_dict(sharded.model),
        "optim": join_optimizer(sharded.model, get_optimizer_state_dict(sharded.model, optim)),
    }


def step(sharded: Sharded, optim: AdamW, seed: int) -> None:
    reference_loss(sharded.model, *batch(seed)).backward()  # type: ignore[no-untyped-call]
    optim.step()


Run = tuple[dict[str, int], dict[str, Any]]


def through_dcp(rank: int, ranks: int, folder: str, run: Run, seed: int) -> tuple[dict[str, Tensor], list[str]]:
    """Seed 0 trains and saves, another loads, and goes on: whole tensors of the checkpoint, and names of parameters."""
    sharded = sharded_llama(run[0], seed=seed, **run[1])
    optim = AdamW(sharded, lr=1e-2)
    for number in range(2 if seed == 0 else 0):
        step(sharded, optim, number)
    states = packed(sharded, optim)
    if seed == 0:
        dcp.save(states, checkpoint_id=folder)  # type: ignore[attr-defined]
    else:
        dcp.load(states, checkpoint_id=folder)  # type: ignore[attr-defined]
        set_model_state_dict(sharded.model, states["model"])
        set_optimizer_state_dict(sharded.model, optim, cut_optimizer(sharded.model, states["optim"]))
        states = packed(sharded, optim)
    found = {f"model.{name}": whole(value).clone() for name, value in states["model"].items()}
    for name, kept in sorted(states["optim"]["state"].items()):
        found |= {f"optim.{name}.{key}": whole(value).clone() for key, value in kept.items()}
    step(sharded, optim, 2)
    return found, states["optim"]["param_groups"][0]["params"]


REMAINDER = {"param": "bf16", "master": "remainder", "moments": "bf16"}
FIRST = "tests/parallel/test_tiling_state_dicts.py::test_checkpoints_load_exactly_into_other_tiles_stages_and_ranks"
OTHERS = [
    ((2, (TILED, REMAINDER)), (2, ({"tiles": 7}, {"stage": 1, **REMAINDER}))),
    ((1, ({}, {"stage": 1, "param": "bf16"})), (4, (TILED, {"stage": 3, "param": "bf16"}))),
]
CHECKPOINTS = [
    ((2, (TILED, {"stage": 3})), (1, ({"tiles": 7}, {"stage": 2}))),
    *(pytest.param(*each, marks=pytest.mark.full(FIRST)) for each in OTHERS),
]


@pytest.mark.parametrize(("saved", "loaded"), CHECKPOINTS)
def test_checkpoints_load_exactly_into_other_tiles_stages_and_ranks(
    pool: Pool, tmp_path: Path, saved: tuple[int, Run], loaded: tuple[int, Run]
) -> None:
    want, names = pool.run(through_dcp, saved[0], str(tmp_path), saved[1], 0)[0]
    assert sorted(names) == sorted(name for name, _ in llama().named_parameters())
    for got, _ in pool.run(through_dcp, loaded[0], str(tmp_path), loaded[1], 1):
        assert_close(got, want, rtol=0, atol=0)


@on_ranks(2)
def test_eight_bit_states_of_tiles_are_refused_by_name(rank: int, ranks: int) -> None:
    sharded = sharded_llama(TILED, param="bf16", moments="int8")
    with pytest.raises(ValueError, match=r"embedding\.weight.*8-bit.*precision\.moments=fp32"):
        packed(sharded, AdamW(sharded))
