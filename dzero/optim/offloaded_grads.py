"""The gradients of one unit that are stored on the host or on disk: moved there, accumulated, read and changed."""

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
    """Moves the gradients of `names` between the device and their slots, through the lanes of the offload.

    Attributes:
        names: Names of the unit's parameters whose gradients are stored off the device.
    """

    def __init__(self, unit: Unit, offload: OffloadManager) -> None:
        self._unit, self._offload = unit.shape.name, offload
        self._trained = sum(shape.trainable for shape in unit.shape.params)
        self.names = {shape.name for shape in unit.shape.params if offload.buffer_layout.on_host("grad", shape.name)}
        self.forget()

    def forget(self) -> None:
        """Forget all gradients, at the start of a step."""
        self._additions: list[tuple[list[str], Future[torch.Tensor]]] = []
        self._left = False

    def leave(self, pieces: Named, buffer: torch.Tensor) -> Named:
        """Start moving slices of `buffer` to their slots; return the slots [elems] by name.

        If all slots are laid out like the buffer, it moves as one piece.
        """
        placement = {name: self._offload.view(name, "grad", piece.numel()) for name, piece in pieces.items()}
        moves = [(placement[name], piece) for name, piece in pieces.items()]
        slot = self._offload.slot(next(iter(pieces)), "grad", buffer)
        ahead = slot.data_ptr() - buffer.data_ptr()
        alike = all(storage.data_ptr() - piece.data_ptr() == ahead for storage, piece in moves)
        if alike and len(pieces) == self._trained:
            moves = [(slot, buffer)]
        self._offload.keep_grads(self._unit, moves, more=self._left)
        self._left = True
        return placement

    def add(self, placement: Mapping[str, torch.Tensor], pieces: Named) -> None:
        """Start adding slices on the device to the gradients in `placement`; `put_sums` collects the new sums."""
        if not pieces:
            return
        landing = {name: self._offload.view(name, "landing", piece.numel()) for name, piece in pieces.items()}
        self._offload.evict("landing", self._unit, [(landing[name], piece) for name, piece in pieces.items()])
        accs = [placement[name] for name in landing]
        work = partial(cpu_kernels.accumulate, accs, [*landing.values()])
        self._additions.append(([*landing], self._offload.accumulate(self._unit, work)))

    def put_sums(self, sums: SquareSums) -> None:
        """Wait for the additions, and put the sums of squares that they computed into `sums`, once."""
        additions, self._additions = self._additions, []
        for names, addition in additions:
            sums.put(names, addition.result())

    def read(self, placement: Named) -> Named:
        """Return the gradients in `placement` once they have arrived; those on disk are copies."""
        return self._offload.read_grads(self._unit, placement) if self._left else placement

    def change(self, storage: torch.Tensor, flat: torch.Tensor) -> None:
        """Replace the gradient in the slot `storage` by `flat` [elems], which may be what `read` returned."""
        if flat is not storage:
            self._offload.change_grads(self._unit, [(storage, flat)])
