"""CPU kernels of the update: one pass over memory, plain IEEE arithmetic, the same bits wherever a shard is cut.

    kernel        reads                            writes                     used for
    adamw         grad, param, master, m, v        param, master, m, v        the update (the maths: optim/rules.py)
    sum_squares   grad                             one fp64                   the norm and the finite check
    accumulate    acc, grad                        acc, one fp64              gradients of several microbatches

Tests compare every kernel with the torch operations of `rules.py`. They run on slices of `CHUNK_ELEMS` in a thread pool
that the optimizer owns; arrays are flat. Tensors without memory stay as they are, and their squares sum to 0.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numba
import numpy as np
import torch

from dzero.host import JIT, Array, as_array, from_bf16, has_memory

CHUNK_ELEMS = 1 << 20


@numba.njit(inline="always")
def _mix(x):  # type: ignore[no-untyped-def]
    """32 well-mixed bits (the finaliser of MurmurHash3); `rules.mix` is the same."""
    x = np.uint32((x ^ (x >> np.uint32(16))) * np.uint32(0x85EBCA6B))
    x = np.uint32((x ^ (x >> np.uint32(13))) * np.uint32(0xC2B2AE35))
    return np.uint32(x ^ (x >> np.uint32(16)))


@cache
def adamw_kernel(*, grad_bf16: bool, master: str, moments_bf16: bool, follows: bool = False) -> Callable[..., None]:
    """Compile AdamW for one row of dtypes. `master`: `param` (fp32 param is it), `fp32`, or `remainder` (bf16 param).

    follows: an element of the working copy that is not its fp32 master rounded was edited, and is the master then.

    Arrays are flat and of one length; `work` is the uint16 pattern of the bf16 working copy, or unused (fp16 copies
    are made by torch). `coefficients`: see `rules.Coefficients.as_array`. `seed`, `first`: key and global index of
    element 0 for stochastic rounding.
    """

    def kernel(grad, work, state, remainder, m, v, coefficients, seed, first):  # type: ignore[no-untyped-def]
        scale, b1, c1, b2, c2, root, eps, decay, rate = coefficients
        for i in range(grad.size):
            g = (from_bf16(grad[i]) if grad_bf16 else grad[i]) * scale
            m_old = from_bf16(m[i]) if moments_bf16 else m[i]
            v_old = from_bf16(v[i]) if moments_bf16 else v[i]
            m_new = m_old * b1 + g * c1
            v_new = v_old * b2 + (g * g) * c2
            if master == "remainder":
                bits = np.uint32(np.uint32(work[i]) << np.uint32(16)) + np.uint32(np.int32(remainder[i]))
                old = np.uint32(bits).view(np.float32)
            else:
                old = state[i]
                if follows:
                    rounded = np.uint16((np.float32(old).view(np.uint32) + np.uint32(0x8000)) >> np.uint32(16))
                    old = old if rounded == work[i] else from_bf16(work[i])
            new = old * decay - (m_new / (np.sqrt(v_new) * root + eps)) * rate
            if moments_bf16:
                noise = _mix(np.uint32(np.uint32(first + i) ^ np.uint32(seed)))
                m[i] = np.uint16((np.float32(m_new).view(np.uint32) + (noise & np.uint32(0xFFFF))) >> np.uint32(16))
                v[i] = np.uint16((np.float32(v_new).view(np.uint32) + (noise >> np.uint32(16))) >> np.uint32(16))
            else:
                m[i] = m_new
                v[i] = v_new
            if master != "remainder":
                state[i] = new
            if master != "param":
                bits = np.float32(new).view(np.uint32)
                work[i] = np.uint16((bits + np.uint32(0x8000)) >> np.uint32(16))
                if master == "remainder":
                    remainder[i] = np.int16(bits & np.uint32(0xFFFF))

    return numba.njit(kernel, **JIT)  # type: ignore[no-any-return]


LANES = 256


@cache
def _sum_squares_kernel(*, bf16: bool) -> Callable[[Array], float]:
    """Sum of squares in fp64: LANES running sums (element i goes to lane i mod LANES), then the lanes in order."""

    def kernel(x):  # type: ignore[no-untyped-def]
        lanes = np.zeros(LANES)
        for start in range(0, x.size, LANES):
            block = x[start : start + LANES]
            for i in range(block.size):
                value = np.float64(from_bf16(block[i]) if bf16 else block[i])
                lanes[i] += value * value
        total = 0.0
        for lane in lanes:
            total += lane
        return total

    return numba.njit(kernel, **JIT)  # type: ignore[no-any-return]


@cache
def _accumulate_kernel() -> Callable[[Array, Array], float]:
    """acc += grad (both fp32), returning the new acc's sum of squares as above."""

    def kernel(acc, grad):  # type: ignore[no-untyped-def]
        lanes = np.zeros(LANES)
        for start in range(0, acc.size, LANES):
            a, g = acc[start : start + LANES], grad[start : start + LANES]
            for i in range(a.size):
                value = a[i] + g[i]
                a[i] = value
                wide = np.float64(value)
                lanes[i] += wide * wide
        total = 0.0
        for lane in lanes:
            total += lane
        return total

    return numba.njit(kernel, **JIT)  # type: ignore[no-any-return]


def sum_squares(grad: torch.Tensor) -> float:
    """Sum of squares of a contiguous CPU tensor (fp32, bf16, fp16) in fp64; its order depends on the length alone."""
    flat = (grad.float() if grad.dtype == torch.float16 else grad).view(-1)
    if not has_memory(flat):
        return 0.0
    array, kernel = as_array(flat), _sum_squares_kernel(bf16=grad.dtype == torch.bfloat16)
    return float(sum(kernel(array[i : i + CHUNK_ELEMS]) for i in range(0, array.size, CHUNK_ELEMS)))


def accumulate(acc: torch.Tensor, grad: torch.Tensor) -> float:
    """acc += grad, contiguous CPU tensors of one dtype; returns `sum_squares(acc)` from the same pass."""
    if acc.dtype != torch.float32:
        acc += grad
        return sum_squares(acc)
    if not has_memory(acc):
        return 0.0
    a, g, kernel = as_array(acc.view(-1)), as_array(grad.view(-1)), _accumulate_kernel()
    return float(sum(kernel(a[i : i + CHUNK_ELEMS], g[i : i + CHUNK_ELEMS]) for i in range(0, a.size, CHUNK_ELEMS)))
