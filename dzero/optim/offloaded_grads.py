"""The gradients of one unit that live on the host or on disk: how they get there, are added to, read and changed."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from functools import partial

import torch

from dzero.offload.manager import OffloadManager
from dzero.optim import cpu_kernels
from dzero.optim.grad_sums import SquareSums
from dzero.zero.unit import Unit

Named = dict[str, torch.Tensor]


class OffloadedGrads:
    """Moves gradients of `names` between the device and their slots, through the offload's lanes."""

    def __init__(self, unit: Unit, offload: OffloadManager) -> None:
        self._unit, self._offload = unit.shape.name, offload
        self._trained = sum(shape.trainable for shape in unit.shape.params)
        self.names = {shape.name for shape in unit.shape.params if offload.buffer_layout.on_host("grad", shape.name)}
        self.forget()

    def forget(self) -> None:
        """Begin a step: nothing is there."""
        self._additions: list[tuple[list[str], Future[torch.Tensor]]] = []
        self._left = False

    def leave(self, pieces: Named, buffer: torch.Tensor) -> Named:
        """Send slices of `buffer` on the device to their slots; return those, [elems] by name.

        Where the slot is laid out like the buffer they go in one piece.
        """
        placement = {name: self._offload.view(name, "grad", piece.numel()) for name, piece in pieces.items()}
        moves = [(placement[name], piece) for name, piece in pieces.items()]
        slot = self._offload.slot(next(iter(pieces)), "grad", buffer)
        ahead = slot.data_ptr() - buffer.data_ptr()
        alike = all(home.data_ptr() - piece.data_ptr() == ahead for home, piece in moves)
        if alike and len(pieces) == self._trained:
            moves = [(slot, buffer)]
        self._offload.keep_grads(self._unit, moves, more=self._left)
        self._left = True
        return placement

    def add(self, placement: Mapping[str, torch.Tensor], pieces: Named) -> None:
        """Start adding slices on the device to what is in the slots; `put_sums` gives the sums of what comes out."""
        if not pieces:
            return
        landing = {name: self._offload.view(name, "landing", piece.numel()) for name, piece in pieces.items()}
        self._offload.evict("landing", self._unit, [(landing[name], piece) for name, piece in pieces.items()])
        accs = [placement[name] for name in landing]
        work = partial(cpu_kernels.accumulate, accs, [*landing.values()])
        self._additions.append(([*landing], self._offload.accumulate(self._unit, work)))

    def put_sums(self, sums: SquareSums) -> None:
        """Wait for the additions, and put the sums of squares that they found into `sums`."""
        for names, addition in self._additions:
            sums.put(names, addition.result())

    def read(self, placement: Named) -> Named:
        """Return the gradients in `placement` once they have arrived; of those on disk copies."""
        return self._offload.read_grads(self._unit, placement) if self._left else placement

    def change(self, home: torch.Tensor, flat: torch.Tensor) -> None:
        """Let the gradient in `home` be `flat` [elems]; it may be what `read` returned, changed in place."""
        if flat is not home:
            self._offload.change_grads(self._unit, [(home, flat)])
