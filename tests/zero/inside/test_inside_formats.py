"""Formats of weights against their definitions: bf16 and a remainder, blocks of 8 or 4 bits, and operands in fp8."""

from __future__ import annotations

import pytest
import reference
import torch
from torch import Tensor

from dzero.comm.wire import Blocks
from dzero.zero import quantized_weights
from dzero.zero.quantized_weights import BLOCK_ELEMS, CODECS, NORMAL_LEVELS
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


def check(patterns: Tensor) -> None:
    """All promises for int64 patterns [n] of anything but NaN."""
    master = masters(patterns)
    working, remainder = split(master)
    assert (working.dtype, remainder.dtype) == (torch.bfloat16, torch.int16)
    assert torch.equal(working.view(torch.int16), reference.to_working(master, torch.bfloat16).view(torch.int16))
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


FORMATS = pytest.mark.parametrize("name", CODECS)
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
BITS = {"int8": 8.25, "nf4": 4.25}


def decoded(name: str, values: Tensor) -> Tensor:
    found = torch.full_like(values, torch.nan)
    CODECS[name].decode(CODECS[name].encode(values), found)
    return found


def drawn(rows: int, elems: int, dtype: torch.dtype) -> Tensor:
    """Rows of very different sizes, with a block of zeros."""
    values = torch.randn(rows, elems, generator=torch.Generator().manual_seed(1))
    values *= torch.logspace(-6, 2, rows).unsqueeze(1)
    values[0, :BLOCK_ELEMS] = 0
    return values.to(dtype)


def test_levels_in_4_bits_are_quantiles_of_the_normal_distribution() -> None:
    def quantiles(count: int) -> Tensor:  # QLoRA, equation 4, for one half of the distribution
        outermost = 0.9677083
        return torch.special.ndtri(torch.linspace(outermost, 0.5, count, dtype=torch.float64))

    positive, negative = quantiles(9), -quantiles(8)
    levels = torch.cat([positive, negative[:-1]]).sort().values / positive.max()
    torch.testing.assert_close(torch.tensor(NORMAL_LEVELS, dtype=torch.float64), levels, rtol=0, atol=2e-7)


@FORMATS
@DTYPES
def test_values_are_the_nearest_level_times_the_largest_of_their_block(name: str, dtype: torch.dtype) -> None:
    values = drawn(6, 3 * BLOCK_ELEMS, dtype)
    found, levels = decoded(name, values), torch.tensor(CODECS[name].levels, dtype=torch.float64)
    for row, stored in zip(values, found, strict=True):
        for block, each in zip(row.split(BLOCK_ELEMS), stored.split(BLOCK_ELEMS), strict=True):
            scale = block.abs().max().bfloat16()
            ratios = (block.double() / scale.double()).nan_to_num(0.0)
            codes = (ratios[:, None] - levels).abs().argmin(1)
            want = levels.to(dtype)[codes] * scale.to(dtype)
            assert torch.equal(each, want)


@FORMATS
@DTYPES
def test_what_was_decoded_is_encoded_to_the_same_bytes(name: str, dtype: torch.dtype) -> None:
    values = drawn(512, 8 * BLOCK_ELEMS, dtype)
    assert torch.equal(CODECS[name].encode(decoded(name, values)), CODECS[name].encode(values))


@FORMATS
def test_rows_are_stored_by_themselves_in_the_bytes_of_the_formula(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    values = drawn(10, 5 * BLOCK_ELEMS, torch.bfloat16)
    packed = CODECS[name].encode(values)
    assert packed.dtype == torch.uint8
    assert packed.numel() == values.numel() * BITS[name] / 8
    monkeypatch.setattr(quantized_weights, "ELEMS_AT_ONCE", 1)
    for row, stored, found in zip(values.split(1), packed.split(1), decoded(name, values).split(1), strict=True):
        assert torch.equal(CODECS[name].encode(row), stored)
        assert torch.equal(decoded(name, row), found)


@FORMATS
def test_what_is_not_finite_shows(name: str) -> None:
    values = torch.zeros(1, 2 * BLOCK_ELEMS)
    values[0, 3] = torch.inf
    assert decoded(name, values)[0, 3].isnan()
    assert (decoded(name, values)[0, BLOCK_ELEMS:] == 0).all()


def operand(weight: Tensor, dim: int) -> Tensor:
    """Values that a product with `fp8_rowwise` sees: scales are powers of two that keep rows or columns below 448."""
    largest = weight.double().abs().amax(dim, keepdim=True)
    scale = torch.exp2(torch.ceil(torch.log2(largest / 448)))
    return (weight.double() / scale).float().to(torch.float8_e4m3fn).double() * scale


@pytest.mark.parametrize(("code", "least", "most"), [("fp8", 0.0, 1e-3), ("int8", 0.05, 1.0)])
def test_gathers_in_fp8_leave_the_operands_of_rowwise_products(code: str, least: float, most: float) -> None:
    """Both scales are powers of two, so a value is rounded again only where it is tiny beside its row."""
    weight = torch.randn(128, 1024, generator=torch.Generator().manual_seed(0)).mul(0.02).bfloat16()
    blocks = Blocks(((weight.numel(), False),), code)
    row, gathered = torch.empty(blocks.nbytes, dtype=torch.uint8), torch.empty_like(weight)
    blocks.encode(weight.flatten(), row)
    blocks.decode(row, gathered.view(-1))
    for dim in (0, 1):
        differ = (operand(weight, dim) != operand(gathered, dim)).float().mean().item()
        assert least <= differ <= most
