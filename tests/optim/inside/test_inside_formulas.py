"""Arithmetic: which rank owns which matrix of Muon, in how many rounds, and the shapes of learning rates."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch
from pool import Pool
from training_loops import params_of, sharded_net, train, unequal

from dzero import Muon
from dzero.optim import unsharded_updates
from dzero.optim.lr_schedule import ScheduleConfig
from dzero.optim.newton_schulz import cost_of
from dzero.optim.rank_assignment import rounds_of
from dzero.zero.unit_shapes import ParamShape


def matrix(name: str, rows: int, cols: int) -> ParamShape:
    return ParamShape(name, (rows, cols), True)


def drawn(seed: int) -> list[ParamShape]:
    draw = random.Random(seed)
    return [matrix(f"m{n}", draw.randint(1, 300), draw.randint(1, 300)) for n in range(draw.randint(1, 60))]


def test_every_matrix_has_one_owner_who_holds_no_more_than_its_room() -> None:
    room = 50_000
    for seed, owners in itertools.product(range(20), (1, 2, 7)):
        matrices = drawn(seed)
        largest = max(each.elems for each in matrices)
        rounds = rounds_of(matrices, owners, cost_of, room)
        assert all(len(each) == owners for each in rounds)
        assert sorted(m.name for each in rounds for owned in each for m in owned) == sorted(m.name for m in matrices)
        assert max(sum(m.elems for m in owned) for each in rounds for owned in each) <= max(room, largest)


def test_owners_of_a_round_differ_by_no_more_than_one_matrix() -> None:
    """Whoever has most had least before its last one."""
    for seed in range(20):
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


def in_rounds(rank: int, ranks: int) -> list[tuple[int, dict[str, torch.Tensor]]]:
    """Calls of an update and parameters after two steps, with room for all matrices, and for one at a time."""
    found = []
    for room in (unsharded_updates.ROOM_ELEMS, 0):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(unsharded_updates, "ROOM_ELEMS", room)
            sharded = sharded_net("uneven", stage=2, param="fp32")
            optim = Muon(sharded, lr=3e-3, max_norm=0.5)
        train(sharded, optim, "uneven", steps=2)
        found.append((sum(each.calls for each in optim.traffic.values()), params_of(sharded)))
    return found


def test_rounds_change_no_bit(pool: Pool) -> None:
    """An owner has the largest matrix at a time, or a few that are together no larger, and so several rounds.

    A round is an exchange there and back.
    """
    for (calls, params), (more_calls, others) in pool.run(in_rounds, 2):
        assert calls == 2
        assert more_calls > calls
        assert more_calls % 2 == 0
        assert unequal(params, others) == []


def test_cosine_warms_up_and_falls_to_its_final_factor() -> None:
    at = ScheduleConfig(kind="cosine", warmup_steps=4, final=0.1).factor(104)
    assert [at(step) for step in range(4)] == [0.2, 0.4, 0.6, 0.8]
    assert at(4) == 1.0
    assert math.isclose(at(103), 0.1)
    assert math.isclose(at(4 + 33), 1 - 0.9 * (1 - math.cos(math.pi / 3)) / 2)
    assert all(at(step) >= at(step + 1) for step in range(4, 103))
    assert math.isclose(at(500), 0.1)


def test_wsd_stays_at_one_until_its_decay() -> None:
    at = ScheduleConfig(kind="wsd", warmup_steps=2, decay_steps=5, final=0.0).factor(20)
    assert [at(step) for step in range(2, 16)] == [1.0] * 14
    assert [round(at(step), 9) for step in range(15, 20)] == [1.0, 0.75, 0.5, 0.25, 0.0]


def test_linear_falls_from_one_to_the_final_factor_after_a_fraction_of_warm_up() -> None:
    at = ScheduleConfig(kind="linear", warmup_fraction=0.29, final=0.5).factor(100)
    assert at(28) < 1.0 == at(29)
    assert [round(at(step), 9) for step in (29, 64, 99)] == [1.0, 0.75, 0.5]


def test_constant_stays_at_one() -> None:
    at = ScheduleConfig(kind="constant", warmup_steps=1).factor(10)
    assert [at(step) for step in range(10)] == [0.5] + [1.0] * 9


def test_a_schedule_drives_torchs_own_scheduler() -> None:
    optim = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optim, ScheduleConfig(warmup_steps=1).factor(10))
    assert optim.param_groups[0]["lr"] == 1.0
    optim.step()
    scheduler.step()
    assert optim.param_groups[0]["lr"] == 2.0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "steps"}, r"schedule\.kind='steps': choose one of \['constant', 'cosine', 'linear', 'wsd'\]"),
        ({"warmup_steps": -1}, r"schedule\.warmup_steps=-1"),
        ({"final": 1.5}, r"schedule\.final=1\.5"),
        ({"kind": "wsd"}, r"schedule\.kind=wsd with schedule\.decay_steps=null"),
        ({"decay_steps": 3}, r"schedule\.decay_steps=3 with schedule\.kind=cosine"),
        ({"kind": "wsd", "decay_steps": 0}, r"schedule\.decay_steps=0"),
    ],
)
def test_schedule_settings_without_effect_are_errors(settings: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ScheduleConfig(**settings)


def test_warm_up_and_decay_must_fit_the_run() -> None:
    with pytest.raises(ValueError, match=r"warmup_steps=8 \+ schedule\.decay_steps=5 exceed train\.steps=10"):
        ScheduleConfig(kind="wsd", warmup_steps=8, decay_steps=5).factor(10)
