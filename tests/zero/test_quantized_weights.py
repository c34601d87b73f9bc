"""Formats of quantized weights against their definition, element by element."""

from __future__ import annotations

import pytest
import torch

from dzero.zero import quantized_weights
from dzero.zero.quantized_weights import BLOCK_ELEMS, CODECS, NORMAL_LEVELS

FORMATS = pytest.mark.parametrize("name", CODECS)
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
BITS = {"int8": 8.25, "nf4": 4.25}


def decoded(name: str, values: torch.Tensor) -> torch.Tensor:
    found = torch.full_like(values, torch.nan)
    CODECS[name].decode(CODECS[name].encode(values), found)
    return found


def drawn(rows: int, elems: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows of very different sizes, with a block of zeros."""
    values = torch.randn(rows, elems, generator=torch.Generator().manual_seed(1))
    values *= torch.logspace(-6, 2, rows).unsqueeze(1)
    values[0, :BLOCK_ELEMS] = 0
    return values.to(dtype)


def test_levels_in_4_bits_are_quantiles_of_the_normal_distribution() -> None:
    def quantiles(count: int) -> torch.Tensor:  # QLoRA, equation 4, for one half of the distribution
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
