"""Element-wise classes of torch.optim keep masters and states on disk, with the bits that they have on the device."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import Pool
from training_loops import params_of, sharded_net, snapshot, train, unequal

from dzero import DiskConfig, OffloadConfig, TorchOptimizer
from dzero.estimate.memory import off_device
from dzero.estimate.transfers import moved_of
from dzero.optim.build import build_optimizer, rule_states
from dzero.optim.config import OptimConfig
from dzero.optim.requires_unsharded import ELEMENTWISE
from dzero.zero.dtensors import local_of
from dzero.zero.offload_config import KINDS

OPTIONS: dict[str, dict[str, Any]] = {
    "SGD": {"momentum": 0.9},
    "Adam": {"amsgrad": True},
    "RMSprop": {"momentum": 0.5, "centered": True},
    "Adagrad": {"initial_accumulator_value": 0.25},
}
KEPT = {
    "SGD": 1,
    "Adam": 3,
    "AdamW": 2,
    "Adagrad": 1,
    "Adadelta": 2,
    "Adamax": 2,
    "NAdam": 2,
    "RAdam": 2,
    "RMSprop": 3,
    "ASGD": 1,
    "Rprop": 2,
}
"""Tensors of a parameter's shape that each class keeps, with these options."""


Cell = tuple[str, dict[str, Any], dict[str, Any]]
"""A class, how its net is cut, and what is elsewhere than on disk."""


def on_disk(path: str, **changes: Any) -> OffloadConfig:
    kinds = {"grad": "host", "master": "disk", "moments": "disk", **changes}
    return OffloadConfig(**kinds, disk=DiskConfig(paths=[path], block_bytes=8192))


def made(name: str, offload: OffloadConfig | None, **net: Any) -> tuple[Any, TorchOptimizer]:
    sharded = sharded_net("uneven", offload=offload, **net)
    rule = getattr(torch.optim, name)
    return sharded, TorchOptimizer(sharded, rule, max_norm=0.5, lr=1e-3, **OPTIONS.get(name, {}))


def result(name: str, offload: OffloadConfig | None, **net: Any) -> dict[str, Any]:
    sharded, optim = made(name, offload, **net)
    losses = train(sharded, optim, "uneven", steps=4)
    if offload is not None:
        kept = optim.offload.buffer_layout.layout.rule_states
        assert kept is not None
        assert len(kept) == KEPT[name]
        away = [held for held in optim._held.values() if held.mesh is not None]
        places = [place for held in away for place in held.places.values()]
        states = [state for held in away for state in optim._class_states.tensors_of(held)]
        assert {id(each) for each in states} <= {id(each) for each in places}, "all lie in their slots"
        assert len(states) == len(places)
    found = {"losses": torch.tensor(losses), **params_of(sharded)}
    found |= {f"state {key}": value for key, value in snapshot(sharded, optim).items() if not key.endswith(".master")}
    optim.offload.executor.close()
    return found


def compare(rank: int, ranks: int, path: str, cells: list[Cell]) -> list[str]:
    wrong = []
    for name, net, changes in cells:
        late = changes if changes.get("overlap") == "delayed" else None  # with other weights than on the device
        like = OffloadConfig(grad="host", master="host", moments="host", **late) if late else None
        got, want = result(name, on_disk(path, **changes), **net), result(name, like, **net)
        wrong += [f"{name} {net} {changes}: {key}" for key in unequal(got, want)]
    return wrong


def test_every_class_has_the_same_bits_on_disk(pool: Pool, tmp_path: Path) -> None:
    cells: list[Cell] = [
        (name, {"stage": 1 + at % 3, "param": ("bf16", "fp32")[at % 2]}, {}) for at, name in enumerate(KEPT)
    ]
    assert set(KEPT) == set(ELEMENTWISE)
    assert pool.run(compare, 2, str(tmp_path), cells) == [[], []]


WAYS = [
    ({"stage": 3, "param": "bf16"}, dict.fromkeys(KINDS, "disk")),
    ({"stage": 3, "param": "fp32", "microbatches": 4}, dict.fromkeys(KINDS, "disk")),
    ({"stage": 2, "param": "bf16", "microbatches": 4}, {"overlap": "delayed", "delay_warmup_steps": 2}),
    ({"stage": 3, "param": "fp32"}, {"param": "host", "overlap": "step", "prefetch_units": 2}),
    ({"stage": 0, "param": "bf16"}, {"grad": "device", "prefetch_units": 1}),
    ({"stage": 2, "param": "bf16"}, {"master_fraction": 0.5, "moments_fraction": 0.5}),
]


def test_every_way_to_offload_has_the_same_bits(pool: Pool, tmp_path: Path) -> None:
    cells: list[Cell] = [(("NAdam", "Adagrad")[at % 2], net, changes) for at, (net, changes) in enumerate(WAYS)]
    assert pool.run(compare, 2, str(tmp_path), cells) == [[], []]


@pytest.mark.slow
def test_every_way_to_offload_has_the_same_bits_full_product(pool: Pool, tmp_path: Path) -> None:
    for name in KEPT:
        assert pool.run(compare, 2, str(tmp_path), [(name, *way) for way in WAYS]) == [[], []]


def bytes_of(rank: int, ranks: int, path: str, names: list[str]) -> list[dict[str, tuple[int, int]]]:
    """What a plan foresees of a class, and what it takes."""
    found = []
    for name in names:
        config = OptimConfig(rule=name, lr=1e-3, options=OPTIONS.get(name, {}))
        sharded = sharded_net("uneven", stage=3, offload=on_disk(path))
        optim = build_optimizer(sharded, config)
        train(sharded, optim, "uneven", steps=2)
        optim.await_updates()
        optim.offload.take_use()
        train(sharded, optim, "uneven", steps=1)
        optim.await_updates()
        use = optim.offload.take_use()
        moved = {way: sum(use[lane].moved_bytes for lane in use if way in lane) for way in ("LOAD", "SPILL")}
        layout = replace(sharded.layout, rule_states=rule_states(config))
        host, disk = off_device(layout, sharded.shapes, None)
        foreseen, schedule = moved_of(layout, sharded.shapes), optim.offload.schedule
        found.append(
            {
                "host": (sum(host.values()), schedule.host_bytes),
                "disk": (sum(disk.values()), schedule.disk_bytes),
                "read": (foreseen.read, moved["LOAD"]),
                "written": (foreseen.written, moved["SPILL"]),
            }
        )
        optim.offload.executor.close()
    return found


def test_plans_know_what_a_class_keeps(pool: Pool, tmp_path: Path) -> None:
    names = ["SGD", "Adam", "Rprop"]
    one, two, three = pool.run(bytes_of, 2, str(tmp_path), names)[0]
    for each in (one, two, three):
        assert {key: foreseen for key, (foreseen, _) in each.items()} == {key: took for key, (_, took) in each.items()}
    assert one["disk"][0] < three["disk"][0] < two["disk"][0]


def seen(rank: int, ranks: int, path: str) -> dict[str, Any]:
    """A state on disk is read, written and loaded through state dicts, as any other."""
    sharded, optim = made("SGD", on_disk(path), stage=2, param="bf16")
    train(sharded, optim, "uneven", steps=2)
    param = next(iter(sharded.named_params().values()))
    before = local_of(optim.state[param]["momentum_buffer"]).clone()
    optim.state[param]["momentum_buffer"].mul_(2)
    doubled = torch.equal(local_of(optim.state[param]["momentum_buffer"]).clone(), before * 2)
    packed = {"state": {}, **optim.state_dict()}
    saved = copy.deepcopy(packed)
    train(sharded, optim, "uneven", steps=2)
    other, fresh = made("SGD", on_disk(path), stage=2, param="bf16")
    other.model.load_state_dict(sharded.model.state_dict())
    fresh.load_state_dict(saved)
    held = fresh._held[next(iter(other.named_params().values()))]
    assert held.target is not None
    at_home = fresh.inner.state[held.target]["momentum_buffer"] is held.places["momentum_buffer"]
    same = torch.equal(local_of(fresh.state[held.param]["momentum_buffer"]).clone(), before * 2)
    return {
        "doubled": doubled,
        "at home": at_home,
        "same": same,
        "kind": type(local_of(packed["state"][0]["master"])).__name__,
    }


def test_states_on_disk_are_read_and_written_through_state_dicts(pool: Pool, tmp_path: Path) -> None:
    want = {"doubled": True, "at home": True, "same": True, "kind": "OffDeviceShard"}
    assert pool.run(seen, 2, str(tmp_path)) == [want, want]


def later(rank: int, ranks: int, path: str) -> list[str]:
    """Groups: some parameters in none (fp32 masters on disk are the parameters), one added after two steps."""
    ends = []
    for offload in (None, on_disk(path, param="disk")):
        sharded = sharded_net("uneven", stage=3, param="fp32", offload=offload)
        first, *rest = sharded.named_params().values()
        optim = TorchOptimizer(sharded, torch.optim.SGD, rest[:3], lr=0.05, momentum=0.9)
        train(sharded, optim, "uneven", steps=2)
        optim.add_param_group({"params": [first, *rest[3:6]], "lr": 0.01, "momentum": 0.0})
        train(sharded, optim, "uneven", steps=2)
        optim.synchronize()
        ends.append(params_of(sharded) | snapshot(sharded, optim))
        del optim
        again = TorchOptimizer(sharded, torch.optim.Adam, lr=1e-3)
        train(sharded, again, "uneven", steps=2)
        again.synchronize()
        ends[-1] |= {f"then {key}": value for key, value in params_of(sharded).items()}
    wrong: list[str] = unequal(*ends)
    return wrong


def test_groups_may_be_partial_and_come_later(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(later, 2, str(tmp_path)) == [[], []]


class Lookahead(torch.optim.SGD):
    """Keeps the first values of each parameter, from the moment it is made."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param]["slow"] = param.detach().clone()


def refused(rank: int, ranks: int, path: str) -> str:
    sharded = sharded_net("even", offload=on_disk(path))
    with pytest.raises(ValueError, match=r"take offload\.master=host") as error:
        TorchOptimizer(sharded, Lookahead, lr=0.1, elementwise=True)
    return str(error.value)


def test_a_class_that_copies_values_when_it_is_made_is_refused(pool: Pool, tmp_path: Path) -> None:
    assert "'slow'" in pool.run(refused, 1, str(tmp_path))[0]


def owned(rank: int, ranks: int, path: str) -> list[str]:
    """Adafactor: masters on disk, and what it keeps of whole parameters with their owners. SGD: masters alone."""
    ends = []
    for offload in (None, on_disk(path), on_disk(path, param="disk", grad="disk")):
        for rule in (torch.optim.Adafactor, torch.optim.SGD):
            sharded = sharded_net("uneven", stage=3, param="bf16", offload=offload)
            optim = TorchOptimizer(sharded, rule, lr=1e-2)
            train(sharded, optim, "uneven", steps=3)
            ends.append(params_of(sharded))
            told = [line for line in optim.describe() if "stays in host memory" in line]
            assert len(told) == (offload is not None and rule is torch.optim.Adafactor)
            optim.offload.executor.close()
    return [key for at, end in enumerate(ends[2:]) for key in unequal(ends[at % 2], end)]


def test_masters_are_on_disk_alone_if_a_class_keeps_nothing_beside_them(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(owned, 2, str(tmp_path)) == [[], []]
