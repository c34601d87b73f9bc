"""Between an fp32 master and its working copy: rounding, and the exact 16-bit remainder.

    hi  = ((bits + 0x8000) >> 16) & 0xFFFF      the bf16 working copy: nearest, ties away from zero
    rem = int16(bits & 0xFFFF)                  what the rounding took away, in units of the last fp32 place
    master bits = ((hi << 16) + rem) mod 2^32   exact for all 2^32 patterns

An int16 spans [-2^15, 2^15): a tie (low half 0x8000) is -2^15, so it must round away from zero; ties-to-even would need
+2^15 for half of them. Every kind of master makes its bf16 copy this way, so that the kinds agree to the bit. A NaN's
pattern may carry into an infinity's: NaN never enters a master (a non-finite gradient skips the step).
"""

from __future__ import annotations

import torch


def to_working(master: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A new tensor: `master` [any shape, fp32] rounded once to `dtype` (bf16: ties away; fp16: ties to even)."""
    if dtype != torch.bfloat16:
        return master.to(dtype, copy=True)
    return high_half(master.contiguous().view(torch.int32)).view(torch.bfloat16)


def split(master: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """fp32 [any shape] -> (bf16 working copy, int16 remainder), both new."""
    bits = master.contiguous().view(torch.int32)
    return high_half(bits).view(torch.bfloat16), bits.to(torch.int16)


def join(working: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
    """(bf16, int16 remainder) -> the fp32 master, exactly; a new tensor."""
    high = working.contiguous().view(torch.int16).to(torch.int32) << 16
    return high.add_(remainder).view(torch.float32)


def high_half(bits: torch.Tensor) -> torch.Tensor:
    """int32 patterns of fp32 -> int16 patterns of the nearest bf16, ties away from zero (mod 2^32 arithmetic)."""
    return ((bits + 0x8000) >> 16).to(torch.int16)
