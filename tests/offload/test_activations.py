"""Block inputs that wait for backward on the host or on disk: the same bits, all moved, and nothing left behind."""

from __future__ import annotations

import gc
import random
import time
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import offload_lanes
import pytest
import small_decoders
import torch
import torch.distributed as dist
from pool import Pool
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from training_loops import params_of, snapshot, unequal

from dzero import AdamW, DiskConfig, OffloadConfig, OffloadError, Sharded, ZeroConfig, make_mesh, shard

ALONE = OffloadConfig(activations="host")
WITH_STATES = OffloadConfig(activations="host", grad="host", master="host", moments="host", overlap="backward")
SAMPLES, TOKENS = 8, 16
DEEP = 7
"""Blocks enough for those on disk to come and go: with `on_disk`, host memory has room for the inputs of three."""
LAYERS, WIDTH = small_decoders.SHAPES["even"].layers, small_decoders.SHAPES["even"].width
BLOCK_BYTES = SAMPLES * TOKENS * WIDTH * 2  # bf16
SAME = "tests/offload/test_activations.py::test_parameters_masters_and_moments_have_the_same_bits"


def on_disk(path: Path, *, states: str = "device", prefetch_units: int = 1) -> OffloadConfig:
    """Activations on disk; states on a tier, parameters only where that is the disk."""
    disk = DiskConfig(paths=[str(path)], block_bytes=4096)
    kinds: Any = dict.fromkeys(("grad", "master", "moments") + ("param",) * (states == "disk"), states)
    return OffloadConfig(activations="disk", prefetch_units=prefetch_units, disk=disk, **kinds)


class Around(small_decoders.Block):
    """Checkpoints its whole call, hooks included, as transformers' layers do."""

    def __call__(self, *args: Any) -> Any:
        return checkpoint(super().__call__, *args, use_reentrant=False)


def net(
    offload: OffloadConfig | None,
    *,
    stage: int = 3,
    microbatches: int = 1,
    keep: str = "full",
    layers: int = LAYERS,
    compiled: bool = False,
) -> tuple[Sharded, AdamW]:
    """keep: "full" recomputes blocks in backward, so that they keep their inputs alone; "calls" with `Around`."""
    model = small_decoders.build("even", layers=layers)
    for block in model.layers if keep == "full" else ():
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)  # type: ignore[method-assign]
    for block in model.layers if keep == "calls" else ():
        block.__class__ = Around
    mesh = make_mesh("cpu", replicate=dist.get_world_size() if stage == 0 else 1)
    sharded = shard(model, ZeroConfig(stage=stage), offload=offload, mesh=mesh, microbatches=microbatches)
    for block in model.layers if compiled else ():
        block.compile()
    return sharded, AdamW(sharded, lr=1e-2)


def batches(steps: int, microbatches: int = 1) -> list[list[Tensor]]:
    """`[step][microbatch]` of this rank."""
    ranks = dist.get_world_size()
    drawn = small_decoders.batches(
        "even", steps=steps, ranks=ranks, microbatches=microbatches, samples=SAMPLES, tokens=TOKENS
    )
    return [of_step[dist.get_rank()] for of_step in drawn]


def train(sharded: Sharded, optim: AdamW, steps: int, *, interrupted: bool = False) -> None:
    """interrupted: after each step comes an evaluation, and a forward whose graph is dropped."""
    microbatches = sharded.layout.microbatches
    for of_step in batches(steps, microbatches):
        for index, batch in enumerate(of_step):
            with sharded.microbatch(is_last=index == microbatches - 1):
                (small_decoders.loss_fn(sharded.model, batch) / microbatches).backward()  # type: ignore[no-untyped-call]
        optim.step()
        if interrupted:
            with torch.no_grad():
                small_decoders.loss_fn(sharded.model, of_step[0])
            small_decoders.loss_fn(sharded.model, of_step[0])
            sharded.reshard()
    optim.synchronize()


def result(
    offload: OffloadConfig | None, before: Callable[[str], object] | None = None, **how: Any
) -> dict[str, Tensor]:
    sharded, optim = net(offload, **how)
    offload_lanes.before(optim, before)
    train(sharded, optim, 3, interrupted=before is None)
    kept = {**params_of(sharded), **{f"state {key}": value for key, value in snapshot(sharded, optim).items()}}
    if offload is not None:
        to_disk = {"SPILL activation", "LOAD activation"} if offload.activations == "disk" else set()
        assert offload_lanes.moved(optim).keys() >= {"EVICT", "FETCH"} | to_disk
    return kept


def compare(rank: int, ranks: int, offload: OffloadConfig, seed: int | None, how: dict[str, Any]) -> list[str]:
    """What differs from a run that keeps its activations on the device. seed: of delays before moves of some kind."""
    chance = random.Random(None if seed is None else 1000 * seed + rank)
    late = ("FETCH LOAD", "EVICT SPILL", "FETCH EVICT SPILL LOAD")[(seed or 0) % 3]

    def before(action: str) -> None:
        if action.split()[0] in late:
            time.sleep(chance.choice([0.0, 0.001, 0.01]))

    return unequal(result(offload, None if seed is None else before, **how), result(None, **how))


RUNS: dict[str, tuple[int, OffloadConfig | str, dict[str, Any]]] = {
    "host, with states": (2, WITH_STATES, {"stage": 2, "microbatches": 2}),
    "host, stage 2": (2, ALONE, {"stage": 2}),
    "host, 4 microbatches": (2, ALONE, {"microbatches": 4}),
    "host, with states, stage 0": (2, WITH_STATES, {"stage": 0, "microbatches": 4}),
    "disk": (1, "device", {"layers": DEEP}),
    "host, checkpoints around calls": (2, ALONE, {"keep": "calls"}),
    "host, blocks keep more than inputs": (2, ALONE, {"microbatches": 4, "keep": "all"}),
    "disk, with states": (2, "disk", {"layers": DEEP, "microbatches": 3}),
    "disk, with states on the host": (2, "host", {"stage": 2, "layers": DEEP, "microbatches": 3}),
    "compiled": (1, ALONE, {"compiled": True}),
}
"""Ranks; what is elsewhere than on the device, or the tier of states beside activations on disk; and how it is cut."""
DELAYED = ("host, 4 microbatches", "host, with states", "disk", "disk, with states on the host")


def check(pool: Pool, path: Path, name: str, seed: int | None) -> None:
    ranks, offload, how = RUNS[name]
    where = offload if isinstance(offload, OffloadConfig) else on_disk(path, states=offload)
    assert pool.run(compare, ranks, where, seed, how) == [[]] * ranks


@pytest.mark.product(keep=2)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name == "compiled" else ()) for name in RUNS]
)
def test_parameters_masters_and_moments_have_the_same_bits(pool: Pool, tmp_path: Path, name: str) -> None:
    check(pool, tmp_path, name, None)


@pytest.mark.full(SAME)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", DELAYED)
def test_delays_change_no_bit(pool: Pool, tmp_path: Path, name: str, seed: int) -> None:
    """Of fetches, of evictions, or of both."""
    check(pool, tmp_path, name, seed)


def at_each_block(sharded: Sharded, do: Callable[[int, Tensor], object]) -> None:
    """Call `do(index, input)` when a block begins to compute, in forward and in recomputation."""
    for index, block in enumerate(sharded.model.get_submodule("layers")):
        norm = block.get_submodule("norm1")
        norm.register_forward_pre_hook(lambda _, args, index=index: do(index, args[0]))


def counted(rank: int, ranks: int, offload: OffloadConfig, microbatches: int, layers: int) -> None:
    """Each block begins when every move has ended, so that all inputs but the last one's leave the device."""
    sharded, optim = net(offload, microbatches=microbatches, layers=layers)
    at_each_block(sharded, lambda index, x: offload_lanes.drain(optim))
    train(sharded, optim, 3)
    blocks = {lane: count / (3 * microbatches * BLOCK_BYTES) for lane, count in offload_lanes.moved(optim).items()}
    turns = 2 + offload.prefetch_units if offload.activations == "disk" else layers
    want = {"EVICT": layers, "FETCH": layers - 1}
    want |= {"SPILL activation": layers - turns + 1, "LOAD activation": layers - turns} if turns < layers else {}
    assert blocks == want
    assert offload_lanes.host_bytes(optim) == turns * BLOCK_BYTES  # the microbatches take turns
    told = "\n".join(optim.describe())
    assert f"what blocks keep of their inputs for backward leaves the device, to {offload.activations}" in told


@pytest.mark.parametrize(("tier", "microbatches", "prefetch_units"), [("host", 4, 1), ("disk", 1, 1), ("disk", 3, 2)])
def test_every_blocks_input_leaves_in_every_microbatch(
    pool: Pool, tmp_path: Path, tier: str, microbatches: int, prefetch_units: int
) -> None:
    """To the disk goes what a few slots of host memory do not hold."""
    offload, layers = (ALONE, LAYERS) if tier == "host" else (on_disk(tmp_path, prefetch_units=prefetch_units), DEEP)
    pool.run(counted, 1, offload, microbatches, layers)


def ordered(rank: int, ranks: int, offload: OffloadConfig | None, layers: int = LAYERS) -> tuple[list[bool], list[str]]:
    """Which blocks' inputs are alive after a forward, and the order of fetches and recomputations in backward.

    Lanes are drained at the beginning of each block's work, so that all has happened which may have been started.
    """
    sharded, optim = net(offload, layers=layers)
    inputs: list[Callable[[], object]] = []
    events: list[str] = []
    offload_lanes.before(optim, lambda action: events.append(action.replace(" activation", "")))

    def at_work(index: int, x: Tensor) -> None:
        offload_lanes.drain(optim)
        inputs.append(weakref.ref(x.untyped_storage()))
        events.append(f"block {index}")

    at_each_block(sharded, at_work)
    loss = small_decoders.loss_fn(sharded.model, batches(1)[0][0])
    alive = [storage() is not None for storage in inputs]
    events.clear()
    loss.backward()  # type: ignore[no-untyped-call]
    return alive, events


def test_inputs_leave_the_device_and_come_back_one_block_ahead(pool: Pool) -> None:
    assert pool.run(ordered, 1, None)[0] == ([True, True, True], ["block 2", "block 1", "block 0"])
    alive, events = pool.run(ordered, 1, ALONE)[0]
    assert alive == [False, False, True]
    assert events == ["FETCH 1", "block 2", "FETCH 0", "block 1", "block 0"]


def test_those_on_disk_are_loaded_ahead_of_that(pool: Pool, tmp_path: Path) -> None:
    """Inputs 2, 3, 4 are still in host memory. Lanes run side by side, so each is looked at by itself."""
    alive, events = pool.run(ordered, 1, on_disk(tmp_path), 5)[0]
    assert alive == [False, False, False, False, True]
    order = [event for event in events if event.startswith(("LOAD", "block"))]
    assert order == ["block 4", "LOAD 1", "block 3", "LOAD 0", "block 2", "block 1", "block 0"]
    order = [event for event in events if event.startswith(("FETCH", "block"))]
    assert order == ["FETCH 3", "block 4", "FETCH 2", "block 3", "FETCH 1", "block 2", "FETCH 0", "block 1", "block 0"]


def dropped(rank: int, ranks: int, offload: OffloadConfig, layers: int) -> list[str]:
    """Host memory is used again however a forward ends; what is still alive when all has been dropped."""
    sharded, optim = net(offload, layers=layers)
    (one,), (two,) = batches(2)
    most = (3 if offload.activations == "disk" else 2 * layers) * BLOCK_BYTES
    for _ in range(3):
        first, second = small_decoders.loss_fn(sharded.model, one), small_decoders.loss_fn(sharded.model, two)
        del second
        first.backward()  # type: ignore[no-untyped-call]
        del first
        optim.step()
        assert offload_lanes.host_bytes(optim) == most
    watched = {"optimizer": weakref.ref(optim), "model": weakref.ref(sharded.model)}
    del sharded, optim
    gc.collect()
    return [name for name, reference in watched.items() if reference() is not None]


def test_seats_come_back_and_nothing_is_kept_alive(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(dropped, 1, ALONE, LAYERS) == [[]]
    assert pool.run(dropped, 1, on_disk(tmp_path), DEEP) == [[]]
    deadline = time.monotonic() + 120
    while list(tmp_path.iterdir()) and time.monotonic() < deadline:
        time.sleep(0.01)  # the disk's threads let the file go just after a transfer's end
    assert list(tmp_path.iterdir()) == []


def orphaned(rank: int, ranks: int, hosted: OffloadConfig) -> list[str]:
    """What differs in gradients of a graph whose optimizer is gone, and of the next one, which stays on the device."""
    found = []
    (batch,) = batches(1)[0]
    for offload in (None, hosted):
        sharded, optim = net(offload, layers=DEEP)
        loss = small_decoders.loss_fn(sharded.model, batch)
        optim.synchronize()
        del optim
        gc.collect()
        for each in (loss, small_decoders.loss_fn(sharded.model, batch)):
            each.backward()  # type: ignore[no-untyped-call]
        grads = {name: param.grad for name, param in sharded.named_params().items() if param.grad is not None}
        found.append({name: grad.to_local().clone() for name, grad in grads.items()})  # type: ignore[attr-defined]
    assert found[0]
    return unequal(*found)


def test_a_graph_outlives_its_optimizer(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(orphaned, 1, ALONE) == [[]]
    assert pool.run(orphaned, 1, on_disk(tmp_path)) == [[]]


def failing(rank: int, ranks: int, offload: OffloadConfig, actions: list[str]) -> list[str]:
    """What the loop gets to see of an exception in a lane."""
    said = []
    for action in actions:
        sharded, optim = net(offload, microbatches=4, layers=DEEP)
        train(sharded, optim, 1)
        offload_lanes.fail(optim, action)
        with pytest.raises(OffloadError) as told:
            train(sharded, optim, 2)
        said.append(str(told.value))
    return said


def test_what_fails_in_a_lane_is_raised_with_its_cause(pool: Pool, tmp_path: Path) -> None:
    """On one rank: of two, the one that fails first leaves the other waiting in a collective."""
    cases = [
        (WITH_STATES, ["EVICT activation 0", "FETCH activation 0", "COMPUTE ahead layers.1"]),
        (on_disk(tmp_path), ["SPILL activation 1", "LOAD activation 0"]),
    ]
    for offload, actions in cases:
        for action, said in zip(actions, pool.run(failing, 1, offload, actions)[0], strict=True):
            assert f"{action} failed: the cable is out" in said


def unused(rank: int, ranks: int) -> None:
    with pytest.raises(ValueError, match=r"offload\.activations=host has no effect: Linear has no blocks"):
        AdamW(shard(nn.Linear(8, 8), ZeroConfig(), offload=ALONE))


def test_a_model_without_blocks_is_told(pool: Pool) -> None:
    pool.run(unused, 1)
