"""Rounding of fp32 master parameters to the working dtype, and the exact 16-bit remainder.

    hi  = ((bits + 0x8000) >> 16) & 0xFFFF      the bf16 parameter: nearest, ties away from zero
    rem = int16(bits & 0xFFFF)                  the rounding error, in units of the last fp32 place
    master bits = ((hi << 16) + rem) mod 2^32   exact for all 2^32 patterns

An int16 spans [-2^15, 2^15). A tie (low half 0x8000) is -2^15, so it must round away from zero; ties-to-even would need
+2^15 for half of them. All kinds of master parameters round to bf16 this way, so that they agree to the bit. The
pattern of a NaN may carry into that of an infinity, but a NaN never enters a master, because a non-finite gradient
skips the step.
"""

from __future__ import annotations

import torch


def to_working(master: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Round `master` [any shape, fp32] once to `dtype`, into a new tensor (bf16: ties away; fp16: ties to even)."""
    if dtype != torch.bfloat16:
        return master.to(dtype, copy=True)
    return high_half(master.contiguous().view(torch.int32)).view(torch.bfloat16)


def split(master: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Split an fp32 tensor [any shape] into new tensors: the bf16 parameter and the int16 remainder."""
    bits = master.contiguous().view(torch.int32)
    return high_half(bits).view(torch.bfloat16), bits.to(torch.int16)


def join(working: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
    """Return the exact fp32 master of a bf16 parameter and its int16 remainder, as a new tensor."""
    high = working.contiguous().view(torch.int16).to(torch.int32) << 16
    return high.add_(remainder).view(torch.float32)


def high_half(bits: torch.Tensor) -> torch.Tensor:
    """Round int32 patterns of fp32 to int16 patterns of the nearest bf16, ties away from zero, modulo 2^32."""
    return ((bits + 0x8000) >> 16).to(torch.int16)
