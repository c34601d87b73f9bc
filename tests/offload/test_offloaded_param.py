"""Parameters off the device: nothing of them rests there, they come in time, and are tensors like others."""

from __future__ import annotations

import copy
import gc
import io
import threading
import time
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import offload_lanes
import offload_parity
import pytest
import small_decoders
import torch
import torch.distributed.checkpoint as dcp
from offload_parity import KINDS, end_of, has_the_bits_of_the_device
from pool import Pool
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.tensor import DTensor
from training_loops import backward, params_of, sharded_net, train, unequal

from dzero import AdamW, OffloadConfig, testing

ALL: dict[str, Any] = dict.fromkeys(KINDS, "host")


@pytest.fixture(params=["host", "disk"])
def everything(request: pytest.FixtureRequest, tmp_path: Path) -> OffloadConfig:
    """Every state in host memory, or on disk."""
    return OffloadConfig(**ALL) if request.param == "host" else offload_parity.everything(tmp_path)


def like_any_other(rank: int, ranks: int, offload: OffloadConfig) -> None:
    """What torch's users do with a tensor, with a shard off the device."""
    sharded = sharded_net("even", stage=3, offload=offload, param="fp32")
    optim = AdamW(sharded)
    shard = testing.local(sharded.named_params()["layers.0.out.weight"])
    plain = shard.clone()
    assert type(plain) is torch.Tensor
    row, its = shard[1], plain[1]
    assert torch.equal(row + 1, its + 1)
    assert type(row + 1) is torch.Tensor
    assert row.tolist() == row.numpy().tolist() == torch.from_dlpack(row).tolist() == its.tolist()
    with torch.no_grad():
        for each in (shard, plain):
            each[1].mul_(2)
            each[2].copy_(torch.ones(32))
            torch._foreach_add_([each[0], each[3]], [torch.ones(32)] * 2)  # type: ignore[attr-defined]
            each[4].copy_(each[2])
    assert torch.equal(shard.clone(), plain)
    assert torch.equal(row.clone(), plain[1])
    bits = shard.view(torch.int32)
    assert torch.equal(bits + 0, plain.view(torch.int32))
    assert torch.equal(bits[1:].view(torch.uint8) + 0, plain[1:].view(torch.int32).view(torch.uint8))
    complex_ = torch.view_as_complex(shard.view(-1, 2))
    assert torch.equal(complex_ * 1, torch.view_as_complex(plain.view(-1, 2)))
    file = io.BytesIO()
    torch.save({"row": row}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)["row"]
    assert type(saved) is torch.Tensor
    assert torch.equal(saved, plain[1])
    assert torch.equal(copy.deepcopy(row), plain[1])
    for refused in (lambda: shard.t_(), lambda: shard.resize_(2), lambda: shard.unsqueeze_(0), shard.share_memory_):
        with pytest.raises(NotImplementedError, match="on a parameter"):
            refused()
    optim.synchronize()


def test_a_shard_is_a_tensor_like_any_other(pool: Pool, everything: OffloadConfig) -> None:
    pool.run(like_any_other, 1, everything)


def ahead(rank: int, ranks: int) -> list[bool]:
    """While a block runs its forward, the next one's parameters are on their way."""
    sharded = sharded_net("even", stage=3, offload=OffloadConfig(**ALL))
    optim = AdamW(sharded)
    train(sharded, optim, steps=1)
    optim.synchronize()
    started = threading.Event()
    offload_lanes.before(optim, lambda action: started.set() if action == "FETCH param layers.1" else None)
    seen: list[bool] = []
    block = sharded.model.get_submodule("layers.0.norm1")
    block.register_forward_pre_hook(lambda *_: seen.append(started.wait(120)))
    train(sharded, optim, steps=1)
    return seen


def test_the_next_unit_comes_while_this_one_computes(pool: Pool) -> None:
    assert pool.run(ahead, 2) == [[True], [True]]


def read_and_written(rank: int, ranks: int, offload: OffloadConfig | None) -> dict[str, torch.Tensor]:
    """What a user does to parameters between steps, with every action late; without `synchronize`. Evaluations are
    under inference_mode in turn."""
    sharded = sharded_net("uneven", stage=3, offload=offload, param="fp32")
    (first,) = small_decoders.batches("uneven", steps=1, ranks=ranks, microbatches=1, seed=7)
    with torch.no_grad():
        kept = {"without an optimizer": small_decoders.loss_fn(sharded.model, first[rank][0])}
    optim = AdamW(sharded, lr=1e-2)
    offload_lanes.slow(optim)
    for step in range(2):
        train(sharded, optim, "uneven", steps=1, seed=step)
        kept |= {f"{step} {name}": value for name, value in params_of(sharded).items()}
        with torch.no_grad():
            for param in sharded.named_params().values():
                param.mul_(0.5)  # fp32 parameters are their own masters
        batch = small_decoders.batches("uneven", steps=1, ranks=ranks, microbatches=1, seed=70 + step)[0][rank][0]
        for number, mode in enumerate((torch.no_grad, torch.inference_mode)):
            with mode():
                kept[f"{step} eval {number}"] = small_decoders.loss_fn(sharded.model, batch).clone()
    sharded.model.unshard() if ranks == 1 else None  # type: ignore[operator]
    whole = {name: p.detach().clone() for name, p in sharded.model.named_parameters()} if ranks == 1 else {}
    sharded.reshard()
    optim.synchronize()
    return kept | whole | params_of(sharded)


@pytest.mark.product(keep=1)
@pytest.mark.parametrize("ranks", [2, 1])
def test_reads_and_writes_between_steps_wait_for_updates(pool: Pool, ranks: int, everything: OffloadConfig) -> None:
    has_the_bits_of_the_device(pool, read_and_written, ranks, everything)


def loaded_midway(rank: int, ranks: int, offload: OffloadConfig | None) -> dict[str, torch.Tensor]:
    """A state dict loaded between backward and step, before and after first use: FSDP2 pads shards anew then."""
    sharded = sharded_net("uneven", stage=3, offload=offload)
    optim = AdamW(sharded, lr=1e-2)
    start = {name: value.clone() for name, value in sharded.model.state_dict().items()}
    for step in range(4):
        (batches,) = small_decoders.batches("uneven", steps=1, ranks=ranks, microbatches=1, seed=step)
        backward(sharded, optim, batches[rank])
        if step in (0, 2):
            sharded.model.load_state_dict({name: value * (1 - step / 4) for name, value in start.items()})
        optim.step()
    return end_of(sharded, optim)


@pytest.mark.product(keep=1)
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("everything", ["disk", "host"], indirect=True)
def test_a_state_dict_may_be_loaded_at_any_moment(pool: Pool, ranks: int, everything: OffloadConfig) -> None:
    for overlap in ("forward", "backward"):
        has_the_bits_of_the_device(pool, loaded_midway, ranks, replace(everything, overlap=overlap))


def across(rank: int, ranks: int, folder: Path, everything: OffloadConfig, is_from_device: bool) -> list[str]:
    """Saved in one place, loaded into the other, in three ways; then all go on with the bits of the one that saved."""
    full = StateDictOptions(full_state_dict=True, cpu_offload=True)
    from_rank0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    first, second = (None, everything) if is_from_device else (everything, None)
    saving = sharded_net("uneven", stage=3, offload=first)
    optim = AdamW(saving, lr=1e-2)
    train(saving, optim, "uneven", steps=1)
    states, file, place = saving.model.state_dict(), io.BytesIO(), folder / "saved"
    torch.save({"model": states, "optimizer": optim.state_dict()}, file)
    elems = sum(testing.local(param).numel() for param in saving.named_params().values())
    assert file.tell() < 16 * elems + 200_000  # in bf16 a value, and its states in fp32: not their pool once for each
    whole = get_model_state_dict(saving.model, options=full)
    dcp.save(states, checkpoint_id=place)
    ends = {}
    for way in ("torch.load", "helpers", "dcp"):
        loading = sharded_net("uneven", stage=3, offload=second, seed=4)
        other = AdamW(loading, lr=1e-2)
        train(loading, other, "uneven", steps=1, seed=8)
        file.seek(0)
        loaded = torch.load(file, weights_only=True)
        if way == "torch.load":
            loading.model.load_state_dict(loaded["model"])
        elif way == "helpers":
            set_model_state_dict(loading.model, whole if rank == 0 else {}, options=from_rank0)
        else:
            own = loading.model.state_dict()
            dcp.load(own, checkpoint_id=place)
            loading.model.load_state_dict(own)
        other.load_state_dict(loaded["optimizer"])
        train(loading, other, "uneven", steps=2, seed=3)
        ends[way] = end_of(loading, other)
    optim.load_state_dict(optim.state_dict())
    train(saving, optim, "uneven", steps=2, seed=3)
    want = end_of(saving, optim)
    if everything.param == "host":
        assert all(type(testing.local(v)) is torch.Tensor for v in states.values() if isinstance(v, DTensor))
    return [f"{way} {key}" for way, end in ends.items() for key in unequal(end, want)]


@pytest.mark.product(keep=1)
@pytest.mark.parametrize("is_from_device", [False, True])
def test_state_dicts_go_to_the_device_and_back(
    pool: Pool, tmp_path: Path, everything: OffloadConfig, is_from_device: bool
) -> None:
    assert pool.run(across, 2, tmp_path, everything, is_from_device) == [[], []]


def forgotten(rank: int, ranks: int, everything: OffloadConfig) -> list[str]:
    """What is alive of models, their optimizers and their parameters some time after all has been dropped."""
    kept: list[weakref.ref[Any]] = []
    for steps in (0, 2):
        sharded = sharded_net("uneven", stage=3, offload=everything)
        optim = AdamW(sharded, lr=1e-2)
        train(sharded, optim, "uneven", steps=steps)
        kept += map(weakref.ref, (sharded.model, optim, *sharded.named_params().values()))
        del sharded, optim
    until = time.monotonic() + 120
    while any(each() is not None for each in kept) and time.monotonic() < until:
        gc.collect()
        time.sleep(0.01)  # a lane may be at its last action
    return [type(each()).__name__ for each in kept if each() is not None]


def test_nothing_of_a_dropped_model_stays(pool: Pool, everything: OffloadConfig) -> None:
    """And of its threads and files: `tests/zero/test_made_anew.py`."""
    assert pool.run(forgotten, 1, everything) == [[]]


def guessed(rank: int, ranks: int, everything: OffloadConfig) -> int:
    """The most units that were begun to be fetched, beyond those that were gathered, when blocks are skipped."""
    sharded = sharded_net("even", stage=3, offload=everything)
    optim = AdamW(sharded)
    fetches = []
    offload_lanes.before(optim, lambda action: fetches.append(action) if action.startswith("FETCH param") else None)
    blocks: Any = sharded.model.get_submodule("layers")
    most = 0
    for order in ([0, 1, 2], [0, 2], [1, 2], [2, 0], [0, 1], [1], [2, 1, 0]) * 3:
        for index in order:
            with torch.no_grad():
                offload_lanes.drain(optim)
                fetches.clear()
                blocks[index].unshard()
                blocks[index].reshard()
                offload_lanes.drain(optim)
            most = max(most, len(fetches))
    return most


def test_wrong_guesses_do_not_pile_up(pool: Pool, everything: OffloadConfig) -> None:
    """At most the unit that is asked for is fetched, and the one that is guessed to come next."""
    assert max(pool.run(guessed, 1, everything)) == 2
