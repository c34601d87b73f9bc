"""Sums of squares of gradients, from which norms are computed and non-finite gradients are detected."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from dzero.optim import cpu_kernels
from dzero.optim.cuda_sums import CudaSums
from dzero.utils.numba_views import has_memory


class SquareSums:
    """Sums of squares of one unit's gradients, fp64 in the order of `names`, zero for those not in `found`.

    Args:
        names: Names of the parameters.
        device: Device of the unit; sums are kept there, and in a second tensor on the CPU.

    Attributes:
        found: Names of the parameters whose sums are known.
        has_host: Whether some sums were computed on the CPU beside a GPU.
        values: Sums [names] on the device, and on the CPU if that is another device.
    """

    def __init__(self, names: Sequence[str], device: torch.device) -> None:
        self._names = tuple(names)
        self._at = {name: index for index, name in enumerate(names)}
        self._devices = (device, torch.device("cpu")) if device.type != "cpu" else (device,)
        self._on_cuda = CudaSums()
        self._kept_indices: dict[tuple[tuple[str, ...], torch.device], torch.Tensor] = {}
        self.clear()

    def clear(self) -> None:
        """Forget all sums."""
        self.found: set[str] = set()
        self.has_host = False
        self.values = [torch.zeros(len(self._names), dtype=torch.float64, device=device) for device in self._devices]

    def find(self, grads: Mapping[str, torch.Tensor]) -> None:
        """Compute and store the sums of squares of `grads` on the device that holds them; see `sum_squares`."""
        self.put(grads, _sum_squares([*grads.values()], self._on_cuda))

    def put(self, names: Iterable[str], values: torch.Tensor) -> None:
        """Store `values`, fp64 [names] on the device or the CPU, as the sums of `names`."""
        names = tuple(names)
        self.drop(names)
        where = [device.type for device in self._devices].index(values.device.type)
        self.has_host = self.has_host or where > 0
        if names == self._names:
            self.values[where] = values
        elif names:
            self.values[where][self._indices(names, self._devices[where])] = values
        self.found.update(names)

    def of(self, names: Sequence[str]) -> torch.Tensor:
        """Return the sums of `names`, fp64 [len(names)], on the device."""
        values = [each.to(self._devices[0]) for each in self.values[: 1 + self.has_host]]
        return sum(values[1:], values[0])[[self._at[name] for name in names]]

    def _indices(self, names: tuple[str, ...], device: torch.device) -> torch.Tensor:
        """Return the positions of `names` on a device, copied there once, since the host waits for such a copy."""
        if (names, device) not in self._kept_indices:
            self._kept_indices[names, device] = torch.tensor([self._at[name] for name in names], device=device)
        return self._kept_indices[names, device]

    def drop(self, names: Iterable[str]) -> None:
        """Forget the sums of `names`."""
        for name in self.found.intersection(names):
            for values in self.values:
                values[self._at[name]] = 0.0
            self.found.discard(name)


def sum_squares(grads: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sum of squares of each gradient, fp64 [len(grads)], on the device that holds them.

    The bits are the same on a CPU and a GPU. On a GPU the host does not wait, but every call builds its tables anew:
    for the sums of every step use `SquareSums.find`, which keeps them.

    Args:
        grads: Contiguous tensors on the CPU or on one GPU, all fp32, bf16 or fp16.
    """
    return _sum_squares(grads, CudaSums())


def _sum_squares(grads: Sequence[torch.Tensor], on_cuda: CudaSums) -> torch.Tensor:
    if not grads or not grads[0].is_cuda:
        return cpu_kernels.sum_squares(grads)
    if not has_memory(grads[0]):
        return torch.zeros(len(grads), dtype=torch.float64, device=grads[0].device)
    return on_cuda.sum_squares(grads)
