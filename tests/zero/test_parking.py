"""`Sharded.park`: the formula's bytes leave the device, and training goes on with the bits of a run without it."""

from __future__ import annotations

import errno
import gc
import os
from pathlib import Path
from typing import Any

import pytest
import small_decoders
import torch
from live_tensors import live_bytes
from on_ranks import on_ranks
from pool import Pool
from torch import Tensor
from training_loops import backward, sharded_net, snapshot, train, unequal

import dzero
from dzero import AdamW, DiskConfig, OffloadConfig, Sharded, TorchOptimizer, testing

PARKED = "the model's states are parked, off the device: call sharded.unpark() first"
BF16 = {"param": "bf16"}
TIERS = {"grad": "host", "master": "host", "moments": "host"}
ALL_AWAY = TIERS | {"param": "host"}
PARTLY = TIERS | {"overlap": "delayed", "delay_warmup_steps": 1, "master_fraction": 0.5}
STAGE_1, STAGE_3 = {"stage": 1, **BF16}, {"stage": 3, **BF16}
OVER_ALL = {"replicate": 2, **BF16, "optimizer_shard_axes": ("replicate", "shard")}
CELLS: list[tuple[int, dict[str, Any]]] = [
    (2, {**STAGE_1, "net": "even"}),
    (2, {"stage": 2, **BF16, "microbatches": 2}),
    (2, {**STAGE_3, "rule": "muon"}),
    (2, {"stage": 0, **BF16, "master": "remainder"}),
    (2, {**STAGE_3, "moments": "int8"}),
    (2, {"stage": 3, "param": "fp16"}),
    (2, {"stage": 2, **BF16, "offload": PARTLY}),
    (2, {**STAGE_1, "rule": "sgd", "net": "tied"}),
    (2, {**STAGE_3, "offload": ALL_AWAY}),
    (2, {**STAGE_3, "frozen": "int8", "net": "frozen"}),
    (4, {"stage": 3, **OVER_ALL}),
    (4, {"stage": 2, **OVER_ALL, "offload": TIERS}),
]


def made(folder: str, *, net: str = "uneven", rule: str = "adamw", **kwargs: Any) -> tuple[Sharded, Any]:
    tiers = kwargs.pop("offload", {})
    disk = {"disk": DiskConfig(paths=[folder])} if "disk" in tiers.values() else {}
    sharded = sharded_net(net, offload=OffloadConfig(**tiers, **disk), **kwargs)
    optims = {
        "adamw": lambda: AdamW(sharded, lr=1e-2, max_norm=0.5),
        "muon": lambda: dzero.Muon(sharded, lr=1e-2),
        "sgd": lambda: TorchOptimizer(sharded, torch.optim.SGD, lr=1e-2, momentum=0.9),
    }
    return sharded, optims[rule]()


PLACES = ("host", "host", "disk")


def parked_between(rank: int, ranks: int, folder: str, cell: dict[str, Any]) -> dict[str, Any]:
    """Train with and without parking after each step, and before the first; return what differs, and bytes."""
    net, steps = cell.get("net", "uneven"), len(PLACES)
    sharded, optim = made(folder, **cell)
    train(sharded, optim, net, steps=steps)
    want = snapshot(sharded, optim)
    sharded, optim = made(folder, **cell)
    drawn = small_decoders.batches(net, steps=steps, ranks=ranks, microbatches=sharded.layout.microbatches)
    freed = []
    for where, of_step in zip(PLACES, drawn, strict=True):
        gc.collect()
        sharded.reshard()  # what the evaluation left gathered
        before = live_bytes()
        freed.append(sharded.park(where, folder if where == "disk" else None))
        held = before - live_bytes()  # on disk, the process holds no other copy
        left = sum(optim.state_bytes().values())
        sharded.unpark()
        backward(sharded, optim, of_step[rank])
        optim.step()
        sharded.model.eval()(drawn[0][rank][0][:, :-1])  # leaves parameters gathered
        sharded.model.train()
    rest, formula = sum(optim.state_bytes().values()), testing.resting_bytes(sharded)
    told = {"differ": unequal(want, snapshot(sharded, optim)), "freed": freed, "left": left, "rest": rest, "held": held}
    return told | {"formula": formula["param"] + formula["master"] + formula["moments"]}


@pytest.mark.product(keep=3)
@pytest.mark.parametrize(("ranks", "cell"), CELLS, ids=str)
def test_training_goes_on_with_the_same_bits_and_the_formulas_bytes_are_free(
    pool: Pool, tmp_path: Path, ranks: int, cell: dict[str, Any]
) -> None:
    tiers = cell.get("offload", {})
    for found in pool.run(parked_between, ranks, str(tmp_path), cell):
        assert found["differ"] == []
        assert found["left"] == 0
        assert found["freed"][1] == found["freed"][2] == found["rest"]
        if cell.get("net") == "even":  # 2 ranks cut it evenly: all of the states, each byte once
            assert {*found["freed"]} == {found["formula"]}
        assert tiers or found["held"] == found["rest"]
        stays = {"param", "master", "moments"} <= tiers.keys()  # off the device all the time
        assert (found["rest"] > 0) != stays


@on_ranks(2)
def test_masters_of_no_optimizer_are_parked_too(rank: int, ranks: int) -> list[str]:
    """What differs if masters are parked before an optimizer takes them, and after one is gone."""
    found = []
    for parks in (False, True):
        sharded = sharded_net("uneven", stage=2, **BF16)
        for seed in range(2):
            if parks:
                sharded.park()
                sharded.unpark()
            optim = AdamW(sharded, lr=1e-2)
            train(sharded, optim, "uneven", steps=1, seed=seed)
            found.append(snapshot(sharded, optim))
            del optim
            gc.collect()
    assert unequal(found[0], found[1]) != []
    return unequal(found[0], found[2]) + unequal(found[1], found[3])


def told_by(do: Any) -> str:
    with pytest.raises((RuntimeError, ValueError, OSError, MemoryError)) as raised:
        do()
    return str(raised.value)


def refusals(rank: int, ranks: int, folder: str) -> tuple[set[str], list[str], list[str]]:
    """What is said while parked and otherwise, and what differs from a run in which none of it was tried."""
    drawn = small_decoders.batches("uneven", steps=3, ranks=ranks, microbatches=1)
    sharded, optim = made(folder, **STAGE_3)
    train(sharded, optim, "uneven", steps=3)
    want = snapshot(sharded, optim)
    sharded, optim = made(folder, **STAGE_3)
    backward(sharded, optim, drawn[0][rank])
    optim.step()
    checkpoints = dzero.Checkpointer(dzero.CheckpointConfig(folder=f"{folder}/checkpoints"), sharded, optim)
    checkpoints.save(1, {})
    checkpoints.finish()
    state, param = sharded.model.state_dict(), next(iter(sharded.named_params().values()))
    others = [sharded.unpark, lambda: sharded.park("gpu"), lambda: sharded.park(path="x")]
    said = [told_by(each) for each in others]
    backward(sharded, optim, drawn[1][rank])
    said.append(told_by(sharded.park))
    optim.step()
    sharded.park()
    tokens = drawn[2][rank][0][:, :-1]
    reads = [
        *(lambda: sharded.model(tokens), lambda: sharded.model.layers[0](tokens), sharded.model.state_dict),
        *(lambda: backward(sharded, optim, drawn[2][rank]), optim.step, optim.state_dict, lambda: optim.state),
        *(lambda: optim.load_state_dict({}), lambda: sharded.model.load_state_dict(state), lambda: AdamW(sharded)),
        *(lambda: checkpoints.save(2, {}), lambda: checkpoints.resume("auto"), sharded.park, lambda: print(param)),
        *(lambda: param.to_local().sum(), lambda: param.detach().mul_(2), lambda: next(iter(state.values())).clone()),
    ]
    told = {told_by(each) for each in reads}
    sharded.unpark()
    checkpoints.close()
    backward(sharded, optim, drawn[2][rank])
    optim.step()
    return told, said, unequal(want, snapshot(sharded, optim))


def test_whatever_reads_parked_states_is_refused_and_nothing_is_lost(pool: Pool, tmp_path: Path) -> None:
    for told, others, differ in pool.run(refusals, 2, str(tmp_path)):
        assert told == {PARKED}
        assert others == [
            "unpark(): nothing is parked",
            "park(where='gpu'): choose one of ['host', 'disk']",
            "park(path='x'): only where='disk' writes a file; leave the path away",
            "park() with gradients of a step that has not ended: call step() or zero_grad() first",
        ]
        assert differ == []


def failing(owner: Any, name: str, at: int, error: BaseException, do: Any) -> str:
    """What is said where the call of that number of a function raises an error."""
    real, calls = getattr(owner, name), []

    def some(*args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        if len(calls) == at:
            raise error
        return real(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, some)
        with pytest.raises(BaseException) as raised:  # noqa: PT011  # the caller compares what it says
            do()
    return str(raised.value)


def too_small(rank: int, ranks: int, folder: str) -> tuple[list[str], list[str]]:
    """What is said when disk or device are too small or fail, at any time; and what differs after it all."""
    sharded, optim = made(folder, **STAGE_1)
    train(sharded, optim, "uneven", steps=2)
    want = snapshot(sharded, optim)
    full = OSError(errno.ENOSPC, "No space left on device")
    told = [failing(os, "pwritev", 3, full, lambda: sharded.park("disk", folder))]
    assert unequal(want, snapshot(sharded, optim)) == []
    sharded.park("disk", folder)
    preadv = os.preadv
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "preadv", lambda fd, data, offset: preadv(fd, data, 0))
        told.append(told_by(sharded.unpark))
    assert sum(optim.state_bytes().values()) == 0
    told.append(told_by(sharded.park))
    sharded.unpark()
    sharded.park("host")
    told.append(failing(Tensor, "copy_", 3, torch.OutOfMemoryError("CUDA out of memory"), sharded.unpark))
    assert sum(optim.state_bytes().values()) == 0
    sharded.unpark()
    return told, unequal(want, snapshot(sharded, optim))


TOO_SMALL = [
    ("writing the parked states", "No space left on device"),
    ("the parked states of", "are not what was written: the disk or its cable is failing"),
    (PARKED,),
    ("unpark(): the device has no room for", "meanwhile, and call unpark() again"),
]


def test_a_full_disk_or_device_and_a_damaged_file_are_one_line_and_lose_nothing(pool: Pool, tmp_path: Path) -> None:
    for told, differ in pool.run(too_small, 2, str(tmp_path)):
        assert differ == []
        for said, parts in zip(told, TOO_SMALL, strict=True):
            assert all(part in said for part in parts), said
        assert not any("\n" in each for each in told)
    assert list(tmp_path.iterdir()) == []


def interrupted(rank: int, ranks: int, folder: str) -> list[Any]:
    """What is true after an interrupt at each copy of park and unpark, and while memory is freed."""
    sharded, optim = made(folder, **STAGE_1)
    train(sharded, optim, "uneven", steps=2)
    want = snapshot(sharded, optim)
    found: list[Any] = []

    def interrupt(owner: Any, name: str, at: int, do: Any) -> None:
        failing(owner, name, at, KeyboardInterrupt(), do)

    for at in (1, 3):
        interrupt(Tensor, "copy_", at, sharded.park)
        found += [told_by(sharded.unpark), unequal(want, snapshot(sharded, optim))]
        interrupt(torch.UntypedStorage, "resize_", at, sharded.park)  # some of it is free
        found.append(told_by(optim.step))
        sharded.unpark()
        found.append(unequal(want, snapshot(sharded, optim)))
        sharded.park()
        interrupt(Tensor, "copy_", at, sharded.unpark)
        found.append(told_by(optim.step))
        sharded.unpark()
        found.append(unequal(want, snapshot(sharded, optim)))
    return found


def test_an_interrupt_at_any_time_loses_nothing(pool: Pool, tmp_path: Path) -> None:
    for found in pool.run(interrupted, 2, str(tmp_path)):
        assert found == ["unpark(): nothing is parked", [], PARKED, [], PARKED, []] * 2


class Fails(torch.optim.SGD):
    def __init__(self, *_: Any, **__: Any) -> None:
        raise ZeroDivisionError


def half_made(rank: int, ranks: int) -> list[int]:
    """What parking frees while an optimizer is there whose constructor failed, and without any."""
    sharded = sharded_net("uneven", **STAGE_3)
    with pytest.raises(ZeroDivisionError) as kept:  # whose traceback has the optimizer
        TorchOptimizer(sharded, Fails, elementwise=True, lr=0.1)
    freed = sharded.park()
    del kept
    return [freed, sharded_net("uneven", **STAGE_3).park()]


def test_an_optimizer_whose_constructor_failed_is_none(pool: Pool) -> None:
    for found in pool.run(half_made, 2):
        assert found[0] == found[1] > 0
