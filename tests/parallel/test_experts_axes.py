"""Experts beside a pipeline and matrices that are cut: the same training as in one process, and states that move."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from expert_axes_cases import config_of, loaded, oracle, overflowed, run_of, saved, trained
from moe_reference import SHAPE
from parity_cells import together
from pool import Pool

from dzero import make_mesh
from dzero.estimate.fake_group import fake_group
from dzero.models.config import MoEShape
from dzero.models.moe import MoE
from dzero.parallel.pipeline.split import split_pipeline
from dzero.parallel.tensor.parallelize import parallelize_tensor
from dzero.parallel.tensor.plans import plan_for
from dzero.plan.run_layout import workers_of

FP32 = 1e-5
"""Relative: of losses and norms of every step, and of the length of each parameter after 20. Sums are cut elsewhere."""

HOST = "offload.grad=host offload.master=host offload.moments=host"
RUNS = [
    f"mesh.dp=2 mesh.ep=2 mesh.pp=2 zero.stage=1 model.balance=loss {HOST}",
    "mesh.dp=2 mesh.ep=2 mesh.pp=2 zero.stage=3 block.activation_checkpoint=full",
    "mesh.dp=1 mesh.ep=2 mesh.tp=2 zero.stage=1 model.balance=loss",
    "mesh.dp=2 mesh.ep=4 mesh.tp=2 zero.stage=3",
    "mesh.dp=1 mesh.ep=2 mesh.tp=2 mesh.pp=2 zero.stage=2 model.balance=loss",
    "mesh.dp=1 mesh.cp=2 mesh.pp=2 zero.stage=3",
    f"mesh.dp=1 mesh.cp=2 mesh.ep=2 mesh.pp=2 zero.stage=1 mesh.cp_attention=ring {HOST}",
    f"mesh.dp=1 mesh.cp=2 mesh.ep=2 mesh.tp=2 zero.stage=2 mesh.cp_attention=ulysses {HOST}",
]
CUT = ("mesh.dp=2 mesh.cp=2", *(f"mesh.dp=1 mesh.cp=2 mesh.{more}" for more in ("pp=2", "ep=2", "ep=2 mesh.tp=2")))
MORE = [
    "mesh.dp=2 mesh.ep=2 mesh.pp=2 zero.stage=0",
    "mesh.dp=2 mesh.ep=2 mesh.pp=2 zero.stage=2 model.balance=loss mesh.pp_schedule=gpipe",
    "mesh.dp=2 mesh.pp=2 zero.stage=3 model.balance=loss block.activation_checkpoint=full",
    f"mesh.dp=2 mesh.ep=2 mesh.tp=2 zero.stage=3 model.balance=loss {HOST}",
    "mesh.dp=1 mesh.ep=2 mesh.tp=2 zero.stage=3 model.balance=loss block.activation_checkpoint=full",
    "mesh.dp=2 mesh.ep=2 mesh.tp=2 zero.stage=1",
    "mesh.dp=2 mesh.ep=4 mesh.tp=2 zero.stage=1 model.balance=loss",
    "mesh.dp=2 mesh.ep=4 mesh.tp=2 zero.stage=0",
    "mesh.dp=1 mesh.cp=2 mesh.ep=4 mesh.tp=2 zero.stage=3",
    "mesh.dp=2 mesh.ep=4 mesh.tp=2 mesh.pp=2 zero.stage=1 model.balance=loss",
    *(f"{mesh} zero.stage={stage} {tier}".strip() for mesh in CUT for stage in range(4) for tier in ("", HOST)),
]


@pytest.mark.product(keep=1)
@pytest.mark.parametrize("line", [*RUNS, *(pytest.param(line, marks=pytest.mark.slow) for line in MORE)])
def test_experts_on_every_axis_train_as_in_one_process(pool: Pool, line: str) -> None:
    config = config_of(line)
    told = pool.run(trained, workers_of(config), config, timeout_s=500)
    want, biases = oracle(run_of(config))
    for of_rank in told:
        assert of_rank["losses"] == told[0]["losses"] == pytest.approx(want.losses, rel=FP32)
        assert of_rank["norms"] == told[0]["norms"] == pytest.approx(want.norms, rel=FP32)
        assert of_rank["agrees"], "traffic by the formulas"
    params, found = together([each["params"] for each in told]), together([each["biases"] for each in told])
    assert params.keys() == want.params.keys()
    for name, value in want.params.items():
        assert (params[name] - value).norm() / value.norm() < FP32, name
    assert found.keys() == (set() if config.model.balance == "loss" else biases.keys())
    assert all(torch.equal(bias, biases[name]) for name, bias in found.items())


MESHES = [
    "mesh.dp=2 mesh.ep=2 mesh.pp=2 zero.stage=3",
    "mesh.dp=2 mesh.ep=4 mesh.tp=2 zero.stage=3",
    "mesh.dp=1 mesh.ep=2 mesh.tp=2 mesh.pp=2 zero.stage=1",
    "mesh.dp=1 zero.stage=0",
    "mesh.dp=2 mesh.ep=2 mesh.pp=2 zero.stage=0",
]


@pytest.mark.full
def test_checkpoints_move_between_meshes_to_the_bit(pool: Pool, tmp_path: Path) -> None:
    configs = [config_of(f"{line} precision=bf16") for line in MESHES]
    for number, (before, after) in enumerate(pairwise(configs)):
        folder = tmp_path / str(number)
        want = together(pool.run(saved, workers_of(before), before, folder, timeout_s=300))
        assert len([name for name in want if name.endswith("router.bias")]) == 2
        got = together(pool.run(loaded, workers_of(after), after, folder, timeout_s=300))
        assert got.keys() == want.keys()
        assert [name for name, value in want.items() if not torch.equal(got[name], value)] == [], MESHES[number]


@pytest.mark.parametrize("line", ["mesh.dp=2 mesh.ep=2 mesh.pp=2 zero.stage=2", "mesh.dp=2 mesh.ep=2 mesh.tp=2"])
def test_an_overflow_in_one_expert_of_one_rank_is_skipped_by_all(pool: Pool, line: str) -> None:
    config = config_of(f"{line} precision=fp16 scaler.init=1024")
    told, layers = pool.run(overflowed, 4, config, timeout_s=300), (1,) if config.mesh.pp > 1 else (0, 1)
    for nonfinite_params, same, next_is_made in told:
        assert {name.split(" ")[0] for name in nonfinite_params} == {
            f"layers.{index}.ffn.experts.down" for index in layers
        }
        assert same
        assert next_is_made


def test_what_parts_add_to_the_loss_is_scaled_as_the_loss_is(pool: Pool) -> None:
    line = "zero.stage=0 precision=fp16 model.balance=loss model.balance_rate=1.0 train.steps=2 mesh.dp=1"
    alone, cut = (config_of(f"{line} {mesh}") for mesh in ("mesh.pp=1", "mesh.pp=2"))
    (want,), told = pool.run(trained, 1, alone), pool.run(trained, 2, cut)
    for of_rank in told:
        assert of_rank["losses"] == pytest.approx(want["losses"], rel=1e-3)
        assert of_rank["norms"] == pytest.approx(want["norms"], rel=1e-3)


@pytest.mark.parametrize("mesh", ["dp=2 mesh.ep=2", "dp=1 mesh.cp=2", "dp=1 mesh.tp=2 mesh.ep=2", "dp=1 mesh.pp=2"])
def test_a_model_that_is_dropped_lets_its_groups_go(pool: Pool, mesh: str) -> None:
    before = len(pool.kept)
    pool.run(trained, 2, config_of(f"mesh.{mesh} zero.stage=2 train.steps=1"))
    assert pool.kept[before:] == []


def test_a_part_costs_what_a_token_uses_of_its_experts() -> None:
    """A block multiplies 960 of its 13,056 elements with a token, and the head 1,920: as many as two blocks."""
    shape = MoEShape(
        vocab_size=240, hidden_size=8, layers=4, heads=2, kv_heads=2, ffn_size=8, experts=64, top_k=1, balance="none"
    )
    with torch.device("meta"):
        model = MoE(shape)
    assert [part.blocks for part in split_pipeline(model, 0, 2).own] == [3]


def test_a_mixture_is_cut_by_tp_once_its_experts_are_shared() -> None:
    with torch.device("meta"):
        model = MoE(replace(SHAPE, shared_experts=0))
    plan, _ = plan_for(model, 2, "tp")
    assert "layers.*.ffn.router" in plan
    assert not [name for name in plan if "shared" in name]
    with pytest.raises(
        ValueError, match=r"does not divide the model's heads=4, kv_heads=4, vocab_size=64; allowed: \[1, "
    ):
        plan_for(model, 3, "tp")
    told = r"says nothing of \['layers.0.ffn.experts.gate', .* experts are shared before \(parallelize_experts\)"
    with fake_group(2), pytest.raises(ValueError, match=told):
        parallelize_tensor(model, make_mesh("cpu", tp=2)["tp"])
