"""The table filled in, and the settings that it refuses: each message names the key, the value and what is allowed."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

from dzero import PrecisionConfig, ZeroConfig
from dzero.mesh_config import MeshConfig
from dzero.zero.cost_model import expected_traffic, resting_bytes
from dzero.zero.layout import GradSyncPolicy, Layout
from dzero.zero.unit_shapes import ParamShape, Split, UnitShape


def layout(stage: int = 2, *, replicate: int = 1, shard: int = 4, microbatches: int = 1, **precision: str) -> Layout:
    if stage == 0:
        replicate, shard = shard, 1
    return Layout.of(
        ZeroConfig(stage=stage),
        PrecisionConfig(**precision),
        replicate=replicate,
        shard=shard,
        microbatches=microbatches,
    )


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_stage_fills_the_column_of_placements(stage: int) -> None:
    table = layout(stage)
    rows = {"param": stage >= 3, "grad": stage >= 2, "master": stage >= 1, "moments": stage >= 1}
    assert {kind: getattr(table, kind).sharded for kind in rows} == rows
    assert table.master.placements == (Replicate(), Shard(0) if stage else Replicate())
    assert table.ranks == 4


def test_dtypes_follow_precision() -> None:
    table = layout(param="bf16", master="remainder", moments="bf16")
    assert (table.param.dtype, table.master.dtype, table.moments.dtype) == (torch.bfloat16, torch.int16, torch.bfloat16)
    assert (table.wire, table.grad.dtype) == (torch.bfloat16, torch.bfloat16)
    assert layout(microbatches=4).grad.dtype == torch.float32
    assert layout(replicate=2, shard=2).grad.dtype == torch.float32
    assert layout(grad="fp32", reduce="fp32").wire == torch.float32
    assert layout(param="fp16").wire == torch.float16
    assert layout(microbatches=4, grad="bf16").grad.dtype == torch.bfloat16


@pytest.mark.parametrize(("stage", "param"), [(0, "bf16"), (2, "bf16"), (3, "fp16")])
def test_what_the_backend_sums_travels_in_fp32_by_default(stage: int, param: str) -> None:
    """As torchtitan reduces: in the working dtype every addition, and every hop, would round."""

    def native(shard: int = 4, **precision: str) -> Layout:
        replicate, shard = (shard, 1) if stage == 0 else (1, shard)
        kinds = PrecisionConfig(param=param, **precision)
        return Layout.of(ZeroConfig(stage=stage), kinds, replicate=replicate, shard=shard, exact=False)

    working = {"bf16": torch.bfloat16, "fp16": torch.float16}[param]
    assert (native().wire, native().grad.dtype) == (torch.float32, torch.float32)
    assert (native(reduce=param).wire, native(reduce=param).grad.dtype) == (working, working)
    assert (native(grad=param).wire, native(grad=param).grad.dtype) == (working, working)
    assert (native(shard=1).wire, native(shard=1).grad.dtype) == (working, working)  # nothing is summed


def test_the_cadence_is_that_of_the_table() -> None:
    for stage, early in (
        (1, GradSyncPolicy(False, False)),
        (2, GradSyncPolicy(True, False)),
        (3, GradSyncPolicy(True, True)),
    ):
        assert layout(stage).grad_sync_policy(is_last=False) == early
        assert layout(stage).grad_sync_policy(is_last=True) == GradSyncPolicy(True, True)
    assert layout(0).grad_sync_policy(is_last=False) == GradSyncPolicy(False, True)


def test_on_one_rank_every_stage_reshards_after_forward() -> None:
    assert all(layout(stage, shard=1).reshard_after_forward is True for stage in (0, 1, 2, 3))
    assert layout(1).reshard_after_forward is False
    assert layout(3).reshard_after_forward is True


def test_shards_are_padded_rows_of_the_first_dim() -> None:
    shape = ParamShape("w", (5, 3), True)
    assert [shape.shard_elems(n) for n in (1, 2, 4, 8)] == [15, 9, 6, 3]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ZeroConfig(stage=5), "zero.stage=5: choose 0, 1, 2 or 3"),
        (lambda: ZeroConfig(reduction="fast"), "zero.reduction='fast': choose one of ['auto', 'exact', 'native']"),
        (
            lambda: ZeroConfig(stage=1, reshard_after_forward=False),
            "zero.reshard_after_forward=false has no effect with zero.stage=1",
        ),
        (lambda: PrecisionConfig(param="bf17"), "precision.param='bf17': choose one of ['fp32', 'bf16', 'fp16']"),
        (lambda: PrecisionConfig(reduce="int2"), "precision.reduce='int2': choose one of"),
        (lambda: PrecisionConfig(master="bf16"), "precision.master='bf16': choose one of ['fp32', 'remainder']"),
        (lambda: PrecisionConfig(moments="fp8"), "precision.moments='fp8': choose one of ['fp32', 'bf16', 'int8']"),
        (
            lambda: PrecisionConfig(param="fp16", master="remainder"),
            "precision.master=remainder with precision.param=fp16: the remainder is",
        ),
        (lambda: PrecisionConfig(grad="fp16"), "precision.grad=fp16 with precision.param=bf16"),
        (lambda: layout(reduce="fp32"), "precision.reduce=fp32 with gradients stored in bf16: the payload is wider"),
        (
            lambda: layout(replicate=2, shard=2, grad="bf16"),
            "precision.grad=bf16 with mesh axis replicate of size 2 and mesh axis shard of size 2: hybrid sharding "
            "keeps fp32 gradients between its two hops; take precision.grad=auto",
        ),
        (
            lambda: Layout.of(ZeroConfig(stage=0), PrecisionConfig(), replicate=1, shard=2),
            "zero.stage=0 with mesh axis shard of size 2: it replicates everything",
        ),
        (
            lambda: Layout.of(ZeroConfig(stage=3, reshard_after_forward=3), PrecisionConfig(), replicate=1, shard=8),
            "zero.reshard_after_forward=3 with mesh axis shard of size 8: parameters are resharded over a part of "
            "the axis; take true, false or a divisor between: [2, 4]",
        ),
        (lambda: MeshConfig(replicate=0), "mesh.replicate=0: must be a whole number ≥ 1"),
        (lambda: MeshConfig(replicate=3).degrees(8, stage=2), "does not divide the 8 ranks; allowed: [1, 2, 4, 8]"),
        (lambda: MeshConfig(replicate=2).degrees(8, stage=0), "mesh.replicate=2 has no effect with zero.stage=0"),
    ],
)
def test_errors_name_the_key_the_value_and_the_repair(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        make()


def test_mesh_degrees_multiply_to_the_ranks() -> None:
    assert MeshConfig().degrees(8, stage=3) == (1, 8)
    assert MeshConfig(replicate=2).degrees(8, stage=1) == (2, 4)
    assert MeshConfig().degrees(8, stage=0) == (8, 1)


EXPERTS = UnitShape("experts", (ParamShape("experts.up", (6, 5), True, Split("ep", 0, 1, 4)),))
"""What one of four ranks has of 24 rows."""


@pytest.mark.parametrize(
    ("stage", "degrees", "own", "kept"),
    [(0, (8, 1), (2, 1), False), (1, (1, 8), (1, 2), True), (3, (2, 8), (2, 2), False), (2, (1, 4), (1, 1), False)],
)
def test_experts_that_ranks_share_have_a_table_of_their_own(
    stage: int, degrees: tuple[int, int], own: tuple[int, int], kept: bool
) -> None:
    replicate, shard = degrees
    zero, precision = ZeroConfig(stage=stage), PrecisionConfig()
    table = Layout.of(zero, precision, replicate=replicate, shard=shard, expert_ranks=4)
    of_unit = table.of_unit(EXPERTS)
    assert (of_unit.replicate, of_unit.shard) == own
    assert of_unit.reshard_after_forward is not kept  # one rank keeps no second copy
    assert (of_unit.param, of_unit.grad, of_unit.master) == (table.param, table.grad, table.master)
    assert table.of_unit(UnitShape("dense", (ParamShape("up", (6, 5), True),))) is table
    rows = -(-6 // own[1])
    assert resting_bytes(table, [EXPERTS]).total == rows * 5 * 14
    sent = {entry.kind: each.sent_bytes for entry, each in expected_traffic(table, [EXPERTS]).items()}
    assert sent.get("reduce_scatter", 0) == (own[1] - 1) * rows * 5 * 2
    assert sent.get("all_gather", 0) == (own[1] - 1) * rows * 5 * 2 * (2 if stage == 3 else 1)
    assert ("all_reduce" in sent) == (own[0] > 1)


def test_what_cuts_experts_is_refused_where_it_does_not_fit() -> None:
    with pytest.raises(ValueError, match=r"mesh.ep=3 does not divide the 8 data-parallel ranks of axis shard"):
        Layout.of(ZeroConfig(), PrecisionConfig(), replicate=1, shard=8, expert_ranks=3)
    nearby = ZeroConfig(stage=3, reshard_after_forward=2)
    with pytest.raises(ValueError, match=r"reshard_after_forward=2 with mesh.ep=4"):
        Layout.of(nearby, PrecisionConfig(), replicate=1, shard=8, expert_ranks=4)
