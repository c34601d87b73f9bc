"""Sums of squares of gradients, of which norms are made and by which non-finite gradients are found."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from dzero.optim import host_kernels

WIDENED_ELEMS = 1 << 24
"""Elements of a gradient on a GPU that torch copies to fp64 at a time, for its norm: 128 MiB."""


class SquareSums:
    """The sums of one unit, fp64 by `names`, of what was `found` on the device and on the host; others are zero."""

    def __init__(self, names: Sequence[str], device: torch.device) -> None:
        self._names = tuple(names)
        self._at = {name: index for index, name in enumerate(names)}
        self._devices = (device, torch.device("cpu")) if device.type != "cpu" else (device,)
        self.clear()

    def clear(self) -> None:
        """Forget all."""
        self.found: set[str] = set()
        self.values = [torch.zeros(len(self._names), dtype=torch.float64, device=device) for device in self._devices]

    def put(self, names: Iterable[str], values: torch.Tensor) -> None:
        """Take `values`, fp64 [names], on the device or the host."""
        names = tuple(names)
        self.drop(names)
        where = [device.type for device in self._devices].index(values.device.type)
        if names == self._names:
            self.values[where] = values
        elif names:
            self.values[where][[self._at[name] for name in names]] = values
        self.found.update(names)

    def drop(self, names: Iterable[str]) -> None:
        """Forget those of `names`."""
        for name in self.found.intersection(names):
            for values in self.values:
                values[self._at[name]] = 0.0
            self.found.discard(name)


def sum_squares(grads: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return each one's sum of squares, fp64 [len(grads)], where they lie: all on the CPU, or on one GPU.

    grads: contiguous and of one dtype. Of those on a GPU nothing is waited for.
    """
    if not grads or not grads[0].is_cuda:
        return host_kernels.sum_squares(grads)
    pieces = [torch.split(grad, WIDENED_ELEMS) for grad in grads]
    norms = [[torch.linalg.vector_norm(piece, dtype=torch.float64) for piece in each] for each in pieces]
    return torch.stack([torch.stack(each).square().sum() for each in norms])
