"""Arithmetic: rounds in which owners update matrices of Muon, and the shapes of learning rates."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from pool import Pool
from training_loops import params_of, sharded_net, train, unequal

from dzero import Muon
from dzero.optim import unsharded_updates
from dzero.optim.lr_schedule import ScheduleConfig


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


HALF_OF_A_COSINE = (1 + math.cos(math.pi / 3)) / 2
FACTORS: list[tuple[dict[str, Any], int, dict[int, float]]] = [
    ({"kind": "constant", "warmup_steps": 1}, 10, {0: 0.5, 1: 1, 9: 1}),
    ({"kind": "cosine", "warmup_steps": 4, "final": 0.1}, 104, {0: 0.2, 1: 0.4, 2: 0.6, 3: 0.8, 4: 1}),
    ({"kind": "cosine", "warmup_steps": 4, "final": 0.1}, 104, {4 + 33: 0.1 + 0.9 * HALF_OF_A_COSINE}),
    ({"kind": "cosine", "warmup_steps": 4, "final": 0.1}, 104, {103: 0.1, 500: 0.1}),
    (
        {"kind": "linear", "warmup_fraction": 0.29, "final": 0.5},
        100,
        {0: 1 / 30, 28: 29 / 30, 29: 1, 64: 0.75, 99: 0.5},
    ),
    ({"kind": "wsd", "warmup_steps": 2, "decay_steps": 5, "final": 0.0}, 20, dict.fromkeys(range(2, 16), 1.0)),
    ({"kind": "wsd", "warmup_steps": 2, "decay_steps": 5, "final": 0.0}, 20, {16: 0.75, 17: 0.5, 18: 0.25, 19: 0}),
]


@pytest.mark.parametrize(("settings", "steps", "factors"), FACTORS)
def test_rates_warm_up_and_fall_as_their_kind_says(
    settings: dict[str, Any], steps: int, factors: dict[int, float]
) -> None:
    at = ScheduleConfig(**settings).factor(steps)
    assert {step: at(step) for step in factors} == pytest.approx(factors)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "steps"}, r"schedule\.kind='steps': choose one of \['constant', 'cosine', 'linear', 'wsd'\]"),
        ({"warmup_steps": -1}, r"schedule\.warmup_steps=-1"),
        ({"final": 1.5}, r"schedule\.final=1\.5"),
        ({"kind": "wsd"}, r"schedule\.kind=wsd with schedule\.decay_steps=null"),
        ({"decay_steps": 3}, r"schedule\.decay_steps=3 with schedule\.kind=cosine"),
        ({"kind": "wsd", "decay_steps": 0}, r"schedule\.decay_steps=0"),
        (
            {"kind": "wsd", "warmup_steps": 8, "decay_steps": 5},
            r"warmup_steps=8 \+ schedule\.decay_steps=5 exceed train\.steps=10",
        ),
    ],
)
def test_schedule_settings_without_effect_are_errors(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ScheduleConfig(**settings).factor(10)
