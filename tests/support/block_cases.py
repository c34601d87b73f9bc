"""Payloads in blocks by the CPU kernels and by those for CUDA, for tests on a GPU and under Triton's interpreter."""

from __future__ import annotations

import torch
from torch import Tensor

from dzero.comm.cuda_blocks import CudaBlocks
from dzero.comm.wire import Blocks

SIZES = ((1000, False), (7, True), (257, False), (0, False), (1, False), (512, False), (3, True))
DTYPES = (torch.float32, torch.bfloat16)


def values(dtype: torch.dtype) -> Tensor:
    """Values of many magnitudes, with ties, zeros, a tiny block, an infinity and a NaN."""
    generator = torch.Generator().manual_seed(1)
    elems = sum(size for size, _ in SIZES)
    drawn = torch.randn(elems, generator=generator) * torch.randn(elems, generator=generator).exp()
    drawn[:256] = torch.arange(256) / 2 - 63.5
    drawn[300], drawn[800] = float("inf"), float("nan")
    drawn[1268:1400] = 1e-36
    return drawn.to(dtype)


def through_blocks(values: Tensor, code: str) -> Tensor:
    """What fp32 values are after a trip in blocks of 256 elements, by their definition in plain torch."""
    pieces = []
    for piece in values.split(256):
        largest = piece.abs().max() if len(piece) else torch.tensor(0.0)
        if largest == 0:
            pieces.append(piece)
        elif code == "fp8":  # torch's own cast, of the values over the smallest power of two that keeps them below 448
            scale = torch.exp2(torch.ceil(torch.log2(largest.double() / 448)))
            pieces.append((piece.double() / scale).float().to(torch.float8_e4m3fn).float() * scale.float())
        else:
            most = torch.tensor(2.0 ** (int(code.removeprefix("int")) - 1) - 1)
            pieces.append(torch.round(piece * (most / largest)) * (largest / most))
    return torch.cat(pieces)


def kernels_differ(device: str, code: str, dtype: torch.dtype) -> list[str]:
    """What the kernels for CUDA, on tensors of `device`, make otherwise than the CPU kernels."""
    blocks, source = Blocks(SIZES, code), values(dtype)
    row = torch.zeros(blocks.nbytes, dtype=torch.uint8)
    blocks.encode(source, row)
    table = CudaBlocks(*blocks._tables, code, torch.device(device))
    other = torch.zeros(blocks.nbytes, dtype=torch.uint8, device=device)
    table.encode(*blocks._sections(other), source.to(device))
    (wide, codes), (other_wide, other_codes) = blocks._sections(row), blocks._sections(other.cpu())
    differ = [] if same(wide, other_wide) and torch.equal(codes, other_codes) else ["encode"]
    for adds in (False, True):
        want = torch.ones(blocks.elems, dtype=torch.float32 if adds else dtype)
        got = want.clone().to(device)
        (blocks.add if adds else blocks.decode)(row, want)
        table.decode(*blocks._sections(row.to(device)), got, adds=adds)
        differ += [] if same(want, got.cpu()) else [f"decode, {adds=}"]
    return differ


def same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have the same values, NaN included."""
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a[~a.isnan()], b[~b.isnan()])
