"""A master splits into a bf16 working copy and a 16-bit remainder, and comes back exactly: for every pattern."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dzero.zero.rounding import join, split, to_working

# zeros, denormals, the smallest normal, 1, odd and even neighbours, the largest finite, infinity; and the negatives
HIGH_HALVES = [0x0000, 0x0001, 0x0002, 0x007F, 0x0080, 0x0081, 0x3F7F, 0x3F80, 0x3F81, 0x4049, 0x7F7E, 0x7F7F, 0x7F80]
HIGH_HALVES += [high | 0x8000 for high in HIGH_HALVES]
HIGH_HALVES += list(range(0x0100, 0x7F00, 0x0333))


def signed(patterns: Tensor, bits: int) -> Tensor:
    """Unsigned patterns (int64) as two's complement values of `bits` bits."""
    return torch.where(patterns >= 1 << (bits - 1), patterns - (1 << bits), patterns)


def masters(patterns: Tensor) -> Tensor:
    """int64 in [0, 2^32) -> the fp32 values with these patterns."""
    return signed(patterns, 32).to(torch.int32).view(torch.float32)


def nearest_ties_away(patterns: Tensor) -> Tensor:
    """The bf16 pattern nearest to each fp32 pattern, by comparing its low half with one half: no addition of 0x8000."""
    high, low = patterns >> 16, patterns & 0xFFFF
    return (high + (low >= 0x8000)) & 0xFFFF


def check(patterns: Tensor) -> None:
    """All promises for int64 patterns [n] of anything but NaN."""
    master = masters(patterns)
    working, remainder = split(master)
    assert (working.dtype, remainder.dtype) == (torch.bfloat16, torch.int16)
    assert torch.equal(working.view(torch.int16).long() & 0xFFFF, nearest_ties_away(patterns))
    assert torch.equal(to_working(master, torch.bfloat16).view(torch.int16), working.view(torch.int16))
    assert torch.equal(join(working, remainder).view(torch.int32), master.view(torch.int32))


def test_every_low_half_of_many_high_halves_is_reconstructed() -> None:
    low = torch.arange(1 << 16)
    for high in HIGH_HALVES:
        patterns = high * 65536 + low
        check(patterns[:1] if high & 0x7FFF == 0x7F80 else patterns)  # behind infinity's zero low half lie NaNs


@pytest.mark.slow
def test_every_pattern_of_32_bits_is_reconstructed() -> None:
    """join(split(x)) holds for NaN patterns too; the rounding is meant for numbers."""
    block = 1 << 18  # stays in a cache
    for start in range(0, 1 << 32, block):
        patterns = torch.arange(start, start + block)
        if (start & 0x7FFFFFFF) < 0x7F800000:
            check(patterns)
        else:
            master = masters(patterns)
            assert torch.equal(join(*split(master)).view(torch.int32), master.view(torch.int32))


def test_rounding_is_the_nearest_bf16_measured_in_float64() -> None:
    generator = torch.Generator().manual_seed(0)
    master = torch.randn(100_000, generator=generator) * torch.randn(100_000, generator=generator).exp()
    ours, torchs = to_working(master, torch.bfloat16), master.to(torch.bfloat16)
    error = (ours.double() - master.double()).abs()
    assert torch.equal(error, (torchs.double() - master.double()).abs())  # torch's differs at ties only
    ties = (master.view(torch.int32) & 0xFFFF) == 0x8000
    assert torch.equal(ours[~ties], torchs[~ties])


def test_ties_round_away_from_zero_and_the_largest_values_to_infinity() -> None:
    patterns = torch.tensor([0x3F808000, 0x3F818000, 0xBF808000, 0x7F7F7FFF, 0x7F7F8000])
    expected = [0x3F81, 0x3F82, 0xBF81, 0x7F7F, 0x7F80]
    assert (to_working(masters(patterns), torch.bfloat16).view(torch.int16).long() & 0xFFFF).tolist() == expected


def test_other_working_dtypes_are_torchs_own_rounding_and_new_tensors() -> None:
    master = torch.randn(100)
    assert torch.equal(to_working(master, torch.float16), master.half())
    same = to_working(master, torch.float32)
    assert torch.equal(same, master)
    assert same.data_ptr() != master.data_ptr()
