"""What each overlap mode promises besides the bits: updates that really are early, undone, or one step late."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import offload_lanes
import parity_cells
import pytest
import small_decoders
import torch
from offload_parity import everything
from parity_cells import Cell
from pool import Pool
from training_loops import backward, params_of, sharded_net, snapshot, train, unequal

from dzero import AdamW, DiskConfig, OffloadConfig, Sharded, TorchOptimizer, testing

HOST: dict[str, Any] = {"grad": "host", "master": "host", "moments": "host"}
UNITS = 4
"""Of the net: three blocks and the root."""
DELAYED = [
    (Cell(stage=2, precision="bf16", microbatches=1, master="remainder", net="uneven", ranks=2), "states on host"),
    (Cell(stage=0, precision="fp16", microbatches=4, master="fp32", net="frozen", ranks=2), "states on host"),
    (Cell(stage=3, precision="fp32", microbatches=4, master="fp32", net="tied", ranks=2), "all on host"),
    (Cell(stage=3, precision="bf16", microbatches=1, master="remainder", net="uneven", ranks=2), "all on disk"),
]


@pytest.mark.product(keep=1)
@pytest.mark.parametrize("warmup", [3, 0])
@pytest.mark.parametrize(("cell", "where"), DELAYED, ids=str)
def test_delayed_is_the_one_step_stale_reference_to_the_bit(
    pool: Pool, tmp_path: Path, cell: Cell, where: str, warmup: int
) -> None:
    """Also where gathers fetch the parameters: they get those of the step before."""
    late = {"overlap": "delayed", "delay_warmup_steps": warmup}
    hosted = HOST if where == "states on host" else {**HOST, "param": "host"}
    offload = everything(tmp_path, **late) if where == "all on disk" else OffloadConfig(**hosted, **late)
    result, (stale, prompt) = parity_cells.train_beside_oracles(pool, cell, offload, delays=(warmup, None))
    assert parity_cells.differences(result, stale) == []
    assert parity_cells.differences(result, prompt) != []


RULES: dict[str, dict[str, Any]] = {"AdamW": {}, "Adam": {}, "SGD": {"momentum": 0.9}}


def resumed(rank: int, ranks: int, rule: str, warmup: int) -> tuple[list[str], bool]:
    """What differs between a run that goes on after a state dict and one that was loaded from it; whether it delays."""

    def start(seed: int) -> tuple[Sharded, Any]:
        offload = OffloadConfig(**HOST, overlap="delayed", delay_warmup_steps=warmup)
        sharded = sharded_net("even", offload=offload, seed=seed)
        if rule == "AdamW":
            return sharded, AdamW(sharded, lr=1e-2)
        return sharded, TorchOptimizer(sharded, getattr(torch.optim, rule), lr=1e-2, **RULES[rule])

    (first, optim), (second, other) = start(0), start(1)
    (line,) = [line for line in optim.describe() if "pageable host memory" in line]
    assert "weights are one step old" in line
    train(first, optim, steps=3)
    second.model.load_state_dict(first.model.state_dict())
    other.load_state_dict(optim.state_dict())
    for sharded, its in ((first, optim), (second, other)):
        train(sharded, its, steps=3, seed=3)
    before = {name: testing.local(param).clone() for name, param in first.named_params().items()}
    optim.synchronize(), other.synchronize()
    after = {name: testing.local(param) for name, param in first.named_params().items()}
    return unequal(snapshot(first, optim), snapshot(second, other)), unequal(before, after) != []


@pytest.mark.product(keep=1)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("warmup", [2, 4])
def test_a_delayed_run_is_resumed_with_its_bits(pool: Pool, rule: str, warmup: int) -> None:
    """The warm-up counts steps since the training began; loading ends a delay in both runs."""
    assert pool.run(resumed, 2, rule, warmup) == [([], True)] * 2


def actions(rank: int, ranks: int, max_norm: float | None, undo_bytes: int) -> Counter[str]:
    """How often each thing ran in 6 steps at stage 2."""
    sharded = sharded_net("even", offload=OffloadConfig(**HOST, overlap="backward", undo_bytes=undo_bytes))
    optim = AdamW(sharded, max_norm=max_norm)
    ran: Counter[str] = Counter()
    offload_lanes.before(optim, lambda action: ran.update([action.split()[1]]))
    train(sharded, optim, steps=6)
    optim.synchronize()
    return ran


def test_backward_updates_early_what_the_undo_budget_allows_until_clipping_is_frequent(pool: Pool) -> None:
    (unclipped,) = pool.run(actions, 1, None, 1 << 30)
    assert unclipped == {"grad": 6 * UNITS, "ahead": 6 * UNITS, "work": 6 * UNITS}
    (clipped,) = pool.run(actions, 1, 1e-3, 1 << 30)
    assert clipped == {"grad": 6 * UNITS, "ahead": 2 * UNITS, "update": 6 * UNITS, "work": 6 * UNITS}
    (tight,) = pool.run(actions, 1, None, 300_000)
    assert 0 < tight["ahead"] < 6 * UNITS
    assert tight["ahead"] + tight["update"] == 6 * UNITS


def states_of(sharded: Sharded, optim: Any) -> dict[str, torch.Tensor]:
    """The states themselves, as a user may keep them; an fp32 parameter has a master of its own off the device only."""
    named = sharded.named_params().items()
    states = {f"{name}.{key}": (value, param) for name, param in named for key, value in optim.state[param].items()}
    return {
        name: testing.local(value)
        for name, (value, param) in states.items()
        if not (name.endswith(".master") and param.dtype == value.dtype)
    }


def second_backward(rank: int, ranks: int, stage: int) -> list[str]:
    """What differs after a refused second backward."""
    sharded = sharded_net("even", stage=stage, offload=OffloadConfig(**HOST, overlap="backward"))
    optim = AdamW(sharded)
    train(sharded, optim, steps=2)
    optim.synchronize()
    before = snapshot(sharded, optim)
    batch = small_decoders.batches("even", steps=1, ranks=ranks, microbatches=1, seed=9)[0][rank][0]
    loss = small_decoders.loss_fn(sharded.model, batch)
    loss.backward(retain_graph=True)  # type: ignore[no-untyped-call]
    with pytest.raises(RuntimeError, match="gradients after those of the step's last microbatch"):
        loss.backward()  # type: ignore[no-untyped-call]
    optim.synchronize()
    return unequal(before, snapshot(sharded, optim))


@pytest.mark.product(keep=1)
@pytest.mark.parametrize("stage", [2, 1, 3])
def test_a_second_backward_is_refused_and_leaves_the_states_as_they_were(pool: Pool, stage: int) -> None:
    assert pool.run(second_backward, 2, stage) == [[], []]


def in_between(
    rank: int, ranks: int, overlap: str, waits: str, precision: dict[str, str], folder: str | None
) -> list[str]:
    """States that were taken at first, read between a backward and its step by the call `waits`, and at the end; a
    block's state dict before that. Against the device's."""
    runs = []
    params = {} if folder is None else {"param": "disk", "disk": DiskConfig(paths=[folder])}
    for offload in (OffloadConfig(**HOST, **params, overlap=overlap), None):
        sharded = sharded_net("uneven", stage=2 if folder is None else 3, offload=offload, **precision)
        optim = AdamW(sharded, lr=1e-2)
        assert any("host memory" in line for line in optim.describe()) == (offload is not None)
        states, seen = states_of(sharded, optim), []
        for step, of_step in enumerate(small_decoders.batches("uneven", steps=6, ranks=ranks, microbatches=1)):
            backward(sharded, optim, of_step[rank])
            if step in (0, 3):  # an odd number of steps pass without a look at the states, then an even one
                getattr(optim, waits)()
                seen.append({key: value.clone() for key, value in states.items()})
            optim.step()
        block = sharded.model.get_submodule("layers.2").state_dict()
        seen.append({name: testing.local(value).clone() for name, value in block.items()})
        optim.synchronize()
        seen.append({key: value.clone() for key, value in (states | params_of(sharded)).items()})
        runs.append(seen)
    return [f"{at} {key}" for at, (got, want) in enumerate(zip(*runs, strict=True)) for key in unequal(got, want)]


@pytest.mark.product(keep=2)
@pytest.mark.parametrize(
    ("overlap", "waits", "precision", "params_on_disk"),
    [
        ("backward", "state_dict", {"master": "remainder"}, True),
        ("backward", "await_updates", {}, False),
        ("forward", "state_dict", {}, False),
        ("backward", "await_updates", {"master": "remainder"}, False),
        ("backward", "await_updates", {"param": "fp32"}, True),
        ("backward", "state_dict", {"param": "fp32"}, False),
        ("backward", "state_dict", {"moments": "int8"}, False),
        ("forward", "await_updates", {"param": "fp16"}, False),
    ],
)
def test_states_are_whole_at_any_moment(
    pool: Pool, tmp_path: Path, overlap: str, waits: str, precision: dict[str, str], params_on_disk: bool
) -> None:
    """Early updates make states in other places, which exchange with those of before, and come back at rest.

    `await_updates` is what a checkpoint calls.
    """
    folder = str(tmp_path) if params_on_disk else None
    assert pool.run(in_between, 2, overlap, waits, precision, folder) == [[], []]
