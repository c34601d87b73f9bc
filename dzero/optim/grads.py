"""Gradients between their reduction and the update: decided upon once for all ranks.

Norm: sqrt of sums of squares in fp64 per (parameter, chunk). A shard is cut into chunks by Shard(0), one for each of
its copies, which sums only that; at stage 0 the shard is the whole. Every rank receives all sums and adds them in the
same order, the chunks of the first shard first. Beside the sums travels a checksum of the rank's collectives
(comm/trail.py) and of the parameters without gradient: where ranks disagree, a branch in the model has mixed data of
different units, or missed parts of one, and the step is refused.

Along axes that cut the model itself the sums travel once more: a parameter that such an axis cuts is the sum of its
ranks', one that they all have is counted once. Ranks of a pipeline have parameters of their own (optim/parts.py).
"""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from dzero.comm.collectives import GatherScalars
from dzero.mesh import PIPELINE, REPLICATE, SHARD
from dzero.offload.attach import Offload
from dzero.optim.grad_views import GradMaker
from dzero.optim.parts import AcrossParts
from dzero.optim.unit_grads import Named, UnitGrads
from dzero.zero.placed import local_of
from dzero.zero.shard import Sharded
from dzero.zero.shares import mesh_of_shares
from dzero.zero.unit import Unit

ALIKE = 1e-2
"""Relative, of sums of squares: more than rounding ever makes of one gradient, less than a part of a batch does."""


TAKEN = (
    "{}: its gradients already go to another optimizer. Give each parameter to one optimizer, which takes several "
    "parameter groups, or drop the old one before making a new one"
)


@dataclass(frozen=True)
class Decision:
    """What all ranks do with this step's gradients. `norm`: of the averaged, unscaled gradients, before clipping."""

    norm: float
    finite: bool
    factor: float
    """Multiplies every gradient in fp32: 1 / loss scale and the clipping coefficient."""
    culprits: tuple[str, ...]
    """Parameters with a non-finite averaged gradient, as `name (rank r)`: r holds the rows, whoever overflowed."""


class Gradients:
    """The reduced gradients of every unit of a sharded model. Only those of `owned` (names) count and are shown."""

    def __init__(self, sharded: Sharded, owned: Collection[str], offload: Offload) -> None:
        groups = {axis: sharded.mesh.get_group(axis) for axis in (REPLICATE, SHARD)}
        self._groups, self._trail = groups, sharded.ledger.trail
        self._gathers = [GatherScalars(group, axis, sharded.ledger) for axis, group in groups.items()]
        self._device = torch.device(sharded.mesh.device_type)
        self._mesh = sharded.mesh
        parts = mesh_of_shares(sharded.mesh) if sharded.layout.shares > 1 else None
        self._units = _shared_with_others(sharded, owned, offload) or [
            UnitGrads(unit, sharded, _copy_of(unit), offload, _makers(unit, parts)) for unit in sharded.units
        ]
        self._names = frozenset(sharded.names)
        self._sharded, self._is_complete = sharded, False
        self.own(owned)

    @property
    def mine(self) -> frozenset[str]:
        """Names of the parameters whose gradients are this optimizer's to drop: its own, and those of none."""
        others = [claimed for other, claimed in self._sharded.claims.items() if other is not self]
        return self._names.difference(*others) if others else self._names

    def own(self, owned: Collection[str]) -> None:
        """From now on those of `owned` count and are shown. Raises RuntimeError where another optimizer has one."""
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
        self._parts = AcrossParts(sharded, self._owned, self._units) if sharded.parts else None

    def _cut_by(self, axis: str, sharded: Sharded) -> list[bool]:
        """[owned]: which parameters the axis cuts."""
        cut = {param.name for unit in sharded.shapes for param in unit.params if param.is_cut_by(axis)}
        return [name in cut for name in self._owned]

    def listen(self, complete: Callable[[str, Named], bool], refused: Callable[[], None]) -> None:
        """From now on, tell of every unit whose gradients are complete, and before gradients are refused.

        Args:
            complete: Called with a unit's name and gradients; returns whether their update has begun. Held weakly.
            refused: Called without arguments. Held weakly.
        """
        for unit in self._units:
            unit.complete, unit.refused = weakref.WeakMethod(complete), weakref.WeakMethod(refused)

    def named(self) -> dict[str, torch.Tensor]:
        """This rank's reduced gradients [local shard, flat] by parameter name; still scaled and unclipped."""
        return self._owned_of(name_and_grad for unit in self._units for name_and_grad in unit.values().items())

    def arriving(self) -> dict[str, torch.Tensor]:
        """As `named`, but what is off the device may be on its way; whatever the offload starts waits for it."""
        return self._owned_of(name_and_grad for unit in self._units for name_and_grad in unit.views.items())

    def _owned_of(self, named: Iterable[tuple[str, torch.Tensor]]) -> Named:
        grads = dict(named)
        return {name: grads[name] for name in self._owned if name in grads}

    def on_device(self) -> list[torch.Tensor]:
        """Those of `named` that lie on the device."""
        return [grad for unit in self._units for grad in unit.on_device()]

    def complete(self) -> None:
        """Wait for every unit's, and add what both ends of a pipeline found of tied parameters; once in a step."""
        if self._is_complete:
            return
        for unit in self._units:
            unit.settle()
        if self._parts is not None:
            self._parts.complete()
        mine = self.mine
        absent = [name for unit in self._units for name in unit.absent if name in mine]
        self._trail.note(f"gradients of all parameters{' but ' * bool(absent)}{', '.join(absent)}")
        self._is_complete = True

    def decide(self, *, scale: float, max_norm: float | None) -> Decision:
        """Global norm, finite check and clipping coefficient; the same on every rank. One small collective along each
        axis.

        Raises RuntimeError on every rank where ranks reduced their units in different orders.
        """
        self.complete()
        self._is_complete = False  # a step that ends here, without gradients, may be followed by others
        gathered = torch.cat(
            [torch.tensor([float(self._trail.checksum)], dtype=torch.float64).to(self._device), self._sums()]
        )
        for of_axis in self._gathers:
            gathered = of_axis(gathered.view(-1))
        gathered = gathered.view(-1, 1 + len(self._owned)).cpu()
        self._check_order(gathered[:, 0])
        chunks = gathered[:, 1:]
        per_param = _in_order(chunks)
        bad = _culprits(chunks, self._owned, "rank", self._rank)
        for axis, gather, cut in self._along_model:
            ranks = gather(per_param.to(self._device)).cpu()
            bad = bad or _culprits(ranks, self._owned, f"{axis} rank")
            self._check_alike(ranks, axis, cut)
            per_param = torch.where(torch.tensor(cut) | ~ranks.isfinite().all(0), _in_order(ranks), ranks[0])
        if self._parts is not None:
            ranks = self._parts.gather(per_param)
            bad = bad or _culprits(ranks, self._parts.names, f"{PIPELINE} rank")
            per_param = _in_order(ranks)
        norm = math.sqrt(sum(per_param.tolist())) / scale
        finite = bool(torch.isfinite(per_param).all())
        clip = 1.0 if max_norm is None or not finite else min(1.0, max_norm / (norm + 1e-6))
        return Decision(norm, finite, clip / scale, tuple(bad))

    def _sums(self) -> torch.Tensor:
        """Return this rank's sums of squares, fp64 [owned], on the device; in one copy those found on the host."""
        found = [torch.cat(each) for each in zip(*(unit.sums.values for unit in self._units), strict=True)]
        return torch.stack([each.to(self._device) for each in found]).sum(0)[self._at]

    def _rank(self, at: int) -> int:
        """Its number, of the data-parallel ranks in the order of what is gathered from them."""
        return int(self._mesh.mesh.T.flatten()[at])

    def _check_order(self, checksums: torch.Tensor) -> None:
        """Of all data-parallel ranks, those of a shard's copies side by side."""
        if others := (checksums != checksums[0]).nonzero().flatten().tolist():
            differing = [self._rank(at) for at in others]
            shards = checksums.view(-1, self._groups[REPLICATE].size())
            group = self._groups[SHARD if bool((shards != shards[0]).any()) else REPLICATE]
            raise RuntimeError(
                f"ranks {sorted(differing)} ran the model's units in another order than rank {self._rank(0)}, or other "
                f"modules of them: {self._trail.divergence(group)}\nEvery rank must run the same modules in the same "
                "order in every microbatch (no branches on the data of one rank); where only some parameters of a unit "
                "differ, zero.unused=zeros counts zeros for their gradients"
            )

    def _check_alike(self, sums: torch.Tensor, axis: str, cut: Sequence[bool]) -> None:
        """Of the parameters that all ranks have, in [ranks, owned]: what they found must be one gradient, but for
        rounding."""
        alike = [number for number, is_cut in enumerate(cut) if not is_cut]
        sums = sums[:, alike]
        apart = ((sums - sums[0]).abs().amax(0) > ALIKE * sums[0]) & sums.isfinite().all(0)
        if found := apart.nonzero().flatten().tolist():
            raise RuntimeError(
                f"ranks of {axis} found different gradients of {self._owned[alike[found[0]]]}, of which each has a "
                "copy: its module sees a part of its input, or parts of a sum. Give it a style in the plan that says so"
            )

    def drop(self) -> None:
        """Forget the step's gradients, reduced or not, and take back updates that have begun with them."""
        for unit in self._units[:1]:
            if unit.refused is not None and (refused := unit.refused()) is not None:
                refused()
        self._sharded.abandon_step(self.mine)
        self.clear()

    def clear(self) -> None:
        """Free the gradients."""
        mine = self.mine
        for unit in self._units:
            unit.clear(mine)
        self._is_complete = False
        self._trail.end_step()


def _shared_with_others(sharded: Sharded, owned: Collection[str], offload: Offload) -> list[UnitGrads] | None:
    """Return the gradients that other optimizers, still alive, take from the model; None where there are none.

    Raises RuntimeError where two cannot share them.
    """
    attached = [unit for unit in sharded.units if unit.attached is not None]
    if not attached:
        return None
    for unit in attached:
        if unit.drain is not None and (drain := unit.drain()) is not None:
            drain()  # queued work holds the optimizer that queued it
    gc.collect()  # a dropped optimizer and its scheduler refer to each other
    units = [grads for unit in sharded.units if isinstance(grads := unit.attached, UnitGrads)]
    if not units:
        return None
    taken = frozenset[str]().union(*sharded.claims.values()).intersection(owned)
    if taken:
        raise RuntimeError(TAKEN.format(min(taken)))
    layout = sharded.layout
    hindrances = {
        "states off the device (offload)": bool(offload.schedule.slots),
        "zero.states_over=all": layout.shares > 1,
        "a pipeline": sharded.parts is not None,
        "fp16, where each would scale the loss by itself": layout.param.dtype == torch.float16,
    }
    if found_here := [what for what, is_here in hindrances.items() if is_here]:
        raise RuntimeError(
            f"this model's gradients already go to another optimizer, and two cannot share them with "
            f"{' and '.join(found_here)}: give one optimizer several parameter groups, or drop the old one"
        )
    return units


def _makers(unit: Unit, parts: DeviceMesh | None) -> dict[str, GradMaker]:
    """Return the makers of a unit's `.grad`, by parameter. parts: the mesh of `Shares`, where there are some."""
    makers = {}
    for shape in unit.shape.params:
        param = unit.params[shape.name]
        if not shape.trainable or not isinstance(param, DTensor):
            continue
        local, mesh, placements = local_of(param).shape, param.device_mesh, param.placements
        if unit.shares is not None and parts is not None:
            rows = unit.shares.rows(shape.name)
            local = torch.Size([rows.stop - rows.start, *local[1:]])
            mesh, placements = parts, (Shard(0), Shard(0))
        makers[shape.name] = GradMaker(shape.name, param, unit.layout.grad.dtype, local, mesh, placements)
    return makers


def _copy_of(unit: Unit) -> tuple[int, int]:
    """(index, count) among the ranks that have copies of a unit: of its gradients each sums its own chunk."""
    copies = unit.mesh.get_group(REPLICATE)
    return copies.rank(), copies.size()


def _culprits(
    sums: torch.Tensor, names: Sequence[str], who: str, number: Callable[[int], int] = int
) -> dict[str, None]:
    """Of sums [ranks, names]; number: of the rank in a row."""
    where = (~torch.isfinite(sums)).nonzero().tolist()
    return dict.fromkeys(f"{names[param]} ({who} {number(at)})" for at, param in where)


def _in_order(sums: torch.Tensor) -> torch.Tensor:
    """[ranks, n] -> [n]: one rank after the other, as no sum promises."""
    return sums.cumsum(0)[-1]
