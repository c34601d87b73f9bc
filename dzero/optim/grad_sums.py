"""Sums of squares of gradients, of which norms are made and by which non-finite gradients are found."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from dzero.optim import cpu_kernels
from dzero.optim.cuda_sums import CudaSums
from dzero.utils.numba_views import has_memory


class SquareSums:
    """The sums of one unit, fp64 by `names`, of what was `found` on the device and on the host; others are zero.

    has_host: whether some were on the host beside a GPU.
    """

    def __init__(self, names: Sequence[str], device: torch.device) -> None:
        self._names = tuple(names)
        self._at = {name: index for index, name in enumerate(names)}
        self._devices = (device, torch.device("cpu")) if device.type != "cpu" else (device,)
        self._on_cuda = CudaSums()
        self.clear()

    def clear(self) -> None:
        """Forget all."""
        self.found: set[str] = set()
        self.has_host = False
        self.values = [torch.zeros(len(self._names), dtype=torch.float64, device=device) for device in self._devices]

    def find(self, grads: Mapping[str, torch.Tensor]) -> None:
        """Sum the squares of `grads` where they lie, as `sum_squares`, and take the sums."""
        self.put(grads, _sum_squares([*grads.values()], self._on_cuda))

    def put(self, names: Iterable[str], values: torch.Tensor) -> None:
        """Take `values`, fp64 [names], on the device or the host."""
        names = tuple(names)
        self.drop(names)
        where = [device.type for device in self._devices].index(values.device.type)
        self.has_host = self.has_host or where > 0
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

    The bits are the same on both. On a GPU nothing is waited for, but tables are made anew by each call: what is
    summed in every step goes through `SquareSums.find`, which keeps them.

    Args:
        grads: Contiguous and of one dtype: fp32, bf16 or fp16.
    """
    return _sum_squares(grads, CudaSums())


def _sum_squares(grads: Sequence[torch.Tensor], on_cuda: CudaSums) -> torch.Tensor:
    if not grads or not grads[0].is_cuda:
        return cpu_kernels.sum_squares(grads)
    if not has_memory(grads[0]):
        return torch.zeros(len(grads), dtype=torch.float64, device=grads[0].device)
    return on_cuda.sum_squares(grads)
