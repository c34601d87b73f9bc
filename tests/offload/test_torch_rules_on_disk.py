"""Element-wise classes of torch.optim keep masters and states on the host or on disk, with the bits of the device."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import Pool
from training_loops import params_of, sharded_net, snapshot, train, unequal

from dzero import DiskConfig, OffloadConfig, Sharded, TorchOptimizer, testing

CLASSES: dict[str, tuple[int, dict[str, Any]]] = {
    "SGD": (1, {"momentum": 0.9}),
    "Adam": (3, {"amsgrad": True}),
    "AdamW": (2, {}),
    "Adagrad": (1, {"initial_accumulator_value": 0.25}),
    "Adadelta": (2, {}),
    "Adamax": (2, {}),
    "NAdam": (2, {}),
    "RAdam": (2, {}),
    "RMSprop": (3, {"momentum": 0.5, "centered": True}),
    "ASGD": (1, {}),
    "Rprop": (2, {}),
}
"""Tensors of a parameter's shape that each element-wise class keeps, with these options."""
Where = dict[str, Any] | None
Cell = tuple[str, dict[str, Any], Where]
"""A class, how its net is cut, and which states are elsewhere than on the device."""
HOST = {"grad": "host", "master": "host", "moments": "host"}
DISK = {"grad": "host", "master": "disk", "moments": "disk"}
EVERYTHING = dict.fromkeys(("param", "grad", "master", "moments"), "disk")
SAME = "tests/offload/test_torch_rules_on_disk.py::test_classes_have_the_same_bits_off_the_device"


def made(name: str, where: Where, path: str, net: str = "uneven", **cut: Any) -> tuple[Sharded, TorchOptimizer]:
    disk = {"disk": DiskConfig(paths=[path], block_bytes=8192)} if where and "disk" in where.values() else {}
    offload = None if where is None else OffloadConfig(**where, **disk)
    sharded = sharded_net(net, offload=offload, **cut)
    options = {"max_norm": 0.5, "lr": 1e-3, **CLASSES[name][1]}
    return sharded, TorchOptimizer(sharded, getattr(torch.optim, name), **options)


def result(cell: Cell, path: str) -> dict[str, torch.Tensor]:
    """Losses, parameters and states; an fp32 parameter has a master of its own off the device only."""
    name, cut, where = cell
    sharded, optim = made(name, where, path, **cut)
    losses = train(sharded, optim, "uneven", steps=4)
    optim.load_state_dict(copy.deepcopy(optim.state_dict()))
    states = {key: value for key, value in snapshot(sharded, optim).items() if not key.endswith(".master")}
    return {"losses": torch.tensor(losses), **params_of(sharded), **{f"state {k}": v for k, v in states.items()}}


def compare(rank: int, ranks: int, path: str, cells: list[Cell]) -> list[str]:
    wrong = []
    for name, cut, where in cells:
        assert where is not None
        late = {key: value for key, value in where.items() if key == "delay_warmup_steps" or value == "delayed"}
        like = {**HOST, **late} if late else None  # delayed updates are not those of the device
        got, want = result((name, cut, where), path), result((name, cut, like), path)
        wrong += [f"{name} {cut} {where}: {key}" for key in unequal(got, want)]
    return wrong


WAYS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"stage": 3, "param": "bf16"}, EVERYTHING),
    ({"stage": 3, "param": "fp32", "microbatches": 4}, EVERYTHING),
    ({"stage": 2, "param": "bf16", "microbatches": 4}, {**DISK, "overlap": "delayed", "delay_warmup_steps": 2}),
    ({"stage": 3, "param": "fp32"}, {**DISK, "param": "host", "overlap": "step", "prefetch_units": 2}),
    ({"stage": 0, "param": "bf16"}, {**DISK, "grad": "device", "prefetch_units": 1}),
    ({"stage": 2, "param": "bf16"}, {**DISK, "master_fraction": 0.5, "moments_fraction": 0.5}),
]
HOST_WAYS = [
    HOST,
    {"master": "host", "moments": "host", "overlap": "step"},
    {"grad": "host"},
    {**HOST, "master_fraction": 0.5, "moments_fraction": 0.5},
]
CELLS: dict[str, list[Cell]] = {
    "two ways": [
        ("SGD", {"stage": 2, "param": "fp32", "microbatches": 2}, HOST),
        ("Adam", {"stage": 3, "param": "bf16"}, EVERYTHING),
    ],
    "every class on disk": [
        (name, {"stage": 1 + at % 3, "param": ("bf16", "fp32")[at % 2]}, DISK) for at, name in enumerate(CLASSES)
    ],
    "every way to disk": [(("NAdam", "Adagrad")[at % 2], *way) for at, way in enumerate(WAYS)],
    "every way to the host": [
        ("NAdam", {"stage": stage, "param": param, "microbatches": 1 + 3 * (stage % 2)}, HOST_WAYS[stage])
        for param, stage in itertools.product(("bf16", "fp32"), range(4))
    ],
}
EXHAUSTIVE = {name: [(name, *way) for way in WAYS] for name in CLASSES}


@pytest.mark.product(keep=1)
@pytest.mark.parametrize("which", [*CELLS, *(pytest.param(name, marks=pytest.mark.slow) for name in EXHAUSTIVE)])
def test_classes_have_the_same_bits_off_the_device(pool: Pool, tmp_path: Path, which: str) -> None:
    assert pool.run(compare, 2, str(tmp_path), (CELLS | EXHAUSTIVE)[which]) == [[], []]


def bytes_of(rank: int, ranks: int, path: str) -> dict[str, tuple[int, int]]:
    """Bytes on disk, taken and by formula, of classes on the net whose shards need no padding."""
    found = {}
    for name in ("SGD", "AdamW", "Adam"):
        kept, _ = CLASSES[name]
        sharded, optim = made(name, DISK, path, "even")
        shares = [4 * sum(param.shard_elems(ranks) for param in unit.params) for unit in sharded.shapes]
        pages = sum(-(-share // 4096) - (-share * kept // 4096) for share in shares)
        found[name] = testing.bytes_on_tiers(optim)["disk"], 4096 * pages
    return found


def test_a_class_keeps_on_disk_its_masters_and_its_states_in_fp32(pool: Pool, tmp_path: Path) -> None:
    """Of each unit the masters, and as many tensors as the class keeps; each in whole pages."""
    for name, (taken, due) in pool.run(bytes_of, 2, str(tmp_path))[0].items():
        assert taken == due, name


def seen(rank: int, ranks: int, path: str) -> tuple[list[str], bool]:
    """A state on disk is read, written and loaded through state dicts, as any other."""
    sharded, optim = made("SGD", DISK, path)
    train(sharded, optim, "uneven", steps=2)
    states = optim.state[next(iter(sharded.named_params().values()))]
    before = testing.local(states["momentum_buffer"]).clone()
    states["momentum_buffer"].mul_(2)
    doubled = torch.equal(testing.local(states["momentum_buffer"]).clone(), before * 2)
    other, fresh = made("SGD", DISK, path, seed=1)
    other.model.load_state_dict(sharded.model.state_dict())
    fresh.load_state_dict(copy.deepcopy(optim.state_dict()))
    for each, its in ((sharded, optim), (other, fresh)):
        train(each, its, "uneven", steps=2, seed=5)
        its.synchronize()
    return unequal(snapshot(sharded, optim), snapshot(other, fresh)), doubled


def test_states_on_disk_are_read_and_written_through_state_dicts(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(seen, 2, str(tmp_path)) == [([], True)] * 2


def later(rank: int, ranks: int, path: str) -> list[str]:
    """Groups: some parameters in none (fp32 masters on disk are the parameters), one added after two steps."""
    ends = []
    disk = DiskConfig(paths=[path], block_bytes=8192)
    for offload in (None, OffloadConfig(**DISK | {"param": "disk"}, disk=disk)):
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
    return unequal(*ends)


@pytest.mark.full(SAME)
def test_groups_may_be_partial_and_come_later(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(later, 2, str(tmp_path)) == [[], []]


class Lookahead(torch.optim.SGD):
    """Keeps the first values of each parameter, from the moment it is made."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param]["slow"] = param.detach().clone()


def refused(rank: int, ranks: int, path: str) -> None:
    on_disk = OffloadConfig(**DISK, disk=DiskConfig(paths=[path]))
    with pytest.raises(ValueError, match=r"'slow'.*take offload\.master=host"):
        TorchOptimizer(sharded_net("even", offload=on_disk), Lookahead, lr=0.1, elementwise=True)
    says = r"it keeps its states where the masters are, in one fraction; take offload\.moments=host, or"
    with pytest.raises(ValueError, match=says):
        TorchOptimizer(sharded_net("even", offload=OffloadConfig(master="host")), torch.optim.SGD, lr=0.1)


def test_classes_whose_states_cannot_lie_beside_the_masters_are_refused(pool: Pool, tmp_path: Path) -> None:
    """One that copies values when it is made, and settings that part states from masters."""
    pool.run(refused, 1, str(tmp_path))


def owned(rank: int, ranks: int, path: str) -> list[str]:
    """Adafactor: masters on disk, and what it keeps of whole parameters with their owners. SGD: masters alone."""
    ends = []
    disk = DiskConfig(paths=[path], block_bytes=8192)
    for offload in (None, OffloadConfig(**DISK, disk=disk), OffloadConfig(**EVERYTHING, disk=disk)):
        for rule in (torch.optim.Adafactor, torch.optim.SGD):
            sharded = sharded_net("uneven", stage=3, param="bf16", offload=offload)
            optim = TorchOptimizer(sharded, rule, lr=1e-2)
            train(sharded, optim, "uneven", steps=3)
            ends.append(params_of(sharded))
            told = [line for line in optim.describe() if "stays in host memory" in line]
            assert len(told) == (offload is not None and rule is torch.optim.Adafactor)
    return [key for at, end in enumerate(ends[2:]) for key in unequal(ends[at % 2], end)]


@pytest.mark.full(SAME)
def test_masters_are_on_disk_alone_if_a_class_keeps_nothing_beside_them(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(owned, 2, str(tmp_path)) == [[], []]
