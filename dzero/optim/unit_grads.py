"""One unit's gradients: taken from FSDP2, accumulated over microbatches, summed up, sent to where the table has them.

For every unit and microbatch FSDP2 first delivers the flat reduced buffer (`Unit.deliver`), then calls the
post-accumulate hook of each parameter that lies in it, in the buffer's order and padded as FSDP2 pads shards. We keep
slices of that buffer, in the table's gradient dtype, and drop FSDP2's own `.grad` (which is rounded to the parameter's
dtype). After the last microbatch `.grad` is a view of what was kept (grad_views.py), and `settle` takes over what was
done to it. By where a parameter's gradients live:

                      first microbatch          later ones                    last one
    device            slices are kept           added to them                 averaged over the copies
    host, no copies   leave at once             land beside and are added     -
    host, copies      as on the device          as on the device              averaged, then leave

Where copies share out the states of a shard, averaging leaves this rank's part of each parameter's (zero/shares.py).
Sums of squares are taken while the data is in cache: on the device's slice, or by the addition that is the last; once
more where a `.grad` was edited since.

A loss that reads a sharded parameter itself (a penalty on weights) leaves its gradient in `.grad`, by autograd. What
comes before the unit's reduction is added after it, before the copies' average; what comes later goes into the view.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial

import torch
from torch import nn

from dzero.offload.attach import Offload
from dzero.optim import host_kernels
from dzero.optim.grad_views import GradMaker, GradUse, flat_of
from dzero.zero.placed import local_of
from dzero.zero.shapes import ParamShape, rows_of
from dzero.zero.shard import Sharded
from dzero.zero.shares import Shares
from dzero.zero.unit import Unit

Named = dict[str, torch.Tensor]


HOOKED = (
    "{} has a post-accumulate-grad hook of its own, which would be called for each microbatch with a gradient that is "
    "not used: read or change .grad between backward() and step() instead"
)


class UnitGrads:
    """The gradients of one unit, between their reduction and the update.

    `views`: gradients by name [local shard or part, flat]; `sums`: sums of squares of this rank's chunks, complete
    after `settle`. copy: (rank, ranks) of the copies of a shard, each of which sums a chunk of it. makers: of `.grad`,
    by name.
    """

    def __init__(
        self,
        unit: Unit,
        sharded: Sharded,
        copy: tuple[int, int],
        offload: Offload,
        makers: Mapping[str, GradMaker],
    ) -> None:
        self._unit, self._sharded, self._copy, self._offload = unit, sharded, copy, offload
        self._shapes: dict[str, ParamShape] = {p.name: p for p in unit.shape.params}
        places = offload.places
        self._hosted = {name for name in self._shapes if places.on_host("grad", name)}
        self._makers = makers
        self._self: weakref.ref[GradUse] = weakref.ref(self)
        self._shown: dict[str, torch.Tensor] = {}
        self._direct: set[str] = set()
        self.complete: weakref.WeakMethod[Callable[[str, Named], bool]] | None = None
        self.refused: weakref.WeakMethod[Callable[[], None]] | None = None
        self._added_on_host = self._hosted if places.accumulates_on_host else set[str]()
        self.clear()
        unit.attach(self._receive)
        unit.drain = weakref.WeakMethod(offload.swap.drain)
        self._hooks: dict[str, int] = {}
        for shape in unit.shape.params:
            if unit.params[shape.name].requires_grad != shape.trainable:
                raise ValueError(
                    f"{shape.name}: requires_grad was changed after shard(); freeze and unfreeze before, so that units "
                    "and reductions hold what is trained"
                )
            if shape.trainable:
                hook, param = partial(_take_if_alive, weakref.ref(self), shape.name), unit.params[shape.name]
                param.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
                if not all(map(_is_ours, _hooks_of(param).values())):
                    raise ValueError(HOOKED.format(shape.name))
                self._hooks[shape.name] = len(_hooks_of(param))

    def clear(self) -> None:
        """Forget the step's gradients."""
        for name in self._shown.keys() | self._direct:
            self._unit.params[name].grad = None
        self._shown, self._direct = {}, set()
        self._delivered: Named = {}
        self._held: Named = {}
        self._is_edited = self._is_started = False
        self.views: Named = {}
        self.sums: dict[str, float | torch.Tensor] = {}
        self._additions: dict[str, Future[dict[str, float]]] = {}
        self._buffers: list[torch.Tensor] = []
        self._incoming: torch.Tensor | None = None
        self._offset = 0
        self._pieces: Named = {}
        self._finished = self._left = False

    def _receive(self, reduced: torch.Tensor) -> None:
        if self._finished:
            if self.refused is not None and (refused := self.refused()) is not None:
                refused()
            raise RuntimeError(
                f"unit {self._unit.shape.name}: gradients after those of the step's last microbatch. Run all but the "
                "last one under microbatch(is_last=False), and call step() before the next. Where the model runs this "
                "unit twice per forward, take zero.stage=2 or 3: with several microbatches FSDP2 reduces it twice"
            )
        for name in self._direct:  # FSDP2 would add to it, in the parameter's dtype
            self._hold(name)
        self._direct = set()
        self._incoming, self._offset = reduced, 0

    def _hold(self, name: str) -> None:
        """Keep what autograd left in `.grad`, to be added to the reduced gradient."""
        param = self._unit.params[name]
        if param.grad is not None:
            direct, param.grad = flat_of(param.grad, param), None
            self._held[name] = self._held[name] + direct if name in self._held else direct

    def _take(self, name: str, param: nn.Parameter) -> None:
        """Cut `name`'s slice out of the incoming buffer; with the last slice the buffer is used up."""
        if self._incoming is None:  # autograd's own, of a loss that read the sharded parameter
            if param.grad is not self._shown.get(name):
                self._direct.add(name)
            return
        if self._sharded.is_last and param.grad is not None and param.grad.dtype == self._incoming.dtype:
            self._delivered[name] = param.grad  # else it keeps a copy of what was delivered
        param.grad = None
        self._pieces[name] = self._incoming[self._offset : self._offset + local_of(param).numel()]
        self._offset += self._shapes[name].shard_elems(self._unit.layout.shard)
        if self._offset == self._incoming.numel():
            buffer, pieces = self._incoming, self._pieces
            self._incoming, self._pieces = None, {}
            self._arrived(buffer, pieces)

    def _arrived(self, buffer: torch.Tensor, pieces: Named) -> None:
        if len(pieces) < len(self._makers):
            self._sharded.ledger.trail.note(f"the reduced gradients were those of {', '.join(pieces)}")
        self._add_on_host(buffer, {n: piece for n, piece in pieces.items() if n in self._added_on_host})
        staying = {n: piece for n, piece in pieces.items() if n not in self._added_on_host}
        if staying.keys() - self.views.keys():
            self._buffers.append(buffer)
        for name, piece in staying.items():
            if name in self.views:
                self._add_on_device(name, piece)
            else:
                self.views[name] = piece
        if self._sharded.is_last:
            self._finish()
            if self.complete is not None and (complete := self.complete()) is not None:
                self._is_started = complete(self._unit.shape.name, self.views)

    def _add_on_device(self, name: str, piece: torch.Tensor) -> None:
        acc = self.views[name]
        if not acc.is_cuda:
            squares = host_kernels.accumulate(acc, piece)
            if self._sharded.is_last and self._unit.average is None:
                self.sums[name] = squares
            return
        acc.add_(piece)
        # Freed here, `piece` would return to the stream that allocated it (FSDP2's reduce-scatter stream), which may
        # overwrite it before this stream has read it.
        piece.record_stream(torch.cuda.current_stream())

    def _add_on_host(self, buffer: torch.Tensor, pieces: Named) -> None:
        first = {name: piece for name, piece in pieces.items() if name not in self.views}
        if first:
            if self._sharded.is_last:
                self.sums.update({name: sum_squares(self._chunk(name, piece)) for name, piece in first.items()})
            self._leave(first, buffer)
        later = {name: piece for name, piece in pieces.items() if name not in first}
        if later:
            unit, offload = self._unit.shape.name, self._offload
            landing = {name: offload.view(name, "landing", piece.numel()) for name, piece in later.items()}
            offload.evict("landing", unit, [(landing[name], piece) for name, piece in later.items()])
            pairs = {name: (self.views[name], landed) for name, landed in landing.items()}
            self._additions.update(dict.fromkeys(later, offload.accumulate(unit, partial(_add_all, pairs))))

    def _leave(self, pieces: Named, buffer: torch.Tensor) -> None:
        """Send device slices of `buffer` to their slot; in one piece where the slot is laid out like the buffer."""
        homes = {name: self._offload.view(name, "grad", piece.numel()) for name, piece in pieces.items()}
        moves = [(homes[name], piece) for name, piece in pieces.items()]
        slot = self._offload.slot(next(iter(pieces)), "grad", buffer)
        ahead = slot.data_ptr() - buffer.data_ptr()
        alike = all(home.data_ptr() - piece.data_ptr() == ahead for home, piece in moves)
        if alike and len(pieces) == sum(shape.trainable for shape in self._shapes.values()):
            moves = [(slot, buffer)]
        self._offload.keep_grads(self._unit.shape.name, moves, more=self._left)
        self._left = True
        self.views.update(homes)

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
        for name, grad in on_device.items():
            if name not in self.sums:
                self.sums[name] = sum_squares(self._chunk(name, grad))
        for buffer in self._buffers:
            leaving = {n: g for n, g in on_device.items() if n in self._hosted and _lies_in(g, buffer)}
            if leaving:
                self._leave(leaving, buffer)
        self._buffers = []
        for name in self.views:
            self._show(name)
        for name, direct in on_host.items():
            self._add_on_host_at_once(name, direct)
        self._held, self._delivered = {}, {}

    def _add_held(self, name: str, direct: torch.Tensor) -> None:
        """Add what autograd left to the reduced gradient of a parameter; it is all of one that had none."""
        self.sums.pop(name, None)
        if name in self.views:
            self.views[name].add_(direct)
        else:
            self.views[name] = direct.to(self._unit.layout.grad.dtype, copy=True)
            self._buffers.append(self.views[name])

    def _add_on_host_at_once(self, name: str, direct: torch.Tensor) -> None:
        if name not in self.views:
            self._adopt(name, direct)
            return
        grad = self.read(name)
        self.put(name, grad.add_(direct.to(grad.device)))

    def _show(self, name: str) -> None:
        """Let the parameter's `.grad` be a view of its gradient, wherever that lives."""
        maker, param = self._makers[name], self._unit.params[name]
        param.grad_dtype = None  # of another dtype than the parameter's; FSDP2 assigned one of that
        if name in self._hosted:
            param.grad = maker.elsewhere(self.views[name], self._self)
        else:
            param.grad = maker.of(self.views[name], self._self, self._delivered.get(name))
        self._shown[name] = param.grad

    def write(self) -> None:
        """As `GradUse.write`."""
        if self._is_started:
            raise RuntimeError(
                f"unit {self._unit.shape.name}: with offload.overlap=backward its update has begun, so its gradients "
                "cannot be changed any more: clip by max_norm= of the optimizer, or take offload.overlap=forward"
            )
        self._is_edited = True

    def read(self, name: str) -> torch.Tensor:
        """As `GradUse.read`."""
        if name not in self.views:
            raise RuntimeError(f"{name}: its gradient was used up by step(), or dropped; clone what is to stay")
        return self._offload.read_grads(self._unit.shape.name, {name: self.views[name]})[name]

    def put(self, name: str, flat: torch.Tensor) -> None:
        """As `GradUse.put`."""
        self.write()
        if flat is not self.views[name]:
            self._offload.change_grads(self._unit.shape.name, [(self.views[name], flat)])

    def _collect(self) -> None:
        """Take over what happened to `.grad` since: another tensor there, or none."""
        for name, param in self._unit.params.items():
            if name in self._hooks and len(_hooks_of(param)) > self._hooks[name]:
                raise RuntimeError(HOOKED.format(name))
            grad, shown = param.grad, self._shown.get(name)
            if grad is shown:
                continue
            if grad is None:
                self.write()
                del self.views[name], self._shown[name]
            else:
                self._adopt(name, flat_of(grad, param))

    def _adopt(self, name: str, flat: torch.Tensor) -> None:
        """Take `flat` as a parameter's gradient in place of what it is, if it has one."""
        self.write()
        grad = flat.to(self._unit.layout.grad.dtype, copy=True)
        if name in self._hosted:
            self._leave({name: grad}, grad)
        else:
            self.views[name] = grad
        self._show(name)

    def _keep_shares(self, shares: Shares) -> None:
        """Of each buffer what was averaged takes its place."""
        for index, buffer in enumerate(self._buffers):
            whole = {name: grad for name, grad in self.views.items() if _lies_in(grad, buffer)}
            self._buffers[index], owned = shares.reduce(whole)
            self.views |= owned

    def settle(self) -> None:
        """Complete `sums`, also for a unit that the last microbatch did not reach.

        Raises RuntimeError where the reduced buffer held more than the parameters that are trained.
        """
        if self._incoming is not None:
            raise RuntimeError(
                f"unit {self._unit.shape.name}: gradients arrived for parameters that were frozen when the model was "
                "sharded; set requires_grad before shard()"
            )
        self._finish()
        self._collect()
        for name, addition in self._additions.items():
            self.sums[name] = addition.result()[name]
        if self._is_edited:
            self.sums = {}
        if missing := self.views.keys() - self.sums.keys():
            grads = self.values()
            self.sums.update({name: sum_squares(self._chunk(name, grads[name])) for name in missing})

    def complete_with(self, name: str, add: Callable[[torch.Tensor], None]) -> None:
        """`add` what other ranks found of one parameter's gradient [local shard, flat], in place; after `settle`."""
        grad = self.values()[name]
        add(grad)
        if grad is not self.views[name]:  # a copy of what is on disk
            self._offload.change_grads(self._unit.shape.name, [(self.views[name], grad)])
        self.sums[name] = sum_squares(self._chunk(name, grad))

    def on_device(self) -> list[torch.Tensor]:
        """Gradients that do not live on the host."""
        return [grad for name, grad in self.views.items() if name not in self._hosted]

    def values(self) -> Named:
        """The gradients once they have arrived; copies of those on disk."""
        if not self._left:
            return self.views
        there = {name: grad for name, grad in self.views.items() if name in self._hosted}
        return self.views | self._offload.read_grads(self._unit.shape.name, there)

    def _chunk(self, name: str, grad: torch.Tensor) -> torch.Tensor:
        """Of a gradient that all copies have what this rank sums."""
        if self._unit.shares is not None or self._copy[1] == 1:
            return grad
        row = self._shapes[name].row_elems
        first, rows = rows_of(grad.numel() // row, self._copy)
        return grad[first * row : (first + rows) * row]


def _hooks_of(param: nn.Parameter) -> dict[int, Callable[[nn.Parameter], None]]:
    hooks: dict[int, Callable[[nn.Parameter], None]] | None = param._post_accumulate_grad_hooks
    return hooks or {}


def _is_ours(hook: object) -> bool:
    return isinstance(hook, partial) and hook.func is _take_if_alive


def _lies_in(piece: torch.Tensor, buffer: torch.Tensor) -> bool:
    return piece.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()


def _add_all(pairs: dict[str, tuple[torch.Tensor, torch.Tensor]]) -> dict[str, float]:
    """acc += landed for every pair; the sums of squares of what came out."""
    return {name: host_kernels.accumulate(acc, landed) for name, (acc, landed) in pairs.items()}


def _take_if_alive(owner: weakref.ref[UnitGrads], name: str, param: nn.Parameter) -> None:
    """Hooks live in the tensor's C++ half, where the garbage collector sees no cycle: a strong reference from there
    would keep model, states and process groups alive for ever."""
    unit = owner()
    if unit is not None:
        unit._take(name, param)


def sum_squares(grad: torch.Tensor) -> float | torch.Tensor:
    """Sum of squares in fp64: a float on the CPU, a 0-dim tensor on CUDA (no synchronisation)."""
    if not grad.is_cuda:
        return host_kernels.sum_squares(grad)
    norm: torch.Tensor = torch.linalg.vector_norm(grad, dtype=torch.float64)
    return norm.square()
