"""Parameters in host memory: nothing of them rests on the device, they come in time, and are tensors like others."""

from __future__ import annotations

import copy
import gc
import io
import os
import subprocess
import sys
import threading
import time
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import parity_cells
import pytest
import small_decoders
import torch
import torch.distributed.checkpoint as dcp
from parity_cells import Cell
from pool import Pool
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.tensor import DTensor
from training_loops import backward, params_of, sharded_net, snapshot, train, unequal

from dzero import AdamW, DiskConfig, OffloadConfig, PrecisionConfig, ZeroConfig
from dzero.zero.dtensors import local_of
from dzero.zero.layout import Layout
from dzero.zero.offloaded_param import HostStorage, OffDeviceShard, OffDeviceTensor

ALL: dict[str, Any] = {"param": "host", "grad": "host", "master": "host", "moments": "host"}


class CountingHooks:
    """Counts who asked."""

    settled = edited = 0

    def await_update(self) -> None:
        self.settled += 1

    def before_write(self) -> None:
        self.edited += 1

    def fetch(self, memory: OffDeviceTensor) -> torch.Tensor:
        return memory.flat


class Far(HostStorage):
    """A home whose elements cannot be seen in place, as on disk."""

    def get(self) -> torch.Tensor:
        return self.flat.clone()


@pytest.mark.parametrize("home", [HostStorage, Far])
def test_a_shard_is_a_tensor_like_any_other(home: type[HostStorage]) -> None:
    door = CountingHooks()
    memory = OffDeviceTensor("w", home(torch.arange(12.0)), torch.float32, 12, torch.device("cpu"), weakref.ref(door))
    shard = OffDeviceShard.of(memory, (3, 4))
    row = shard[1]
    assert isinstance(row, OffDeviceShard)
    assert door.settled == 0  # nobody has looked yet
    assert torch.equal(row + 1, torch.tensor([5.0, 6.0, 7.0, 8.0]))
    assert not isinstance(row + 1, OffDeviceShard)
    with torch.no_grad():
        row.mul_(2)
        shard[2].copy_(torch.ones(4))
        torch._foreach_add_([shard[0]], [torch.ones(4)])  # type: ignore[attr-defined]
    assert memory.flat.tolist() == [1, 2, 3, 4, 8, 10, 12, 14, 1, 1, 1, 1]
    assert door.settled >= 4
    assert door.edited == 3
    moved = torch.full((12,), 7.0)
    memory.move_to(home(moved))
    moved[4] = 9
    assert row.clone().tolist() == [9, 10, 12, 14]
    padded = shard.new_zeros(4, 4)
    assert isinstance(padded, OffDeviceShard)
    assert padded.memory.hooks is memory.hooks
    bits = shard.view(torch.int32)
    assert torch.equal(bits + 0, moved.view(3, 4).view(torch.int32))
    assert torch.equal(bits[1:].view(torch.uint8) + 0, moved[4:].view(2, 4).view(torch.uint8))
    assert torch.equal(torch.view_as_complex(shard.view(6, 2)) * 1, torch.view_as_complex(moved.view(6, 2)))
    assert row.tolist() == row.numpy().tolist() == torch.from_dlpack(row).tolist() == moved[4:8].tolist()
    file = io.BytesIO()
    torch.save({"row": row}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)["row"]
    assert type(saved) is torch.Tensor
    assert torch.equal(saved, moved[4:8])
    assert torch.equal(copy.deepcopy(row), moved[4:8])
    with torch.no_grad():
        torch._foreach_add_([*shard], [torch.ones(4)] * 3)  # type: ignore[attr-defined]
        shard[0].copy_(shard[2])
    assert memory.flat.tolist() == moved.tolist() == [2, 2, 2, 2, 10, 11, 13, 15, 2, 2, 2, 2]
    for refused in (lambda: shard.t_(), lambda: shard.resize_(2), lambda: shard.unsqueeze_(0), shard.share_memory_):
        with pytest.raises(NotImplementedError, match="on a parameter in host memory"):
            refused()
    other = torch.ones(4)
    with torch.no_grad():
        torch._foreach_add_([shard[0], other], [torch.ones(4), torch.ones(4)])  # type: ignore[attr-defined]
    assert memory.flat.tolist()[:4] == [3, 3, 3, 3]
    assert other.tolist() == [2, 2, 2, 2]


def settings(**changes: Any) -> Layout:
    zero = ZeroConfig(stage=changes.pop("stage", 3), reshard_after_forward=changes.pop("reshard", True))
    return Layout.of(zero, PrecisionConfig(), OffloadConfig(**{**ALL, **changes}), replicate=1, shard=4)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"stage": 2}, r"offload.param=host with zero.stage=2: only stage 3"),
        ({"reshard": 2}, r"zero.reshard_after_forward=2: .* take zero.reshard_after_forward=true"),
        ({"master": "device"}, r"with its master, which is larger; take offload.master=host"),
        ({"master_fraction": 0.5}, r"offload.master_fraction ≥ offload.param_fraction"),
    ],
)
def test_settings_that_cannot_work_say_what_can(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        settings(**changes)


def moved(rank: int, ranks: int, fraction: float) -> None:
    """Bytes at rest, and bytes fetched per step once the order of units is known: 2 M gathers of every shard, M of the
    root's, which stays gathered for backward; one rank gathers nothing, and fetches all of them twice."""
    microbatches = 2
    offload = OffloadConfig(**ALL, param_fraction=fraction)
    sharded = sharded_net("uneven", stage=3, microbatches=microbatches, offload=offload)
    optim = AdamW(sharded)
    hosted = [name for unit in sharded.units for name in unit.offloaded]
    shapes = {param.name: param for unit in sharded.shapes for param in unit.params}
    assert (fraction < 1) == (len(hosted) < len(shapes))
    staying = sum(2 * shapes[name].shard_elems(ranks) for name in shapes if name not in hosted)
    assert optim.state_bytes() == {"param": staying, "master": 0, "moments": 0}
    coming = sum(2 * shapes[name].shard_elems(ranks) for name in hosted)
    sent = sum(2 * local_of(p.detach()).numel() for n, p in sharded.named_params().items() if n not in hosted)
    train(sharded, optim, "uneven", steps=2)
    optim.synchronize()
    optim.offload.take_use()
    train(sharded, optim, "uneven", steps=3)
    optim.synchronize()
    fetched = optim.offload.take_use()["FETCH"].moved_bytes
    first = sum(2 * shapes[name].shard_elems(ranks) for name in sharded.units[-1].offloaded)
    # The next forward's root is fetched ahead at the end of each step; synchronising has dropped one, the last stays.
    stays = first if ranks > 1 else 0
    in_a_step = microbatches * (2 * coming - stays) + sent
    assert fetched - 3 * in_a_step == first, (fetched, coming, sent, first)
    optim.offload.executor.close()


@pytest.mark.parametrize("fraction", [1.0, 0.5])
@pytest.mark.parametrize("ranks", [1, 2])
def test_nothing_rests_on_the_device_and_every_gather_fetches_once(pool: Pool, ranks: int, fraction: float) -> None:
    pool.run(moved, ranks, fraction)


BUILD = """
import torch, torch.distributed as dist
from torch import nn
from dzero import AdamW, OffloadConfig, ZeroConfig, shard
from dzero.hardware import peak_rss_bytes, reset_peak_rss, rss_bytes

def materialise(module):
    for each in module.modules() if isinstance(module, nn.Linear) else ():
        each.to_empty(device="cpu").weight.data.normal_()

def build(layers):
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(2048, 1024, bias=False) for _ in range(layers)))
    everything = OffloadConfig(param="host", grad="host", master="host", moments="host")
    return AdamW(shard(model, ZeroConfig(stage=3), offload=everything, init=materialise))

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
build(1)
assert reset_peak_rss()
before = rss_bytes()
optim = build(24)
print(peak_rss_bytes() - before, optim.offload.schedule.host_bytes)
dist.destroy_process_group()
"""


def test_what_moves_to_the_host_is_never_there_twice() -> None:
    """Masters in fp32 and working copies wait outside the pool, and are freed as it fills, unit by unit."""
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}  # freed memory is given back at once
    ended = subprocess.run([sys.executable, "-c", BUILD], env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    peak, memory_pool = map(int, ended.stdout.split())
    unit = 2048 * 1024  # elements
    assert memory_pool == 24 * 16 * unit
    # What is left of the first model may be freed meanwhile. 6 fp32 copies of a unit; those of all would be 24 · 6 / 4.
    assert memory_pool - 16 * unit <= peak < memory_pool + 6 * 4 * unit


def ahead(rank: int, ranks: int) -> list[bool]:
    """While a block runs its forward, the next one's parameters are on their way."""
    sharded = sharded_net("even", stage=3, offload=OffloadConfig(**ALL))
    optim = AdamW(sharded)
    train(sharded, optim, steps=1)
    optim.synchronize()
    started: list[str] = []
    optim.offload.executor.before = lambda key: started.append(str(key))
    seen: list[bool] = []

    def during(*_: object) -> None:
        until = time.monotonic() + 10
        while "FETCH param layers.1" not in started and time.monotonic() < until:
            time.sleep(0.01)
        seen.append("FETCH param layers.1" in started)

    handle = sharded.model.get_submodule("layers.0.norm1").register_forward_pre_hook(during)
    train(sharded, optim, steps=1)
    handle.remove()
    optim.synchronize()
    optim.offload.executor.close()
    return seen


def test_the_next_unit_comes_while_this_one_computes(pool: Pool) -> None:
    assert pool.run(ahead, 2) == [[True], [True]]


DELAYED = [
    Cell(stage=3, precision="bf16", microbatches=1, master="remainder", net="uneven", ranks=2),
    Cell(stage=3, precision="fp32", microbatches=4, master="fp32", net="tied", ranks=2),
    Cell(stage=3, precision="fp16", microbatches=1, master="fp32", net="frozen", ranks=1),
]


@pytest.mark.product(keep=2)
@pytest.mark.parametrize("cell", DELAYED, ids=str)
def test_delayed_updates_wait_with_their_values(pool: Pool, cell: Cell, everything: OffloadConfig) -> None:
    if everything.master == "disk" and cell.precision == "fp32":
        everything = replace(everything, master="host", moments="host")  # the other is refused
    offload = replace(everything, overlap="delayed", delay_warmup_steps=3)
    result, (late,) = parity_cells.train_beside_oracles(pool, cell, offload, delays=(3,))
    assert parity_cells.differences(result, late) == []


@pytest.fixture(params=["host", "disk"])
def everything(request: pytest.FixtureRequest, tmp_path: Path) -> OffloadConfig:
    """Every state in host memory, or on disk."""
    if request.param == "host":
        return OffloadConfig(**ALL)
    disk = DiskConfig(paths=[str(tmp_path)], block_bytes=8192)
    return OffloadConfig(**dict.fromkeys(ALL, "disk"), disk=disk)


EVERYWHERE = pytest.mark.parametrize(
    ("everything", "ranks"),
    [
        ("host", 2),
        ("disk", 1),
        pytest.param("host", 1, marks=pytest.mark.slow),
        pytest.param("disk", 2, marks=pytest.mark.slow),
    ],
    indirect=["everything"],
)


def slow(key: object) -> None:
    time.sleep(0.02)


def read_and_written(rank: int, ranks: int, offload: OffloadConfig | None) -> dict[str, torch.Tensor]:
    """What a user does to parameters between steps, with every action late; without `synchronize`."""
    sharded = sharded_net("uneven", stage=3, offload=offload, param="fp32")
    optim = AdamW(sharded, lr=1e-2)
    optim.offload.executor.before = slow
    kept = {}
    for step in range(2):
        train(sharded, optim, "uneven", steps=1, seed=step)
        if offload is None or offload.param != "device":  # else such a read is a step late (README)
            kept |= {f"{step} {name}": value for name, value in params_of(sharded).items()}
        with torch.no_grad():
            for param in sharded.named_params().values():
                param.mul_(0.5)  # fp32 parameters are their own masters
            batch = small_decoders.batches("uneven", steps=1, ranks=ranks, microbatches=1, seed=70 + step)[0][rank][0]
            kept[f"{step} eval"] = small_decoders.loss_fn(sharded.model, batch)
    sharded.model.unshard() if ranks == 1 else None  # type: ignore[operator]
    whole = {name: p.detach().clone() for name, p in sharded.model.named_parameters()} if ranks == 1 else {}
    sharded.reshard()
    optim.synchronize()
    kept |= whole | params_of(sharded)
    optim.offload.executor.close()
    return kept


@pytest.mark.product(keep=1)
@EVERYWHERE
def test_reads_and_writes_between_steps_wait_for_updates(pool: Pool, ranks: int, everything: OffloadConfig) -> None:
    want = pool.run(read_and_written, ranks, None)
    got = pool.run(read_and_written, ranks, everything)
    for ours, theirs in zip(got, want, strict=True):
        assert unequal(ours, theirs) == []


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
    optim.synchronize()
    kept = {**snapshot(sharded, optim), **{f"whole {name}": p for name, p in params_of(sharded).items()}}
    optim.offload.executor.close()
    return kept


@EVERYWHERE
def test_a_state_dict_may_be_loaded_at_any_moment(pool: Pool, ranks: int, everything: OffloadConfig) -> None:
    want = pool.run(loaded_midway, ranks, None)
    for overlap in ("forward", "backward"):
        got = pool.run(loaded_midway, ranks, replace(everything, overlap=overlap))
        for ours, theirs in zip(got, want, strict=True):
            assert unequal(ours, theirs) == [], overlap


def across(rank: int, ranks: int, folder: Path, everything: OffloadConfig) -> list[str]:
    """Saved in one place, loaded into the other, in three ways; then both go on with the same bits."""
    wrong = []
    full = StateDictOptions(full_state_dict=True, cpu_offload=True)
    from_rank0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    for first, second in ((everything, None), (None, everything)):
        saving = sharded_net("uneven", stage=3, offload=first)
        optim = AdamW(saving, lr=1e-2)
        train(saving, optim, "uneven", steps=2)
        states = saving.model.state_dict()
        file = io.BytesIO()
        torch.save(states, file)
        file.seek(0)
        whole = get_model_state_dict(saving.model, options=full)
        place = folder / f"{first is None}"
        dcp.save(states, checkpoint_id=place)
        ends = []
        for way in ("torch.load", "helpers", "dcp"):
            loading = sharded_net("uneven", stage=3, offload=second, seed=4)
            other = AdamW(loading, lr=1e-2)
            train(loading, other, "uneven", steps=1, seed=8)
            if way == "torch.load":
                loading.model.load_state_dict(torch.load(file, weights_only=True))
            elif way == "helpers":
                set_model_state_dict(loading.model, whole if rank == 0 else {}, options=from_rank0)
            else:
                own = loading.model.state_dict()
                dcp.load(own, checkpoint_id=place)
                loading.model.load_state_dict(own)
            wrong += [f"{way} {key}" for key in unequal(params_of(loading), params_of(saving))]
            train(loading, other, "uneven", steps=2, seed=3)
            other.synchronize()
            ends.append(snapshot(loading, other))
            other.offload.executor.close()
        wrong += unequal(ends[0], ends[1]) + unequal(ends[0], ends[2])
        if everything.param == "host":
            assert all(type(local_of(v)) is torch.Tensor for v in states.values() if isinstance(v, DTensor))
        optim.offload.executor.close()
    return wrong


@pytest.mark.product(keep=1)
def test_state_dicts_go_to_the_device_and_back(pool: Pool, tmp_path: Path, everything: OffloadConfig) -> None:
    assert pool.run(across, 2, tmp_path, everything) == [[], []]


def outlived(rank: int, ranks: int, everything: OffloadConfig) -> list[bool]:
    """A model used before it has an optimizer, between two of them, and with a second one that is refused."""
    equal = []
    runs = []
    for offload in (everything, None):
        sharded = sharded_net("uneven", stage=3, offload=offload)
        batch = small_decoders.batches("uneven", steps=1, ranks=ranks, microbatches=1, seed=7)[0][rank][0]
        with torch.no_grad():
            losses = [small_decoders.loss_fn(sharded.model, batch).item()]
        optim = AdamW(sharded, lr=1e-2)
        optim.offload.executor.before = slow
        train(sharded, optim, "uneven", steps=2)
        with pytest.raises(RuntimeError, match="already go to another optimizer"):
            AdamW(sharded)
        train(sharded, optim, "uneven", steps=1)
        del optim
        with torch.no_grad():
            losses.append(small_decoders.loss_fn(sharded.model, batch).item())
        other = AdamW(sharded, lr=1e-2)
        losses += train(sharded, other, "uneven", steps=3)
        other.offload.executor.close()
        runs.append(losses)
    equal.append(runs[0][:2] == runs[1][:2])
    equal.append(runs[0][2:] == runs[1][2:])
    return equal


@pytest.mark.full
@EVERYWHERE
def test_a_model_lives_without_its_optimizer_and_with_another(
    pool: Pool, ranks: int, everything: OffloadConfig
) -> None:
    assert pool.run(outlived, ranks, everything) == [[True, True]] * ranks


def forgotten(rank: int, ranks: int, everything: OffloadConfig) -> None:
    """Model, optimizer, memory and threads after everything was dropped."""
    sharded_net("uneven", stage=3)  # the first starts the watchdog, which lives as long as the process group
    threads = threading.active_count()
    for steps in (0, 2):
        sharded = sharded_net("uneven", stage=3, offload=everything)
        optim = AdamW(sharded, lr=1e-2)
        train(sharded, optim, "uneven", steps=steps)
        kept = [weakref.ref(sharded.model), weakref.ref(optim), weakref.ref(optim.offload.memory_pool)]
        kept += [weakref.ref(memory) for unit in sharded.units for memory in unit.offloaded.values()]
        del sharded, optim
        until = time.monotonic() + 20
        while time.monotonic() < until:  # a lane may be at its last action
            gc.collect()
            left = [type(each()).__name__ for each in kept if each() is not None]
            if not left and threading.active_count() <= threads:  # one of another test's may have ended meanwhile
                break
            time.sleep(0.01)
        assert left == []
        assert threading.active_count() <= threads


@EVERYWHERE
def test_nothing_of_a_dropped_model_stays(pool: Pool, ranks: int, everything: OffloadConfig, tmp_path: Path) -> None:
    pool.run(forgotten, ranks, everything)
    assert os.listdir(tmp_path) == []


def inferring(rank: int, ranks: int, offload: OffloadConfig | None) -> list[float]:
    """Evaluation under inference_mode between and after steps; FSDP2 cannot start with one."""
    sharded = sharded_net("uneven", stage=3, offload=offload)
    batch = small_decoders.batches("uneven", steps=1, ranks=ranks, microbatches=1, seed=7)[0][rank][0]
    losses = []

    def evaluate() -> None:
        with torch.inference_mode():
            losses.append(small_decoders.loss_fn(sharded.model, batch).item())

    optim = AdamW(sharded, lr=1e-2)
    for _ in range(3):
        losses.extend(train(sharded, optim, "uneven", steps=2))
        evaluate()
        evaluate()
    optim.offload.executor.close()
    return losses


@EVERYWHERE
def test_inference_mode_is_no_other_world(pool: Pool, ranks: int, everything: OffloadConfig) -> None:
    assert pool.run(inferring, ranks, everything) == pool.run(inferring, ranks, None)


def guessing(rank: int, ranks: int, everything: OffloadConfig) -> int:
    """The most units on the device at once, when blocks are skipped at random."""
    sharded = sharded_net("even", stage=3, offload=everything)
    optim = AdamW(sharded)
    incoming, most = optim.offload._outgoing.incoming, 0
    assert incoming is not None
    blocks = [unit.modules[0] for unit in sharded.units[:-1]]
    for order in ([0, 1, 2], [0, 2], [1, 2], [2, 0], [0, 1], [1], [2, 1, 0]) * 3:
        for index in order:
            with torch.no_grad():
                blocks[index].unshard()  # type: ignore[attr-defined]
                blocks[index].reshard()  # type: ignore[attr-defined]
            most = max(most, len(incoming._ahead))
    optim.offload.executor.close()
    return most


def test_wrong_guesses_do_not_pile_up(pool: Pool, everything: OffloadConfig) -> None:
    assert pool.run(guessing, 2, everything) == [1, 1]
