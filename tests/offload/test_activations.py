"""Block inputs that wait for backward on the host or on disk: the same bits, all moved, and nothing left behind."""

from __future__ import annotations

import gc
import itertools
import random
import time
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import small_decoders
import small_runs
import torch
import torch.distributed as dist
from pool import Pool
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from training_loops import params_of, snapshot, unequal

from dzero import AdamW, DiskConfig, OffloadConfig, OffloadError, Sharded, ZeroConfig, make_mesh, shard
from dzero.config import ConfigError
from dzero.offload import activation_pool
from dzero.offload.activation_pool import ActivationPool
from dzero.offload.activations import ActivationOffload
from dzero.offload.disk import DiskStore
from dzero.offload.executor import ScheduleExecutor
from dzero.offload.memory_pool import HostMemoryPool
from dzero.offload.schedule import ActionKey, OffloadSchedule
from dzero.parallel.blocks import apply_blocks, find_blocks
from dzero.parallel.config import BlockConfig
from dzero.zero.offload_config import KINDS

ALONE = OffloadConfig(activations="host")
WITH_STATES = OffloadConfig(activations="host", grad="host", master="host", moments="host", overlap="backward")
SAMPLES, TOKENS = 8, 16
DEEP = 7
"""Blocks enough for those on disk to come and go: with `on_disk`, host memory has room for the inputs of three."""
LAYERS, WIDTH = small_decoders.SHAPES["even"].layers, small_decoders.SHAPES["even"].width
BLOCK_BYTES = SAMPLES * TOKENS * WIDTH * 2  # bf16


def on_disk(path: Path, *, states: str = "device", prefetch_units: int = 1) -> OffloadConfig:
    disk = DiskConfig(paths=[str(path)], block_bytes=4096)
    where = dict.fromkeys(KINDS if states == "disk" else KINDS[1:], states)
    return OffloadConfig(activations="disk", prefetch_units=prefetch_units, disk=disk, **where)  # type: ignore[arg-type]


def net(
    offload: OffloadConfig | None,
    stage: int = 2,
    microbatches: int = 1,
    keep: str = "full",
    layers: int | None = None,
    **block: bool,
) -> tuple[Sharded, AdamW]:
    model = small_decoders.build("even", layers=layers)
    apply_blocks(model, BlockConfig(activation_checkpoint=keep, **{"compile": False, **block}), "cpu")
    mesh = make_mesh("cpu", replicate=dist.get_world_size() if stage == 0 else 1)
    sharded = shard(model, ZeroConfig(stage=stage), offload=offload, mesh=mesh, microbatches=microbatches)
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
    offload: OffloadConfig | None, before: Callable[[ActionKey], None] | None = None, **how: Any
) -> dict[str, Tensor]:
    interrupted = how.pop("interrupted", False)
    sharded, optim = net(offload, **how)
    optim.offload.executor.before = before
    train(sharded, optim, 4, interrupted=interrupted)
    kept = {**params_of(sharded), **{f"state {key}": value for key, value in snapshot(sharded, optim).items()}}
    if offload is not None:
        use = optim.offload.take_use()
        lanes = ["EVICT", "FETCH"] + (["SPILL activation", "LOAD activation"] if offload.activations == "disk" else [])
        assert all(use[lane].moved_bytes > 0 for lane in lanes)
    return kept


def compare(
    rank: int, ranks: int, offload: OffloadConfig, stage: int, microbatches: int, keep: str, layers: int | None = None
) -> list[str]:
    how: dict[str, Any] = {"stage": stage, "microbatches": microbatches, "keep": keep, "interrupted": True}
    how["layers"] = layers
    return unequal(result(offload, **how), result(None, **how))


@pytest.mark.product(keep=2)
@pytest.mark.parametrize(
    ("stage", "microbatches", "offload"),
    [
        pytest.param(stage, microbatches, offload, marks=[] if (stage + microbatches + own) % 2 else pytest.mark.slow)
        for stage, microbatches, (own, offload) in itertools.product((0, 2, 3), (1, 4), enumerate((ALONE, WITH_STATES)))
    ],
)
def test_parameters_masters_and_moments_have_the_same_bits(
    pool: Pool, stage: int, microbatches: int, offload: OffloadConfig
) -> None:
    """By default the half in which every pair occurs."""
    assert pool.run(compare, 2, offload, stage, microbatches, "full") == [[], []]


@pytest.mark.product(keep=2)
@pytest.mark.parametrize(
    ("ranks", "stage", "microbatches", "states"),
    [(1, 3, 1, "device"), (2, 3, 3, "disk"), (2, 3, 1, "disk"), (2, 2, 3, "host"), (2, 0, 1, "device")],
)
def test_so_they_have_with_activations_on_disk(
    pool: Pool, tmp_path: Path, ranks: int, stage: int, microbatches: int, states: str
) -> None:
    offload = on_disk(tmp_path, states=states)
    assert pool.run(compare, ranks, offload, stage, microbatches, "full", DEEP) == ranks * [[]]


@pytest.mark.product(keep=1)
@pytest.mark.parametrize("keep", ["none", "selective"])
def test_so_they_have_where_blocks_keep_more_than_their_inputs(pool: Pool, keep: str) -> None:
    assert pool.run(compare, 2, ALONE, 3, 4, keep) == [[], []]


def delayed(rank: int, ranks: int, seed: int, path: Path | None) -> list[str]:
    chance = random.Random(1000 * seed + rank)
    how = {"stage": (0, 2, 3)[seed % 3], "microbatches": (1, 4)[seed // 3 % 2]}
    slow = ("FETCH LOAD", "EVICT SPILL", "FETCH EVICT SPILL LOAD")[seed % 3]
    offload = (ALONE, WITH_STATES)[seed % 2]
    if path is not None:
        how["layers"], offload = DEEP, on_disk(path, states=("device", "host")[seed % 2])

    def before(key: ActionKey) -> None:
        if str(key.kind) in slow:
            time.sleep(chance.choice([0.0, 0.001, 0.01]))

    return unequal(result(offload, before, **how), result(None, **how))


@pytest.mark.product(keep=2)
@pytest.mark.parametrize("seed", range(6))
def test_delays_change_no_bit(pool: Pool, seed: int) -> None:
    assert pool.run(delayed, 2, seed, None) == [[], []]


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_nor_do_they_on_the_way_to_the_disk(pool: Pool, tmp_path: Path, seed: int) -> None:
    assert pool.run(delayed, 2, seed, tmp_path) == [[], []]


def compiled(rank: int, ranks: int) -> list[str]:
    how = {"stage": 3, "compile": True}
    return unequal(result(ALONE, **how), result(None, **how))


@pytest.mark.slow
def test_compiled_blocks_have_the_same_bits_too(pool: Pool) -> None:
    assert pool.run(compiled, 1) == [[]]


def counted(rank: int, ranks: int, microbatches: int) -> None:
    sharded, optim = net(ALONE, stage=3, microbatches=microbatches)
    train(sharded, optim, 3)
    use = optim.offload.take_use()
    every = 3 * microbatches * LAYERS * BLOCK_BYTES
    assert use["EVICT"].moved_bytes == every
    # The last block's is used where it is, and so may be those that have not left before backward begins.
    assert use["FETCH"].moved_bytes <= every * (LAYERS - 1) // LAYERS
    assert optim.offload.host_bytes == LAYERS * BLOCK_BYTES  # the microbatches take turns
    assert held(optim) == 0
    (line,) = optim.describe()
    assert "what blocks keep of their inputs" in line


def counted_on_disk(rank: int, ranks: int, path: Path, microbatches: int, prefetch_units: int) -> None:
    """Each block begins when every move has ended, so that all inputs but the last one's leave the device."""
    offload = on_disk(path, prefetch_units=prefetch_units)
    sharded, optim = net(offload, stage=3, microbatches=microbatches, layers=DEEP)
    for _, block in find_blocks(sharded.model):
        block.get_submodule("norm1").register_forward_pre_hook(lambda *_: optim.offload.executor.drain())
    train(sharded, optim, 3)
    use = {lane: use.moved_bytes / (3 * microbatches * BLOCK_BYTES) for lane, use in optim.offload.take_use().items()}
    turns = 2 + prefetch_units
    want = {"EVICT": DEEP, "FETCH": DEEP - 1, "SPILL activation": DEEP - turns + 1, "LOAD activation": DEEP - turns}
    assert use == {lane: blocks for lane, blocks in want.items() if blocks > 0}
    assert optim.offload.host_bytes == min(turns, DEEP) * BLOCK_BYTES  # not of every block
    assert held(optim) == 0
    where, what = optim.describe()
    assert where.startswith(f"offload: scratch space on {path} (100%)")
    assert "leaves the device, to disk; its host memory and scratch space are taken" in what


@pytest.mark.parametrize(("microbatches", "prefetch_units"), [(1, 1), (3, 2), (1, 6)])
def test_the_disk_gets_what_a_few_slots_of_host_memory_do_not_hold(
    pool: Pool, tmp_path: Path, microbatches: int, prefetch_units: int
) -> None:
    pool.run(counted_on_disk, 2, tmp_path, microbatches, prefetch_units)


def held(optim: AdamW) -> int:
    """Seats in use."""
    moving = optim.offload.activations
    assert moving is not None
    assert len(set(moving.pool.free)) == len(moving.pool.free)
    return len(moving.pool.seat_bytes) - len(moving.pool.free)


@pytest.mark.parametrize("microbatches", [1, 4])
def test_every_blocks_input_leaves_in_every_microbatch(pool: Pool, microbatches: int) -> None:
    pool.run(counted, 2, microbatches)


def ordered(
    rank: int, ranks: int, offload: OffloadConfig | None, layers: int | None = None
) -> tuple[list[bool], list[str]]:
    """Which blocks' inputs are alive after a forward, and the order of fetches and recomputations in backward.

    Lanes are drained at the beginning of each block's work, so that all has happened which may have been started.
    """
    sharded, optim = net(offload, stage=3, layers=layers)
    inputs: list[Callable[[], object]] = []
    events: list[str] = []
    optim.offload.executor.before = lambda key: events.append(f"{key.kind} {key.unit}")

    def at_work(index: int, x: Tensor) -> None:
        optim.offload.executor.drain()
        inputs.append(weakref.ref(x.untyped_storage()))
        events.append(f"block {index}")

    for index, (_, block) in enumerate(find_blocks(sharded.model)):
        block.get_submodule("norm1").register_forward_pre_hook(lambda _, args, index=index: at_work(index, *args))
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
    """Seats come back however a forward ends; what is still alive when all has been dropped."""
    sharded, optim = net(offload, stage=3, layers=layers)
    (one,), (two,) = batches(2)
    first, second = small_decoders.loss_fn(sharded.model, one), small_decoders.loss_fn(sharded.model, two)
    assert held(optim) == 2 * layers
    del second
    assert held(optim) == layers
    first.backward()  # type: ignore[no-untyped-call]
    del first
    assert held(optim) == 0
    assert optim.offload.host_bytes == (3 if offload.activations == "disk" else 2 * layers) * BLOCK_BYTES
    optim.step()
    watched = {"optimizer": optim, "activations": optim.offload.activations, "swap": optim.offload.executor}
    watched |= {"model": sharded.model} | ({"store": store} if (store := optim.offload.staging.store) else {})
    references = {name: weakref.ref(value) for name, value in watched.items()}
    del sharded, optim, watched, store
    gc.collect()
    return [name for name, reference in references.items() if reference() is not None]


def test_seats_come_back_and_nothing_is_kept_alive(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(dropped, 2, ALONE, LAYERS) == [[], []]
    assert pool.run(dropped, 2, on_disk(tmp_path), DEEP) == [[], []]
    deadline = time.monotonic() + 10
    while list(tmp_path.iterdir()) and time.monotonic() < deadline:
        time.sleep(0.01)  # the disk's threads let the file go just after a transfer's end
    assert list(tmp_path.iterdir()) == []


def orphaned(rank: int, ranks: int, hosted: OffloadConfig, lanes: set[str]) -> None:
    """A graph brings its activations back without the optimizer; the model's next ones stay on the device."""
    losses = []
    (batch,) = batches(1)[0]
    for offload in (None, hosted):
        sharded, optim = net(offload, layers=DEEP)
        executor = optim.offload.executor
        loss = small_decoders.loss_fn(sharded.model, batch)
        optim.synchronize()
        executor.take_use()
        del optim
        gc.collect()
        loss.backward()  # type: ignore[no-untyped-call]
        grads = {name: param.grad for name, param in sharded.named_params().items() if param.grad is not None}
        losses.append({name: grad.to_local().clone() for name, grad in grads.items()})  # type: ignore[attr-defined]
        if offload is not None:
            assert executor.take_use().keys() == lanes
        small_decoders.loss_fn(sharded.model, batch).backward()  # type: ignore[no-untyped-call]
        assert executor.take_use() == {}
    assert losses[0]
    assert unequal(*losses) == []


def test_a_model_without_its_optimizer_keeps_its_activations_on_the_device(pool: Pool, tmp_path: Path) -> None:
    pool.run(orphaned, 1, ALONE, {"FETCH"})
    pool.run(orphaned, 1, on_disk(tmp_path), {"FETCH", "LOAD activation"})


def failing(rank: int, ranks: int, offload: OffloadConfig, action: str) -> str:
    """What the loop gets to see of an exception in a lane."""
    sharded, optim = net(offload, stage=3, microbatches=4, layers=DEEP)
    train(sharded, optim, 1)

    def before(key: ActionKey) -> None:
        if str(key) == action:
            raise OSError("the cable is out")

    optim.offload.executor.before = before
    with pytest.raises(OffloadError) as told:
        train(sharded, optim, 2)
    return str(told.value)


@pytest.mark.parametrize("action", ["EVICT activation 0", "FETCH activation 0"])
def test_what_fails_in_a_lane_is_raised_with_its_cause(pool: Pool, action: str) -> None:
    """On one rank: of two, the one that fails first leaves the other waiting in a collective."""
    for said in pool.run(failing, 1, ALONE, action):
        assert f"{action} failed: the cable is out" in said


@pytest.mark.parametrize("action", ["SPILL activation 1", "LOAD activation 0"])
def test_so_is_what_fails_on_the_way_to_the_disk(pool: Pool, tmp_path: Path, action: str) -> None:
    for said in pool.run(failing, 1, on_disk(tmp_path), action):
        assert f"{action} failed: the cable is out" in said


def unused(rank: int, ranks: int, offload: OffloadConfig) -> None:
    sharded = shard(nn.Linear(8, 8), ZeroConfig(), offload=offload)
    with pytest.raises(
        ValueError, match=rf"offload\.activations={offload.activations} has no effect: Linear has no blocks"
    ):
        AdamW(sharded)


def test_a_model_without_blocks_is_told(pool: Pool, tmp_path: Path) -> None:
    pool.run(unused, 1, ALONE)
    pool.run(unused, 1, on_disk(tmp_path))


class Root(nn.Module):
    """x [rows, 64] + shift, through its blocks: `checkpointed(x, table)`; `beside`: each on the same x."""

    def __init__(self, beside: bool = False) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.ones(64))
        self.beside = beside
        self.blocks = nn.ModuleList(Scaled() for _ in range(4))
        self.saved: list[Tensor] = []
        self.after: Callable[[int], object] = lambda _: None

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        x = x + self.shift
        out = torch.zeros_like(x)
        for index, block in enumerate(self.blocks):
            self.saved.append(x)
            y = block(x, table)
            self.after(index)
            out, x = (out + y, x) if self.beside else (y, y)
        return out


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.linspace(0.5, 1.5, 64))

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        return checkpoint(lambda x, table: (x * self.gain * table).tanh(), x, table, use_reentrant=False)  # type: ignore[no-any-return]


def watched(root: Root, disk: Path | None = None) -> tuple[ActivationOffload, ScheduleExecutor]:
    """disk: there, behind two slots of host memory."""
    executor = ScheduleExecutor(OffloadSchedule(), HostMemoryPool(0), torch.device("cpu"))
    store = None if disk is None else DiskStore(DiskConfig(paths=[str(disk)]), {})
    moving = ActivationOffload(ActivationPool(executor, pin=False, store=store), "cpu")
    moving.attach([*root.blocks])
    return moving, executor


X, TABLE = torch.linspace(-1, 1, 64 * 64).view(64, 64), torch.linspace(1, 2, 64 * 64).view(64, 64)


def grads(root: Root, x: Tensor = X, *, retain: bool = False) -> dict[str, Tensor]:
    loss = root(x, TABLE[: len(x)]).sum()
    found: dict[str, Tensor] = {}
    for turn in range(2 if retain else 1):
        root.zero_grad()
        loss.backward(retain_graph=retain and turn == 0)
        found |= {f"{turn} {name}": p.grad.clone() for name, p in root.named_parameters() if p.grad is not None}
    return found


def test_blocks_beside_each_other_share_one_copy_and_tables_stay() -> None:
    root = Root(beside=True)
    want = grads(root)
    _, executor = watched(root)
    assert unequal(grads(root), want) == []
    assert executor.take_use()["EVICT"].moved_bytes == X.nbytes


class Around(nn.Module):
    """Checkpoints its whole call, hooks included, as transformers' layers do."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.linspace(0.5, 1.5, 64))

    def __call__(self, *args: Any) -> Any:
        return checkpoint(super().__call__, *args, use_reentrant=False)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        return (x * self.gain * table).tanh()


def test_a_checkpoint_around_the_blocks_call_is_seen_from_outside_too() -> None:
    root, events = Root(), list[str]()
    root.blocks = nn.ModuleList(Around() for _ in range(4))
    want = grads(root)
    _, executor = watched(root)
    for block in root.blocks:
        block.register_forward_pre_hook(lambda *_: events.append("forward"))
    assert unequal(grads(root), want) == []
    assert events == 2 * 4 * ["forward"]  # recomputed
    assert executor.take_use()["EVICT"].moved_bytes == 4 * X.nbytes


@pytest.mark.parametrize("on_disk", [False, True])
@pytest.mark.parametrize("beside", [False, True])
def test_a_second_backward_over_the_same_graph_brings_them_again(tmp_path: Path, beside: bool, on_disk: bool) -> None:
    root = Root(beside)
    want = grads(root, retain=True)
    moving, executor = watched(root, tmp_path if on_disk else None)
    root.after = lambda _: executor.drain()  # all but the newest have left before backward
    assert unequal(grads(root, retain=True), want) == []
    use = executor.take_use()
    assert use["FETCH" if not beside else "EVICT"].moved_bytes == (1 if beside else 2 * 3) * X.nbytes
    assert ("LOAD activation" in use) == (on_disk and not beside)
    assert len(moving.pool.free) == len(moving.pool.seat_bytes)


@pytest.mark.parametrize("on_disk", [False, True])
@pytest.mark.parametrize("latest_first", [False, True])
def test_forwards_that_precede_their_backwards_keep_their_own(
    tmp_path: Path, latest_first: bool, on_disk: bool
) -> None:
    """Pipelines run several forwards, of batches of several sizes, and then the backwards in either order."""
    root, rows = Root(), (64, 32, 48)

    def run() -> dict[str, Tensor]:
        losses = [root(-X[:count] * count, TABLE[:count]).sum() for count in rows]
        found: dict[str, Tensor] = {}
        for turn in range(3):
            root.zero_grad()
            losses.pop(-1 if latest_first else 0).backward()
            found |= {f"{turn} {name}": p.grad.clone() for name, p in root.named_parameters() if p.grad is not None}
        return found

    want = run()
    moving, executor = watched(root, tmp_path if on_disk else None)
    assert unequal(run(), want) == []
    assert unequal(run(), want) == []
    assert ("LOAD activation" in executor.take_use()) == on_disk
    assert len(moving.pool.free) == len(moving.pool.seat_bytes) == 12


def test_slots_grow_with_the_batch_and_small_inputs_stay() -> None:
    root = Root()
    moving, executor = watched(root)
    for rows, slots_bytes in ((32, 32 * 64 * 4), (64, 64 * 64 * 4), (16, 64 * 64 * 4)):
        grads(root, X[:rows])
        assert moving.pool.host_bytes == executor.schedule.host_bytes == 4 * slots_bytes
    executor.drain()
    executor.take_use()
    grads(root, X[:15])  # 15 * 64 * 4 is less than LEAST_BYTES
    assert executor.take_use() == {}


def test_what_is_changed_in_place_while_it_leaves_makes_backward_raise_and_later_does_not_matter() -> None:
    for late, index, at in ((False, 0, 0), (False, 0, 2), (False, 3, 3), (True, 0, 2)):
        root = Root()
        want = grads(root)
        root.saved.clear()
        _, executor = watched(root)
        if not late:
            executor.before = lambda key: time.sleep(0.1)

        def change(block: int, root: Root, executor: ScheduleExecutor, late: bool, index: int, at: int) -> None:
            if late:
                executor.drain()  # the next save then sees that it has left
            if block == at:
                with torch.no_grad():
                    root.saved[index].add_(1.0)

        root.after = partial(change, root=root, executor=executor, late=late, index=index, at=at)
        with nullcontext() if late else pytest.raises(RuntimeError, match="at version 1, expected version 0; change a"):
            assert unequal(grads(root), want) == []


def test_what_stays_is_checked_as_autograd_does() -> None:
    """A table, and an input that is too small to move."""
    for rows, index in ((64, None), (15, 1)):
        root, table = Root(), TABLE[:rows].clone()
        watched(root)
        loss = root(X[:rows], table).sum()
        with torch.no_grad():
            (table if index is None else root.saved[index]).add_(1.0)
        with pytest.raises(RuntimeError, match=r"at version 1[,;] expected version 0"):
            loss.backward()


def test_too_little_host_memory_is_told_before_it_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    root = Root()
    moving, _ = watched(root)
    monkeypatch.setattr(activation_pool, "host_available_bytes", lambda: X.nbytes - 1)
    with pytest.raises(MemoryError, match=r"are available\. Take smaller microbatches \(train\.microbatch_sequences\)"):
        grads(root)
    assert moving.pool.host_bytes == 0


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_the_trainer_has_the_losses_of_a_run_without(pool: Pool, tmp_path: Path, tier: str) -> None:
    text = small_runs.write_text(tmp_path / "text.txt")
    full = ["zero.stage=3", "train.accumulate=2", "block.activation_checkpoint=full", "block.compile=false"]
    full.append(f"model.layers={DEEP}")
    offload = [f"offload.activations={tier}"] + ([f"offload.disk.paths=[{tmp_path}]"] if tier == "disk" else [])
    runs = [
        pool.run(small_runs.train, 2, small_runs.settled(text, *full, *each), tmp_path / f"{len(each)}")[0]
        for each in ([], offload)
    ]
    assert runs[0].losses == runs[1].losses
    assert runs[0].held_out == runs[1].held_out


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_the_trainer_refuses_it_without_checkpointing(tmp_path: Path, tier: str) -> None:
    with pytest.raises(ConfigError, match=rf"offload\.activations={tier} with block\.activation_checkpoint=none"):
        small_runs.settled(small_runs.write_text(tmp_path / "text.txt"), f"offload.activations={tier}")
