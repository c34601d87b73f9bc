"""Rules of whole matrices over those that tensor parallelism cuts: owners of the parts gather and update the whole."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from parity_cells import whole
from pool import Pool
from tensor_cases import Run, batches, cut_logits, loss_of, model_of
from training_loops import unequal

from dzero import (
    CheckpointConfig,
    Checkpointer,
    Muon,
    MuonConfig,
    OffloadConfig,
    PrecisionConfig,
    TorchOptimizer,
    ZeroConfig,
    make_mesh,
    parallelize,
    shard,
)
from dzero.mesh import TENSOR, data_rank_of
from dzero.models.meta_init import MetaInitializer
from dzero.optim.base import MasterOptimizer

STEPS = 4


def trained(
    rank: int, ranks: int, run: Run, rule: str, folder: str = "", first: int = 0, last: int = STEPS
) -> dict[str, Any]:
    """Train from step `first` to step `last`; with a folder, resume from what is there, and save at the end."""
    model = model_of(run)
    fill: Any = MetaInitializer(model, seed=0, device="cpu")
    mesh = make_mesh("cpu", replicate=run.dp if run.stage == 0 else run.replicate, tp=run.tp)
    cut = parallelize(model, mesh)
    sharded = shard(
        cut,
        ZeroConfig(stage=run.stage),
        precision=PrecisionConfig(**run.precision),
        offload=OffloadConfig(grad=run.offload, master=run.offload, moments=run.offload),
        init=fill,
    )
    optim: MasterOptimizer
    if rule == "muon":
        optim = Muon(sharded, muon=MuonConfig(lr=0.02, compute="fp32"), lr=1e-3, max_norm=0.5)
    else:
        optim = TorchOptimizer(sharded, torch.optim.Adafactor, lr=1e-2, max_norm=0.5)
    checkpoints = Checkpointer(CheckpointConfig(folder=folder), sharded, optim) if folder else None
    if checkpoints is not None and first:
        checkpoints.resume("auto")
    own = data_rank_of(mesh)
    for of_step in batches(STEPS, run.dp, 1)[first:last]:
        with cut_logits(cut.tensor):
            loss = loss_of(sharded.model, of_step[own][0])
            loss.backward()  # type: ignore[no-untyped-call]
        sharded.ledger.take()
        optim.step()
        optim.synchronize()
        sent = {entry: each for entry, each in sharded.ledger.take().items() if entry.phase == "update"}
        assert sent == optim.traffic
    if checkpoints is not None:
        checkpoints.save(last, {})
        checkpoints.finish()
    params = {name: whole(param.detach()).clone() for name, param in sharded.named_params().items()}
    along = [entry.kind for entry in optim.traffic if entry.axis == TENSOR]
    return {"params": params, "along": along}


RUNS = [
    Run(dp=1, tp=2, stage=0),
    Run(dp=2, tp=2, stage=3),
    Run(dp=2, tp=2, stage=1, offload="host"),
    Run(dp=2, tp=2, stage=0, offload="host"),
]


@pytest.mark.parametrize("rule", ["muon", "Adafactor"])
def test_cut_matrices_are_updated_whole(pool: Pool, rule: str) -> None:
    """Forward sums along tp in another order, hence a tolerance; parts that are updated alone are far from it.

    Stages and tiers have the same bits.
    """
    of_two = []
    for run in RUNS:
        alone = Run(dp=run.dp, tp=1, stage=0)
        want = pool.run(trained, alone.ranks, alone, rule)[0]
        found, *others = pool.run(trained, run.ranks, run, rule)
        assert found["along"] == ["all_gather"]
        for name, value in want["params"].items():
            far = (found["params"][name] - value).norm() / value.norm()
            assert far < 1e-4, (run, name, float(far))
            assert all(torch.equal(each["params"][name], found["params"][name]) for each in others), (run, name)
        of_two += [found["params"]] if run.dp == 2 else []
    for other in of_two[1:]:
        assert unequal(other, of_two[0]) == []


@pytest.mark.parametrize("rule", ["muon", "Adafactor"])
def test_their_states_load_on_another_mesh(pool: Pool, tmp_path: Path, rule: str) -> None:
    two = Run(dp=2, tp=2, stage=3)
    (straight, *_) = pool.run(trained, 4, two, rule)
    pool.run(trained, 4, two, rule, f"{tmp_path}/saved", 0, 2)
    (again, *_) = pool.run(trained, 4, replace(two, stage=1, offload="host"), rule, f"{tmp_path}/saved", 2)
    assert unequal(again["params"], straight["params"]) == []
    pool.run(trained, 4, two, rule, f"{tmp_path}/other", 0, 2)
    (alone, *_) = pool.run(trained, 2, Run(dp=2, tp=1, stage=2), rule, f"{tmp_path}/other", 2)
    for name, value in straight["params"].items():
        assert (alone["params"][name] - value).norm() / value.norm() < 1e-4, name


def fused(rank: int, ranks: int, rule: str) -> str:
    with pytest.raises(ValueError, match="cut in several places") as error:
        trained(rank, ranks, Run(dp=1, tp=2, stage=1, gpt2=True), rule)
    return str(error.value)


@pytest.mark.parametrize("rule", ["muon", "Adafactor"])
def test_matrices_with_several_results_side_by_side_are_refused(pool: Pool, rule: str) -> None:
    told = pool.run(fused, 2, rule)[0]
    assert f"optim.rule={rule}" in told
    assert "take mesh.tp=1" in told
