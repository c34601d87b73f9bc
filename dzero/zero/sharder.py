"""Sharding of a model; the only file that calls `fully_shard` and sets its switches.

    switch                              value                    reason
    mesh                                shard axis only (1-D)    dzero averages over replicas: in fp32, once a step
    reshard_after_forward               that of the layout       each unit has its own (`Layout.of_unit`)
    reduce_dtype                        Layout.grad.dtype        the hook receives gradients in their final dtype
    custom all_gather, reduce_scatter   comm/collectives.py      exact sums, pairwise transfers, the ledger
    gradient divide factor              1, plain sums            fp16 must be divided in fp32, as the collective does;
                                                                 one that a loop sets goes to `Unit.grad_factor`
    all_reduce_hook                     Unit.deliver             called with the reduced shard, even if none is reduced

`Unit.deliver` receives the gradients of a unit's trained parameters in one buffer (zero/reduce_buffers.py). Without a
consumer, the buffer is averaged over the replicas in place, and FSDP2's ordinary `.grad` is correct.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from dzero.comm.collectives import AverageReplicas, ReduceGrads, UnshardParams
from dzero.comm.ledger import Ledger
from dzero.comm.reduction import AxisReduction, ExactReduction, NativeReduction
from dzero.comm.watchdog import follow
from dzero.hardware import give_back_freed_memory
from dzero.mesh import AXES, EXPERT, PIPELINE, REPLICATE, SHARD, next_model
from dzero.parallel.expert.dispatch import ExpertParallel
from dzero.parallel.pipeline.split import ModelStages
from dzero.parallel.tiling.tile import count_tiles, fill_tiles
from dzero.streams import Loans, exist
from dzero.utils.forward_hooks import before_forward
from dzero.zero.dtensor_operators import watch_operators
from dzero.zero.fsdp_internals import (
    follow_outputs,
    follow_root,
    generate_alone,
    groups_of,
    shards_of,
    use_shards,
)
from dzero.zero.guards import (
    check_loads,
    explain_shards,
    keep_class_name,
    let_accelerate_return,
    refuse_func_gradients,
    refuse_lost_writes,
    refuse_other_dtypes,
    refuse_outside_forward,
    refuse_own_save,
    refuse_resizing,
)
from dzero.zero.init_on_disk import InitSpillFile
from dzero.zero.init_params import Materialise, ParamInit
from dzero.zero.layout import Layout
from dzero.zero.offload_config import FROZEN
from dzero.zero.offloaded_param import HostStorage, TensorStorage, put_on_host
from dzero.zero.offloaded_state_dicts import hook_state_dicts
from dzero.zero.reduce_buffers import reduce_whole
from dzero.zero.replica_shards import ReplicaShards
from dzero.zero.scalar_params import Places, names_of, narrow_in_forward
from dzero.zero.sharded import Sharded
from dzero.zero.split_rules import check_experts, check_frozen, check_splits, check_tables
from dzero.zero.tiers import names_off_device
from dzero.zero.unit import Unit, as_fsdp, as_module
from dzero.zero.unit_inputs import cast_all_inputs, cast_first_input, own_outputs
from dzero.zero.unit_shapes import UnitShape
from dzero.zero.units import ParamSlot, Units, nested, roots_of, shapes_of, slots_by_unit


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
            axis: ExactReduction(group, layout.hops(axis, group.size())) if layout.exact else NativeReduction(group)
            for axis, group in groups.items()
        }
        return cls(mesh, groups, exchanges)


class Sharder:
    """State of one call of `shard`, which processes the units in order, the root last."""

    def __init__(
        self,
        model: nn.Module,
        layout: Layout,
        mesh: DeviceMesh,
        groups_of_model: dict[str, dist.ProcessGroup],
        units: Units,
        materialise: Materialise | None,
        from_rank_0: bool,
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
        self.ledger.collective_log.belong_to(next_model(mesh))
        follow(self.ledger.collective_log)
        self.loans = Loans(on)
        self.values = ParamInit(layout, device, materialise, from_rank_0, ends)
        self.units, self.inside = units, nested([name for name, _ in units])
        self.slots = slots_by_unit(model, units, stages.aliases if stages else None)
        codec = layout.frozen.codec
        self.shapes = {shape.name: shape for shape in shapes_of(self.slots, units, self.roots, codec)}
        shapes, tiles = [*self.shapes.values()], count_tiles(model)
        check_frozen(layout, shapes, device)
        check_tables(layout, shapes, tiles=tiles)
        check_splits(shapes, groups_of_model, tiles=tiles)
        check_experts(shapes, mesh, experts, layout.model_ranks)
        self.off_device = names_off_device(layout.tiers, [self.shapes[name] for name, _ in self.units])
        rank = mesh.get_local_rank(SHARD)
        self.spill_file = InitSpillFile.of(layout, self.slots, self.shapes, self.off_device, rank=rank)

    def run(self) -> Sharded:
        """Shard all units, and return the sharded model."""
        self.values.equalise_buffers(self.model, self.axes[1].groups)
        units = [self._cut(name, modules, self.slots[name]) for name, modules in self.units]
        for root in self.roots:
            check_loads(root)
            refuse_other_dtypes(root)
            refuse_own_save(root)
            refuse_resizing(root)
            self._let_generate(root)
            let_accelerate_return(root)
            explain_shards(root)
        for unit in units:
            if any(as_module(module) is root for module in unit.modules for root in self.roots):
                refuse_outside_forward(unit, [other for other in units if other is not unit])
        for root in self.roots:
            inside = {*root.modules()} - {root}
            inner = {each for unit in units for each in map(as_module, unit.modules) if each in inside}
            for module in inner:
                follow_root(module, as_fsdp(root))
            first = next((module for module in root.modules() if module in inner), None)
            if self.stages is not None and first is not None:
                # Backward ends with this unit. FSDP2 would prefetch the one that preceded it in another microbatch.
                as_fsdp(first).set_modules_to_backward_prefetch([as_fsdp(root)])
        watch_operators(param.device_mesh for param in self.model.parameters() if isinstance(param, DTensor))
        for unit in units:
            unit.watch()
        sharded = Sharded(
            self.model, self.layout, self.mesh, self.model_groups, units, self.ledger, self.loans, self.stages
        )
        sharded.scalars = names_of(self.model, self.scalars)
        return sharded

    def _let_generate(self, root: nn.Module) -> None:
        """Gather the root's parameters for `generate` of transformers, which calls parts of the model by themselves."""
        if callable(getattr(root, "generate", None)):
            register_fsdp_forward_method(root, "generate")
        if self.layout.shard == self.layout.replica_shards == 1 and not self.model_groups:  # nothing is gathered
            for module in root.modules():
                if hasattr(type(module), "generate"):
                    generate_alone(module)

    def _cut(self, name: str, modules: list[nn.Module], slots: list[ParamSlot]) -> Unit:
        """Initialize one unit, round it to the working dtype, shard it, and set FSDP2's switches."""
        shape = self.shapes[name]
        layout, axes = self.layout.of_unit(shape), self.axes[shape.shared_by]
        self.values.fill(modules, slots, axes.groups)
        rounded = self.values.round(modules, slots, self._cuts(axes))
        origin = {name: self._where_master_lives(name, rows) for name, rows in rounded.items()}
        quantized = {param.name for param in shape.params if param.codec is not None}
        stored = quantized | self.off_device["param"] | self.off_device[FROZEN]
        put_on_host(modules, {slot.param: slot.name for slot in slots if slot.name in stored})
        is_root = any(modules[0] is root for root in self.roots)
        for module in modules:
            own_outputs(module)
        fully_shard(
            modules if len(modules) > 1 else modules[0],
            mesh=axes.mesh[SHARD],
            reshard_after_forward=layout.reshard_after_forward,
            mp_policy=MixedPrecisionPolicy(
                param_dtype=self.layout.param.dtype,
                reduce_dtype=self.layout.grad.dtype,
                cast_forward_inputs=False,
            ),
            ignored_params={p for m in modules for p in m.parameters() if not p.is_floating_point()},
        )
        for module in modules:
            keep_class_name(module)
        for module in modules:
            if is_root:
                cast_all_inputs(module, self.layout.param.dtype)
                continue
            refuse_lost_writes(name, module)
            if name not in self.inside:  # the block around it has what it computed, whose dtype may be on purpose
                cast_first_input(module, self.layout.param.dtype)
        for module in modules:
            refuse_func_gradients(module)
            follow_outputs(module, is_root=is_root)
        unit = Unit(
            shape=shape,
            layout=layout,
            mesh=axes.mesh,
            modules=[as_fsdp(m) for m in modules],
            params={slot.name: slot.param for slot in slots},
            average=self._average_replicas(name, layout, axes),
            origin=origin,
            replica_shards=self._replica_shards(shape, axes),
        )
        narrow_in_forward(unit, self.scalars)
        self._switch(unit, axes)
        self._store(unit)
        if "disk" in (self.layout.param.tier, self.layout.frozen.tier, self.layout.master.tier):
            give_back_freed_memory()
        if unit.offloaded:
            hook_state_dicts(unit, unit.mesh)
        return unit

    def _store(self, unit: Unit) -> None:
        """Quantize the frozen matrices of a unit, and write to disk what is stored there."""
        for param in unit.shape.params:
            if (memory := unit.offloaded.get(param.name)) is None:
                continue
            kind = "param" if param.trainable else FROZEN
            away = param.name in self.off_device[kind]
            if param.codec is not None:
                memory.quantize(param.codec, param.shape, on_device=not away)
            if away and self.layout.tiers[kind][0] == "disk":
                memory.storage = self._on_disk(param.name, memory.flat)

    def _where_master_lives(self, name: str, origin: torch.Tensor) -> TensorStorage:
        """Return the storage of an fp32 origin until its optimizer takes it."""
        if name not in self.off_device["master"]:
            return HostStorage(origin)
        return self._on_disk(name, origin) if self.layout.master.tier == "disk" else HostStorage(origin.cpu())

    def _on_disk(self, name: str, tensor: torch.Tensor) -> TensorStorage:
        assert self.spill_file is not None
        return self.spill_file.keep(name, tensor)

    def _average_replicas(self, name: str, layout: Layout, axes: Axes) -> AverageReplicas | None:
        if layout.replicate == 1:
            return None
        return AverageReplicas(name, axes.exchanges[REPLICATE], REPLICATE, layout.replicate_wire, self.ledger)

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
        name_of = {param: name for name, param in unit.params.items()}
        ordered = unit.shape.ordered([name_of[param] for group in groups_of(module) for param in shards_of(group)])
        wire = unit.layout.reduce_wire(ordered)
        reduce = ReduceGrads(name, exchange, SHARD, wire, self.ledger, self.loans, feedback=unit.layout.feedback)
        unit.reduce = reduce
        module.set_custom_reduce_scatter(reduce)  # type: ignore[arg-type]
        if unit.layout.shard > 1:
            blocks = unit.layout.gather_blocks(ordered)
            gather = UnshardParams(name, exchange, SHARD, self.ledger, unit.wait_for_update, blocks)
            module.set_custom_all_gather(gather)  # type: ignore[arg-type]
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
        else:
            # Nothing is gathered. FSDP2 reads the shards in its own pre-forward hook, which runs after this one.
            for each in unit.modules:
                before_forward(as_module(each), lambda *_: unit.wait_for_update(), prepend=True)
            use_shards(module)
        ranks = self.mesh.size()
        for each in unit.modules:  # `set_reduce_scatter_divide_factor` calls it too
            each.set_gradient_divide_factor = partial(unit.divide_gradients_by, ranks)  # type: ignore[method-assign]
