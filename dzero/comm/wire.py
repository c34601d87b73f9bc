"""Formats of payloads on the wire: elements of a dtype, or blocks of 8 or 4 bits each (ZeRO++, Wang et al. 2023).

A part of a unit's buffer is the shards of several parameters, one after the other. Matrices are cut into blocks of
`BLOCK_ELEMS` elements, none of which reaches into another parameter; parameters with one dimension, such as norms and
biases, are sent as they are. As bytes, a part is:

    scales   fp32 [blocks]     int8, int4: largest magnitude of the block / 127, or / 7
                               fp8: smallest power of two for which no magnitude / scale is above 448
    whole    fp32 [elements]   parameters with one dimension
    codes    [elements]        x / scale as an integer, one byte each or two to a byte, or as a float of 8 bits (e4m3)

Codes are rounded to the nearest, ties to even. A block with an element that is not finite decodes to NaN, so that an
overflow is seen by every rank. A block below 2^-100 decodes to zeros. Each operation is one in IEEE fp32, so that the
bits depend on the block alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
import torch

from dzero.comm.block_kernels import BLOCK_ELEMS, decode_kernel, encode_kernel
from dzero.comm.cuda_blocks import CudaBlocks
from dzero.comm.hops import Hops, Leg
from dzero.utils.numba_views import Array, as_array, has_memory

SCALE_BYTES = WHOLE_BYTES = 4
FORMATS = {"int8": 8, "int4": 4, "fp8": 8}
"""Bits of a code, by the name of the format in settings."""


@dataclass(frozen=True)
class Blocks:
    """Format of one rank's part on the wire.

    Attributes:
        sizes: For each parameter, the elements of its shard in the part, and whether they are sent whole.
        code: Format of a code, a key of `FORMATS`.
        starts: First element of each parameter in the tensors to encode or decode; (): one after the other.
    """

    sizes: tuple[tuple[int, bool], ...]
    code: str
    starts: tuple[int, ...] = ()

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return FORMATS[self.code]

    @property
    def elems(self) -> int:
        """Number of elements."""
        return sum(elems for elems, _ in self.sizes)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the payload, a multiple of 4."""
        quantized = [elems for elems, is_whole in self.sizes if not is_whole]
        scales = sum(-(-elems // BLOCK_ELEMS) for elems in quantized)
        codes = sum(-(-elems * self.bits // 8) for elems in quantized)
        return scales * SCALE_BYTES + (self.elems - sum(quantized)) * WHOLE_BYTES + -(-codes // 4) * 4

    def encode(self, source: torch.Tensor, row: torch.Tensor) -> None:
        """Write the payload of `source` [elems], in fp32, bf16 or fp16, to `row`, uint8 [>= nbytes]."""
        if not has_memory(source):
            return
        if source.dtype == torch.float16:
            source = source.float()
        wide, codes = self._sections(row)
        if source.is_cuda:
            self._on(source.device).encode(wide, codes, source)
            return
        kernel = encode_kernel(code=self.code, bf16=source.dtype == torch.bfloat16)
        kernel(*self._tables, as_array(wide), as_array(codes), as_array(source))

    def encoders(self, source: torch.Tensor, row: torch.Tensor, count: int) -> list[Callable[[], None]]:
        """Return about `count` functions, one for each thread, that together encode in host memory as `encode` does."""
        source = source.float() if source.dtype == torch.float16 else source
        wide, codes, values = *map(as_array, self._sections(row)), as_array(source)
        blocks, whole = self._tables
        kernel = encode_kernel(code=self.code, bf16=source.dtype == torch.bfloat16)
        length = max(1, -(-len(blocks) // count))
        return [
            partial(kernel, blocks[:0], whole, wide, codes, values),
            *(
                partial(kernel, blocks[at : at + length], whole[:0], wide[at:], codes, values)
                for at in range(0, len(blocks), length)
            ),
        ]

    def decode(self, row: torch.Tensor, target: torch.Tensor) -> None:
        """Write the values of `row`, uint8 [>= nbytes], to `target` [elems], rounded to its dtype."""
        if not has_memory(target):
            return
        values = target.float() if target.dtype == torch.float16 else target
        self._read(row, values, adds=False)
        if values is not target:
            target.copy_(values)

    def add(self, row: torch.Tensor, total: torch.Tensor) -> None:
        """Add the values of `row`, uint8 [>= nbytes], to `total`, fp32 [elems]."""
        if has_memory(total):
            self._read(row, total, adds=True)

    def cut(self, most_elems: int) -> Iterator[tuple[int, Blocks]]:
        """Yield (first element, format) of consecutive pieces of about `most_elems` elements; no block is divided."""
        most = -(-most_elems // BLOCK_ELEMS) * BLOCK_ELEMS
        start, held = 0, list[tuple[int, bool]]()
        for elems, is_whole in self.sizes:
            while elems:
                room = most - sum(size for size, _ in held)
                taken = elems if elems <= room else room // BLOCK_ELEMS * BLOCK_ELEMS
                held += [(taken, is_whole)] if taken else []
                elems -= taken
                if elems:
                    yield start, Blocks((*held,), self.code)
                    start, held = start + sum(size for size, _ in held), []
        if held:
            yield start, Blocks((*held,), self.code)

    def _read(self, row: torch.Tensor, target: torch.Tensor, *, adds: bool) -> None:
        """Write the values of a payload to `target`, fp32 or bf16, or add them to it in fp32."""
        wide, codes = self._sections(row)
        if target.is_cuda:
            self._on(target.device).decode(wide, codes, target, adds=adds)
            return
        kernel = decode_kernel(code=self.code, adds=adds, bf16=target.dtype == torch.bfloat16)
        kernel(*self._tables, as_array(wide), as_array(codes), as_array(target))

    def _sections(self, row: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the fp32 (scales and whole elements) and the codes of a payload."""
        blocks, whole = self._tables
        wide = (len(blocks) + int(whole[:, 1].sum())) * SCALE_BYTES
        return row[:wide].view(torch.float32), row[wide : self.nbytes]

    def _on(self, device: torch.device) -> CudaBlocks:
        if device not in self._by_device:
            self._by_device[device] = CudaBlocks(*self._tables, self.code, device)
        return self._by_device[device]

    @cached_property
    def _by_device(self) -> dict[torch.device, CudaBlocks]:
        """Tables on GPUs."""
        return {}

    @cached_property
    def _tables(self) -> tuple[Array, Array]:
        """The kernels' `blocks` and `whole`."""
        blocks, runs, start, codes = list[Sequence[int]](), list[Sequence[int]](), 0, 0
        for index, (elems, is_whole) in enumerate(self.sizes):
            start = self.starts[index] if self.starts else start
            if is_whole:
                runs.append((start, elems, 0))
            for first in range(0, 0 if is_whole else elems, BLOCK_ELEMS):
                size = min(BLOCK_ELEMS, elems - first)
                blocks.append((start + first, size, codes + first * self.bits // 8))
            codes += 0 if is_whole else -(-elems * self.bits // 8)
            start += elems
        whole = np.array(runs, np.int64).reshape(-1, 3)
        whole[:, 2] = len(blocks) + np.cumsum(whole[:, 1]) - whole[:, 1]
        return np.array(blocks, np.int64).reshape(-1, 3), whole


@dataclass(frozen=True)
class Plain:
    """Format of elements of a dtype.

    Attributes:
        elems: Number of elements.
        dtype: Their dtype on the wire.
    """

    elems: int
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the payload."""
        return self.elems * self.dtype.itemsize

    def encode(self, source: torch.Tensor, row: torch.Tensor) -> None:
        """Write `source` [<= elems] to `row`, uint8 [>= nbytes], rounded to the dtype."""
        self._values(row)[: source.numel()].copy_(source)

    def decode(self, row: torch.Tensor, target: torch.Tensor) -> None:
        """Write the values of `row` to `target` [elems]."""
        target.copy_(self._values(row))

    def add(self, row: torch.Tensor, total: torch.Tensor) -> None:
        """Add the values of `row` to `total`, fp32 [elems]."""
        total.add_(self._values(row).to(torch.float32))

    def _values(self, row: torch.Tensor) -> torch.Tensor:
        return row[: self.nbytes].view(self.dtype)


Wire = torch.dtype | Blocks
"""Format of a reduction's payload."""


def dtype_on_wire(wire: Wire) -> torch.dtype:
    """Return the dtype under which traffic in this format is counted: bytes for blocks."""
    return torch.uint8 if isinstance(wire, Blocks) else wire


def legs_of_sum(wire: Wire, elems: int, hops: Hops) -> tuple[Leg, ...]:
    """Return the legs of the sum of parts of `elems` elements."""
    if isinstance(wire, Blocks):
        return hops.of_sum(wire.nbytes, wire.nbytes)
    return hops.of_sum(elems * wire.itemsize, elems * 4)
