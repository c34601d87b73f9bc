"""The table filled in, and the settings that it refuses: each message names the key, the value and what is allowed."""

from __future__ import annotations

import re
from typing import Any

import decoders
import pytest
import torch
from fake_ranks import fake_ranks
from torch.distributed.tensor import Replicate, Shard
from training_loops import sharded_net

from dzero import ModelInit, ParallelConfig, make_mesh, parallelize, shard, testing

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def layout(stage: int = 2, *, ranks: int = 4, **settings: Any) -> Any:
    with fake_ranks(ranks):
        return sharded_net(stage=stage, **settings).layout


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_stage_fills_the_column_of_placements(stage: int) -> None:
    table = layout(stage)
    rows = {"param": stage >= 3, "grad": stage >= 2, "master": stage >= 1, "moments": stage >= 1}
    assert {kind: getattr(table, kind).sharded for kind in rows} == rows
    assert table.master.placements == (Replicate(), Shard(0) if stage else Replicate())
    assert table.ranks == 4
    assert table.reshard_after_forward is (stage in (0, 3))
    assert layout(stage, ranks=1).reshard_after_forward is True, "nothing is kept for backward that is not copied"


def test_dtypes_follow_precision() -> None:
    table = layout(param="bf16", master="remainder", moments="bf16")
    assert (table.param.dtype, table.master.dtype, table.moments.dtype) == (BF16, torch.int16, BF16)
    assert (table.wire, table.grad.dtype) == (BF16, BF16)
    assert layout(microbatches=4).grad.dtype == FP32
    assert layout(replicate=2).grad.dtype == FP32
    assert layout(grad="fp32", reduce="fp32").wire == FP32
    assert layout(param="fp16").wire == FP16
    assert layout(microbatches=4, grad="bf16").grad.dtype == BF16


@pytest.mark.parametrize(("stage", "param"), [(0, "bf16"), (2, "bf16"), (3, "fp16")])
def test_what_the_backend_sums_travels_in_fp32_by_default(stage: int, param: str) -> None:
    """As torchtitan reduces: in the working dtype every addition, and every hop, would round."""

    def native(ranks: int = 4, **precision: str) -> tuple[torch.dtype, torch.dtype]:
        table = layout(stage, ranks=ranks, reduction="native", param=param, **precision)
        return table.wire, table.grad.dtype

    working = {"bf16": BF16, "fp16": FP16}[param]
    assert native() == (FP32, FP32)
    assert native(reduce=param) == native(grad=param) == (working, working)
    assert native(ranks=1) == (working, working)  # nothing is summed


def test_shards_are_padded_rows_of_the_first_dim() -> None:
    """Of 5 rows of 3 elements, in fp32."""
    for ranks, rows in ((1, 5), (2, 3), (4, 2), (8, 1)):
        with fake_ranks(ranks):
            sharded = shard(torch.nn.Linear(3, 5, bias=False), 3, precision="fp32")
            assert testing.resting_bytes(sharded)["param"] == rows * 3 * 4


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ({"reduction": "fast"}, "zero.reduction='fast': choose one of ['auto', 'exact', 'native']"),
        ({"reduce": "int2"}, "precision.reduce='int2': choose one of"),
        ({"master": "bf16"}, "precision.master='bf16': choose one of ['fp32', 'remainder']"),
        ({"moments": "fp8"}, "precision.moments='fp8': choose one of ['fp32', 'bf16', 'int8']"),
        ({"reshard": 3}, "take true, false or a divisor between: [2, 4]"),
        ({"grad": "bf16", "replicate": 2}, "hybrid sharding keeps fp32 gradients between its two hops"),
    ],
    ids=str,
)
def test_errors_name_the_key_the_value_and_the_repair(kind: dict[str, Any], told: str) -> None:
    """What does not go together is all in `tests/test_compatibility.py`."""
    with pytest.raises(ValueError, match=re.escape(told)):
        layout(3, ranks=8, **kind)


@pytest.mark.parametrize(
    ("stage", "replicate", "ranks", "own"),
    [(0, 8, 8, (2, 1)), (1, 1, 8, (1, 2)), (3, 2, 16, (2, 2)), (2, 1, 4, (1, 1))],
)
def test_experts_that_ranks_share_have_a_table_of_their_own(
    stage: int, replicate: int, ranks: int, own: tuple[int, int]
) -> None:
    """Of four experts each of four neighbours has one, in as many copies and shards as there are ranks left."""
    with fake_ranks(ranks):
        model, mesh = decoders.on_meta(**decoders.EXPERTS), make_mesh("cpu", replicate=replicate)
        init = ModelInit(device=torch.device("meta"))
        sharded = shard(parallelize(model, mesh, ParallelConfig(ep=4)), stage, mesh=mesh, init=init)
        tables = {unit.shape.name: unit.layout for unit in sharded.units}
    experts = [table for name, table in tables.items() if name.endswith("experts")]
    assert [(table.replicate, table.shard) for table in experts] == [own] * 2
    assert tables["root"].ranks == ranks
