"""Checks of models with tensor parallelism, tiles or shared experts for unsupported combinations."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from dzero.compatibility import check_compatible
from dzero.parallel.expert.dispatch import ExpertParallel
from dzero.utils.rules import Settings
from dzero.zero.layout import Layout
from dzero.zero.unit_shapes import UnitShape


def check_splits(units: list[UnitShape], groups: dict[str, dist.ProcessGroup], *, tiles: int) -> None:
    """Raise ValueError if parameters are cut along an axis that `groups` lacks, or if such a model has tiles."""
    dense = (unit for unit in units if unit.shared_by == 1)
    split = next((param for unit in dense for param in unit.params if param.split is not None), None)
    if split is None or split.split is None:
        return
    axis = split.split.axis
    if axis not in groups:
        raise ValueError(
            f"parameter {split.name} is cut along the axis {axis}, which the mesh does not have: pass the whole mesh "
            f"(dzero.make_mesh(..., {axis}={split.split.count})), of which it was parallelized over mesh[{axis!r}]"
        )
    check_compatible(Settings({f"mesh.{axis}": split.split.count, "block.tiles": tiles}))


def check_experts(units: list[UnitShape], mesh: DeviceMesh, experts: ExpertParallel | None, model_ranks: int) -> None:
    """Raise ValueError if shared experts are not those of `experts`, or are shared over other ranks.

    `mesh` has one of each `model_ranks` tensor-parallel ranks.
    """
    shared = [unit for unit in units if unit.shared_by > 1]
    if shared and experts is None:
        raise ValueError(
            f"{shared[0].shared_by} ranks share experts of unit {shared[0].name}: pass what parallelize_experts "
            "returned as experts="
        )
    if experts is None:
        return
    over = experts.mesh.mesh
    if over.numel() != mesh.size() * model_ranks or not torch.isin(mesh.mesh, over).all():
        raise ValueError("experts= was made over another mesh: pass one mesh to parallelize_experts and to shard")


def check_tables(layout: Layout, units: list[UnitShape], *, tiles: int) -> None:
    """Raise ValueError if tiled or fused parameters rule out the layout's sharding or dtype of states."""
    check_compatible(layout.settings.having({"block.tiles": tiles}))
    fused = [param.name for unit in units for param in unit.params if param.fused]
    if fused:
        check_compatible(layout.settings.having({"param.fused": fused[0]}))


def check_frozen(layout: Layout, units: list[UnitShape], device: torch.device) -> None:
    """Raise ValueError if settings of frozen parameters have no effect, or there are no values to quantize."""
    frozen = any(not param.trainable for unit in units for param in unit.params)
    check_compatible(
        layout.settings.having({"params.frozen": frozen, "params.quantized": any(unit.quantized for unit in units)})
    )
    quantized = next((param for unit in units for param in unit.params if param.codec is not None), None)
    if quantized is not None and quantized.codec is not None and device.type == "meta":
        raise ValueError(
            f"precision.frozen={quantized.codec.name}: {quantized.name} has no values on meta that could be quantized; "
            "pass init= with materialise, and no device"
        )
