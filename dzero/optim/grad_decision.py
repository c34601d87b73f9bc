"""The reduced gradients of a model, and the decision that all ranks make on them once per step.

The norm is the root of sums of squares, in fp64 per (parameter, chunk). Shard(0) cuts a shard into one chunk per
replica, and each replica sums its chunk; at stage 0 the shard is the whole parameter. All ranks add the same numbers
in the same order (optim/grad_norm.py). With zero.unused=union, the sign of a sum says that this rank reached the
parameter, and every rank drops gradients of parameters that no rank reached. A checksum of the rank's collectives
(comm/collective_log.py) and of the parameters without gradient is sent with the sums. If checksums differ, a branch
in the model has mixed data of different units or left out modules of a unit, and the step is refused.

Along axes that cut the model itself, the totals are gathered once more. A parameter that such an axis cuts gets the sum
over its ranks. A parameter that all ranks have counts once. Ranks of a pipeline have parameters of their own
(optim/pipeline_grads.py).
"""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Collection, Iterable
from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from dzero.comm.collectives import GatherScalars
from dzero.mesh import PIPELINE, REPLICATE
from dzero.offload.manager import OffloadManager
from dzero.optim.grad_accumulation import EarlyUpdates, Named, UnitGrads
from dzero.optim.grad_norm import AxisSums, DataParallelSums, add_where_cut, check_alike, in_rank_order
from dzero.optim.grad_views import GradMaker
from dzero.optim.pipeline_grads import PipelineGrads
from dzero.optim.scaled_grads import Scaled, refuse_scaled
from dzero.optim.total_norm import take_part_in_norms
from dzero.utils.numba_views import has_memory
from dzero.zero.dtensor_operators import watch_operators
from dzero.zero.dtensors import local_of
from dzero.zero.replica_shards import mesh_of_replica_shards
from dzero.zero.sharded import Sharded
from dzero.zero.unit import Unit

TAKEN = (
    "{}: its gradients already go to another optimizer. Give each parameter to one optimizer, which takes several "
    "parameter groups, or drop the old one before making a new one"
)


@dataclass(frozen=True)
class StepDecision:
    """Decision of all ranks on the gradients of one step.

    Attributes:
        norm: Norm of the averaged, unscaled gradients before clipping.
        finite: Whether the step is applied; False if any gradient is non-finite.
        factor: Factor of every gradient in fp32: 1 / loss scale times the clipping coefficient.
        nonfinite_params: Parameters with a non-finite averaged gradient, as `name (rank r)`. Rank r holds the
            rows, but the overflow may be another rank's.
    """

    norm: float
    finite: bool
    factor: float
    nonfinite_params: tuple[str, ...]


class Gradients:
    """Reduced gradients of all units of a sharded model, for one optimizer.

    Args:
        sharded: The sharded model.
        owned: Names of the parameters that the optimizer updates; only their gradients are returned and counted.
        offload: Transfers to and from the tiers off the device.

    Raises:
        RuntimeError: Another optimizer owns a parameter, or optimizers cannot share the gradients of this model.
    """

    def __init__(self, sharded: Sharded, owned: Collection[str], offload: OffloadManager) -> None:
        self._collective_log = sharded.ledger.collective_log
        self._data_parallel = DataParallelSums(sharded.mesh, sharded.ledger)
        self._device = torch.device(sharded.mesh.device_type)
        replica_mesh = mesh_of_replica_shards(sharded.mesh) if sharded.layout.replica_shards > 1 else None
        if replica_mesh is not None:
            watch_operators([replica_mesh])
        self._units = _shared_with_others(sharded, owned, offload) or [
            UnitGrads(unit, sharded, _copy_of(unit), offload, _makers(unit, replica_mesh)) for unit in sharded.units
        ]
        self._names = frozenset(sharded.names)
        self._sharded = sharded
        self.own(owned)
        take_part_in_norms(sharded)

    @property
    def mine(self) -> frozenset[str]:
        """Names of the parameters whose gradients this optimizer may drop: its own, and those of no optimizer."""
        others = [claimed for other, claimed in self._sharded.claims.items() if other is not self]
        return self._names.difference(*others) if others else self._names

    def own(self, owned: Collection[str]) -> None:
        """Set the parameters, by name, whose gradients are returned and counted for the norm.

        Raises:
            RuntimeError: Another optimizer owns a parameter.
        """
        sharded = self._sharded
        if taken := frozenset(owned) - self.mine:
            raise RuntimeError(TAKEN.format(min(taken)))
        sharded.claims[self] = frozenset(owned)
        self._owned = [name for name in sharded.names if name in owned]
        at = {name: index for index, name in enumerate(name for unit in self._units for name in unit.names)}
        self._at = torch.tensor([at[name] for name in self._owned], device=self._device)
        self._along_model = [
            (axis, GatherScalars(each, axis, sharded.ledger), self._cut_by(axis, sharded))
            for axis, each in sharded.model_groups.items()
            if axis != PIPELINE
        ]
        self._pipeline = PipelineGrads(sharded, self._owned, self._units) if sharded.stages else None

    def _cut_by(self, axis: str, sharded: Sharded) -> list[bool]:
        """Return for each owned parameter whether the axis cuts it."""
        cut = {param.name for unit in sharded.shapes for param in unit.params if param.is_cut_by(axis)}
        return [name in cut for name in self._owned]

    def tell(self, early: EarlyUpdates) -> None:
        """Register `early`, held weakly, for updates of units as soon as their gradients are complete."""
        for unit in self._units:
            unit.early = weakref.ref(early)

    def refuse_scaled(self, optim: Scaled) -> None:
        """Refuse norms and limits of the units' `.grad` while `optim` says that they are scaled."""
        for unit in self._units:
            refuse_scaled(unit, optim)

    def named(self) -> dict[str, torch.Tensor]:
        """Return this rank's reduced gradients by name, flat [local shard], still scaled and unclipped."""
        return self._owned_of(name_and_grad for unit in self._units for name_and_grad in unit.values().items())

    def arriving(self) -> dict[str, torch.Tensor]:
        """Return `named` without waiting for transfers to the host or disk; work of the offload waits for them."""
        return self._owned_of(name_and_grad for unit in self._units for name_and_grad in unit.views.items())

    def _owned_of(self, named: Iterable[tuple[str, torch.Tensor]]) -> Named:
        grads = dict(named)
        return {name: grads[name] for name in self._owned if name in grads}

    def on_device(self) -> list[torch.Tensor]:
        """Return the units' gradients that are stored on the device."""
        return [grad for unit in self._units for grad in unit.on_device()]

    def complete(self) -> None:
        """Complete every unit's gradients, and add those of tied parameters across the pipeline once per step.

        It may be called several times in a step, before and after edits of `.grad`.
        """
        for unit in self._units:
            unit.complete()
        if self._pipeline is not None:
            self._pipeline.complete()

    def decide(self, *, scale: float, max_norm: float | None) -> StepDecision:
        """Return the global norm, finiteness and the clipping factor, the same on every rank.

        Args:
            scale: Loss scale by which the gradients are still multiplied.
            max_norm: Norm to clip the unscaled gradients to; None for no clipping.

        Raises:
            RuntimeError: On every rank, if ranks reduced units in different orders, or found different gradients of a
                parameter that all of them have.
        """
        self.complete()
        mine = self.mine
        absent = [name for unit in self._units for name in unit.absent if name in mine]
        self._collective_log.note(f"gradients of all parameters{' but ' * bool(absent)}{', '.join(absent)}")
        if self._pipeline is not None:
            self._pipeline.end_step()  # a step without gradients ends here, and the next one adds anew
        sums = self._own_sums()
        edited = any(unit.is_edited for unit in self._units)
        totals, edited = self._data_parallel.add(sums, self._collective_log.checksum, is_edited=edited)
        if edited:
            self._check_copies()
        totals, found = self._add_along_model(totals)
        if self._sharded.layout.unused == "union":
            self._keep_reached(totals if self._pipeline is None else totals[self._pipeline.at])
        norm = math.sqrt(sum(totals.abs().tolist())) / scale
        finite = bool(torch.isfinite(totals).all())
        clip = 1.0 if max_norm is None or not finite else min(1.0, max_norm / (norm + 1e-6))
        return StepDecision(norm, finite, clip / scale, () if finite else self._nonfinite(sums, found))

    def _keep_reached(self, totals: torch.Tensor) -> None:
        """Drop the gradients that no rank reached, by totals [owned], which are negative where one did.

        A gradient that is not zero was reached too, by whoever wrote into `.grad`.
        """
        if all(unit.is_whole for unit in self._units):
            return
        owned = frozenset(self._owned)
        is_reached = (totals.signbit() | (totals != 0)).tolist()
        reached = {name for name, reaches in zip(self._owned, is_reached, strict=True) if reaches}
        for unit in self._units:
            unit.keep_only(reached.intersection(unit.names), owned)

    def _own_sums(self) -> torch.Tensor:
        """Return this rank's sums of squares, fp64 [owned] on the device; a single copy from the host synchronizes.

        With zero.unused=union they are negative where this rank reached the parameter.
        """
        sums = [unit.sums for unit in self._units]
        found = torch.cat([each.values[0] for each in sums])
        if any(each.has_host for each in sums):
            found = found + torch.cat([each.values[1] for each in sums]).to(self._device)
        found = found[self._at]
        if self._sharded.layout.unused != "union":
            return found
        if all(unit.is_whole for unit in self._units):
            return -found
        is_used = [used for unit in self._units for used in unit.used]
        is_cuda = self._device.type == "cuda"
        flags = torch.tensor(is_used, pin_memory=is_cuda).to(self._device, non_blocking=is_cuda)[self._at]
        return torch.where(flags, -found, found)

    def _check_copies(self) -> None:
        """Check that replicas have equal gradients after an edit; all ranks call this."""
        whole: dict[DeviceMesh, list[torch.Tensor]] = {}
        names: dict[DeviceMesh, list[str]] = {}
        for unit in self._units:
            if unit.has_copies and all(map(has_memory, unit.views.values())):  # simulated tensors have no values
                whole.setdefault(unit.mesh, []).append(unit.whole_sums().to(self._device))
                names.setdefault(unit.mesh, []).extend(unit.names)
        if whole:
            self._data_parallel.check_copies({mesh: torch.cat(sums) for mesh, sums in whole.items()}, names)

    def _add_along_model(self, totals: torch.Tensor) -> tuple[torch.Tensor, list[AxisSums]]:
        """Add the totals [owned] along the axes that cut the model; return those of the model, and each axis's sums."""
        found = []
        for axis, gather, cut in self._along_model:
            sums = gather(totals.to(self._device)).cpu()
            check_alike(sums, self._owned, axis, cut)
            totals = add_where_cut(sums, cut)
            found.append(AxisSums(axis, self._owned, sums))
        if self._pipeline is not None:
            sums = self._pipeline.gather(totals)
            totals = in_rank_order(sums)
            found.append(AxisSums(PIPELINE, self._pipeline.names, sums))
        return totals, found

    def _nonfinite(self, sums: torch.Tensor, found: Iterable[AxisSums]) -> tuple[str, ...]:
        """Return the non-finite parameters with the ranks that have them; every rank of the model calls this, or none.

        The ranks are data-parallel ranks. If all of their sums are finite, they are those of the first other axis along
        which a sum is not.
        """
        names = self._data_parallel.nonfinite(sums, self._owned)
        for each in found:
            names = names or each.nonfinite()
        return tuple(names)

    def drop(self) -> None:
        """Drop the step's gradients, reduced or not, and undo updates that were started with them."""
        for unit in self._units[:1]:
            if unit.early is not None and (early := unit.early()) is not None:
                early.rollback()
        self._sharded.abandon_step(self.mine)
        self.clear()

    def clear(self) -> None:
        """Free the gradients and end the step's collective log."""
        mine = self.mine
        for unit in self._units:
            unit.clear(mine)
        if self._pipeline is not None:
            self._pipeline.end_step()
        self._sharded.loans.clear()
        self._collective_log.end_step()


def _shared_with_others(sharded: Sharded, owned: Collection[str], offload: OffloadManager) -> list[UnitGrads] | None:
    """Return the gradients that other live optimizers take from the model, or None; raise if sharing is impossible."""
    if not _drain(sharded.units):
        return None
    gc.collect()  # a dropped optimizer and its scheduler form a reference cycle
    units = [grads for unit in sharded.units if isinstance(grads := unit.attached, UnitGrads)]
    if not units:
        return None
    taken = frozenset[str]().union(*sharded.claims.values()).intersection(owned)
    if taken:
        raise RuntimeError(TAKEN.format(min(taken)))
    layout = sharded.layout
    hindrances = {
        "states off the device (offload)": bool(offload.schedule.slots),
        "zero.optimizer_shard_axes=[replicate,shard]": layout.replica_shards > 1,
        "a pipeline": sharded.stages is not None,
        "fp16, where each would scale the loss by itself": layout.param.dtype == torch.float16,
    }
    if found_here := [what for what, is_here in hindrances.items() if is_here]:
        raise RuntimeError(
            f"this model's gradients already go to another optimizer, and two cannot share them with "
            f"{' and '.join(found_here)}: give one optimizer several parameter groups, or drop the old one"
        )
    return units


def _drain(units: Iterable[Unit]) -> bool:
    """Wait for work that other optimizers queued, which refers to them; return whether there are any."""
    found = False
    for unit in units:
        if (consumer := unit.attached) is not None:
            consumer.drain()
            found = True
    return found


def _makers(unit: Unit, replica_mesh: DeviceMesh | None) -> dict[str, GradMaker]:
    """Return the makers of a unit's `.grad` by parameter; `replica_mesh` is the mesh of its replica shards, if any."""
    makers = {}
    for shape in unit.shape.params:
        param = unit.params[shape.name]
        if not shape.trainable or not isinstance(param, DTensor):
            continue
        local, mesh, placements = local_of(param).shape, param.device_mesh, param.placements
        if unit.replica_shards is not None and replica_mesh is not None:
            rows = unit.replica_shards.rows(shape.name)
            local = torch.Size([rows.stop - rows.start, *local[1:]])
            mesh, placements = replica_mesh, (Shard(0), Shard(0))
        makers[shape.name] = GradMaker(shape.name, param, unit.layout.grad.dtype, local, mesh, placements)
    return makers


def _copy_of(unit: Unit) -> tuple[int, int]:
    """Return (index, count) of this rank among the replicas of a unit, each of which sums one chunk of a gradient."""
    replicas = unit.mesh.get_group(REPLICATE)
    return replicas.rank(), replicas.size()
