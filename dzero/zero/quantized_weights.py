"""Frozen matrices in 8 or 4 bits: what a row is stored as, and its exact decoding (QLoRA, Dettmers et al. 2023).

    value = level[code] * scale        of its block of 64 elements of a row
    scale   bf16                       largest magnitude of the block
    code    int8: 1 byte               index of one of 255 levels, the multiples of 1/128 in [-1, 1] but +-127/128
            nf4: 4 bits                index of one of 16 levels, the quantiles of a normal distribution
    row     uint8                      the scales of its blocks, then its codes; in 4 bits the first is the high half

A row takes 66 bytes per 64 elements in 8 bits and 34 in 4, 8.25 and 4.25 bits per element. A block lies in one row, so
that `Shard(0)` cuts the stored matrix as it cuts the values, and no value depends on the number of ranks. Encoding what
was decoded gives the same bytes.

Levels, scales and products are rounded to the working dtype; all levels in 8 bits are exact in bf16. Decoding takes
three operators per `ELEMS_AT_ONCE` elements, on any device.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

BLOCK_ELEMS = 64
"""Elements of a block, which share one scale; also QLoRA's."""
SCALE_BYTES = 2
ELEMS_AT_ONCE = 1 << 22
"""Elements that are encoded or decoded at once; decoding takes 16 MiB of temporaries, which stay in a cache."""
# Section 3 of the paper: quantiles of the standard normal distribution, symmetric around an exact zero.
NORMAL_LEVELS = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)


@dataclass(frozen=True)
class WeightCodec:
    """Format of quantized weights.

    Attributes:
        name: Value of `precision.frozen`.
        levels: Ascending levels in [-1, 1], both ends included.
        per_byte: Codes in a byte.
    """

    name: str
    levels: tuple[float, ...]
    per_byte: int

    def row_bytes(self, row_elems: int) -> int:
        """Return the bytes of a row of `row_elems` elements, a multiple of `BLOCK_ELEMS`."""
        return row_elems // BLOCK_ELEMS * SCALE_BYTES + row_elems // self.per_byte

    def decode_bytes(self, itemsize: int) -> float:
        """Return the bytes that `decode` reads and writes per element, for a working dtype of `itemsize` bytes."""
        index = 1 + 2 * torch.int32.itemsize  # a code becomes an index, which is read again
        return index / self.per_byte + 3 * itemsize

    def encode(self, values: Tensor) -> Tensor:
        """Quantize `values` [rows, row_elems, a multiple of BLOCK_ELEMS] into a new tensor [rows, bytes] of uint8."""
        rows, elems = values.shape
        packed = torch.empty(rows, self.row_bytes(elems), dtype=torch.uint8, device=values.device)
        step = max(1, ELEMS_AT_ONCE // elems)
        for first in range(0, rows, step):
            scale, codes = self._quantize(values[first : first + step].float())
            part = packed[first : first + step]
            part[:, : -codes.shape[1]] = scale.view(torch.uint8)
            part[:, -codes.shape[1] :] = codes
        return packed

    def decode(self, packed: Tensor, out: Tensor) -> None:
        """Write the values of `packed` [rows, bytes] into `out` [rows, row_elems], a contiguous tensor."""
        table = self._tables.get((out.dtype, out.device))
        if table is None:
            table = self._tables[out.dtype, out.device] = self._table(out.dtype).to(out.device)
        rows, elems = out.shape
        codes_at = elems // BLOCK_ELEMS * SCALE_BYTES
        scales = packed[:, :codes_at].view(torch.bfloat16).to(out.dtype).unsqueeze(-1)
        step = max(1, ELEMS_AT_ONCE // elems)
        for first in range(0, rows, step):
            codes = packed[first : first + step, codes_at:].int().view(-1)  # a part of rows becomes contiguous with it
            part = out[first : first + step].view(-1, elems // BLOCK_ELEMS, BLOCK_ELEMS)
            torch.mul(
                table.index_select(0, codes).view(out.dtype).view(part.shape), scales[first : first + step], out=part
            )

    def _quantize(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return the scales [rows, blocks] in bf16 and the packed codes [rows, bytes] of fp32 `values`."""
        blocks = values.view(len(values), -1, BLOCK_ELEMS)
        scale = blocks.abs().amax(-1).bfloat16()
        ratio = (blocks / scale.float().unsqueeze(-1)).nan_to_num_(0.0, 1.0, -1.0)  # a block of zeros has no ratios
        codes = torch.bucketize(ratio, self._bounds.to(values.device), out_int32=True).to(torch.uint8).flatten(1)
        if self.per_byte == 2:
            codes = codes[:, ::2] << 4 | codes[:, 1::2]
        return scale, codes

    @cached_property
    def _bounds(self) -> Tensor:
        """fp32 bounds between neighboring levels, half way."""
        levels = torch.tensor(self.levels, dtype=torch.float64)
        return ((levels[1:] + levels[:-1]) / 2).float()

    @cached_property
    def _tables(self) -> dict[tuple[torch.dtype, torch.device], Tensor]:
        return {}

    def _table(self, dtype: torch.dtype) -> Tensor:
        """Return what each byte stands for: one level, or two of them side by side as one wider integer [256]."""
        levels = torch.tensor(self.levels, dtype=torch.float64).to(dtype)
        if self.per_byte == 1:
            return torch.cat([levels, levels.new_zeros(256 - len(levels))])
        pairs = torch.stack([levels.repeat_interleave(16), levels.repeat(16)], 1)
        return pairs.view(torch.int64 if dtype == torch.float32 else torch.int32).view(256)


CODECS = {
    codec.name: codec
    for codec in (
        WeightCodec("int8", (-1.0, *(code / 128 for code in range(-126, 127)), 1.0), 1),
        WeightCodec("nf4", NORMAL_LEVELS, 2),
    )
}
"""Formats by their names in `precision.frozen`."""
