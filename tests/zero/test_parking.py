"""`Sharded.park`: the formula's bytes leave the device, and training goes on with the bits of a run without it."""

from __future__ import annotations

import errno
import gc
import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import small_decoders
import torch
from live_tensors import live_bytes
from pool import Pool
from torch import Tensor
from training_loops import backward, sharded_net, snapshot, train, unequal

import dzero
from dzero import AdamW, DiskConfig, OffloadConfig, Sharded, TorchOptimizer
from dzero.optim.base import MasterOptimizer
from dzero.zero import parking
from dzero.zero.cost_model import resting_bytes
from dzero.zero.unit import PARKED

BF16 = {"param": "bf16"}
STORED: list[dict[str, Any]] = [
    {"stage": 0, **BF16, "master": "remainder"},
    {"stage": 1, **BF16},
    {"stage": 2, "param": "fp32"},
    {"stage": 3, **BF16, "moments": "int8"},
    {"stage": 3, "param": "fp16"},
]
TIERS = {"grad": "host", "master": "host", "moments": "host"}
ALL_AWAY = TIERS | {"param": "host"}
PARTLY = TIERS | {"overlap": "delayed", "delay_warmup_steps": 1, "master_fraction": 0.5}


def made(folder: str, *, net: str = "uneven", rule: str = "adamw", **kwargs: Any) -> tuple[Sharded, MasterOptimizer]:
    tiers = kwargs.pop("offload", {})
    disk = {"disk": DiskConfig(paths=[folder])} if "disk" in tiers.values() else {}
    sharded = sharded_net(net, offload=OffloadConfig(**tiers, **disk), **kwargs)
    optims = {
        "adamw": lambda: AdamW(sharded, lr=1e-2, max_norm=0.5),
        "muon": lambda: dzero.Muon(sharded, lr=1e-2),
        "sgd": lambda: TorchOptimizer(sharded, torch.optim.SGD, lr=1e-2, momentum=0.9),
    }
    return sharded, optims[rule]()


def parked_between(rank: int, ranks: int, folder: str, cells: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Train four steps with and without parking after each, and before the first; return what differs, and bytes."""
    found = []
    for cell in cells:
        sharded, optim = made(folder, **cell)
        train(sharded, optim, cell.get("net", "uneven"), steps=4)
        want = snapshot(sharded, optim)
        sharded, optim = made(folder, **cell)
        freed = []
        for where in ("host", "disk", "host", "disk"):
            freed.append(sharded.park(where, folder if where == "disk" else None))
            left = sum(optim.state_bytes().values())
            sharded.unpark()
            drawn = small_decoders.batches(
                cell.get("net", "uneven"), steps=4, ranks=ranks, microbatches=sharded.layout.microbatches
            )
            backward(sharded, optim, drawn[len(freed) - 1][rank])
            optim.step()
            sharded.model.eval()(drawn[0][rank][0][:, :-1])  # leaves parameters gathered
            sharded.model.train()
        rest = sum(optim.state_bytes().values())
        formula = resting_bytes(sharded.layout, sharded.shapes)
        found.append(
            {
                "cell": str(cell),
                "differ": unequal(want, snapshot(sharded, optim)),
                "freed": freed,
                "left": left,
                "rest": rest,
                "formula": formula.param + formula.master + formula.moments,
            }
        )
    return found


def check(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        assert row["differ"] == [], row["cell"]
        assert row["left"] == 0, row["cell"]
        assert all(a == b for a, b in pairwise(row["freed"][1:])), row["cell"]
        assert row["freed"][-1] == row["rest"], row["cell"]


def test_training_goes_on_with_the_same_bits_and_the_device_is_free(pool: Pool, tmp_path: Path) -> None:
    for rows in pool.run(parked_between, 2, str(tmp_path), STORED):
        check(rows)


def test_what_is_freed_is_the_formula(pool: Pool, tmp_path: Path) -> None:
    """Of a net that 2 ranks cut evenly: all of param, master and moments, each byte once."""
    cells = [{**cell, "net": "even"} for cell in STORED]
    for row in pool.run(parked_between, 2, str(tmp_path), cells[:3])[0]:
        check([row])
        assert set(row["freed"]) == {row["formula"]}


def test_states_off_the_device_stay_there_and_other_optimizers_are_parked_too(pool: Pool, tmp_path: Path) -> None:
    cells: list[dict[str, Any]] = [
        {"stage": 3, **BF16, "offload": ALL_AWAY},
        {"stage": 2, **BF16, "offload": PARTLY},
        {"stage": 3, **BF16, "offload": dict.fromkeys(ALL_AWAY, "disk")},
        {"stage": 3, **BF16, "rule": "muon"},
        {"stage": 1, **BF16, "rule": "sgd", "net": "tied"},
        {"stage": 2, **BF16, "microbatches": 2},
        {"stage": 3, **BF16, "frozen": "int8", "net": "frozen"},
    ]
    for rows in pool.run(parked_between, 2, str(tmp_path), cells):
        check(rows)
        assert rows[0]["freed"] == rows[2]["freed"] == [0] * 4
        assert rows[1]["freed"][-1] > 0


def handed_on(rank: int, ranks: int, folder: str) -> list[str]:
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


def test_masters_of_no_optimizer_are_parked_too(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(handed_on, 2, str(tmp_path)) == [[], []]


@pytest.mark.full
def test_replica_shards_are_parked(pool: Pool, tmp_path: Path) -> None:
    cells = [
        {"stage": stage, "replicate": 2, **BF16, "optimizer_shard_axes": ("replicate", "shard"), "offload": offload}
        for stage, offload in ((2, {}), (3, {}), (2, TIERS))
    ]
    for rows in pool.run(parked_between, 4, str(tmp_path), cells):
        check(rows)


def memory(rank: int, ranks: int, folder: str) -> tuple[int, int, int, int]:
    """Bytes of all tensors of the process before and while parked on disk, and after; and what park returns."""
    sharded, optim = made(folder, **STORED[1])
    train(sharded, optim, "uneven", steps=1)
    sharded.park("disk", folder)
    sharded.unpark()
    gc.collect()
    before = live_bytes()
    freed = sharded.park("disk", folder)
    parked = live_bytes()
    sharded.unpark()
    return before, parked, live_bytes(), freed


def test_the_process_holds_no_other_copy(pool: Pool, tmp_path: Path) -> None:
    for before, parked, after, freed in pool.run(memory, 2, str(tmp_path)):
        assert before - parked == freed > 0
        assert after == before


def told_by(do: Any) -> str:
    with pytest.raises((RuntimeError, ValueError, OSError, MemoryError)) as raised:
        do()
    return str(raised.value)


def refusals(rank: int, ranks: int, folder: str, kwargs: dict[str, Any]) -> tuple[list[str], list[str], list[str]]:
    """What is said while parked and otherwise, and what differs from a run in which none of it was tried."""
    drawn = small_decoders.batches("uneven", steps=3, ranks=ranks, microbatches=1)
    sharded, optim = made(folder, **kwargs)
    for of_step in drawn:
        backward(sharded, optim, of_step[rank])
        optim.step()
    want = snapshot(sharded, optim)
    sharded, optim = made(folder, **kwargs)
    backward(sharded, optim, drawn[0][rank])
    optim.step()
    checkpoints = dzero.Checkpointer(dzero.CheckpointConfig(folder=f"{folder}/checkpoints"), sharded, optim)
    checkpoints.save(1, {})
    checkpoints.finish()
    state = sharded.model.state_dict()
    param = next(iter(sharded.named_params().values()))
    others = [
        told_by(lambda: sharded.unpark()),
        told_by(lambda: sharded.park("gpu")),
        told_by(lambda: sharded.park(path="x")),
    ]
    backward(sharded, optim, drawn[1][rank])
    others.append(told_by(sharded.park))
    optim.step()
    sharded.park()
    tokens = drawn[2][rank][0][:, :-1]
    told = [
        told_by(each)
        for each in (
            lambda: sharded.model(tokens),
            lambda: sharded.model.layers[0](tokens),
            lambda: backward(sharded, optim, drawn[2][rank]),
            optim.step,
            optim.state_dict,
            lambda: optim.load_state_dict({}),
            lambda: optim.state,
            sharded.model.state_dict,
            lambda: sharded.model.load_state_dict(state),
            lambda: checkpoints.save(2, {}),
            lambda: checkpoints.resume("auto"),
            lambda: AdamW(sharded),
            sharded.park,
            lambda: print(param),
            lambda: param.to_local().sum(),
            lambda: param.detach().mul_(2),
            lambda: next(iter(state.values())).clone(),
        )
    ]
    sharded.unpark()
    checkpoints.close()
    backward(sharded, optim, drawn[2][rank])
    optim.step()
    return told, others, unequal(want, snapshot(sharded, optim))


@pytest.mark.parametrize("kwargs", [{"stage": 3, **BF16}, {"stage": 0, **BF16}], ids=["stage3", "stage0"])
def test_whatever_reads_parked_states_is_refused_and_nothing_is_lost(
    pool: Pool, tmp_path: Path, kwargs: dict[str, Any]
) -> None:
    for told, others, differ in pool.run(refusals, 2, str(tmp_path), kwargs):
        assert set(told) == {PARKED}
        assert others == [
            "unpark(): nothing is parked",
            "park(where='gpu'): choose one of ['host', 'disk']",
            "park(path='x'): only where='disk' writes a file; leave the path away",
            "park() with gradients of a step that has not ended: call step() or zero_grad() first",
        ]
        assert differ == []


def failing(rank: int, ranks: int, folder: str) -> tuple[list[str], list[str]]:
    """What is said when memory or disk are too small, at any time; and what differs after it all."""
    kwargs = STORED[1]
    sharded, optim = made(folder, **kwargs)
    train(sharded, optim, "uneven", steps=2)
    want = snapshot(sharded, optim)
    told = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dzero.zero.parking.host_available_bytes", lambda: 1000)
        told.append(told_by(lambda: sharded.park("host")))
    pwritev, calls = os.pwritev, []

    def full_after_two(fd: int, data: Any, offset: int) -> int:
        calls.append(offset)
        if len(calls) > 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        return pwritev(fd, data, offset)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "pwritev", full_after_two)
        told.append(told_by(lambda: sharded.park("disk", folder)))
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
    copied, copy_ = [], Tensor.copy_

    def too_large(*args: Any, **kwargs: Any) -> Tensor:
        copied.append(args)
        if len(copied) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return copy_(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "copy_", too_large)
        told.append(told_by(sharded.unpark))
    assert sum(optim.state_bytes().values()) == 0
    sharded.unpark()
    return told, unequal(want, snapshot(sharded, optim))


def test_too_little_memory_or_disk_is_one_line_and_loses_nothing(pool: Pool, tmp_path: Path) -> None:
    for told, differ in pool.run(failing, 2, str(tmp_path)):
        assert differ == []
        for said, parts in zip(
            told,
            [
                ("park(where='host') needs", "1000 B are available now: take park(where='disk')"),
                (f"{tmp_path}: writing the parked states", "No space left on device"),
                (f"{tmp_path}: the parked states of", "are not what was written: the disk or its cable is failing"),
                (PARKED,),
                ("unpark(): the device has no room for", "meanwhile, and call unpark() again"),
            ],
            strict=True,
        ):
            assert all(part in said for part in parts), said
        assert not any("\n" in each for each in told)
    assert list(tmp_path.iterdir()) == []


def interrupted(rank: int, ranks: int, folder: str) -> list[Any]:
    """What is true after an interrupt at each copy of park and unpark, and while memory is freed."""
    sharded, optim = made(folder, **STORED[1])
    train(sharded, optim, "uneven", steps=2)
    want = snapshot(sharded, optim)
    found: list[Any] = []

    def interrupt(owner: Any, name: str, at: int, do: Any) -> None:
        real, calls = getattr(owner, name), []

        def some(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            if len(calls) == at:
                raise KeyboardInterrupt
            return real(*args, **kwargs)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(owner, name, some)
            with pytest.raises(KeyboardInterrupt):
                do()

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


def test_a_rank_that_is_late_may_take_what_the_others_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 10 units of host memory, each of 2 ranks takes 4; of 7, the second one is refused in time."""
    unit = parking.CHUNK_BYTES // 4096
    monkeypatch.setattr(parking, "CHUNK_BYTES", unit)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    for total, refused in ((10, False), (7, True)):
        taken: list[int] = []
        monkeypatch.setattr(parking, "host_available_bytes", lambda total=total, taken=taken: total * unit - sum(taken))
        monkeypatch.setattr(parking.streams, "pin_memory", lambda new, _, taken=taken: taken.append(len(new)) or new)
        data = torch.arange(4 * unit).to(torch.uint8)
        parking.HostCopies(len(data), data.device).save(0, data)
        if refused:
            with pytest.raises(MemoryError, match="on each rank"):
                parking.HostCopies(len(data), data.device).save(0, data)
            continue
        late = parking.HostCopies(len(data), data.device)
        late.save(0, data)
        late.load(0, loaded := torch.empty_like(data))
        assert torch.equal(loaded, data)


def half_made(rank: int, ranks: int) -> list[int]:
    """What parking frees while an optimizer is there whose constructor failed, and without any."""
    found = []
    for module, name, rule in (("adamw", "AdamWUpdater", AdamW), ("torch_optimizer", "StatePlacement", TorchOptimizer)):
        sharded = sharded_net("uneven", stage=3, **BF16)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(f"dzero.optim.{module}.{name}", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError) as kept:
                rule(sharded, *([torch.optim.SGD] if rule is TorchOptimizer else []), lr=0.1)
        found.append(sharded.park())
        sharded.unpark()
        del kept
    sharded = sharded_net("uneven", stage=3, **BF16)
    return [*found, sharded.park()]


def test_an_optimizer_whose_constructor_failed_is_none(pool: Pool) -> None:
    for found in pool.run(half_made, 2):
        assert len({*found}) == 1
