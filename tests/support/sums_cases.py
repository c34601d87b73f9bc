"""Gradients whose squares are summed, and the sums by NumPy: the order of the contract, written a second time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from dzero.optim.cpu_kernels import CHUNK_ELEMS

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SIZES = (0, 1, 255, 256, 257, 5000)
LONG = (CHUNK_ELEMS - 1, CHUNK_ELEMS, CHUNK_ELEMS + 300)
SPECIAL = (float("inf"), float("-inf"), float("nan"))


def gradient(size: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Values over as many binades as the dtype has, subnormal ones among them, so that every addition rounds."""
    generator = torch.Generator().manual_seed(1000 * size + seed)
    values = torch.randn(size, generator=generator) * (5 * torch.randn(size, generator=generator)).exp()
    values[3::101], values[50::101], values[51::101], values[52::101] = 0.0, 1e-40, 3e-45, -6e-8
    return (values.clamp(-6e4, 6e4) if dtype == torch.float16 else values).to(dtype)


def gradients(dtype: torch.dtype, sizes: Sequence[int] = SIZES) -> list[Tensor]:
    """One of each size, and for each special value one that ends in it."""
    special = [gradient(700, dtype) for _ in SPECIAL]
    for each, value in zip(special, SPECIAL, strict=True):
        each[-1] = value
    return [gradient(size, dtype) for size in sizes] + special


def by_numpy(grad: Tensor, chunk_elems: int = CHUNK_ELEMS) -> float:
    """The sum of squares of one gradient in the order of the contract."""
    squares, chunks = 0.0, grad.double().numpy()
    for begin in range(0, chunks.size, chunk_elems):
        chunk, lanes = chunks[begin : begin + chunk_elems], np.zeros(256)
        for start in range(0, chunk.size, 256):
            row = chunk[start : start + 256]
            lanes[: row.size] += row * row
        total = 0.0
        for lane in lanes.tolist():
            total += lane
        squares += total
    return squares


def same_bits(ours: Tensor, want: Tensor) -> bool:
    """Whether two fp64 tensors agree in every bit; of a NaN only that it is one, as its pattern is the machine's."""
    ours, want = ours.cpu(), want.cpu()
    nan = want.isnan()
    return torch.equal(ours.isnan(), nan) and torch.equal(ours[~nan].view(torch.int64), want[~nan].view(torch.int64))
