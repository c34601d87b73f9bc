"""One unit's gradients: taken from FSDP2, accumulated over microbatches, summed up, sent to where the table has them.

For every unit and microbatch FSDP2 first delivers the flat reduced buffer (`Unit.deliver`), then calls the
post-accumulate hook of each parameter that lies in it, in the buffer's order and padded as FSDP2 pads shards. We keep
slices of that buffer, in the table's gradient dtype, and drop FSDP2's own `.grad` (which is rounded to the parameter's
dtype). Then, by where a parameter's gradients live:

                      first microbatch          later ones                    last one
    device            slices are kept           added to them                 averaged over the copies
    host, no copies   leave at once             land beside and are added     -
    host, copies      as on the device          as on the device              averaged, then leave

Where copies share out the states of a shard, averaging leaves this rank's part of each parameter's (zero/shares.py).
Sums of squares are taken while the data is in cache: on the device's slice, or by the addition that is the last.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

import torch
from torch import nn

from dzero.offload.attach import Offload
from dzero.optim import host_kernels
from dzero.zero.placed import local_of
from dzero.zero.shapes import ParamShape, rows_of
from dzero.zero.shard import Sharded
from dzero.zero.shares import Shares
from dzero.zero.unit import Unit

Named = dict[str, torch.Tensor]


class UnitGrads:
    """`views`: gradients by name [local shard or part, flat]; `sums`: sums of squares of this rank's chunks, complete
    after `settle`. copy: (rank, ranks) of the copies of a shard, each of which sums a chunk of it."""

    def __init__(self, unit: Unit, sharded: Sharded, copy: tuple[int, int], offload: Offload) -> None:
        self._unit, self._sharded, self._copy, self._offload = unit, sharded, copy, offload
        self._shapes: dict[str, ParamShape] = {p.name: p for p in unit.shape.params}
        places = offload.places
        self._hosted = {name for name in self._shapes if places.on_host("grad", name)}
        self.complete: weakref.WeakMethod[Callable[[str, Named], None]] | None = None
        self.refused: weakref.WeakMethod[Callable[[], None]] | None = None
        self._added_on_host = self._hosted if places.accumulates_on_host else set[str]()
        self.clear()
        unit.attach(self._receive)
        unit.drain = weakref.WeakMethod(offload.swap.drain)
        for shape in unit.shape.params:
            if unit.params[shape.name].requires_grad != shape.trainable:
                raise ValueError(
                    f"{shape.name}: requires_grad was changed after shard(); freeze and unfreeze before, so that units "
                    "and reductions hold what is trained"
                )
            if shape.trainable:
                hook = partial(_take_if_alive, weakref.ref(self), shape.name)
                unit.params[shape.name].register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def clear(self) -> None:
        """Forget the step's gradients."""
        self.views: Named = {}
        self.sums: dict[str, float | torch.Tensor] = {}
        self._additions: dict[str, Future[dict[str, float]]] = {}
        self._buffers: list[torch.Tensor] = []
        self._incoming, self._offset = torch.empty(0), 0
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
        self._incoming, self._offset = reduced, 0

    def _take(self, name: str, param: nn.Parameter) -> None:
        """Cut `name`'s slice out of the incoming buffer; with the last slice the buffer is used up."""
        param.grad = None
        self._pieces[name] = self._incoming[self._offset : self._offset + local_of(param).numel()]
        self._offset += self._shapes[name].shard_elems(self._unit.layout.shard)
        if self._offset == self._incoming.numel():
            buffer, pieces = self._incoming, self._pieces
            self._incoming, self._pieces = torch.empty(0), {}
            self._arrived(buffer, pieces)

    def _arrived(self, buffer: torch.Tensor, pieces: Named) -> None:
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
                complete(self._unit.shape.name, self.views)

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
        if self._offset < self._incoming.numel():
            raise RuntimeError(
                f"unit {self._unit.shape.name}: gradients arrived for parameters that were frozen when the model was "
                "sharded; set requires_grad before shard()"
            )
        self._finish()
        for name, addition in self._additions.items():
            self.sums[name] = addition.result()[name]
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
