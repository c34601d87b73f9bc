"""Which rank owns which matrix, and what that moves: by arithmetic, by the ledger, by the auditor below it."""

from __future__ import annotations

import random
from typing import Any

import pytest
import small_decoders
from dispatch_counter import DispatchCounter
from pool import Pool
from training_loops import backward, sharded_net

from dzero import Muon
from dzero.comm.ledger import Entry, Traffic
from dzero.optim.newton_schulz import cost_of
from dzero.optim.rank_assignment import rounds_of
from dzero.zero.unit_shapes import ParamShape


def matrix(name: str, rows: int, cols: int) -> ParamShape:
    return ParamShape(name, (rows, cols), True)


def drawn(seed: int) -> list[ParamShape]:
    draw = random.Random(seed)
    return [matrix(f"m{n}", draw.randint(1, 300), draw.randint(1, 300)) for n in range(draw.randint(1, 60))]


@pytest.mark.parametrize("seed", range(20))
def test_every_matrix_has_one_owner_who_holds_no_more_than_its_room(seed: int) -> None:
    matrices, room = drawn(seed), 50_000
    largest = max(each.elems for each in matrices)
    for owners in (1, 2, 7):
        rounds = rounds_of(matrices, owners, cost_of, room)
        assert all(len(each) == owners for each in rounds)
        assert sorted(m.name for each in rounds for owned in each for m in owned) == sorted(m.name for m in matrices)
        assert max(sum(m.elems for m in owned) for each in rounds for owned in each) <= max(room, largest)


@pytest.mark.parametrize("seed", range(20))
def test_owners_of_a_round_differ_by_no_more_than_one_matrix(seed: int) -> None:
    """Whoever has most had least before its last one."""
    (only,) = rounds_of(drawn(seed), 4, cost_of, 1 << 40)
    costs = [sum(map(cost_of, owned)) for owned in only]
    most = max(only, key=lambda owned: sum(map(cost_of, owned)))
    assert max(costs) - min(costs) <= cost_of(most[-1])


def test_blocks_of_a_decoder_are_dealt_evenly() -> None:
    """Four equal blocks of 4 matrices over four owners: each has one of each kind's cost."""
    kinds = {"q": (64, 64), "o": (64, 64), "up": (256, 64), "down": (64, 256)}
    matrices = [matrix(f"{block}.{kind}", *shape) for block in range(4) for kind, shape in kinds.items()]
    (only,) = rounds_of(matrices, 4, cost_of)
    assert {sum(map(cost_of, owned)) for owned in only} == {2 * 64**3 * (1 + 1 + 4 + 4) + 4 * 64**3}


def test_the_deal_depends_on_shapes_and_order_alone() -> None:
    matrices = drawn(3)
    assert rounds_of(matrices, 3, cost_of) == rounds_of(list(matrices), 3, cost_of)


def step_traffic(rank: int, ranks: int, cells: list[dict[str, Any]]) -> list[tuple[dict[Entry, Traffic], int]]:
    """What a step's update moved by the ledger, which must be the formula's; and by the auditor, bytes."""
    found = []
    for cell in cells:
        net = cell.pop("net", "even")
        sharded = sharded_net(net, **cell)
        optim = Muon(sharded, max_norm=1.0)
        first, second = small_decoders.batches(net, steps=2, ranks=ranks, microbatches=1)
        backward(sharded, optim, first[rank])
        optim.step()
        backward(sharded, optim, second[rank])
        sharded.ledger.take()
        with DispatchCounter(ranks) as counter:
            optim.step()
        moved = {entry: traffic for entry, traffic in sharded.ledger.take().items() if entry.phase == "update"}
        assert moved == optim.traffic, (net, cell)
        assert counter.sent_bytes["send"] == sum(traffic.sent_bytes for traffic in moved.values()), (net, cell)
        found.append((moved, counter.sent_bytes["send"]))
    return found


@pytest.mark.full
def test_a_step_moves_what_the_formula_says(pool: Pool) -> None:
    cells = [{"stage": stage, "net": net} for stage in range(4) for net in ("even", "uneven", "frozen")]
    cells += [{"stage": 2, "param": "fp32"}, {"stage": 3, "param": "fp16"}]
    for ranks, some in ((1, cells[::5]), (2, cells), (4, [each for each in cells if each.get("net") == "uneven"])):
        for of_rank in pool.run(step_traffic, ranks, some):
            assert all((sent > 0) == (ranks > 1) for _, sent in of_rank)
    hybrid = [{"stage": 3, "replicate": 2, "net": "uneven"}]
    for ((moved, _),) in pool.run(step_traffic, 4, hybrid):
        assert [entry.axis for entry in moved] == ["shard"]


def test_the_bytes_written_out(pool: Pool) -> None:
    """Three blocks of qkv [45, 15], out [15, 15], up [21, 15] and down [15, 21], so costs of 23625, 10125 and twice
    12825. Dealt in that order to whoever has least:

        rank 0   qkv 0, qkv 2, up 1, up 2, out 0, out 2
        rank 1   qkv 1, up 0, down 0, down 1, down 2, out 1
    """
    qkv, out, up, down = 23 * 15, 8 * 15, 11 * 15, 8 * 21  # elements of a shard, padded to 2 ranks
    own = [2 * qkv + 2 * up + 2 * out, qkv + up + 3 * down + out]
    for rank, [(moved, _)] in enumerate(pool.run(step_traffic, 2, [{"stage": 3, "net": "uneven"}])):
        sent = own[1 - rank] + own[rank]  # shards to the other's owner, and those that the other needs of its own
        assert moved == {Entry("update", "all_to_all", "shard", "bfloat16"): Traffic(2, 2 * sent)}
    whole = [2 * 45 * 15 + 2 * 21 * 15 + 2 * 15 * 15, 45 * 15 + 4 * 21 * 15 + 15 * 15]
    for rank, [(moved, _)] in enumerate(pool.run(step_traffic, 2, [{"stage": 0, "net": "uneven", "param": "fp32"}])):
        assert moved == {Entry("update", "all_gather", "replicate", "float32"): Traffic(1, 4 * whole[rank])}
