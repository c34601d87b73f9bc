"""What torch users do with gradients gives what plain torch in one process gives, at every stage."""

from __future__ import annotations

import pytest
import small_decoders
import torch
from loops_of_torch import HABITS, HOST, LIMIT, OPTIONS, RATE, edited, in_dzero, in_torch, whole
from pool import Pool
from torch import Tensor, nn
from training_loops import sharded_net, unequal

from dzero import AdamW, OffloadConfig, ZeroConfig, shard

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


class Partly(nn.Module):
    """A block with a layer that never runs."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.other = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.used(x)
        return out


def gradients_of_three(rank: int, ranks: int, stage: int) -> list[float]:
    """Of the last bias in bf16, after three microbatches that each add 1."""
    sharded = shard(nn.Sequential(Partly(), Partly()), ZeroConfig(stage=stage), precision="bf16", microbatches=3)
    for index in range(3):
        with sharded.microbatch(is_last=index == 2):
            sharded.model(torch.ones(1, 4)).float().sum().backward()
    grad = sharded.model.get_parameter("1.used.bias").grad
    assert grad is not None
    return [float(each) for each in whole(grad)]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_microbatch_counts_where_a_parameter_of_the_unit_is_never_used(pool: Pool, stage: int) -> None:
    assert pool.run(gradients_of_three, 2, stage) == [[3.0] * 4] * 2


def of_own_data(model: nn.Module, batch: Tensor, rank: int) -> Tensor:
    """A loss that reads whole weights beside the forward, by hand, and differs between ranks."""
    drawn = torch.Generator().manual_seed(rank)
    total: Tensor = small_decoders.loss_fn(model, batch)
    for param in list(model.parameters())[::2]:
        by_hand = whole(param) * torch.randn(param.shape, generator=drawn)
        total = total + 0.1 * (by_hand.square().mean() + whole(param.norm()) * by_hand.detach().abs().mean())
    return total


def read_whole(rank: int, ranks: int, stage: int, offload: dict[str, str]) -> dict[str, Tensor]:
    tiers = OffloadConfig(**offload) if offload else None
    sharded = sharded_net("even", stage=stage, param="fp32", offload=tiers)
    optim = AdamW(sharded, **OPTIONS)  # type: ignore[arg-type]
    for of_step in small_decoders.batches("even", steps=2, ranks=ranks, microbatches=1):
        of_own_data(sharded.model, of_step[rank][0], rank).backward()  # type: ignore[no-untyped-call]
        optim.step()
    optim.synchronize()
    return {name: whole(param.detach()).clone() for name, param in sharded.named_params().items()}


@pytest.mark.parametrize(("stage", "offload"), [(0, {}), (1, {}), (2, HOST), (3, {}), (3, {"param": "host", **HOST})])
def test_a_loss_of_a_ranks_own_data_may_read_whole_weights(pool: Pool, stage: int, offload: dict[str, str]) -> None:
    """By itself, DTensor gives each shard the gradient of its own rank's loss."""
    model = small_decoders.build("even")
    optim = torch.optim.AdamW(model.parameters(), **OPTIONS)  # type: ignore[arg-type]
    for of_step in small_decoders.batches("even", steps=2, ranks=2, microbatches=1):
        optim.zero_grad()
        losses = [of_own_data(model, of_step[rank][0], rank) for rank in range(2)]
        torch.stack(losses).mean().backward()  # type: ignore[no-untyped-call]
        optim.step()
    for found in pool.run(read_whole, 2, stage, offload):
        for name, param in model.named_parameters():
            torch.testing.assert_close(found[name], param.detach(), rtol=0, atol=TOLERANCE, msg=name)
