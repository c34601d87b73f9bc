"""Ring attention (Liu et al. 2023) over sequences that are split over ranks, with torch's loops and any kernel.

    step i of n    a rank attends to               sent meanwhile
    forward, 0     its own keys, causally          these, to the next rank
    forward, i     those of the i-th rank before   these, to the next rank
    backward, i    the same again                  keys, and after them their fp32 gradients, back at their rank after n

The results of the steps are merged by their log-sum-exp, in fp32. With the zigzag split (context/zigzag.py) each step
after the first is half a square on every rank. A rank holds its own keys and those of one other rank.

torch's own entry point, `context_parallel`, replaces scaled_dot_product_attention in the whole process, with DTensors
that support no CPU kernel. Its loops take any kernel, so this module runs them on both devices. They are private to
torch, so they are looked for when a ring is constructed, and no other code depends on them.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from dzero.comm.context_exchange import ContextExchange
from dzero.parallel.context.scores import PLAIN, Scores
from dzero.utils.torch_internals import Seam, check

aten = torch.ops.aten
LOOPS = "torch.distributed.tensor.experimental._context_parallel._attention"
SEAMS = (
    Seam(
        (
            f"{LOOPS}:set_rotate_method",
            f"{LOOPS}:_templated_ring_attention",
            f"{LOOPS}:_templated_ring_attention_backward",
            "torch:ops.aten._scaled_dot_product_flash_attention_for_cpu",
            "torch:ops.aten._scaled_dot_product_flash_attention_for_cpu_backward",
            "torch:ops.aten._scaled_dot_product_flash_attention",
            "torch:ops.aten._scaled_dot_product_flash_attention_backward",
        ),
        "mesh.cp_attention=ring (mesh.cp_attention=all_gather does not need it)",
    ),
)
"""What rings need of torch."""
TIME = 2
FLASH = ("cum_seq_q", "cum_seq_k", "max_q", "max_k", "philox_seed", "philox_offset")
"""Outputs of CUDA's kernel besides its result, which backward takes as inputs."""


def hops(dtype: torch.dtype, ranks: int) -> tuple[list[tuple[torch.dtype, int]], list[tuple[torch.dtype, int]]]:
    """Return how often keys and values, and gradients, are sent to the next rank, by dtype: in forward, in backward."""
    keys = (dtype, ranks - 1)
    return [keys], [keys, (torch.float32, ranks)]


class Ring:
    """Attention of every rank's queries to the keys of one rank after the other."""

    def __init__(self, exchange: ContextExchange) -> None:
        check(SEAMS)
        self._exchange, self._loops = exchange, import_module(LOOPS)
        # For the whole process; torch's other method gathers all keys at once.
        self._loops.set_rotate_method("alltoall")

    def mask_of(self, positions: Tensor) -> Tensor:
        """Raise ValueError: torch's ring attention takes no masks."""
        raise ValueError(
            f"mesh.cp_attention=ring: sequences of {positions.shape[1]} tokens hold several documents, which it does "
            "not tell apart; take all_gather or ulysses"
        )

    def queries(self, time: int, device: torch.device) -> Tensor:
        """Raise ValueError: queries are asked for to make masks, which torch's ring attention does not take."""
        raise ValueError(
            f"mesh.cp_attention=ring: it takes no masks (of {time} tokens on {device}), as documents that share a "
            "sequence, windows and caps need them; take mesh.cp_attention=all_gather or ulysses"
        )

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, scores: Scores = PLAIN
    ) -> Tensor:
        """Implement `ContextAttention`; raise ValueError for what the kernels do not take."""
        if mask is not None or scores.dropout or not scores.is_fused:
            raise ValueError(
                f"mesh.cp_attention=ring: it takes no masks, caps, sinks and dropout={scores.dropout} of attention; "
                "take mesh.cp_attention=all_gather or ulysses"
            )
        if query.is_cuda and (query.dtype not in (torch.bfloat16, torch.float16) or query.shape[-1] % 8):
            raise ValueError(
                f"mesh.cp_attention=ring with heads of {query.shape[-1]} in {query.dtype}: on CUDA it takes bf16 or "
                "fp16, and a multiple of 8; take mesh.cp_attention=all_gather"
            )
        scale = query.shape[-1] ** -0.5 if scores.scale is None else scores.scale
        ring: Any = _Ring.apply
        mixed: Tensor = ring(query, key, value, self._exchange, self._loops, scale)
        return mixed


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        exchange: ContextExchange,
        loops: Any,
        scale: float,
    ) -> Tensor:
        on_cpu = aten._scaled_dot_product_flash_attention_for_cpu
        kernel = aten._scaled_dot_product_flash_attention if query.is_cuda else on_cpu
        mixed: Tensor
        with exchange.ring(key, hops(key.dtype, exchange.ranks)[0]):
            mixed, sums, *rest = loops._templated_ring_attention(
                exchange.group, TIME, _forward(kernel), query, key, value, is_causal=True, dropout_p=0.0, scale=scale
            )
        ctx.exchange, ctx.loops, ctx.scale = exchange, loops, scale
        ctx.rest = dict(zip(FLASH, rest, strict=False))
        ctx.save_for_backward(query, key, value, mixed, sums)
        return mixed

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, mixed, sums = ctx.saved_tensors
        on_cpu = aten._scaled_dot_product_flash_attention_for_cpu_backward
        kernel = aten._scaled_dot_product_flash_attention_backward if query.is_cuda else on_cpu
        with ctx.exchange.ring(key, hops(key.dtype, ctx.exchange.ranks)[1]):
            found = ctx.loops._templated_ring_attention_backward(
                ctx.exchange.group,
                TIME,
                _backward(kernel),
                grads[0].contiguous(),
                "grad_out",
                query,
                key,
                value,
                mixed,
                sums,
                is_causal=True,
                dropout_p=0.0,
                scale=ctx.scale,
                **ctx.rest,
            )
        return (*found[:3], None, None, None)


def _forward(kernel: Any) -> Callable[..., Any]:
    """Return `kernel` with support for queries whose heads share keys."""

    def run(query: Tensor, key: Tensor, value: Tensor, **settings: Any) -> Any:
        return kernel(query, *(_for_each(each, query) for each in (key, value)), **settings)

    return run


def _backward(kernel: Any) -> Callable[..., Any]:
    def run(*, query: Tensor, key: Tensor, value: Tensor, **settings: Any) -> Any:
        keys, values = (_for_each(each, query) for each in (key, value))
        of_query, *others = kernel(query=query, key=keys, value=values, **settings)
        groups = (key.shape[1], query.shape[1] // key.shape[1])
        return of_query, *(each.unflatten(1, groups).sum(2) for each in others)

    return run


def _for_each(shared: Tensor, query: Tensor) -> Tensor:
    """Repeat heads: [batch, kv_heads, time, dim] to [batch, heads, time, dim]."""
    return shared.repeat_interleave(query.shape[1] // shared.shape[1], dim=1)
