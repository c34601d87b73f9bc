"""The gradients of one unit: received from FSDP2, accumulated over microbatches, summed, and moved to their tier.

For every reduction of a unit, FSDP2 delivers the flat reduced buffer (`receive`), padded like its shards, and sets
`.grad`. `UnitGrads` keeps slices of that buffer, in the gradient dtype of the layout. After the last microbatch `.grad`
is a DTensor over what was kept (optim/grad_views.py), and `complete` takes over edits of it. What happens depends on
where a parameter's gradient is stored:

                        first microbatch       later microbatches                 last microbatch
    device              slices are kept        added to the slices                averaged over the replicas
    host, no replicas   moved to the host      copied to the host, added there    -
    host, replicas      as on the device       as on the device                   averaged, then moved to the host

If replicas divide the states of a shard (zero/replica_shards.py), averaging leaves this rank's replica shard of each
gradient. Sums of squares are computed while the data is in cache, on the slices on the device or in the last addition.
They are computed again if a `.grad` was edited since. Each of these operations is one call for all parameters of the
unit.

A loss that reads a sharded parameter directly, e.g. a weight penalty, leaves its gradient in `.grad` through autograd.
If that happens before the unit's reduction, the gradient is added after the reduction and before the average over
replicas. Otherwise it is added through the view. The same holds for gradients that are reduced after the last
microbatch's, e.g. by several backward calls without `microbatch()` or over one graph.

Parameters that backward does not reach, by zero.unused:

    union    A reduction counts zeros for ranks that did not reach a parameter, whose `.grad` is then set on all ranks.
             `step` asks whether any rank reached it (optim/grad_decision.py), and `keep_only` drops the others.
    agree    Those that this rank did not reach have no gradient. Ranks must agree on them (comm/collective_log.py).
    zeros    All parameters of a unit that was reduced have a gradient.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from enum import Enum
from typing import Protocol

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from dzero import streams
from dzero.offload.manager import OffloadManager
from dzero.optim import cpu_kernels
from dzero.optim.grad_sums import SquareSums
from dzero.optim.grad_views import USED_UP, GradMaker
from dzero.optim.offloaded_grads import OffloadedGrads
from dzero.optim.shown_grads import ShownGrads
from dzero.utils.torch_internals import add_each
from dzero.zero.dtensors import local_of
from dzero.zero.replica_shards import ReplicaShards
from dzero.zero.sharded import Sharded
from dzero.zero.unit import Unit
from dzero.zero.unit_shapes import ParamShape, rows_of

Named = dict[str, torch.Tensor]


class GradPhase(Enum):
    """Phases of a unit's gradients within a step; `MOVES` lists the legal transitions."""

    EMPTY = "nothing"
    ARRIVING = "those of some microbatches, in `views` and the buffers behind them; `.grad` is None"
    COMPLETE = "those of all: averaged over the replicas, summed, in their tier, and shown as `.grad`"
    IN_USE = "the same, and the update that writes over them has begun (offload.overlap=backward)"


MOVES = {
    GradPhase.EMPTY: {GradPhase.EMPTY, GradPhase.ARRIVING},
    GradPhase.ARRIVING: {GradPhase.EMPTY, GradPhase.ARRIVING, GradPhase.COMPLETE},
    GradPhase.COMPLETE: {GradPhase.EMPTY, GradPhase.COMPLETE, GradPhase.IN_USE},
    GradPhase.IN_USE: {GradPhase.EMPTY},
}


class EarlyUpdates(Protocol):
    """Interface of an optimizer that may update a unit while backward is still running (offload.overlap=backward)."""

    def begin(self, unit: str, grads: Named) -> bool:
        """Start the update of the unit named `unit`, whose gradients are complete; return whether it was started."""

    def rollback(self) -> None:
        """Undo the updates that were started, because their gradients are refused or dropped."""


class UnitGrads:
    """Gradients of one unit, between their reduction and the update.

    Args:
        unit: The unit.
        sharded: The sharded model that the unit belongs to.
        copy: (index, count) of this rank among the replicas of its shard, each of which sums the squares of one chunk.
        offload: Transfers to and from the tiers off the device.
        makers: Makers of `.grad`, by parameter name.

    Attributes:
        names: Names of the trained parameters, in the order of FSDP2's buffers.
        views: Gradients by name, flat [local shard], or [replica shard] once reduced to it.
        sums: Sums of squares of this rank's chunks, valid after `complete`.
        generation: Increases whenever the gradients are dropped.

    Raises:
        ValueError: A trained parameter was frozen when the model was sharded, or has a hook of its own.
    """

    def __init__(
        self,
        unit: Unit,
        sharded: Sharded,
        copy: tuple[int, int],
        offload: OffloadManager,
        makers: Mapping[str, GradMaker],
    ) -> None:
        self._unit, self._sharded, self._copy, self._offloaded = unit, sharded, copy, OffloadedGrads(unit, offload)
        self._executor = offload.executor
        self._shapes: dict[str, ParamShape] = {p.name: p for p in unit.shape.params}
        self._hosted = self._offloaded.names
        self.names = unit.buffered
        self._trained = {name: unit.params[name] for name in self.names}
        self._shown = ShownGrads(unit, self._trained, makers, weakref.ref(self))
        self._device = torch.device(sharded.mesh.device_type)
        self.sums = SquareSums(self.names, self._device)
        self._padded = [self._shapes[name].shard_elems(unit.layout.shard) for name in unit.buffered]
        self._elems = [local_of(param).numel() for param in self._trained.values()]
        self._unused = sharded.layout.unused
        self.early: weakref.ref[EarlyUpdates] | None = None
        self._added_on_host = self._hosted if offload.buffer_layout.accumulates_on_host else set[str]()
        self._phase, self.generation = GradPhase.EMPTY, 0
        self._forget()
        for shape in unit.shape.params:
            if unit.params[shape.name].requires_grad and not shape.trainable:
                raise ValueError(
                    f"{shape.name}: requires_grad was set after shard(): unfreeze before, so that units and reductions "
                    "hold what is trained; what was trained then may be frozen and unfrozen since"
                )
        unit.attach(self)

    @property
    def phase(self) -> GradPhase:
        """Phase of the unit's gradients in this step."""
        return self._phase

    @phase.setter
    def phase(self, to: GradPhase) -> None:
        if to not in MOVES[self._phase]:
            raise RuntimeError(f"unit {self._unit.shape.name}: gradients went from {self._phase.name} to {to.name}")
        self._phase = to

    def clear(self, names: frozenset[str]) -> None:
        """Drop the step's gradients of `names`; gradients of other optimizers stay until those have used them."""
        mine = names.intersection(self._trained)
        self._shown.drop(mine)
        if self.phase is GradPhase.EMPTY:
            return
        if len(mine) < len(self._trained):
            for kind in (self.views, self._held):
                for name in mine.intersection(kind):
                    del kind[name]
            self.sums.drop(mine)
            self._used -= mine
            self._removed -= mine
        if len(mine) == len(self._trained) or not (self.views or self._held):
            self._forget()

    def _forget(self) -> None:
        self.phase = GradPhase.EMPTY
        self.generation += 1
        self.views: Named = {}
        self.sums.clear()
        self._held: Named = {}
        self._used: set[str] = set()
        self._removed: set[str] = set()
        self._is_edited = False
        self._offloaded.forget()
        self._pieces: Named = {}
        self._buffers: list[torch.Tensor] = []
        self._reduced: streams.Event = None  # behind the last reduction

    def receive(self, reduced: torch.Tensor, missing: frozenset[str]) -> None:
        """Implement `GradConsumer.receive`: take over or accumulate a reduced buffer."""
        if reduced.numel() != sum(self._padded):
            raise RuntimeError(
                f"unit {self._unit.shape.name}: gradients arrived for parameters that were frozen when the model was "
                "sharded; set requires_grad before shard()"
            )
        if self.phase is GradPhase.IN_USE:
            if self.early is not None and (early := self.early()) is not None:
                early.rollback()
            raise RuntimeError(
                f"unit {self._unit.shape.name}: gradients after those of the step's last microbatch, whose update has "
                "begun with offload.overlap=backward: of another backward, or of another use of the unit in one "
                "forward, which FSDP2 reduces apart at stages 0 and 1. Take offload.overlap=forward, or run all but "
                "the last backward under microbatch(is_last=False) and use the unit once"
            )
        self._hide()
        reached = self._trained.keys() if self._unused == "zeros" else self._trained.keys() - missing
        self._used.update(reached)
        self._removed -= reached
        pieces = torch.split(reduced, self._padded)
        if self._padded != self._elems:
            pieces = tuple(piece[:elems] for piece, elems in zip(pieces, self._elems, strict=True))
        self._pieces = dict(zip(self.names, pieces, strict=True))
        if self.phase is GradPhase.COMPLETE:
            self._add_late(reduced, self._pieces)
        else:
            self.phase = GradPhase.ARRIVING
            self._arrived(reduced, self._pieces)
        self._sharded.loans.lend(reduced)
        self._reduced = streams.record_event(self._device)

    def shown(self, name: str, piece: torch.Tensor) -> DTensor | None:
        """Implement `GradConsumer.shown`: return a view if the gradient stays in the reduced buffer."""
        stays = self._is_complete and self._counts(name) and self.views.get(name) is self._pieces[name]
        return self._shown.over(name, piece) if stays else None

    def returned(self) -> None:
        """Implement `GradConsumer.returned`: set the `.grad` that `shown` left open."""
        self._pieces = {}
        if len(self._shown.names) < len(self.names):
            others = [name for name in self.names if name not in self._shown.names]
            self._shown.drop(others)
            self._show(others)

    def drain(self) -> None:
        """Implement `GradConsumer.drain`."""
        self._executor.drain()

    @property
    def _is_complete(self) -> bool:
        return self.phase in (GradPhase.COMPLETE, GradPhase.IN_USE)

    def _counts(self, name: str) -> bool:
        """Return whether what was reduced for a parameter may be its gradient, as far as this rank knows."""
        return name in self._used or (self._unused == "union" and name not in self._removed)

    def _show(self, names: Iterable[str]) -> None:
        """Set the `.grad` of those of `names` that have a complete gradient."""
        for name in names if self._is_complete else ():
            if name in self.views and self._counts(name):
                self._shown.show(name, self.views[name], off_device=name in self._hosted)

    def _hide(self) -> None:
        """Set `.grad` to None, as FSDP2 would add to it in the parameter's dtype, and hold what autograd left there."""
        if self._is_complete:
            self._collect()
        for name, grad in self._shown.hide().items():
            direct = self._shown.flat(name, grad, shared_out=self._is_complete)
            if (held := self._held.get(name)) is not None:
                for each in (held, direct):  # autograd allocated them on its own stream, and they are dropped here
                    streams.record_stream(each)
                direct = held + direct
            self._held[name] = direct
            self._used.add(name)
            self.phase = GradPhase.ARRIVING

    def _add_late(self, buffer: torch.Tensor, pieces: Named) -> None:
        """Add a reduction that arrived after the last microbatch's, which is averaged over the replicas by itself."""
        self._is_edited = True
        if self._unit.replica_shards is not None:
            _, pieces = self._unit.replica_shards.reduce(pieces)
        elif self._unit.average is not None:
            self._unit.average(buffer)
        for name, piece in pieces.items():
            if name in self.views:
                self._add_late_to(name, piece)
            else:
                self._replace(name, piece)

    def _arrived(self, buffer: torch.Tensor, pieces: Named) -> None:
        if self._added_on_host:
            self._add_on_host(buffer, {name: piece for name, piece in pieces.items() if name in self._added_on_host})
            pieces = {name: piece for name, piece in pieces.items() if name not in self._added_on_host}
        later = {name: piece for name, piece in pieces.items() if name in self.views} if self.views else {}
        if len(later) < len(pieces):
            self._buffers.append(buffer)
            self.views |= {name: piece for name, piece in pieces.items() if name not in later} if later else pieces
        self._add_on_device(later)
        if self._sharded.is_last:
            self._finish()
            if self.early is not None and (early := self.early()) is not None:
                used = {name: grad for name, grad in self.views.items() if name in self._used}
                if early.begin(self._unit.shape.name, used):
                    self.phase = GradPhase.IN_USE

    def _add_on_device(self, pieces: Named) -> None:
        if not pieces:
            return
        accs, added = [self.views[name] for name in pieces], [*pieces.values()]
        if not accs[0].is_cuda:
            squares = cpu_kernels.accumulate(accs, added)
            if self._sharded.is_last and self._unit.average is None:
                self.sums.put(pieces, squares)
            return
        add_each(accs, added)

    def _add_on_host(self, buffer: torch.Tensor, pieces: Named) -> None:
        first = {name: piece for name, piece in pieces.items() if name not in self.views}
        if first:
            if self._sharded.is_last:
                self._sum(first)
            self.views |= self._offloaded.leave(first, buffer)
        self._offloaded.add(self.views, {name: piece for name, piece in pieces.items() if name not in first})

    def _sum(self, grads: Named) -> None:
        """Compute the sums of squares of `grads`, in one call."""
        self.sums.find({name: self._chunk(name, grad) for name, grad in grads.items()})

    def _finish(self) -> None:
        """Finish the last microbatch: average over replicas, sum squares, and move gradients to their tier."""
        if self._is_complete or not self.views:
            return
        self.phase = GradPhase.COMPLETE
        on_host = {name: direct for name, direct in self._held.items() if name in self._added_on_host}
        for name, direct in self._held.items():
            if name not in on_host:
                self._add_held(name, direct)
        if self._unit.replica_shards is not None:
            self._keep_replica_shards(self._unit.replica_shards)
        elif self._unit.average is not None:
            for buffer in self._buffers:
                self._unit.average(buffer)
        on_device = {name: grad for name, grad in self.views.items() if name not in self._added_on_host}
        self._sum({name: grad for name, grad in on_device.items() if name not in self.sums.found})
        for buffer in self._buffers if self._hosted else ():
            leaving = {n: g for n, g in on_device.items() if n in self._hosted and _lies_in(g, buffer)}
            if leaving:
                self.views |= self._offloaded.leave(leaving, buffer)
        self._buffers = []
        for name, direct in on_host.items():
            if name in self.views:
                self._add_late_to(name, direct)
            else:
                self._replace(name, direct)
        self._held = {}

    def _add_held(self, name: str, direct: torch.Tensor) -> None:
        """Add the gradient that autograd left to the parameter's reduced one, or keep it alone if there is none."""
        self.sums.drop({name})
        if name in self.views:
            self.views[name].add_(direct)
        else:
            self.views[name] = direct.to(self._unit.layout.grad.dtype, copy=True)
            self._buffers.append(self.views[name])
        streams.record_stream(direct)  # autograd allocated it on its own stream, and it is dropped after this

    def _add_late_to(self, name: str, grad: torch.Tensor) -> None:
        """Add to a complete gradient, in the tier in which it is stored."""
        if name in self._hosted:
            own = self.read(name)
            self.put(name, own.add_(grad.to(own.device)))
        else:
            self._is_edited = True
            self._add_on_device({name: grad.to(self.views[name].dtype)})

    def before_read(self) -> None:
        """Implement `GradUse.before_read`: let the current stream wait for the reduction.

        FSDP2 waits at the end of backward. Autograd adds to a `.grad` before that, e.g. the gradient of a weight
        penalty.
        """
        streams.wait_event(self._reduced, self._device)

    def before_write(self) -> None:
        """Implement `GradUse.before_write`: invalidate the sums, or raise if the update in place has begun."""
        self.before_read()
        if self.phase is GradPhase.IN_USE:
            raise RuntimeError(
                f"unit {self._unit.shape.name}: with offload.overlap=backward its update has begun, so its gradients "
                "cannot be changed any more: clip by max_norm= of the optimizer, or take offload.overlap=forward"
            )
        self._is_edited = True

    def before_address(self) -> None:
        """Treat every request for the memory's address as a write."""
        self.before_write()

    def read(self, name: str) -> torch.Tensor:
        """Implement `GradUse.read`."""
        if name not in self.views:
            raise RuntimeError(f"{name}: {USED_UP}")
        return self._offloaded.read({name: self.views[name]})[name]

    def put(self, name: str, flat: torch.Tensor) -> None:
        """Implement `GradUse.put`."""
        self.before_write()
        self._offloaded.change(self.views[name], flat)

    def _collect(self) -> None:
        """Take over `.grad` that were set to another tensor or to None."""
        for name, grad in self._shown.changes():
            self.before_write()
            if grad is None:
                del self.views[name], self._shown.names[name]
                self._used.discard(name)
                self._removed.add(name)
                continue
            if not self._is_complete:
                self.phase = GradPhase.ARRIVING
            flat = self._shown.flat(name, grad, shared_out=self._is_complete)
            if name not in self._shown.names and name in self.views:  # other ranks used it, this one did not
                self._add_late_to(name, flat)
            else:
                self._replace(name, flat)
            self._used.add(name)
            self._removed.discard(name)
            self._shown.show(name, self.views[name], off_device=name in self._hosted)

    def _replace(self, name: str, flat: torch.Tensor) -> None:
        """Store `flat` as a parameter's gradient, in place of the present one if there is one."""
        self._is_edited = True
        grad = flat.to(self._unit.layout.grad.dtype, copy=True)
        if name in self._hosted:
            self.views |= self._offloaded.leave({name: grad}, grad)
        else:
            self.views[name] = grad

    def _keep_replica_shards(self, replica_shards: ReplicaShards) -> None:
        """Replace each buffer by the averaged replica shards of its gradients."""
        for index, buffer in enumerate(self._buffers):
            whole = {name: grad for name, grad in self.views.items() if _lies_in(grad, buffer)}
            self._buffers[index], owned = replica_shards.reduce(whole)
            self.views |= owned
            self._sharded.loans.lend(buffer)  # of an earlier microbatch's reduction, whose own loan has ended

    def complete(self) -> None:
        """Complete `sums`, also if the last microbatch did not reach the unit."""
        if not self._is_complete and self.views:
            self._hide()
            self._finish()
            self._show(self.names)
        self._collect()
        if self._unused != "union":  # there, `_collect` has dropped what the user removed
            self._drop(self.views.keys() - self._used)
        self._offloaded.put_sums(self.sums)
        if self._is_edited:
            self.sums.clear()
        if missing := self.views.keys() - self.sums.found:
            self._sum_anywhere(missing)

    def keep_only(self, reached: Collection[str], owned: Collection[str]) -> None:
        """Leave those of `owned` with a gradient that are in `reached`, which some rank reached; after `complete`."""
        self._drop({name for name in self.views if name in owned and name not in reached})
        for name in reached:
            if name in self._trained and name not in self.views:  # another rank alone has a gradient, of autograd's
                self._put_zeros(name)

    def _drop(self, names: Collection[str]) -> None:
        if not names:
            return
        for name in names:
            del self.views[name]
        self.sums.drop(names)
        self._shown.drop(names)

    def _put_zeros(self, name: str) -> None:
        zeros = torch.zeros_like(local_of(self._trained[name]).view(-1), dtype=self._unit.layout.grad.dtype)
        replica_shards = self._unit.replica_shards
        if not self._is_complete:
            self.phase = GradPhase.ARRIVING
            self.phase = GradPhase.COMPLETE
        self._replace(name, zeros if replica_shards is None else zeros[replica_shards.span(name)])

    @property
    def is_edited(self) -> bool:
        """Whether the gradients have changed since they were reduced and averaged."""
        return self._is_edited

    @property
    def has_copies(self) -> bool:
        """Whether replicas must end up with the same gradients as this rank."""
        return self._copy[1] > 1 and self._unit.replica_shards is None

    @property
    def mesh(self) -> DeviceMesh:
        """The data-parallel (replicate, shard) mesh of the unit."""
        return self._unit.mesh

    @property
    def has_replica_shards(self) -> bool:
        """Whether every replica ends up with a part of its own of each gradient."""
        return self._unit.replica_shards is not None

    @property
    def grad_meshes(self) -> set[DeviceMesh]:
        """Meshes of the `.grad` that are set at present."""
        return {grad.device_mesh for param in self._trained.values() if isinstance(grad := param.grad, DTensor)}

    @property
    def reductions(self) -> int:
        """Number of the unit's reductions so far."""
        return self._unit.reductions

    def chunks(self, names: Iterable[str]) -> Named:
        """Return the parts of gradients that this rank counts in a norm, in any tier; valid after `complete`."""
        grads = self.values()
        return {name: self._chunk(name, grads[name]) for name in names}

    def whole_sums(self) -> torch.Tensor:
        """Return the sums of squares of whole shards, fp64 [names] on the device; valid after `complete`."""
        sums, grads = SquareSums(self.names, self._device), self.values()
        for off_device in (False, True):
            some = {name: grad for name, grad in grads.items() if (name in self._hosted) == off_device}
            sums.find(some)
        return torch.stack([each.to(self._device) for each in sums.values]).sum(0)

    def _sum_anywhere(self, names: Iterable[str]) -> None:
        """Compute the sums of squares of gradients in any tier."""
        grads = self.values()
        for off_device in (False, True):
            self._sum({name: grads[name] for name in names if (name in self._hosted) == off_device})

    @property
    def is_whole(self) -> bool:
        """Whether backward on this rank reached all of `names`, each of which has a gradient; after `complete`."""
        return len(self._used) == len(self.views) == len(self.names)

    @property
    def used(self) -> list[bool]:
        """Whether backward on this rank reached each of `names`, or the user gave it a gradient."""
        return [name in self._used for name in self.names]

    @property
    def absent(self) -> list[str]:
        """Names of the parameters without a gradient, of which ranks must agree that they have none; after `complete`.

        With zero.unused=union these are the ones of which the user removed the gradient.
        """
        union = self._unused == "union"
        return [name for name in self._trained if (name in self._removed if union else name not in self.views)]

    def complete_with(self, name: str, add: Callable[[torch.Tensor, bool], bool]) -> None:
        """Add gradients that other ranks have of one parameter; after `complete`.

        Args:
            name: The parameter.
            add: Function that adds them in place to this rank's gradient, or to zeros, is told whether this rank has
                one, and returns whether any of them has.
        """
        is_here = name in self.views
        if not is_here:
            self._put_zeros(name)
        grad = self.values()[name]
        if not add(grad, is_here):
            self._drop([name])
            return
        self._offloaded.change(self.views[name], grad)
        self._sum({name: grad})
        if self._unused != "union":
            self._used.add(name)

    def on_device(self) -> list[torch.Tensor]:
        """Return the gradients that are stored on the device."""
        return [grad for name, grad in self.views.items() if name not in self._hosted]

    def values(self) -> Named:
        """Return the gradients by name once transfers have ended; those on disk are copies."""
        if not self._hosted:
            return self.views
        return self.views | self._offloaded.read({n: grad for n, grad in self.views.items() if n in self._hosted})

    def _chunk(self, name: str, grad: torch.Tensor) -> torch.Tensor:
        """Return the part of a gradient whose squares this rank sums; replicas of one gradient sum a chunk each."""
        if self._unit.replica_shards is not None or self._copy[1] == 1:
            return grad
        row = self._shapes[name].row_elems
        first, rows = rows_of(grad.numel() // row, self._copy)
        return grad[first * row : (first + rows) * row]


def _lies_in(piece: torch.Tensor, buffer: torch.Tensor) -> bool:
    return piece.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()
