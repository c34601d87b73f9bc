"""What each overlap mode promises besides the bits: updates that really are early, undone, or one step late."""

from __future__ import annotations

import copy
import io
import itertools
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import parity_cells
import pytest
import small_decoders
import torch
from parity_cells import Cell
from pool import Pool
from torch import nn
from training_loops import backward, params_of, sharded_net, snapshot, train, unequal

from dzero import AdamW, DiskConfig, OffloadConfig, OffloadError, Sharded, TorchOptimizer, ZeroConfig, shard
from dzero.offload.schedule import ActionKey
from dzero.optim.base import MasterOptimizer
from dzero.zero.dtensors import local_of

HOST: dict[str, Any] = {"grad": "host", "master": "host", "moments": "host"}
DELAYED = [
    Cell(stage=2, precision="bf16", microbatches=1, master="remainder", net="uneven", ranks=2),
    Cell(stage=3, precision="fp16", microbatches=1, master="fp32", net="even", ranks=2),
    Cell(stage=1, precision="fp32", microbatches=4, master="fp32", net="frozen", ranks=2),
    Cell(stage=0, precision="bf16", microbatches=1, master="fp32", net="tied", ranks=2),
    Cell(stage=2, precision="bf16", microbatches=4, master="fp32", net="even", ranks=4),
]


@pytest.mark.product(keep=2)
@pytest.mark.parametrize(
    ("cell", "warmup"),
    [
        pytest.param(cell, warmup, id=f"{cell}-{warmup}", marks=[] if (index + late) % 2 == 0 else pytest.mark.slow)
        for (index, cell), (late, warmup) in itertools.product(enumerate(DELAYED), enumerate((3, 0)))
    ],
)
def test_delayed_is_the_one_step_stale_reference_to_the_bit(pool: Pool, cell: Cell, warmup: int) -> None:
    offload = OffloadConfig(**HOST, overlap="delayed", delay_warmup_steps=warmup)
    result, (late, prompt) = parity_cells.train_beside_oracles(pool, cell, offload, delays=(warmup, None))
    assert parity_cells.differences(result, late) == []
    assert parity_cells.differences(result, prompt) != []


def resumed(rank: int, ranks: int, rule: str, warmup: int) -> tuple[list[str], bool]:
    """What differs between a run that goes on after a state dict and one that was loaded from it; whether it delays."""

    def start(seed: int) -> tuple[Sharded, MasterOptimizer]:
        offload = OffloadConfig(**HOST, overlap="delayed", delay_warmup_steps=warmup)
        sharded = sharded_net("even", offload=offload, seed=seed)
        if rule == "ours":
            return sharded, AdamW(sharded, lr=1e-2)
        if rule == "adam":
            return sharded, TorchOptimizer(sharded, torch.optim.Adam, lr=1e-2)
        return sharded, TorchOptimizer(sharded, torch.optim.SGD, lr=1e-2, momentum=0.9)

    (first, optim), (second, other) = start(0), start(1)
    train(first, optim, steps=3)
    second.model.load_state_dict(first.model.state_dict())
    other.load_state_dict(optim.state_dict())
    for sharded, its in ((first, optim), (second, other)):
        train(sharded, its, steps=3, seed=3)
    delays = [local_of(p.detach()).clone() for p in first.named_params().values()]
    optim.synchronize(), other.synchronize()
    late = any(
        not torch.equal(old, local_of(p.detach())) for old, p in zip(delays, first.named_params().values(), strict=True)
    )
    wrong = unequal(snapshot(first, optim), snapshot(second, other))
    for its in (optim, other):
        its.offload.executor.close()
    return wrong, late


@pytest.mark.product(keep=2)
@pytest.mark.parametrize("rule", ["ours", "adam", "sgd"])
@pytest.mark.parametrize("warmup", [2, 4])
def test_a_delayed_run_is_resumed_with_its_bits(pool: Pool, rule: str, warmup: int) -> None:
    """The warm-up counts steps since the training began; loading ends a delay in both runs."""
    assert pool.run(resumed, 2, rule, warmup) == [([], True)] * 2


def actions(rank: int, ranks: int, max_norm: float | None, undo_bytes: int) -> Counter[str]:
    """How often each thing ran in 6 steps at stage 2."""
    sharded = sharded_net("even", offload=OffloadConfig(**HOST, overlap="backward", undo_bytes=undo_bytes))
    optim = AdamW(sharded, max_norm=max_norm)
    ran: Counter[str] = Counter()
    optim.offload.executor.before = lambda key: ran.update([key.what])
    train(sharded, optim, steps=6)
    optim.synchronize()
    optim.offload.executor.close()
    return ran


def test_backward_updates_early_what_the_undo_budget_allows_until_clipping_is_frequent(pool: Pool) -> None:
    units = 4  # three blocks and the root
    unclipped = pool.run(actions, 2, None, 1 << 30)[0]
    assert unclipped == {"grad": 6 * units, "ahead": 6 * units, "work": 6 * units}
    clipped = pool.run(actions, 2, 1e-3, 1 << 30)[0]
    assert clipped == {"grad": 6 * units, "ahead": 2 * units, "update": 6 * units, "work": 6 * units}
    tight = pool.run(actions, 2, None, 150_000)[0]
    assert 0 < tight["ahead"] < 6 * units
    assert tight["ahead"] + tight["update"] == 6 * units


def held_up(rank: int, ranks: int, max_norm: float | None) -> tuple[list[str], Counter[str]]:
    """One step whose early updates are held up until it is decided: differences to the device's, and what ran."""
    decided, ran = threading.Event(), Counter[str]()

    class Counted(AdamW):
        def _run(self, how: Any, pending: Any, before_piece: Any = None) -> None:
            ran["early" if before_piece is not None else "updates"] += 1
            super()._run(how, pending, before_piece)

    def before(key: ActionKey) -> None:
        if key.what == "ahead":
            decided.wait(60)

    ends = []
    for kind, offload in ((Counted, OffloadConfig(**HOST, overlap="backward")), (AdamW, None)):
        sharded = sharded_net("even", offload=offload)
        optim = kind(sharded, lr=1e-2, max_norm=max_norm)
        optim.offload.executor.before = before
        backward(sharded, optim, small_decoders.batches("even", steps=1, ranks=ranks, microbatches=1)[0][rank])
        optim.step()
        decided.set()
        optim.synchronize()
        ends.append(snapshot(sharded, optim))
        optim.offload.executor.close()
    return unequal(*ends), ran


@pytest.mark.parametrize("max_norm", [None, 1e-3])
def test_an_update_of_which_nothing_is_done_when_the_step_is_decided_runs_once(
    pool: Pool, max_norm: float | None
) -> None:
    units = 4
    for wrong, ran in pool.run(held_up, 2, max_norm):
        assert wrong == []
        assert ran == {"updates" if max_norm else "early": units}


def states_of(sharded: Sharded, optim: MasterOptimizer) -> dict[str, torch.Tensor]:
    """The states themselves, as a user may keep them."""
    named = sharded.named_params().items()
    return {f"{name}.{key}": local_of(value) for name, param in named for key, value in optim.state[param].items()}


def exchanged(
    rank: int, ranks: int, precision: dict[str, str], folder: str | None = None
) -> tuple[list[str], list[int]]:
    """What differs from the device's run in tensors that were taken before 3, then 2 steps; units exchanged by then."""
    taken, counts = list[dict[str, torch.Tensor]](), list[int]()
    params = {} if folder is None else {"param": "disk", "disk": DiskConfig(paths=[folder])}
    for offload in (OffloadConfig(**HOST, **params, overlap="backward"), None):
        sharded = sharded_net("even", stage=2 if folder is None else 3, offload=offload, **precision)
        optim = AdamW(sharded, lr=1e-2)
        held = states_of(sharded, optim)
        for steps in (3, 2):
            train(sharded, optim, steps=steps, seed=steps)
            counts.append(sum(optim.offload.undo.is_exchanged(unit.shape.name) for unit in sharded.units))
            optim.synchronize()
            assert not any(optim.offload.undo.is_exchanged(unit.shape.name) for unit in sharded.units)
            taken.append({key: value.clone() for key, value in (held | params_of(sharded)).items()})
        optim.offload.executor.close()
    return [key for here, there in zip(taken[:2], taken[2:], strict=True) for key in unequal(here, there)], counts


@pytest.mark.parametrize(
    "precision", [{}, {"master": "remainder"}, {"moments": "int8"}, {"param": "fp32"}, {"param": "fp16"}], ids=str
)
def test_early_updates_exchange_the_places_of_states_and_tensors_taken_before_have_them_at_rest(
    pool: Pool, precision: dict[str, str]
) -> None:
    """After an odd number of updates all units are exchanged, after an even number none; bits as without offload."""
    units = 4
    assert pool.run(exchanged, 2, precision) == [([], [units, 0, 0, 0])] * 2


@pytest.mark.parametrize("precision", [{"master": "remainder"}, {"param": "fp32"}], ids=str)
def test_new_parameters_go_to_disk_from_where_an_early_update_made_them(
    pool: Pool, tmp_path: Path, precision: dict[str, str]
) -> None:
    units = 4
    assert pool.run(exchanged, 2, precision, str(tmp_path)) == [([], [units, 0, 0, 0])] * 2


class Pair(nn.Module):
    """A unit whose second weight has no gradient while `both` is False."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.both = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False), True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x) + self.second(x) if self.both else self.first(x)


def in_part(rank: int, ranks: int, by_group: bool) -> list[str]:
    """What differs from the device's run if only a part of a unit is updated in some of 6 steps."""
    ends = []
    for offload in (OffloadConfig(**HOST, overlap="backward"), None):
        torch.manual_seed(0)
        net = nn.Sequential(Pair(), Pair())
        sharded = shard(net, ZeroConfig(stage=2, units=["Pair"]), offload=offload)
        named = sharded.named_params()
        late = [param for name, param in named.items() if by_group and "second" in name]
        optim = AdamW(sharded, [param for param in named.values() if all(param is not each for each in late)], lr=1e-2)
        for step in range(6):
            for pair in net:
                pair.both = by_group or step not in (1, 2, 4)
            if late and step == 3:
                optim.add_param_group({"params": late})
            sharded.model(torch.ones(4, 8) * (1 + rank + step)).square().sum().backward()
            optim.step()
        optim.synchronize()
        ends.append(snapshot(sharded, optim))
        optim.offload.executor.close()
    return unequal(*ends)


@pytest.mark.parametrize("by_group", [False, True], ids=["without gradients", "in no group"])
def test_a_unit_of_which_a_part_is_updated_keeps_the_states_of_the_rest(pool: Pool, by_group: bool) -> None:
    assert pool.run(in_part, 2, by_group) == [[], []]


def second_backward(rank: int, ranks: int) -> list[str]:
    """What differs after a refused second backward; stages 1 to 3."""
    wrong = []
    for stage in (1, 2, 3):
        sharded = sharded_net("even", stage=stage, offload=OffloadConfig(**HOST, overlap="backward"))
        optim = AdamW(sharded)
        train(sharded, optim, steps=2)
        optim.synchronize()
        before = snapshot(sharded, optim)
        batch = small_decoders.batches("even", steps=1, ranks=ranks, microbatches=1, seed=9)[0][rank][0]
        loss = small_decoders.loss_fn(sharded.model, batch)
        loss.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="gradients after those of the step's last microbatch"):
            loss.backward()
        optim.synchronize()
        wrong += [f"stage {stage} {key}" for key in unequal(before, snapshot(sharded, optim))]
        optim.offload.executor.close()
    return wrong


def test_a_second_backward_is_refused_and_leaves_the_states_as_they_were(pool: Pool) -> None:
    assert pool.run(second_backward, 2) == [[], []]


def in_between(rank: int, ranks: int, overlap: str, waits: str) -> list[str]:
    """States read between backward and step, and right after a step, against the device's; `waits`: by which call."""
    wrong = []
    runs = []
    for offload in (OffloadConfig(**HOST, overlap=overlap), None):
        sharded = sharded_net("uneven", offload=offload)
        optim = AdamW(sharded, lr=1e-2)
        held, seen = states_of(sharded, optim), []
        for step, of_step in enumerate(small_decoders.batches("uneven", steps=6, ranks=ranks, microbatches=1)):
            backward(sharded, optim, of_step[rank])
            getattr(optim, waits)()
            seen.append({key: value.clone() for key, value in held.items()})
            optim.step()
            if step % 3 == 2:  # two steps pass without a look at the states, which would bring them to rest
                sharded.model.state_dict()
                seen.append({**snapshot(sharded, optim), **params_of(sharded)})
        optim.offload.executor.close()
        runs.append(seen)
    for index, (got, want) in enumerate(zip(*runs, strict=True)):
        wrong += [f"{overlap} {index} {key}" for key in unequal(got, want)]
    return wrong


@pytest.mark.parametrize("waits", ["state_dict", "await_updates"])
@pytest.mark.parametrize("overlap", ["forward", "backward"])
def test_states_are_whole_at_any_moment(pool: Pool, overlap: str, waits: str) -> None:
    """`await_updates` is what a checkpoint calls."""
    assert pool.run(in_between, 2, overlap, waits) == [[], []]


def failing(rank: int, ranks: int) -> list[str]:
    """An exception in a lane, and what the loop gets to see of it."""
    sharded = sharded_net("even", offload=OffloadConfig(**HOST))
    optim = AdamW(sharded)
    train(sharded, optim, steps=1)
    optim.synchronize()

    def before(key: object) -> None:
        if str(key) == "COMPUTE update layers.1":
            raise OSError("the cable is out")

    optim.offload.executor.before = before
    said = []
    for _ in range(2):
        try:
            train(sharded, optim, steps=1)
            optim.synchronize()
        except OffloadError as error:
            said.append(str(error))
    optim.offload.executor.close()
    return said


def test_what_fails_in_a_thread_is_raised_with_its_cause(pool: Pool) -> None:
    for said in pool.run(failing, 1):
        assert len(said) == 2
        assert all("COMPUTE update layers.1 failed: the cable is out" in words for words in said)


def introduced(rank: int, ranks: int) -> None:
    optim = AdamW(sharded_net("even", offload=OffloadConfig(**HOST, overlap="delayed")))
    (line,) = optim.offload.describe()
    assert "weights are one step old" in line
    assert "pageable host memory" in line
    optim.offload.executor.close()
    assert AdamW(sharded_net("even")).offload.describe() == []


def test_what_lives_where_is_told(pool: Pool) -> None:
    pool.run(introduced, 1)


def dropped(rank: int, ranks: int, stage: int) -> list[bool]:
    """A model is used after its optimizer is gone, with every copy to the device late; then it gets another one."""
    equal = []
    for waits in (True, False):
        sharded = sharded_net("even", stage=stage, offload=OffloadConfig(**HOST))
        optim = AdamW(sharded, lr=1e-2)
        optim.offload.executor.before = lambda key: time.sleep(0.05 if key.kind == "FETCH" else 0)
        train(sharded, optim, steps=2)
        if waits:
            optim.synchronize()
        del optim
        batch = small_decoders.batches("even", steps=1, ranks=ranks, microbatches=1, seed=7)[0][rank][0]
        with torch.no_grad():
            equal.append(small_decoders.loss_fn(sharded.model, batch).item())
        other = AdamW(sharded)
        train(sharded, other, steps=1)
        other.synchronize()
    return [equal[0] == equal[1]]


@pytest.mark.full
def test_a_model_outlives_its_optimizer(pool: Pool) -> None:
    for ranks, stage in ((1, 2), (2, 3)):
        assert pool.run(dropped, ranks, stage) == [[True]] * ranks


def saved(rank: int, ranks: int) -> None:
    """Host states in torch.save, deepcopy, and through a submodule's state dict."""
    sharded = sharded_net("uneven", offload=OffloadConfig(**HOST))
    optim = AdamW(sharded, lr=1e-2)
    optim.offload.executor.before = lambda key: time.sleep(0.05 if key.kind == "FETCH" else 0)
    train(sharded, optim, "uneven", steps=2)
    block = sharded.model.get_submodule("layers.2")
    before = {name: local_of(value).clone() for name, value in block.state_dict().items()}
    optim.synchronize()
    after = {name: local_of(value).clone() for name, value in block.state_dict().items()}
    assert unequal(before, after) == []
    kept = optim.state_dict()
    file = io.BytesIO()
    torch.save(kept, file)
    elems = sum(local_of(p.detach()).numel() for p in sharded.named_params().values())
    assert file.tell() < 14 * elems + 200_000  # not the whole pool once per state
    for index, states in copy.deepcopy(kept)["state"].items():
        for key, value in states.items():
            assert torch.equal(local_of(value), local_of(kept["state"][index][key]))
    train(sharded, optim, "uneven", steps=1)
    block.load_state_dict({name: torch.zeros_like(value) for name, value in block.state_dict().items()})
    assert all(not local_of(value).any() for value in block.state_dict().values())
    train(sharded, optim, "uneven", steps=1)
    optim.synchronize()
    assert all(local_of(value).abs().max() < 0.1 for value in block.state_dict().values() if local_of(value).numel())


def test_host_states_are_saved_and_copied_like_any_others(pool: Pool) -> None:
    pool.run(saved, 2)


def across_tiers(rank: int, ranks: int) -> list[str]:
    """fp32 states saved on one tier and loaded on the other go on with the same bits."""
    wrong = []
    for first, second in ((None, OffloadConfig(**HOST)), (OffloadConfig(**HOST), None)):
        ends = []
        for later in (first, second):
            sharded = sharded_net("even", offload=first, param="fp32")
            optim = AdamW(sharded, lr=1e-2)
            train(sharded, optim, steps=2)
            model, states = sharded.model.state_dict(), optim.state_dict()
            resumed = sharded_net("even", offload=later, param="fp32", seed=5)
            other = AdamW(resumed, lr=1e-2)
            resumed.model.load_state_dict(model)
            other.load_state_dict(states)
            train(resumed, other, steps=2, seed=3)
            other.synchronize()
            ends.append(snapshot(resumed, other))
        wrong += unequal(*ends)
    return wrong


def test_fp32_states_move_between_tiers(pool: Pool) -> None:
    assert pool.run(across_tiers, 2) == [[], []]
