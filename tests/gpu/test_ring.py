"""One CUDA device, a ring of one rank: torch's loops with flash attention, and gradients that come back."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from dzero.comm.context_exchange import ContextExchange
from dzero.comm.ledger import Ledger
from dzero.comm.reduction import NativeReduction
from dzero.parallel.context.ring import Ring

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("kv_heads", [8, 2])
def test_a_ring_of_one_is_causal_attention(tmp_path: Path, kv_heads: int) -> None:
    """Forward and backward in bf16, within what bf16 can hold."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device: `pytest -m gpu` asks for one")
    torch.cuda.set_device(0)
    where, device = f"file://{tmp_path}/rendezvous", torch.device("cuda", 0)
    dist.init_process_group(
        "nccl", init_method=where, rank=0, world_size=1, timeout=timedelta(seconds=60), device_id=device
    )
    try:
        group = dist.group.WORLD
        assert group is not None
        sizes = ((2, 8, 256, 64), (2, kv_heads, 256, 64), (2, kv_heads, 256, 64))
        given = [torch.randn(size, device=device, dtype=torch.bfloat16, requires_grad=True) for size in sizes]
        grad = torch.randn(sizes[0], device=device, dtype=torch.bfloat16)
        got = Ring(ContextExchange(NativeReduction(group), 0, "cp", Ledger()))(*given)
        got.backward(grad)
        plain = [each.detach().clone().requires_grad_() for each in given]
        want = F.scaled_dot_product_attention(*plain, is_causal=True, enable_gqa=kv_heads < 8)
        want.backward(grad)
        for made, due in [(got, want), *((a.grad, b.grad) for a, b in zip(given, plain, strict=True))]:
            assert made is not None
            assert due is not None
            assert (made - due).float().norm() < 2e-2 * due.float().norm()
    finally:
        dist.destroy_process_group()
