"""What torch users do with gradients gives what plain torch in one process gives, at every stage."""

from __future__ import annotations

import pytest
from loops_of_torch import HABITS, HOST, LIMIT, RATE, edited, in_dzero, in_torch
from pool import Pool
from training_loops import unequal

TOLERANCE = 1e-6


def check(
    pool: Pool, habit: str, ranks: int, microbatches: int, stages: tuple[int, ...], tiers: dict[str, str]
) -> None:
    """The parameters of every stage are those of plain torch in one process."""
    expected = in_torch(habit, ranks, microbatches)
    for stage in stages:
        (found, *_) = pool.run(in_dzero, ranks, habit, stage, microbatches, tiers)
        far = {name: (found[name] - value).abs().max().item() for name, value in expected.items()}
        assert {name: gap for name, gap in far.items() if not gap <= TOLERANCE} == {}, (stage, habit)


@pytest.mark.product(keep=8)
@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("habit", HABITS)
def test_a_habit_of_torch_users_gives_what_torch_gives(pool: Pool, habit: str, ranks: int, microbatches: int) -> None:
    check(pool, habit, ranks, microbatches, (0, 1, 2, 3), {})


@pytest.mark.product(keep=3)
@pytest.mark.parametrize("habit", HABITS)
def test_so_it_does_where_states_are_on_the_host(pool: Pool, habit: str) -> None:
    check(pool, habit, 2, 4, (1, 3), HOST)


KINDS = [
    ("adamw", {"master": "fp32"}),
    ("adamw", {"master": "remainder"}),
    ("adamw", {"param": "fp32"}),
    ("torch's AdamW", {"master": "fp32"}),
    ("torch's AdamW", {"param": "fp32"}),
]


@pytest.mark.product(keep=1)
@pytest.mark.parametrize(("rule", "precision"), KINDS, ids=str)
def test_parameters_edited_between_steps_stay_edited(pool: Pool, rule: str, precision: dict[str, str]) -> None:
    """Their masters follow, element by element; the bits are those of every stage."""
    found = {stage: pool.run(edited, 2, stage, rule, precision, {})[0] for stage in (0, 1, 2, 3)}
    for stage, by_edit in found.items():
        for edit, params in by_edit.items():
            largest = max(value.abs().max().item() for value in params.values())
            assert largest <= LIMIT + 3 * RATE, (stage, edit)
            assert unequal(params, found[0]["in place"]) == [], (stage, edit)


ALL = {**HOST, "param": "host"}
DISK = dict.fromkeys(("grad", "master", "moments"), "disk")


@pytest.mark.product(keep=1)
@pytest.mark.parametrize(
    ("rule", "precision", "tiers"),
    [
        ("adamw", {"master": "fp32"}, HOST),
        ("adamw", {"master": "fp32"}, {**HOST, "overlap": "forward"}),
        ("adamw", {"master": "fp32"}, {**HOST, "overlap": "backward"}),
        ("adamw", {"master": "remainder"}, HOST),
        ("adamw", {"param": "fp32"}, HOST),
        ("adamw", {"master": "fp32"}, ALL),
        ("adamw", {"master": "remainder"}, {**ALL, "overlap": "forward"}),
        ("adamw", {"param": "fp32"}, ALL),
        ("adamw", {"master": "fp32"}, DISK),
        ("adamw", {"param": "fp32"}, {**DISK, "param": "disk"}),
        ("torch's AdamW", {"master": "fp32"}, HOST),
        ("torch's AdamW", {"param": "fp32"}, ALL),
    ],
    ids=str,
)
def test_so_they_do_where_masters_live_elsewhere(
    pool: Pool, rule: str, precision: dict[str, str], tiers: dict[str, str]
) -> None:
    """Bit by bit as on the device."""
    on_device = pool.run(edited, 2, 3, rule, precision, {})[0]
    for edit, params in pool.run(edited, 2, 3, rule, precision, tiers)[0].items():
        assert unequal(params, on_device[edit]) == [], edit


def test_edits_of_delayed_parameters_stay(pool: Pool) -> None:
    """The update that is on its way arrives before they are made."""
    for params in pool.run(edited, 2, 3, "adamw", {"master": "fp32"}, {**HOST, "overlap": "delayed"})[0].values():
        assert max(value.abs().max().item() for value in params.values()) <= LIMIT + 3 * RATE
