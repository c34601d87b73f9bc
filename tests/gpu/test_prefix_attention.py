"""One CUDA device: queries at the end of a longer row of keys, by flash attention and by tiles."""

from __future__ import annotations

import pytest
import torch

from dzero.parallel.context.attention import TILE_TOKENS, Masks, over_prefix

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("kv_heads", [8, 2])
@pytest.mark.parametrize(
    ("dtype", "dim", "allowed"), [(torch.bfloat16, 64, 2e-2), (torch.bfloat16, 12, 2e-2), (torch.float32, 64, 1e-3)]
)
def test_a_chunk_sees_the_keys_up_to_its_own_end(dtype: torch.dtype, dim: int, allowed: float, kv_heads: int) -> None:
    """Forward and backward, against attention written out; in bf16 within what bf16 can hold."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device: `pytest -m gpu` asks for one")
    time, length = TILE_TOKENS + 64, 3 * TILE_TOKENS
    sizes = ((2, 8, time, dim), (2, kv_heads, length, dim), (2, kv_heads, length, dim))
    given = [torch.randn(size, device="cuda", dtype=dtype, requires_grad=True) for size in sizes]
    grad = torch.randn(sizes[0], device="cuda", dtype=dtype)
    masks = Masks()
    masks.tokens = length + TILE_TOKENS
    got = torch.cat([*over_prefix(given[0], given[1], given[2], masks)], dim=2)
    got.backward(grad)

    query, key, value = (each.detach().double().requires_grad_() for each in given)
    keys, values = (each.repeat_interleave(8 // kv_heads, dim=1) for each in (key, value))
    later = torch.ones(time, length, device="cuda", dtype=torch.bool).triu(length - time + 1)
    scores = (query @ keys.transpose(2, 3) / dim**0.5).masked_fill(later, -torch.inf)
    want = scores.softmax(-1) @ values
    want.backward(grad.double())
    pairs = [(got, want), *((each.grad, plain.grad) for each, plain in zip(given, (query, key, value), strict=True))]
    for made, plain in pairs:
        assert made is not None
        assert plain is not None
        assert (made.double() - plain).norm() < allowed * plain.norm()
