"""What each overlap mode promises besides the bits: updates that really are early, undone, or one step late."""

from __future__ import annotations

from collections import Counter
from typing import Any

import cells
import nets
import pytest
from cells import Cell
from loops import backward, params_of, sharded_net, snapshot, train, unequal
from pool import Pool

from dzero import AdamW, OffloadConfig
from dzero.offload.swap import OffloadError

HOST: dict[str, Any] = {"grad": "host", "master": "host", "moments": "host"}
DELAYED = [
    Cell(stage=2, precision="bf16", microbatches=1, master="remainder", net="uneven", ranks=2),
    Cell(stage=3, precision="fp16", microbatches=1, master="fp32", net="even", ranks=2),
    Cell(stage=1, precision="fp32", microbatches=4, master="fp32", net="frozen", ranks=2),
    Cell(stage=0, precision="bf16", microbatches=1, master="fp32", net="tied", ranks=2),
    Cell(stage=2, precision="bf16", microbatches=4, master="fp32", net="even", ranks=4),
]


@pytest.mark.parametrize("cell", DELAYED, ids=str)
@pytest.mark.parametrize("warmup", [0, 5])
def test_delayed_is_the_one_step_stale_reference_to_the_bit(pool: Pool, cell: Cell, warmup: int) -> None:
    offload = OffloadConfig(**HOST, overlap="delayed", delay_warmup_steps=warmup)
    result = pool.run(cells.train, cell.ranks, cell, offload)[0]
    assert cells.differences(result, cells.oracle(cell, delay_after=warmup)) == []
    assert cells.differences(result, cells.oracle(cell)) != []


def actions(rank: int, ranks: int, max_norm: float | None, undo_bytes: int) -> Counter[str]:
    """How often each thing ran in 6 steps at stage 2."""
    sharded = sharded_net("even", offload=OffloadConfig(**HOST, overlap="backward", undo_bytes=undo_bytes))
    optim = AdamW(sharded, max_norm=max_norm)
    ran: Counter[str] = Counter()
    optim.offload.swap.before = lambda key: ran.update([key.what])
    train(sharded, optim, steps=6)
    optim.synchronize()
    optim.offload.swap.close()
    return ran


def test_backward_updates_early_what_the_undo_budget_allows_until_clipping_is_frequent(pool: Pool) -> None:
    units = 4  # three blocks and the root
    unclipped = pool.run(actions, 2, None, 1 << 30)[0]
    assert unclipped == {"grad": 6 * units, "ahead": 6 * units, "work": 6 * units}
    clipped = pool.run(actions, 2, 1e-3, 1 << 30)[0]
    assert clipped == {"grad": 6 * units, "ahead": 2 * units, "undo": 2 * units, "update": 6 * units, "work": 6 * units}
    tight = pool.run(actions, 2, None, 150_000)[0]
    assert 0 < tight["ahead"] < 6 * units
    assert tight["ahead"] + tight["update"] == 6 * units


def second_backward(rank: int, ranks: int) -> list[str]:
    """What differs after a refused second backward; stages 1 to 3."""
    wrong = []
    for stage in (1, 2, 3):
        sharded = sharded_net("even", stage=stage, offload=OffloadConfig(**HOST, overlap="backward"))
        optim = AdamW(sharded)
        train(sharded, optim, steps=2)
        optim.synchronize()
        before = snapshot(sharded, optim)
        batch = nets.batches("even", steps=1, ranks=ranks, microbatches=1, seed=9)[0][rank][0]
        loss = nets.loss_fn(sharded.model, batch)
        loss.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="gradients after those of the step's last microbatch"):
            loss.backward()
        optim.synchronize()
        wrong += [f"stage {stage} {key}" for key in unequal(before, snapshot(sharded, optim))]
        optim.offload.swap.close()
    return wrong


def test_a_second_backward_is_refused_and_leaves_the_states_as_they_were(pool: Pool) -> None:
    assert pool.run(second_backward, 2) == [[], []]


def in_between(rank: int, ranks: int, overlap: str) -> list[str]:
    """State dicts taken between backward and step, and right after a step, against the device's."""
    wrong = []
    runs = []
    for offload in (OffloadConfig(**HOST, overlap=overlap), None):
        sharded = sharded_net("uneven", offload=offload)
        optim = AdamW(sharded, lr=1e-2)
        seen = []
        for of_step in nets.batches("uneven", steps=4, ranks=ranks, microbatches=1):
            backward(sharded, optim, of_step[rank])
            optim.state_dict()
            seen.append(snapshot(sharded, optim))
            optim.step()
            sharded.model.state_dict()
            seen.append({**snapshot(sharded, optim), **params_of(sharded)})
        optim.offload.swap.close()
        runs.append(seen)
    for index, (got, want) in enumerate(zip(*runs, strict=True)):
        wrong += [f"{overlap} {index} {key}" for key in unequal(got, want)]
    return wrong


@pytest.mark.parametrize("overlap", ["forward", "backward"])
def test_state_dicts_are_whole_at_any_moment(pool: Pool, overlap: str) -> None:
    assert pool.run(in_between, 2, overlap) == [[], []]


def failing(rank: int, ranks: int) -> list[str]:
    """An exception in a lane, and what the loop gets to see of it."""
    sharded = sharded_net("even", offload=OffloadConfig(**HOST))
    optim = AdamW(sharded)
    train(sharded, optim, steps=1)
    optim.synchronize()

    def before(key: object) -> None:
        if str(key) == "COMPUTE update layers.1":
            raise OSError("the cable is out")

    optim.offload.swap.before = before
    said = []
    for _ in range(2):
        try:
            train(sharded, optim, steps=1)
            optim.synchronize()
        except OffloadError as error:
            said.append(str(error))
    optim.offload.swap.close()
    return said


def test_what_fails_in_a_thread_is_raised_with_its_cause(pool: Pool) -> None:
    for said in pool.run(failing, 1):
        assert len(said) == 2
        assert all("COMPUTE update layers.1 failed: the cable is out" in words for words in said)


def introduced(rank: int, ranks: int) -> None:
    optim = AdamW(sharded_net("even", offload=OffloadConfig(**HOST, overlap="delayed")))
    (line,) = optim.offload.introduce()
    assert "weights are one step old" in line
    assert "pageable host memory" in line
    optim.offload.swap.close()
    assert AdamW(sharded_net("even")).offload.introduce() == []


def test_what_lives_where_is_told(pool: Pool) -> None:
    pool.run(introduced, 1)
