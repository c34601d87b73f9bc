"""One unit's gradients: taken from FSDP2, accumulated over microbatches, summed up, sent to where the table has them.

For every unit and reduction FSDP2 delivers the flat reduced buffer (`receive`), padded as it pads shards, and sets
`.grad`. We keep slices of that buffer, in the table's gradient dtype. After the last microbatch `.grad` is a DTensor
over what was kept (grad_views.py), and `settle` takes over what was done to it. By where a parameter's gradients live:

                      first microbatch          later ones                    last one
    device            slices are kept           added to them                 averaged over the copies
    host, no copies   leave at once             land beside and are added     -
    host, copies      as on the device          as on the device              averaged, then leave

Where copies share out the states of a shard, averaging leaves this rank's part of each parameter's (zero/shares.py).
Sums of squares are taken while the data is in cache: on the device's slice, or by the addition that is the last; once
more where a `.grad` was edited since. Each step of this is one call for all parameters of the unit.

A loss that reads a sharded parameter itself (a penalty on weights) leaves its gradient in `.grad`, by autograd. What
comes before the unit's reduction is added after it, before the copies' average; what comes later goes into the view.
So does what a backward reduces after the last microbatch: several without `microbatch()`, or over one graph.

A parameter without gradient on all ranks has none, as in torch. Ranks must agree on which those are (comm/trail.py),
unless zero.unused=zeros lets zeros stand for them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from dzero.mesh import SHARD
from dzero.offload.attach import Offload
from dzero.optim import host_kernels
from dzero.optim.grad_sums import SquareSums
from dzero.optim.grad_views import GradMaker, GradUse, flat_of
from dzero.optim.offloaded_grads import OffloadedGrads
from dzero.zero.placed import local_of
from dzero.zero.shapes import ParamShape, rows_of
from dzero.zero.shard import Sharded
from dzero.zero.shares import Shares
from dzero.zero.unit import Unit

Named = dict[str, torch.Tensor]


HOOKED = (
    "{} has a hook of its own (register_hook or register_post_accumulate_grad_hook), which would see the gradients of "
    "single microbatches, or none: read or change .grad between backward() and step() instead"
)


class UnitGrads:
    """The gradients of one unit, between their reduction and the update.

    `names`: of the trained parameters. `views`: gradients by name [local shard or part, flat]; `sums`: sums of squares
    of this rank's chunks, complete after `settle`. copy: (rank, ranks) of the copies of a shard, each of which sums a
    chunk of it. makers: of `.grad`, by name.
    """

    def __init__(
        self,
        unit: Unit,
        sharded: Sharded,
        copy: tuple[int, int],
        offload: Offload,
        makers: Mapping[str, GradMaker],
    ) -> None:
        self._unit, self._sharded, self._copy, self._offloaded = unit, sharded, copy, OffloadedGrads(unit, offload)
        self._shapes: dict[str, ParamShape] = {p.name: p for p in unit.shape.params}
        self._hosted = self._offloaded.names
        self._makers = makers
        self._self: weakref.ref[GradUse] = weakref.ref(self)
        self.names = unit.buffered
        self._trained = {name: unit.params[name] for name in self.names}
        self.sums = SquareSums(self.names, torch.device(sharded.mesh.device_type))
        self._padded = [self._shapes[name].shard_elems(unit.layout.shard) for name in unit.buffered]
        self._elems = [local_of(param).numel() for param in self._trained.values()]
        self._counts_zeros = sharded.layout.unused == "zeros"
        self.complete: weakref.WeakMethod[Callable[[str, Named], bool]] | None = None
        self.refused: weakref.WeakMethod[Callable[[], None]] | None = None
        self._added_on_host = self._hosted if offload.places.accumulates_on_host else set[str]()
        self._forget()
        for shape in unit.shape.params:
            if unit.params[shape.name].requires_grad and not shape.trainable:
                raise ValueError(
                    f"{shape.name}: requires_grad was set after shard(): unfreeze before, so that units and reductions "
                    "hold what is trained; what was trained then may be frozen and unfrozen since"
                )
        for name, param in self._trained.items():
            if _is_hooked(param):
                raise ValueError(HOOKED.format(name))
        unit.attach(self)
        unit.drain = weakref.WeakMethod(offload.swap.drain)

    def clear(self, names: frozenset[str]) -> None:
        """Forget the step's gradients of `names`; those of other optimizers stay until these are done with them."""
        mine = names.intersection(self._trained)
        for name in mine:
            self._trained[name].grad = None
        if self._is_empty:
            return
        if len(mine) < len(self._trained):
            for kind in (self.views, self._held, self._shown):
                for name in mine.intersection(kind):
                    del kind[name]
            self.sums.drop(mine)
            self._used -= mine
        if len(mine) == len(self._trained) or not (self.views or self._held):
            self._forget()

    def _forget(self) -> None:
        self._shown: Named = {}
        self._held: Named = {}
        self._used: set[str] = set()
        self._is_edited = self._is_started = False
        self.views: Named = {}
        self.sums.clear()
        self._offloaded.forget()
        self._pieces: Named = {}
        self._buffers: list[torch.Tensor] = []
        self._finished, self._is_empty = False, True

    def receive(self, reduced: torch.Tensor, missing: frozenset[str]) -> None:
        """As `Consumer.receive`."""
        if reduced.numel() != sum(self._padded):
            raise RuntimeError(
                f"unit {self._unit.shape.name}: gradients arrived for parameters that were frozen when the model was "
                "sharded; set requires_grad before shard()"
            )
        if self._is_started:
            if self.refused is not None and (refused := self.refused()) is not None:
                refused()
            raise RuntimeError(
                f"unit {self._unit.shape.name}: gradients after those of the step's last microbatch, whose update has "
                "begun with offload.overlap=backward: of another backward, or of another use of the unit in one "
                "forward, which FSDP2 reduces apart at stages 0 and 1. Take offload.overlap=forward, or run all but "
                "the last backward under microbatch(is_last=False) and use the unit once"
            )
        self._is_empty = False
        self._hide()
        self._used |= self._trained.keys() - (set() if self._counts_zeros else missing)
        slices = zip(self.names, torch.split(reduced, self._padded), self._elems, strict=True)
        self._pieces = {name: piece if piece.numel() == elems else piece[:elems] for name, piece, elems in slices}
        if self._finished:
            self._add_late(reduced, self._pieces)
        else:
            self._arrived(reduced, self._pieces)

    def shown(self, name: str, piece: torch.Tensor) -> DTensor | None:
        """As `Consumer.shown`: of a gradient that stays where it was reduced."""
        if not self._finished or name not in self._used or self.views.get(name) is not self._pieces[name]:
            return None
        self._shown[name] = grad = self._makers[name].of(piece, self._self)
        return grad

    def returned(self) -> None:
        """As `Consumer.returned`."""
        self._pieces = {}
        for name in self.names if len(self._shown) < len(self.names) else ():
            if name in self._shown:
                continue
            if self._finished and name in self.views and name in self._used:
                self._show(name)
            else:
                self._trained[name].grad = None

    def _hide(self) -> None:
        """Take `.grad` away, to which FSDP2 would add in the parameter's dtype; what autograd left there is held."""
        if self._finished:
            self._collect()
        for name, param in self._trained.items():
            if param.grad is None:
                continue
            self._is_empty = False
            if name not in self._shown:
                direct = self._flat_of(name, param.grad)
                self._held[name] = self._held[name] + direct if name in self._held else direct
                self._used.add(name)
            param.grad = None
        self._shown.clear()

    def _add_late(self, buffer: torch.Tensor, pieces: Named) -> None:
        """Add what was reduced after the last microbatch's, averaged over the copies by itself."""
        self._is_edited = True
        if self._unit.shares is not None:
            _, pieces = self._unit.shares.reduce(pieces)
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
        later = {name: piece for name, piece in pieces.items() if name in self.views}
        if len(later) < len(pieces):
            self._buffers.append(buffer)
            self.views |= {name: piece for name, piece in pieces.items() if name not in later}
        self._add_on_device(later)
        if self._sharded.is_last:
            self._finish()
            if self.complete is not None and (complete := self.complete()) is not None:
                used = {name: grad for name, grad in self.views.items() if name in self._used}
                self._is_started = complete(self._unit.shape.name, used)

    def _add_on_device(self, pieces: Named) -> None:
        if not pieces:
            return
        accs, added = [self.views[name] for name in pieces], [*pieces.values()]
        if not accs[0].is_cuda:
            squares = host_kernels.accumulate(accs, added)
            if self._sharded.is_last and self._unit.average is None:
                self.sums.put(pieces, squares)
            return
        torch._foreach_add_(accs, added)
        for piece in added:
            # Freed here, `piece` would return to the stream that allocated it (FSDP2's reduce-scatter stream), which
            # may overwrite it before this stream has read it.
            piece.record_stream(torch.cuda.current_stream())

    def _add_on_host(self, buffer: torch.Tensor, pieces: Named) -> None:
        first = {name: piece for name, piece in pieces.items() if name not in self.views}
        if first:
            if self._sharded.is_last:
                self._sum(first)
            self.views |= self._offloaded.leave(first, buffer)
        self._offloaded.add(self.views, {name: piece for name, piece in pieces.items() if name not in first})

    def _sum(self, grads: Named) -> None:
        """Find the sums of squares of `grads`, in one call."""
        self.sums.find({name: self._chunk(name, grad) for name, grad in grads.items()})

    def _finish(self) -> None:
        """The last microbatch's are in: average over the copies, sum squares, send away what lives elsewhere."""
        if self._finished or not self.views:
            return
        self._finished = True
        on_host = {name: direct for name, direct in self._held.items() if name in self._added_on_host}
        for name, direct in self._held.items():
            if name not in on_host:
                self._add_held(name, direct)
        if self._unit.shares is not None:
            self._keep_shares(self._unit.shares)
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
        """Add what autograd left to the reduced gradient of a parameter; it is all of one that had none."""
        self.sums.drop({name})
        if name in self.views:
            self.views[name].add_(direct)
        else:
            self.views[name] = direct.to(self._unit.layout.grad.dtype, copy=True)
            self._buffers.append(self.views[name])

    def _add_late_to(self, name: str, grad: torch.Tensor) -> None:
        """Add to a parameter's gradient, wherever that lives by now."""
        if name in self._hosted:
            own = self.read(name)
            self.put(name, own.add_(grad.to(own.device)))
        else:
            self._is_edited = True
            self._add_on_device({name: grad.to(self.views[name].dtype)})

    def _show(self, name: str) -> None:
        """Let the parameter's `.grad` be a view of its gradient, wherever that lives."""
        maker, param = self._makers[name], self._trained[name]
        param.grad_dtype = None
        if name in self._hosted:
            param.grad = maker.elsewhere(self.views[name], self._self)
        else:
            param.grad = maker.of(self.views[name], self._self)
        self._shown[name] = param.grad

    def look(self) -> None:
        """As `GradUse.look`: nothing is on its way to what lives on the device."""

    def write(self) -> None:
        """As `GradUse.write`."""
        if self._is_started:
            raise RuntimeError(
                f"unit {self._unit.shape.name}: with offload.overlap=backward its update has begun, so its gradients "
                "cannot be changed any more: clip by max_norm= of the optimizer, or take offload.overlap=forward"
            )
        self._is_edited = True

    def lend(self) -> None:
        """As `GradUse.lend`: to be sure, what was summed up no longer counts."""
        self.write()

    def read(self, name: str) -> torch.Tensor:
        """As `GradUse.read`."""
        if name not in self.views:
            raise RuntimeError(f"{name}: its gradient was used up by step(), or dropped; clone what is to stay")
        return self._offloaded.read({name: self.views[name]})[name]

    def put(self, name: str, flat: torch.Tensor) -> None:
        """As `GradUse.put`."""
        self.write()
        self._offloaded.change(self.views[name], flat)

    def _collect(self) -> None:
        """Take over what happened to `.grad` since: another tensor there, or none."""
        for name, param in self._trained.items():
            if _is_hooked(param):
                raise RuntimeError(HOOKED.format(name))
            grad, shown = param.grad, self._shown.get(name)
            if grad is shown:
                continue
            self.write()
            self._is_empty = False
            if grad is None:
                del self.views[name], self._shown[name]
                self._used.discard(name)
                continue
            if shown is None and name in self.views:  # other ranks may have reached it, this one has not
                self._add_late_to(name, self._flat_of(name, grad))
            else:
                self._replace(name, self._flat_of(name, grad))
            self._used.add(name)
            self._show(name)

    def _flat_of(self, name: str, grad: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of what a user or autograd left in `.grad`, flat."""
        param = self._trained[name]
        shares = self._unit.shares if self._finished else None
        if shares is not None and isinstance(grad, DTensor) and grad.device_mesh != self._unit.mesh[SHARD]:
            return local_of(grad).reshape(-1)  # made of what was `.grad`, whose parts lie on all copies
        flat = flat_of(grad, param)
        return flat if shares is None else flat[shares.span(name)]

    def _replace(self, name: str, flat: torch.Tensor) -> None:
        """Take `flat` as a parameter's gradient in place of what it is, if it has one."""
        self._is_edited = True
        grad = flat.to(self._unit.layout.grad.dtype, copy=True)
        if name in self._hosted:
            self.views |= self._offloaded.leave({name: grad}, grad)
        else:
            self.views[name] = grad

    def _keep_shares(self, shares: Shares) -> None:
        """Of each buffer what was averaged takes its place."""
        for index, buffer in enumerate(self._buffers):
            whole = {name: grad for name, grad in self.views.items() if _lies_in(grad, buffer)}
            self._buffers[index], owned = shares.reduce(whole)
            self.views |= owned

    def settle(self) -> None:
        """Complete `sums`, also for a unit that the last microbatch did not reach."""
        if not self._finished and self.views:
            self._hide()
            self._finish()
            for name in self._trained:
                if name in self._used:
                    self._show(name)
        self._collect()
        if unused := self.views.keys() - self._used:
            for name in unused:
                del self.views[name]  # zeros, or others' gradients: then ranks differ, and the step is refused
            self.sums.drop(unused)
        self._offloaded.put_sums(self.sums)
        if self._is_edited:
            self.sums.clear()
        if missing := self.views.keys() - self.sums.found:
            self._sum_anywhere(missing)

    def _sum_anywhere(self, names: Iterable[str]) -> None:
        """Find the sums of squares of gradients wherever they live."""
        grads = self.values()
        for off_device in (False, True):
            self._sum({name: grads[name] for name in names if (name in self._hosted) == off_device})

    @property
    def absent(self) -> list[str]:
        """Trained parameters without gradient, after `settle`."""
        return [name for name in self._trained if name not in self.views]

    def complete_with(self, name: str, add: Callable[[torch.Tensor], None]) -> None:
        """`add` what other ranks found of one parameter's gradient [local shard, flat], in place; after `settle`."""
        grad = self.values()[name]
        add(grad)
        self._offloaded.change(self.views[name], grad)
        self._sum({name: grad})

    def on_device(self) -> list[torch.Tensor]:
        """Gradients that do not live on the host."""
        return [grad for name, grad in self.views.items() if name not in self._hosted]

    def values(self) -> Named:
        """The gradients once they have arrived; copies of those on disk."""
        if not self._hosted:
            return self.views
        return self.views | self._offloaded.read({n: grad for n, grad in self.views.items() if n in self._hosted})

    def _chunk(self, name: str, grad: torch.Tensor) -> torch.Tensor:
        """Of a gradient that all copies have what this rank sums."""
        if self._unit.shares is not None or self._copy[1] == 1:
            return grad
        row = self._shapes[name].row_elems
        first, rows = rows_of(grad.numel() // row, self._copy)
        return grad[first * row : (first + rows) * row]


def _is_hooked(param: nn.Parameter) -> bool:
    return bool(param._post_accumulate_grad_hooks or param._backward_hooks)


def _lies_in(piece: torch.Tensor, buffer: torch.Tensor) -> bool:
    return piece.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()
