"""`dzero.shard`: its arguments, and the layout that follows from them."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from dzero.comm.watchdog import begin as begin_watchdog
from dzero.hardware import multiplies_fp8
from dzero.mesh import EXPERT, PIPELINE, data_mesh, join_alone, make_mesh, model_groups
from dzero.models.published import refuse_lost_adapter
from dzero.parallel.parallelize import ParallelModel
from dzero.utils import torch_internals
from dzero.utils.param_attributes import kept_attributes
from dzero.utils.torch_internals import check
from dzero.zero import fsdp_internals
from dzero.zero.config import PRECISIONS, PrecisionConfig, ZeroConfig, sums_exactly
from dzero.zero.empty_init import EmptyInit
from dzero.zero.float8_layers import convert_linear_layers
from dzero.zero.guards import refuse_cut, refuse_sparse
from dzero.zero.init_params import Materialise
from dzero.zero.layout import Layout
from dzero.zero.offload_config import OFFLOADS, OffloadConfig
from dzero.zero.param_hooks import ParamHooks, give_back
from dzero.zero.scalar_params import widen
from dzero.zero.sharded import Sharded
from dzero.zero.sharder import Sharder
from dzero.zero.unit_parts import warn_of_larger
from dzero.zero.units import UnitChoice, roots_of, units_of_roots


@dataclass(frozen=True, kw_only=True)
class ModelInit:
    """Source of a model's values, and the device of its shards.

    Attributes:
        materialise: Called on each unit's modules just before that unit is sharded, to give parameters on meta their
            values, so that at most one unit is ever whole. None: rank 0's values are broadcast.
            The same on all ranks, unless `from_rank_0`.
        device: Where shards are made; None: the mesh's device. On meta, without `materialise`, they get neither values
            nor memory, which `sharded.model.to_empty` gives them later.
        from_rank_0: Whether rank 0's values are broadcast after `materialise` too.
    """

    materialise: Materialise | None = None
    device: torch.device | None = None
    from_rank_0: bool = False


def shard(
    model: nn.Module | ParallelModel,
    stage: int | ZeroConfig = 2,
    *,
    precision: str | PrecisionConfig | None = "bf16",
    offload: str | OffloadConfig | None = "none",
    mesh: DeviceMesh | None = None,
    microbatches: int = 1,
    init: Materialise | ModelInit | EmptyInit | None = None,
) -> Sharded:
    """Shard a model's states in place over the data-parallel ranks, unit by unit. All ranks call this.

        sharded = dzero.shard(model, stage=3, offload="host")
        optim = dzero.AdamW(sharded, lr=3e-4)

    Args:
        model: The model on the mesh's device, the CPU, or meta (see `init`); or what `parallelize` made of it.
        stage: The ZeRO stage 0 to 3, or a `ZeroConfig` with everything else about what is sharded.
        precision: `fp32`, `bf16` (with fp32 masters), `bf16_remainder`, `fp16`, or a `PrecisionConfig`.
        offload: `none`, `host`, `host_all`, `disk`, `infinity`, or an `OffloadConfig`.
        mesh: From `make_mesh`, or from `take_mesh` for a mesh of your own; None: all ranks on the shard axis, at
            stage 0 on the replicate axis. Not given where `parallelize` has one.
        microbatches: Number of microbatches per optimizer step, which decides where gradients accumulate.
        init: How a model on meta gets its values: `materialise` alone, a `ModelInit`, or what `empty_init` gave.

    Returns:
        The handle that optimizers and training loops use.

    Raises:
        TypeError: An argument of a type that is not listed here.
        ValueError: A mesh, dtype or stage that does not fit the model or the ranks, or an adapter that could not be
            saved after training.
        RuntimeError: A torch without names that sharding needs.
    """
    check((*torch_internals.SEAMS, torch_internals.GATHERS, *fsdp_internals.SEAMS))
    torch_internals.gather_under_short_names()  # the mesh may be the user's own
    begin_watchdog()  # before ranks wait for each other, to make the groups of a mesh
    cut = model if isinstance(model, ParallelModel) else None
    whole = model.model if isinstance(model, ParallelModel) else model
    zero = ZeroConfig(stage=stage) if isinstance(stage, int) and not isinstance(stage, bool) else stage
    if not isinstance(zero, ZeroConfig):
        raise TypeError(f"stage={zero!r}: pass 0, 1, 2, 3, or a dzero.ZeroConfig")
    if not isinstance(whole, nn.Module):
        raise TypeError(f"model={type(whole).__name__}: pass an nn.Module, or what dzero.parallelize made of one")
    precision = _named("precision", precision or "bf16", PRECISIONS, PrecisionConfig)
    offload = _named("offload", offload or "none", OFFLOADS, OffloadConfig)
    if isinstance(init, EmptyInit):
        init = ModelInit(materialise=init.fill, from_rank_0=True)
    init = init if isinstance(init, ModelInit) else ModelInit(materialise=init)
    if init.materialise is not None and not callable(init.materialise):
        raise TypeError(
            f"init={init.materialise!r}: pass a function that fills a module, what dzero.empty_init() gave, or a "
            "dzero.ModelInit"
        )
    if cut is not None and mesh not in (None, cut.mesh):
        raise ValueError("mesh: the model was parallelized over a mesh already, which shard() takes; leave it out")
    mesh = mesh if cut is None else cut.mesh
    if mesh is None:
        join_alone()
        device_type = "cuda" if torch.cuda.is_available() else "cpu"
        mesh = make_mesh(device_type, replicate=dist.get_world_size() if zero.stage == 0 else 1)
    stages, experts = (None, None) if cut is None else (cut.stages, cut.experts)
    data, groups = data_mesh(mesh), model_groups(mesh)
    pipeline_ranks = groups[PIPELINE].size() if PIPELINE in groups else 1
    if pipeline_ranks != (stages.ranks if stages else 1):
        raise ValueError(f"a mesh with pp={pipeline_ranks}: cut the model by dzero.parallelize(model, mesh) first")
    layout = Layout.of(
        zero,
        precision,
        offload,
        replicate=data.size(0),
        shard=data.size(1),
        microbatches=microbatches,
        exact=sums_exactly(zero, precision, mesh.device_type),
        model_ranks=mesh.size() // (data.size() * pipeline_ranks),
        pipeline_ranks=pipeline_ranks,
        expert_ranks=1 if experts is None else experts.mesh[EXPERT].size(),
    )
    refuse_cut(whole)
    refuse_sparse(whole)
    if cut is None:
        refuse_lost_adapter(whole)
    float8 = convert_linear_layers(
        whole,
        precision,
        emulate=not multiplies_fp8(mesh.device_type),
        roots=roots_of(whole, stages) if stages else (),
    )
    if float8 is not None and float8.emulated and dist.get_rank() == 0:
        warnings.warn(
            f"precision.compute={float8.compute}: {mesh.device_type} has no units for 8-bit floats here, so products "
            "are emulated in fp32, which is slower than bf16",
            stacklevel=2,
        )
    hooks = ParamHooks.of_all(whole, layout)
    scalars = widen(whole)
    choice = UnitChoice.of(zero, precision)
    units = units_of_roots(whole, stages, choice, None if experts is None else experts.modules)
    materialise = init.materialise
    if cut is not None and materialise is not None:
        materialise = cut.filling(materialise)
    values_on = init.device or _current_device(mesh.device_type)
    from_rank_0 = materialise is None or init.from_rank_0
    sharder = Sharder(whole, layout, data, groups, units, materialise, from_rank_0, values_on, stages, experts, scalars)
    if zero.unit_bytes is not None and dist.get_rank() == 0:
        warn_of_larger([*sharder.shapes.values()], zero.unit_bytes, layout.param.dtype.itemsize)
    with kept_attributes(whole):
        sharded = sharder.run()
    sharded.float8 = float8
    give_back(hooks, sharded.units)
    if cut is not None and cut.config.cp > 1:
        sharded.context = cut.cut_sequences(sharded.ledger, exact=layout.exact)
    return sharded


Config = TypeVar("Config")


def _named(argument: str, given: object, presets: Mapping[str, Config], kind: type[Config]) -> Config:
    """Return the preset of that name, or `given` itself."""
    if isinstance(given, kind):
        return given
    if isinstance(given, str) and given in presets:
        return presets[given]
    raise TypeError(f"{argument}={given!r}: choose one of {[*presets]}, or pass a dzero.{kind.__name__}")


def _current_device(device_type: str) -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if device_type == "cuda" else torch.device(device_type)
