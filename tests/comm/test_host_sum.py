"""The one-pass sum against torch's operations, on bit patterns of every kind: NaN, infinity, subnormals, ties."""

from __future__ import annotations

import itertools

import pytest
import torch

from dzero.comm import host_sum

FP32, BF16 = torch.float32, torch.bfloat16


def patterns(elems: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Random bits, so every exponent occurs, among them those of NaN and of subnormals."""
    integers = torch.int32 if dtype == FP32 else torch.int16
    limits = torch.iinfo(integers)
    drawn = torch.randint(limits.min, limits.max, (elems,), generator=torch.Generator().manual_seed(seed))
    return drawn.to(integers).view(dtype)


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize(("wire", "kept"), list(itertools.product(host_sum.DTYPES, repeat=2)))
def test_the_kernel_gives_the_bits_of_torchs_operations(wire: torch.dtype, kept: torch.dtype, ranks: int) -> None:
    elems = 3 * host_sum.TILE_ELEMS + 77
    payloads = [patterns(elems, wire, seed) for seed in range(ranks)]
    if wire == FP32 and kept == BF16:
        payloads[1:] = [torch.zeros(elems)] * (ranks - 1)  # values stay as drawn, so that ties to even occur
        payloads[0][:256] = (torch.arange(256, dtype=torch.int32) * 0x8000 + 0x3F800000).view(FP32) * ranks
    total = payloads[0].float()
    for payload in payloads[1:]:
        total = total + payload.float()
    want = (total * torch.tensor(1.0 / ranks)).to(kept)
    for rank in range(ranks):
        incoming = torch.stack(payloads)
        incoming[rank] = float("nan")  # never read: this rank's payload is passed as it is
        output = torch.empty(elems, dtype=kept)
        host_sum.average(output, payloads[rank], incoming, rank)
        bits = torch.int32 if kept == FP32 else torch.int16
        same = (output.view(bits) == want.view(bits)) | (output.isnan() & want.isnan())
        assert same.all()
        assert want.isnan().any()
        assert want.isfinite().sum() > elems / 2
