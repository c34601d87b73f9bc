"""Masters and moments over all data-parallel ranks, parameters over the shard axis: HSDP's bits with less of each."""

from __future__ import annotations

import re
from typing import Any

import pytest
import reference
import small_decoders
import torch
from parity_cells import whole
from pool import Pool
from training_loops import masters_of, params_of, sharded_net, train, unequal

from dzero import AdamW, DiskConfig, OffloadConfig, PrecisionConfig, ZeroConfig
from dzero.config import RunConfig
from dzero.models.config import ModelConfig
from dzero.optim.build import check_layout
from dzero.optim.config import OptimConfig
from dzero.parallel.config import BlockConfig
from dzero.zero.cost_model import resting_bytes
from dzero.zero.dtensors import local_of
from dzero.zero.layout import Layout
from dzero.zero.unit_shapes import rows_of

STEPS, LR, CLIP = 20, 3e-3, 0.5
STATES_ON_HOST = {"grad": "host", "master": "host", "moments": "host"}
FORWARD, IN_STEP = OffloadConfig(**STATES_ON_HOST), OffloadConfig(master="host", moments="host", overlap="step")
IN_PART = OffloadConfig(**STATES_ON_HOST, master_fraction=0.5, moments_fraction=0.5, grad_fraction=0.3)
# net, stage, microbatches, offload, precision. `uneven` has short and empty shards, and parts of them.
CELLS: list[tuple[str, int, int, OffloadConfig | str, dict[str, str]]] = [
    ("uneven", 1, 2, OffloadConfig(), {"param": "fp32"}),
    ("uneven", 2, 1, OffloadConfig(), {"param": "bf16", "master": "remainder", "moments": "bf16"}),
    ("uneven", 3, 2, FORWARD, {"param": "bf16"}),
    ("uneven", 3, 1, IN_STEP, {"param": "fp32"}),
    ("frozen", 2, 2, IN_PART, {"param": "fp16"}),
    ("tied", 1, 1, "disk", {"param": "bf16", "moments": "bf16"}),
]


def both(rank: int, ranks: int, folder: str) -> list[list[str]]:
    """What differs, cell by cell, between whole shards of states and parts of them after three steps of 2 x 2 ranks."""
    told = []
    for net, stage, microbatches, offload, precision in CELLS:
        if isinstance(offload, str):
            disk = DiskConfig(paths=[folder], block_bytes=8192)
            offload = OffloadConfig(grad="host", master=offload, moments=offload, disk=disk)
        runs = []
        for optimizer_shard_axes in (("shard",), ("replicate", "shard")):
            sharded = sharded_net(
                net,
                stage=stage,
                microbatches=microbatches,
                replicate=2,
                optimizer_shard_axes=[*optimizer_shard_axes],
                offload=offload,
                **precision,
            )
            optim = AdamW(sharded, lr=LR, max_norm=CLIP)
            losses, norms = [], []
            for seed in range(3):
                losses += train(sharded, optim, net, steps=1, seed=seed)
                assert optim.last_decision is not None
                norms.append(optim.last_decision.norm)
            optim.synchronize()
            run = {"losses": torch.tensor(losses), "norms": torch.tensor(norms, dtype=torch.float64)}
            run |= params_of(sharded) | {f"master {n}": p for n, p in masters_of(sharded, optim).items()}
            for name, param in sharded.named_params().items():
                of_param = optim.state.get(param, {})
                run |= {f"{key} {name}": whole(of_param[key]) for key in ("exp_avg", "exp_avg_sq") if key in of_param}
            runs.append(run)
            optim.offload.executor.close()
        told.append(unequal(*runs))
    return told


def test_parts_of_states_give_the_bits_of_whole_shards_of_them(pool: Pool, tmp_path: Any) -> None:
    """Losses, norms, parameters, masters and moments: each element is averaged and updated by the same operations."""
    for of_rank in pool.run(both, 4, str(tmp_path), timeout_s=400):
        assert of_rank == [[] for _ in CELLS]


def trained(rank: int, ranks: int, stage: int, microbatches: int, tier: str) -> dict[str, Any]:
    offload = OffloadConfig(grad=tier, master=tier, moments=tier)
    sharded = sharded_net(
        "uneven",
        stage=stage,
        microbatches=microbatches,
        replicate=2,
        optimizer_shard_axes=("replicate", "shard"),
        offload=offload,
        param="fp32",
    )
    optim = AdamW(sharded, lr=LR, max_norm=CLIP)
    losses = train(sharded, optim, "uneven", steps=STEPS)
    assert optim.last_decision is not None
    optim.synchronize()
    return {"losses": losses, "norm": optim.last_decision.norm, "params": params_of(sharded)}


@pytest.mark.product(keep=1)
@pytest.mark.parametrize(
    ("stage", "microbatches", "tier"),
    [
        (3, 2, "host"),
        (1, 1, "device"),
        *(
            pytest.param(stage, microbatches, tier, marks=pytest.mark.slow)
            for stage in (1, 2, 3)
            for microbatches in (1, 2)
            for tier in ("device", "host")
            if (stage, microbatches, tier) not in ((3, 2, "host"), (1, 1, "device"))
        ),
    ],
)
def test_it_trains_as_one_process_does(pool: Pool, stage: int, microbatches: int, tier: str) -> None:
    """fp32, 20 steps: 1e-5 of every loss, of the last norm, and of each parameter's length."""
    ranks = pool.run(trained, 4, stage, microbatches, tier)
    drawn = small_decoders.batches("uneven", steps=STEPS, ranks=4, microbatches=microbatches)
    want = reference.train(
        lambda: small_decoders.build("uneven"), drawn, small_decoders.loss_fn, lrs=[LR] * STEPS, clip=CLIP
    )
    losses = torch.tensor([each["losses"] for each in ranks]).mean(0)
    torch.testing.assert_close(losses, torch.tensor(want.losses), rtol=1e-5, atol=0)
    assert ranks[0]["norm"] == pytest.approx(want.norms[-1], rel=1e-5)
    for name, param in want.params.items():
        assert float((ranks[0]["params"][name] - param).norm() / param.norm()) < 1e-5, name
    assert all(unequal(each["params"], ranks[0]["params"]) == [] for each in ranks)


def held(rank: int, ranks: int, net: str, precision: dict[str, str]) -> tuple[dict[str, int], dict[str, int], Layout]:
    """Bytes of this rank's states, those of the formula, and elements of the parameters it has states of."""
    sharded = sharded_net(net, stage=3, replicate=2, optimizer_shard_axes=("replicate", "shard"), **precision)
    optim = AdamW(sharded)
    expected = resting_bytes(sharded.layout, sharded.shapes)
    train(sharded, optim, net, steps=1)
    for name, param in sharded.named_params().items():
        rows = {local_of(value).shape[0] for key, value in optim.state[param].items() if key != "step"}
        cuts = (sharded.mesh.get_local_rank("shard"), 2), (sharded.mesh.get_local_rank("replicate"), 2)
        assert rows == {rows_of(param.shape[0], *cuts)[1]}, name
    formula = {"param": expected.param, "master": expected.master, "moments": expected.moments}
    return optim.state_bytes(), formula, sharded.layout


def test_a_rank_keeps_its_part_of_the_states_and_its_shard_of_the_parameters(pool: Pool) -> None:
    """bf16 over 2 x 2: 2 Ψ / 2 of parameters, 4 Ψ / 4 of masters, 8 Ψ / 4 of moments; where rows do not divide, at most
    the formula, and all ranks together exactly Ψ of each."""
    elems = sum(param.numel() for param in small_decoders.build("even").parameters())
    for got, formula, _ in pool.run(held, 4, "even", {"param": "bf16"}):
        assert got == formula == {"param": elems, "master": elems, "moments": 2 * elems}
    elems = sum(param.numel() for param in small_decoders.build("uneven").parameters())
    ranks = pool.run(held, 4, "uneven", {"param": "bf16", "master": "remainder"})
    for got, formula, _ in ranks:
        assert all(got[kind] <= formula[kind] for kind in got)
    assert sum(got["master"] for got, _, _ in ranks) == 2 * elems
    assert sum(got["moments"] for got, _, _ in ranks) == 8 * elems


def refused(**changed: Any) -> str:
    """What is said of a table with states over all of 2 x 2 ranks."""
    sizes = {"replicate": 2, "shard": 2} | {key: changed.pop(key) for key in [*changed] if key in SIZES}
    stage = changed.pop("stage", 2)
    with pytest.raises(ValueError, match=re.escape("zero.optimizer_shard_axes=[replicate,shard]")) as told:  # noqa: PT012  # either refuses
        zero = ZeroConfig(stage=stage, optimizer_shard_axes=["replicate", "shard"])
        Layout.of(zero, PrecisionConfig(), OffloadConfig(**changed), **sizes)
    return str(told.value)


SIZES = ("replicate", "shard", "model_ranks", "pipeline_ranks")
MODEL = ModelConfig(hidden_size=36, layers=3, heads=6, ffn_size=50)


def test_what_it_does_not_go_with_is_refused_with_what_to_take() -> None:
    assert "mesh.replicate=2 or more" in refused(replicate=1, shard=4)
    assert "zero.stage=1, 2 or 3 with mesh.replicate=2 or more" in refused(stage=0, replicate=4, shard=1)
    assert "offload.param=device" in refused(stage=3, param="host", master="host")
    assert "offload.overlap=forward" in refused(**STATES_ON_HOST, overlap="backward")
    assert "offload.overlap=forward" in refused(**STATES_ON_HOST, overlap="delayed")
    assert "zero.optimizer_shard_axes=[shard]" in refused(model_ranks=2)
    assert "zero.optimizer_shard_axes=[shard]" in refused(pipeline_ranks=2)
    with pytest.raises(ValueError, match=r"choose \[shard\] or \[replicate,shard\]"):
        ZeroConfig(optimizer_shard_axes=["none"])
    layout = Layout.of(ZeroConfig(optimizer_shard_axes=["replicate", "shard"]), PrecisionConfig(), replicate=2, shard=2)
    for rule in ("muon", "SGD"):
        with pytest.raises(ValueError, match=re.escape("optim.rule=adamw")):
            check_layout(OptimConfig(rule=rule), layout)
    with pytest.raises(ValueError, match=re.escape("block.tiles=1")):
        RunConfig(model=MODEL, zero=ZeroConfig(optimizer_shard_axes=["replicate", "shard"]), block=BlockConfig(tiles=2))
