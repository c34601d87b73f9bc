"""Launches of the kernels of comm/block_triton.py; comm/wire.py describes the format."""

from __future__ import annotations

from contextlib import nullcontext

import torch

from dzero.comm.block_kernels import BLOCK_ELEMS
from dzero.utils.numba_views import Array
from dzero.utils.triton_modules import triton_module

KERNELS = "dzero.comm.block_triton"
"""Module with the source of the kernels."""


class CudaBlocks:
    """Tables of one format on a device.

    Args:
        blocks: First element, elements and place of the codes of each block, int64 [blocks, 3].
        whole: First element, elements and place of each run of elements that are sent whole, int64 [runs, 3].
        code: Format of a code (comm/wire.py).
        device: A GPU, or the CPU under Triton's interpreter.
    """

    def __init__(self, blocks: Array, whole: Array, code: str, device: torch.device) -> None:
        self._source, self._code, self._count = triton_module(KERNELS), code, len(blocks)
        self._blocks = torch.from_numpy(blocks).to(device)
        runs = [torch.arange(start, start + elems) for start, elems, _ in whole.tolist()]
        self._whole = torch.cat(runs).to(device) if runs else None

    def encode(self, wide: torch.Tensor, codes: torch.Tensor, source: torch.Tensor) -> None:
        """Write the payload of `source`, fp32 or bf16, to its fp32 section `wide` and its section of codes."""
        if self._whole is not None:
            wide[self._count :] = source[self._whole]
        if self._count:
            patterns = _patterns(source)
            self._launch("encode_kernel", wide, codes, patterns, BF16=patterns is not source)

    def decode(self, wide: torch.Tensor, codes: torch.Tensor, target: torch.Tensor, *, adds: bool) -> None:
        """Write the values of a payload to `target`, fp32 or bf16, or add them to it in fp32."""
        if self._whole is not None:
            values = wide[self._count :]
            target[self._whole] = (target[self._whole] + values if adds else values).to(target.dtype)
        if self._count:
            patterns = _patterns(target)
            self._launch("decode_kernel", wide, codes, patterns, ADDS=adds, BF16=patterns is not target)

    def _launch(
        self, kernel: str, wide: torch.Tensor, codes: torch.Tensor, values: torch.Tensor, **options: bool
    ) -> None:
        with torch.cuda.device(values.device) if values.is_cuda else nullcontext():
            launch = getattr(self._source, kernel)[(self._count,)]
            launch(
                self._blocks, wide, codes, values, CODE=self._code, BLOCK=BLOCK_ELEMS, **options, **self._source.OPTIONS
            )


def _patterns(values: torch.Tensor) -> torch.Tensor:
    return values.view(torch.uint16) if values.dtype == torch.bfloat16 else values
