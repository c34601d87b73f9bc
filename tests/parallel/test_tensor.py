"""Tensor and sequence parallelism beside every stage: the same training as in one process, and states that move."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from comparison_steps import of_lengths
from pool import Pool
from safetensors.torch import load_file
from tensor_cases import (
    PLAN,
    SHAPE,
    Mlp,
    Run,
    gpt2,
    hf_oracle,
    hf_trained,
    kept_whole,
    loaded,
    misled,
    of_its_own,
    oracle,
    saved,
    trained,
    without_its_mesh,
)
from torch import nn

from dzero import ModelInit, PrecisionConfig, ZeroConfig, make_mesh, shard
from dzero.checkpoint.export_hf import export, plan
from dzero.checkpoint.reader import Checkpoint
from dzero.checkpoint.store import checkpoint_at
from dzero.estimate.fake_group import fake_group
from dzero.models.llama import Llama
from dzero.parallel.tensor.parallelize import parallelize_tensor
from dzero.parallel.tensor.plans import plan_for

FP32 = 1e-5
"""Relative: of losses and norms of every step, and of the length of each parameter at the end: sums are cut."""

RUNS = [
    *(Run(dp=2, tp=2, stage=stage) for stage in (0, 2, 3)),
    *(Run(dp=2, tp=2, stage=stage, microbatches=2, offload="host") for stage in (1, 3)),
    Run(dp=1, tp=4, stage=2),
    Run(dp=1, tp=2, stage=3, microbatches=2),
    Run(dp=1, tp=2, stage=0, offload="host"),
    Run(dp=2, tp=2, stage=3, recompute="full", tied=True),
    Run(dp=2, tp=2, stage=1, recompute="selective"),
    Run(dp=2, tp=2, stage=3, microbatches=2, offload="host", gpt2=True),
    Run(dp=1, tp=4, stage=1, gpt2=True),
    Run(dp=1, tp=2, stage=0, recompute="full", gpt2=True),
]
MORE = [
    Run(dp=2, tp=2, stage=1),
    *(Run(dp=2, tp=2, stage=stage, microbatches=2, offload="host") for stage in (0, 2)),
]


ALL = of_lengths(RUNS, lambda run: (run.dp, run.tp, run.gpt2), MORE)


@pytest.mark.product(keep=2)
@pytest.mark.parametrize("run", ALL, ids=lambda run: f"{'gpt2' if run.gpt2 else 'llama'}-{run}")
def test_every_stage_trains_as_in_one_process(pool: Pool, run: Run) -> None:
    told = pool.run(trained, run.ranks, run, timeout_s=300)
    want = oracle(run.dp, run.microbatches, run.tied, run.gpt2, steps=run.steps)
    for step, expected in enumerate(want.losses):
        losses = [of_rank["losses"][step] for of_rank in told]
        assert losses == [loss for loss in losses[:: run.tp] for _ in range(run.tp)], "ranks of tp see the same"
        assert sum(losses) / len(losses) == pytest.approx(expected, rel=FP32)
        assert {of_rank["norms"][step] for of_rank in told} == {told[0]["norms"][step]}
        assert told[0]["norms"][step] == pytest.approx(want.norms[step], rel=FP32)
    params = told[0]["params"]
    assert params.keys() == want.params.keys()
    for name, value in want.params.items():
        got = params[name].view_as(value)
        if name.endswith("c_attn.bias"):  # that of keys moves no softmax: its gradient is what rounding leaves
            got, value = (each.view(3, -1)[::2] for each in (got, value))
        apart = (got - value).norm() / value.norm()
        assert apart < FP32, f"{name}: {apart:.1e}"


@pytest.mark.product(keep=2)
@pytest.mark.parametrize(("kind", "stage"), [("llama", 3), ("qwen2", 1), ("qwen3", 2), ("mistral", 0)])
def test_models_of_transformers_train_so_too_with_the_values_they_have(pool: Pool, kind: str, stage: int) -> None:
    told = pool.run(hf_trained, 4, kind, stage, timeout_s=300)
    want = hf_oracle(kind, 2)
    for step, expected in enumerate(want.losses):
        assert sum(losses[step] for losses, _ in told) / 4 == pytest.approx(expected, rel=FP32)
    params = told[0][1]
    assert params is not None
    assert params.keys() == want.params.keys()
    for name, value in want.params.items():
        if not name.endswith("k_proj.bias"):  # it moves no softmax: its gradient is what rounding leaves
            assert (params[name] - value).norm() / value.norm() < FP32, name


BF16 = {"param": "bf16"}
MESHES = [
    Run(dp=2, tp=2, stage=3, precision=BF16),
    Run(dp=4, tp=1, stage=2, precision=BF16),
    Run(dp=1, tp=4, stage=1, precision={"param": "bf16", "master": "remainder"}),
    Run(dp=4, tp=1, stage=3, replicate=2, precision=BF16),
    Run(dp=1, tp=2, stage=0, precision=BF16),
    Run(dp=2, tp=1, stage=1, precision=BF16),
    Run(dp=1, tp=1, stage=0, precision=BF16),
]


GPT2 = [
    Run(dp=2, tp=2, stage=3, precision=BF16, gpt2=True),
    Run(dp=4, tp=1, stage=2, precision={"param": "bf16", "master": "remainder", "moments": "bf16"}, gpt2=True),
    Run(dp=1, tp=4, stage=1, precision={"param": "fp32"}, gpt2=True),
    Run(dp=1, tp=1, stage=0, precision=BF16, gpt2=True),
]


@pytest.mark.parametrize(
    ("source", "targets"),
    [
        (0, (1, 2, 3)),
        (3, (0, 2)),
        pytest.param(1, (0,), marks=pytest.mark.slow),
        pytest.param(2, (0, 3), marks=pytest.mark.slow),
    ],
)
def test_fused_projections_are_whole_in_a_checkpoint(
    pool: Pool, tmp_path: Path, source: int, targets: tuple[int, ...]
) -> None:
    """Query, key and value of GPT-2 are the columns of one matrix, of which a rank of tp has some of each."""
    held = pool.run(saved, GPT2[source].ranks, GPT2[source], tmp_path, timeout_s=300)[0]
    for target in targets:
        got = pool.run(loaded, GPT2[target].ranks, GPT2[target], tmp_path, timeout_s=300)[0]
        assert got.keys() == held.keys()
        masters = [key for key in held if key.startswith(("master", "step"))]
        assert [key for key in masters if not torch.equal(held[key], got[key])] == [], GPT2[target]
        moments = [key for key in held if key.startswith("exp_avg")]
        apart = [key for key in moments if not torch.equal(held[key].to(got[key].dtype).float(), got[key].float())]
        assert apart == [], GPT2[target]
    with Checkpoint(checkpoint_at(tmp_path)) as checkpoint:
        export(tmp_path / "out", plan(checkpoint, "fp32"))
    published = load_file(tmp_path / "out" / "model.safetensors")
    masters = {key.removeprefix("master model."): held[key] for key in held if key.startswith("master")}
    assert masters.keys() <= published.keys()
    assert [name for name in masters if not torch.equal(masters[name], published[name])] == []


def check_moves(pool: Pool, folder: Path, source: Run, targets: list[Run]) -> None:
    held = pool.run(saved, source.ranks, source, folder, timeout_s=300)[0]
    for target in targets:
        got = pool.run(loaded, target.ranks, target, folder, timeout_s=300)[0]
        assert got.keys() == held.keys()
        assert [key for key in held if not torch.equal(held[key], got[key])] == [], target


@pytest.mark.product(keep=1)
@pytest.mark.parametrize(("source", "first"), [(MESHES[0], 1), (MESHES[1], 0), (MESHES[2], 0), (MESHES[3], 1)], ids=str)
def test_a_checkpoint_moves_between_meshes_exactly(pool: Pool, tmp_path: Path, source: Run, first: int) -> None:
    """Each target takes over from a mesh with tp and from one without."""
    check_moves(pool, tmp_path, source, MESHES[first::2])


@pytest.mark.slow
@pytest.mark.parametrize("source", MESHES[:4], ids=str)
def test_a_checkpoint_moves_from_each_mesh_to_each(pool: Pool, tmp_path: Path, source: Run) -> None:
    check_moves(pool, tmp_path, source, MESHES)


def test_sizes_that_do_not_divide_are_named() -> None:
    with torch.device("meta"):
        model = Llama(SHAPE)
    told = "tp=3 does not divide the model's heads=4, kv_heads=4, vocab_size=64; allowed: [1, 2, 4]"
    with pytest.raises(ValueError, match=re.escape(told)):
        plan_for(model, 3, "tp")


def test_heads_of_gpt2_that_do_not_divide_are_named() -> None:
    with pytest.raises(ValueError, match=re.escape("tp=8 does not divide the model's heads=4, kv_heads=4; allowed:")):
        plan_for(gpt2(), 8, "tp")


def test_8_bit_moments_of_fused_projections_are_refused() -> None:
    model, precision = gpt2(), PrecisionConfig(moments="int8")
    with fake_group(2):
        mesh = make_mesh("cpu", tp=2)
        parallelize_tensor(model, mesh["tp"])
        with pytest.raises(ValueError, match=r"moments=int8 with parameter .*c_attn.weight, which is cut in"):
            shard(model, ZeroConfig(), precision=precision, mesh=mesh, init=ModelInit(device=torch.device("meta")))


def test_frozen_parameters_stay_frozen_when_they_are_cut() -> None:
    with torch.device("meta"):
        model = Llama(SHAPE)
    frozen = {name for name, param in model.named_parameters() if "down" not in name}
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    with fake_group(2):
        parallelize_tensor(model, make_mesh("cpu", tp=2)["tp"])
        assert {name for name, param in model.named_parameters() if not param.requires_grad} == frozen


def test_a_plan_that_says_nothing_of_a_parameter_is_refused() -> None:
    told = r"tp=2: the plan says nothing of \['norm.weight'\]; where a rank sees a part"
    with fake_group(2), pytest.raises(ValueError, match=told):
        parallelize_tensor(Mlp(), make_mesh("cpu", tp=2)["tp"], PLAN)


def test_a_plan_that_names_no_module_is_refused() -> None:
    told = r"tp=2: the plan names \['upp', 'layers\.\*\.down'\], which Mlp has not as modules"
    with fake_group(2), pytest.raises(ValueError, match=told):
        parallelize_tensor(
            Mlp(), make_mesh("cpu", tp=2)["tp"], {"upp": PLAN["up"], "layers.*.down": PLAN["down"]}, alike=["*"]
        )


def test_a_plan_that_is_wrong_of_one_is_found_at_the_first_step(pool: Pool) -> None:
    for told in pool.run(misled, 2):
        assert "ranks of tp found different gradients of norm.weight, of which each has a copy" in told


def test_whole_parameters_are_gone_once_they_are_cut(pool: Pool) -> None:
    assert pool.run(kept_whole, 2) == [0, 0]


def test_ranks_that_draw_values_of_their_own_begin_with_those_of_the_first(pool: Pool) -> None:
    torch.manual_seed(0)
    first = Mlp()
    expected = {**dict(first.named_parameters()), "shift": torch.rand(2), "scale": torch.rand(3)}
    for told in pool.run(of_its_own, 2):
        assert told.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(told[name], value), name


def test_the_whole_mesh_is_needed(pool: Pool) -> None:
    for told in pool.run(without_its_mesh, 2):
        assert "parameter up.weight is cut along the axis tp, which the mesh does not have: pass the whole mesh" in told


def test_a_model_of_another_kind_needs_a_plan() -> None:
    with pytest.raises(ValueError, match=r"tp=2: no plan is known for Linear, only for \['GPT2LMHeadModel', 'Llama', "):
        plan_for(nn.Linear(4, 4), 2, "tp")
