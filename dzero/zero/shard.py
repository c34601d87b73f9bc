"""Sharding of a model; the only file that calls `fully_shard` and sets its switches.

    switch                              value                    reason
    mesh                                shard axis only (1-D)    dzero averages over replicas: in fp32, once a step
    reshard_after_forward               that of the layout       each unit has its own (`Layout.of_unit`)
    reduce_dtype                        Layout.grad.dtype        the hook receives gradients in their final dtype
    custom all_gather, reduce_scatter   comm/collectives.py      exact sums, pairwise transfers, the ledger
    gradient divide factor              1, plain sums            fp16 must be divided in fp32, as the collective does
    all_reduce_hook                     Unit.deliver             called with the reduced shard, even if none is reduced

`Unit.deliver` receives the gradients of a unit's trained parameters in one buffer (zero/reduce_buffers.py). Without a
consumer, the buffer is averaged over the replicas in place, and FSDP2's ordinary `.grad` is correct.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar
from weakref import WeakKeyDictionary, WeakMethod

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from dzero.comm.collectives import AverageCopies, ReduceGrads, UnshardParams
from dzero.comm.ledger import Ledger
from dzero.comm.reduction import AxisReduction, ExactReduction, NativeReduction
from dzero.hardware import give_back_freed_memory
from dzero.mesh import AXES, EXPERT, PIPELINE, REPLICATE, SHARD, data_mesh, make_mesh, model_groups
from dzero.parallel.context.parallelize import ContextParallel
from dzero.parallel.expert.dispatch import ExpertParallel
from dzero.parallel.parallelize import ParallelModel
from dzero.parallel.pipeline.split import ModelStages
from dzero.parallel.tiling.tile import count_tiles, fill_tiles
from dzero.streams import Loans, exist
from dzero.utils import torch_internals
from dzero.utils.terminal import plain
from dzero.utils.torch_internals import check
from dzero.zero import fsdp_internals
from dzero.zero.config import PRECISIONS, PrecisionConfig, ZeroConfig, is_exact
from dzero.zero.describe import kinds_table, units_table
from dzero.zero.fsdp_internals import (
    follow_outputs,
    follow_root,
    has_failed,
    recover,
    reduce_deferred_grads,
    unsharded_params,
    use_shards,
)
from dzero.zero.guards import copy_assigned, refuse_cut, refuse_lost_writes, refuse_outside_forward
from dzero.zero.init_on_disk import InitSpillFile
from dzero.zero.init_params import Materialise, ParamInit
from dzero.zero.layout import Layout
from dzero.zero.microbatch_count import MicrobatchCount
from dzero.zero.offload_config import OFFLOADS, OffloadConfig
from dzero.zero.offloaded_param import HostStorage, TensorStorage, put_on_host
from dzero.zero.offloaded_state_dicts import hook_state_dicts
from dzero.zero.partial_scalars import watch_numbers
from dzero.zero.reduce_buffers import reduce_whole
from dzero.zero.registered_params import drop_waiting, follow_shards
from dzero.zero.replica_shards import ReplicaShards
from dzero.zero.scalar_params import Places, narrow_in_forward, widen
from dzero.zero.split_rules import check_experts, check_splits, check_tables
from dzero.zero.tiers import names_off_device
from dzero.zero.unit import Unit, as_module
from dzero.zero.unit_inputs import cast_first_input, own_output
from dzero.zero.unit_shapes import UnitShape
from dzero.zero.units import ParamSlot, Units, roots_of, shapes_of, slots_by_unit, units_of_roots


class GradClaimant(Protocol):
    """Object that takes the gradients of a sharded model for an optimizer."""

    def drop(self) -> None:
        """Drop the gradients of the step, reduced or not."""


class Sharded:
    """Handle of a sharded model, which `shard` returns.

    Attributes:
        model: The model, sharded in place.
        layout: Layout of its states.
        mesh: Mesh of the data-parallel ranks.
        model_groups: Process groups along the axes that cut the model itself, by axis.
        units: Units, each root behind the units in it.
        ledger: Ledger of the collectives.
        loans: Reduced buffers that other streams still read.
        stages: Pipeline stages on this rank, each a root of FSDP2; None without a pipeline.
        names: Names of the parameters of all pipeline stages.
        claims: Names of the parameters that each optimizer updates, by its claimant, for the optimizer's lifetime.
        is_last: Whether the current microbatch is the last of its step.
    """

    def __init__(
        self,
        model: nn.Module,
        layout: Layout,
        mesh: DeviceMesh,
        model_groups: dict[str, dist.ProcessGroup],
        units: list[Unit],
        ledger: Ledger,
        loans: Loans,
        stages: ModelStages | None,
    ) -> None:
        self.model, self.layout, self.mesh, self.units, self.ledger = model, layout, mesh, units, ledger
        self.loans = loans
        self.model_groups, self.stages = model_groups, stages
        self.names = tuple(name for name, _ in model.named_parameters()) if stages is None else stages.names
        self.context: ContextParallel | None = None
        self.claims: WeakKeyDictionary[GradClaimant, frozenset[str]] = WeakKeyDictionary()
        self.is_last = True
        self._reductions = 0
        self._roots = [_as_fsdp(root) for root in roots_of(model, stages)]
        self._microbatches = [MicrobatchCount(layout) for _ in self._roots]
        follow_shards(units, [model] if stages is None else [], layout)
        drop = WeakMethod(self._drop_gradients)
        model.zero_grad = partial(_zero_grad, model.zero_grad, drop)  # type: ignore[method-assign]

    @contextmanager
    def microbatch(self, is_last: bool = True, pipeline_stage: int = 0) -> Iterator[None]:
        """Run the forward and backward of one microbatch in this context.

        A loop with one microbatch per step does not need it. The caller divides the loss by the number of microbatches.
        A backward outside of the context, after others inside, counts as the last one.

        Args:
            is_last: Whether the microbatch is the last of its step.
            pipeline_stage: Index of the pipeline stage on this rank. Only its backward must run in the context.
        """
        self._microbatches[pipeline_stage].begin(is_last)
        self._set(is_last, self._roots[pipeline_stage])
        try:
            yield
        finally:
            self._set(True, self._roots[pipeline_stage])
            self._reductions = self._count_reductions()

    @contextmanager
    def input_gradients(self, pipeline_stage: int) -> Iterator[None]:
        """Leave the parameter gradients of a stage to `weight_gradients`, in a backward within this context."""
        root = self._roots[pipeline_stage]
        self._set(False, root)
        root.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self._set(True, root)

    @contextmanager
    def weight_gradients(self, is_last: bool, pipeline_stage: int) -> Iterator[None]:
        """Compute the parameter gradients of a stage in this context, which then reduces or accumulates them."""
        with self.microbatch(is_last, pipeline_stage):
            yield
            reduce_deferred_grads(self._roots[pipeline_stage])

    def unsharded_params(self, pipeline_stage: int) -> list[nn.Parameter]:
        """Return the parameters of a stage, as its forward used them, that `weight_gradients` needs gradients of."""
        return unsharded_params(self._roots[pipeline_stage])

    def abandon_step(self, names: Container[str]) -> None:
        """Discard the step's gradients of `names`, even if their backward raised; called by `zero_grad`."""
        for root in self._roots:
            if has_failed(root):
                recover(root)
        drop_waiting(self.units, names)
        for of_stage in self._microbatches:
            of_stage.abandon()

    def _drop_gradients(self) -> None:
        for claimant in [*self.claims]:
            claimant.drop()
        self.abandon_step(self.names)
        self.ledger.collective_log.end_step()  # even on ranks whose optimizers no longer exist

    def end_step(self) -> None:
        """End the step's microbatches; called by the optimizer's step.

        Raises:
            RuntimeError: If a backward raised, or if `MicrobatchCount.end` finds wrong microbatches.
        """
        if any(map(has_failed, self._roots)):
            raise RuntimeError(
                "the step's backward raised: call zero_grad(), and repeat the step from its first forward"
            )
        if len(self._roots) == 1 and self._count_reductions() > self._reductions:
            self._microbatches[0].add_last()
        for of_stage in self._microbatches:
            of_stage.end()

    def _count_reductions(self) -> int:
        """Count the reductions of all units; one since the end of `microbatch` is of a backward outside of it."""
        return sum(unit.reductions for unit in self.units)

    def _set(self, is_last: bool, root: FSDPModule) -> None:
        policy = self.layout.grad_sync_policy(is_last)
        self.is_last = is_last
        root.set_requires_gradient_sync(policy.reduce)
        root.set_reshard_after_backward(policy.reshard)
        for unit in self.units:
            if (own := unit.layout.grad_sync_policy(is_last).reshard) is not policy.reshard:
                unit.modules[0].set_reshard_after_backward(own, recurse=False)

    def train(self, mode: bool = True) -> None:
        """Set the training mode of the model and of its pipeline stages."""
        for root in [self.model, *map(as_module, self._roots)]:
            root.train(mode)

    def forget_masters(self) -> None:
        """Release the masters kept for another optimizer, and their memory and scratch folders.

        Call this if no other optimizer will be created.
        """
        for unit in self.units:
            unit.origin.clear()

    def reshard(self) -> None:
        """Free all unsharded parameters, such as those that a forward without backward left gathered."""
        for unit in self.units:
            for module in unit.modules:
                module.reshard()

    @property
    def shapes(self) -> list[UnitShape]:
        """Unsharded shapes of the units."""
        return [unit.shape for unit in self.units]

    def __repr__(self) -> str:
        of = f"{type(self.model).__name__.removeprefix('FSDP')}, {len(self.units)} units, on {self.mesh.device_type}"
        tables = [kinds_table(self.layout, self.shapes), units_table(self.layout, self.shapes)]
        return f"Sharded({of})\n{plain(tables)}"

    def named_params(self) -> dict[str, nn.Parameter]:
        """Return every parameter once, by its first name in the model, in the order of the units."""
        return {name: param for unit in self.units for name, param in unit.params.items()}


def _zero_grad(
    zero_grad: Callable[[bool], None], drop: WeakMethod[Callable[[], None]], set_to_none: bool = True
) -> None:
    """Drop all gradients, including those that no `.grad` shows yet, and run the model's own `zero_grad`."""
    if (dropping := drop()) is not None:
        dropping()
    zero_grad(set_to_none)


@dataclass(frozen=True, kw_only=True)
class ModelInit:
    """Source of a model's values, and the device of its shards.

    Attributes:
        materialise: Called on each unit's modules just before that unit is sharded, to give parameters on meta their
            values, so that at most one unit is ever whole. None: rank 0's values are broadcast.
        device: Where shards are made; None: the mesh's device. On meta, without `materialise`, they get neither values
            nor memory, which `sharded.model.to_empty` gives them later.
    """

    materialise: Materialise | None = None
    device: torch.device | None = None


def shard(
    model: nn.Module | ParallelModel,
    stage: int | ZeroConfig = 2,
    *,
    precision: str | PrecisionConfig | None = "bf16",
    offload: str | OffloadConfig | None = "none",
    mesh: DeviceMesh | None = None,
    microbatches: int = 1,
    init: Materialise | ModelInit | None = None,
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
        init: How a model on meta gets its values: `materialise` alone, or a `ModelInit`.

    Returns:
        The handle that optimizers and training loops use.

    Raises:
        TypeError: An argument of a type that is not listed here.
        ValueError: A mesh, dtype or stage that does not fit the model or the ranks.
        RuntimeError: A torch without names that sharding needs.
    """
    check((*torch_internals.SEAMS, *fsdp_internals.SEAMS))
    cut = model if isinstance(model, ParallelModel) else None
    whole = model.model if isinstance(model, ParallelModel) else model
    zero = ZeroConfig(stage=stage) if isinstance(stage, int) and not isinstance(stage, bool) else stage
    if not isinstance(zero, ZeroConfig):
        raise TypeError(f"stage={zero!r}: pass 0, 1, 2, 3, or a dzero.ZeroConfig")
    if not isinstance(whole, nn.Module):
        raise TypeError(f"model={type(whole).__name__}: pass an nn.Module, or what dzero.parallelize made of one")
    precision = _named("precision", precision or "bf16", PRECISIONS, PrecisionConfig)
    offload = _named("offload", offload or "none", OFFLOADS, OffloadConfig)
    init = init if isinstance(init, ModelInit) else ModelInit(materialise=init)
    if init.materialise is not None and not callable(init.materialise):
        raise TypeError(f"init={init.materialise!r}: pass a function that fills a module, or a dzero.ModelInit")
    if cut is not None and mesh not in (None, cut.mesh):
        raise ValueError("mesh: the model was parallelized over a mesh already, which shard() takes; leave it out")
    mesh = mesh if cut is None else cut.mesh
    if mesh is None:
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
        exact=is_exact(zero.reduction, mesh.device_type),
        model_ranks=mesh.size() // (data.size() * pipeline_ranks),
        pipeline_ranks=pipeline_ranks,
        expert_ranks=1 if experts is None else experts.mesh[EXPERT].size(),
    )
    refuse_cut(whole)
    scalars = widen(whole)
    names, predicate = (None, zero.units) if callable(zero.units) else (zero.units, None)
    units = units_of_roots(whole, stages, names, predicate, None if experts is None else experts.modules)
    materialise = init.materialise
    if cut is not None and materialise is not None:
        materialise = cut.filling(materialise)
    values_on = init.device or _current_device(mesh.device_type)
    sharder = _Sharder(whole, layout, data, groups, units, materialise, values_on, stages, experts, scalars)
    sharded = sharder.run()
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


@dataclass(frozen=True)
class Axes:
    """Data-parallel axes (replicate, shard) of a unit, with the process group and the collectives of each."""

    mesh: DeviceMesh
    groups: dict[str, dist.ProcessGroup]
    exchanges: dict[str, AxisReduction]

    @classmethod
    def of(cls, mesh: DeviceMesh, layout: Layout) -> Axes:
        """Return the axes of a mesh that has only these two."""
        groups = {axis: mesh.get_group(axis) for axis in AXES}
        exchanges: dict[str, AxisReduction] = {
            axis: (ExactReduction if layout.exact else NativeReduction)(group) for axis, group in groups.items()
        }
        return cls(mesh, groups, exchanges)


class _Sharder:
    """State of one call of `shard`, which processes the units in order, the root last."""

    def __init__(
        self,
        model: nn.Module,
        layout: Layout,
        mesh: DeviceMesh,
        groups_of_model: dict[str, dist.ProcessGroup],
        units: Units,
        materialise: Materialise | None,
        device: torch.device,
        stages: ModelStages | None,
        experts: ExpertParallel | None,
        scalars: Places,
    ) -> None:
        self.model, self.layout, self.mesh, self.model_groups = model, layout, mesh, groups_of_model
        self.scalars = scalars
        self.stages, self.roots = stages, roots_of(model, stages)
        self.ledger = Ledger() if experts is None else experts.ledger
        if materialise is not None:
            materialise = fill_tiles(model, materialise)
        self.axes = {1: Axes.of(mesh, layout)}  # by the number of ranks that share a unit
        if experts is not None:
            self.axes[experts.mesh[EXPERT].size()] = Axes.of(experts.mesh[AXES], layout)
        ends = (groups_of_model[PIPELINE], stages.shared) if stages else None
        on = torch.device(mesh.device_type)
        self.ledger.collective_log.device = on if exist(on) else None
        self.loans = Loans(on)
        self.values = ParamInit(layout, device, materialise, ends)
        self.units = units
        self.slots = slots_by_unit(model, units, stages.aliases if stages else None)
        self.shapes = {shape.name: shape for shape in shapes_of(self.slots, units, self.roots)}
        shapes, tiles = [*self.shapes.values()], count_tiles(model)
        check_tables(layout, shapes, tiles=tiles)
        check_splits(shapes, groups_of_model, tiles=tiles)
        check_experts(shapes, mesh, experts, layout.model_ranks)
        self.off_device = names_off_device(layout.tiers, [self.shapes[name] for name, _ in self.units])
        rank = mesh.get_local_rank(SHARD)
        self.spill_file = InitSpillFile.of(layout, self.slots, self.shapes, self.off_device, rank=rank)

    def run(self) -> Sharded:
        self.values.equalise_buffers(self.model, self.axes[1].groups)
        units = [self._cut(name, modules, self.slots[name]) for name, modules in self.units]
        for root in self.roots:
            copy_assigned(root)
        for unit in units:
            if any(as_module(module) is root for module in unit.modules for root in self.roots):
                refuse_outside_forward(unit, [other for other in units if other is not unit])
        for root in self.roots:
            inside = {*root.modules()} - {root}
            inner = {each for unit in units for each in map(as_module, unit.modules) if each in inside}
            for module in inner:
                follow_root(module, _as_fsdp(root))
            first = next((module for module in root.modules() if module in inner), None)
            if self.stages is not None and first is not None:
                # Backward ends with this unit. FSDP2 would prefetch the one that preceded it in another microbatch.
                _as_fsdp(first).set_modules_to_backward_prefetch([_as_fsdp(root)])
        watch_numbers(param.device_mesh for param in self.model.parameters() if isinstance(param, DTensor))
        for unit in units:
            unit.watch()
        return Sharded(
            self.model, self.layout, self.mesh, self.model_groups, units, self.ledger, self.loans, self.stages
        )

    def _cut(self, name: str, modules: list[nn.Module], slots: list[ParamSlot]) -> Unit:
        """Initialize one unit, round it to the working dtype, shard it, and set FSDP2's switches."""
        shape = self.shapes[name]
        layout, axes = self.layout.of_unit(shape), self.axes[shape.shared_by]
        self.values.fill(modules, slots, axes.groups)
        rounded = self.values.round(modules, slots, self._cuts(axes))
        origin = {name: self._where_master_lives(name, rows) for name, rows in rounded.items()}
        put_on_host(modules, {slot.param: slot.name for slot in slots if slot.name in self.off_device["param"]})
        is_root = any(modules[0] is root for root in self.roots)
        for module in modules:
            own_output(module)
        fully_shard(
            modules if len(modules) > 1 else modules[0],
            mesh=axes.mesh[SHARD],
            reshard_after_forward=layout.reshard_after_forward,
            mp_policy=MixedPrecisionPolicy(
                param_dtype=self.layout.param.dtype,
                reduce_dtype=self.layout.grad.dtype,
                cast_forward_inputs=is_root,
            ),
            ignored_params={p for m in modules for p in m.parameters() if not p.is_floating_point()},
        )
        for module in modules if not is_root else ():
            cast_first_input(module, self.layout.param.dtype)
            refuse_lost_writes(name, module)
        for module in modules:
            follow_outputs(module, is_root=is_root)
        unit = Unit(
            shape=shape,
            layout=layout,
            mesh=axes.mesh,
            modules=[_as_fsdp(m) for m in modules],
            params={slot.name: slot.param for slot in slots},
            average=self._average_copies(name, layout, axes),
            origin=origin,
            replica_shards=self._replica_shards(shape, axes),
        )
        narrow_in_forward(unit, self.scalars)
        self._switch(unit, axes)
        if self.layout.param.tier == "disk":
            for each, memory in unit.offloaded.items():
                memory.storage = self._on_disk(each, memory.flat)
        if "disk" in (self.layout.param.tier, self.layout.master.tier):
            give_back_freed_memory()
        if unit.offloaded:
            hook_state_dicts(unit, unit.mesh)
        return unit

    def _where_master_lives(self, name: str, origin: torch.Tensor) -> TensorStorage:
        """Return the storage of an fp32 origin until its optimizer takes it."""
        if name not in self.off_device["master"]:
            return HostStorage(origin)
        return self._on_disk(name, origin) if self.layout.master.tier == "disk" else HostStorage(origin.cpu())

    def _on_disk(self, name: str, tensor: torch.Tensor) -> TensorStorage:
        assert self.spill_file is not None
        return self.spill_file.keep(name, tensor)

    def _average_copies(self, name: str, layout: Layout, axes: Axes) -> AverageCopies | None:
        if layout.replicate == 1:
            return None
        return AverageCopies(name, axes.exchanges[REPLICATE], REPLICATE, layout.replicate_wire, self.ledger)

    def _cuts(self, axes: Axes) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return (rank, ranks) of the two cuts of masters and moments, over the shard axis and over the replicas."""
        own, replica_shards = axes.groups[SHARD], self.layout.replica_shards
        return (own.rank(), own.size()), (axes.groups[REPLICATE].rank() if replica_shards > 1 else 0, replica_shards)

    def _replica_shards(self, unit: UnitShape, axes: Axes) -> ReplicaShards | None:
        if self.layout.replica_shards == 1:
            return None
        return ReplicaShards(unit, self.layout, *self._cuts(axes), axes.exchanges[REPLICATE], self.ledger)

    def _switch(self, unit: Unit, axes: Axes) -> None:
        module, name, exchange = unit.modules[0], unit.shape.name, axes.exchanges[SHARD]
        if unit.params:
            module.set_all_reduce_hook(unit.deliver)
            reduce_whole(unit)
        # FSDP2's abstract classes for these two are private; it uses only their methods.
        reduce = ReduceGrads(name, exchange, SHARD, self.layout.wire, self.ledger, self.loans)
        module.set_custom_reduce_scatter(reduce)  # type: ignore[arg-type]
        if unit.layout.shard > 1:
            gather = UnshardParams(name, exchange, SHARD, self.ledger, unit.wait_for_update)
            module.set_custom_all_gather(gather)  # type: ignore[arg-type]
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
        else:
            # Nothing is gathered. FSDP2 reads the shards in its own pre-forward hook, which runs after this one.
            for each in unit.modules:
                as_module(each).register_forward_pre_hook(lambda *_: unit.wait_for_update(), prepend=True)
            use_shards(module)


def _as_fsdp(module: nn.Module) -> FSDPModule:
    assert isinstance(module, FSDPModule)
    return module


def _current_device(device_type: str) -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if device_type == "cuda" else torch.device(device_type)
