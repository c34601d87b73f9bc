"""CPU kernels of the optimizer, each of which makes one pass over memory in plain IEEE arithmetic.

    kernel        reads                            writes                     used for
    adamw         grad, param, master, m, v        param, master, m, v,       the update (math: adamw_math.py)
                                                   there or elsewhere         elsewhere if it may be rolled back
    sum_squares   grad                             one fp64                   the norm and the finite check
    accumulate    acc, grad                        acc, one fp64              gradients of several microbatches

The update gives the same bits for any sharding. One call processes many tensors, passed as addresses, because a call
from Python costs as much as a thousand elements. Tests compare every kernel with the torch operations of
`adamw_math.py`. The update runs on slices of `CHUNK_ELEMS` elements in the optimizer's thread pool. Tensors without
memory (of a simulation) are left as they are, and their squares sum to 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import numba
import numpy as np
import torch
from numba import carray

from dzero.utils.numba_views import Array, compiled, from_bf16, has_memory, pointer, stream
from dzero.utils.torch_internals import add_each

CHUNK_ELEMS = 1 << 20
"""Maximum elements of a chunk."""


@numba.njit(inline="always")
def _mix(x):  # type: ignore[no-untyped-def]
    """Return 32 well-mixed bits of a uint32, as `adamw_math.mix` does."""
    x = np.uint32((x ^ (x >> np.uint32(16))) * np.uint32(0x85EBCA6B))
    x = np.uint32((x ^ (x >> np.uint32(13))) * np.uint32(0xC2B2AE35))
    return np.uint32(x ^ (x >> np.uint32(16)))


BLOCK_ELEMS = 128
"""Elements that are updated at a time out of place: in a block that stays in the first cache."""
BLOCK_BYTES = 4 * BLOCK_ELEMS


@numba.njit(inline="always")
def _enter(places, block, states, targets, start, elems, moment_bytes):  # type: ignore[no-untyped-def]
    """Fill in the addresses where elements are updated: in `block`, with their values, if they have a target."""
    for column, elem_bytes in ((0, 2), (1, 4), (2, 2), (3, moment_bytes), (4, moment_bytes)):
        places[column] = states[column] + start * elem_bytes
        if targets[column]:
            values = carray(pointer(places[column]), elems * elem_bytes // 2, np.uint16)
            places[column] = block + column * BLOCK_BYTES
            updated = carray(pointer(places[column]), elems * elem_bytes // 2, np.uint16)
            for i in range(elems * elem_bytes // 2):
                updated[i] = values[i]


@numba.njit(inline="always")
def _leave(places, targets, start, elems, moment_bytes):  # type: ignore[no-untyped-def]
    """Copy the updated elements of a block to their targets."""
    for column, elem_bytes in ((0, 2), (1, 4), (2, 2), (3, moment_bytes), (4, moment_bytes)):
        if targets[column]:
            stream(targets[column] + start * elem_bytes, places[column], elems * elem_bytes)


@cache
def adamw_kernel(
    *, grad_bf16: bool, master: str, moments_bf16: bool, follows: bool = False, apart: bool = False
) -> Callable[..., None]:
    """Compile the AdamW kernel for one combination of dtypes.

    The kernel takes the tables of `optim/update_table.py`, the range of chunks to update, their length, then the
    gradient addresses, seeds and coefficient rows of this step, int64 [params] each, and the coefficients, fp32
    [rows, 9]. Working copies are bf16, or the fp32 master itself. fp16 ones are updated by torch (`flat_update.step`).

    Args:
        grad_bf16: Whether gradients are bf16. They are fp32 otherwise.
        master: "param" (the fp32 parameter is the master), "fp32" or "remainder" (beside a bf16 parameter).
        moments_bf16: Whether the moments are bf16. They are fp32 otherwise.
        follows: Whether an element of the working copy that differs from its rounded fp32 master, and so was edited,
            replaces the master before the update.
        apart: Whether new states are written to their addresses in the table `targets`, and the old ones kept.
    """
    grad_type, grad_bytes = (np.uint16, 2) if grad_bf16 else (np.float32, 4)
    moment_type, moment_bytes = (np.uint16, 2) if moments_bf16 else (np.float32, 4)
    no_targets = np.zeros(5, np.int64)

    def kernel(states, targets, chunks, begin, end, chunk_elems, grads, seeds, rows, coefficients):  # type: ignore[no-untyped-def]
        places, memory = np.empty(5, np.int64), np.empty(5 * BLOCK_BYTES, np.uint8)
        for chunk in range(begin, end):
            param, first = chunks[chunk, 0], np.int64(chunks[chunk, 1]) * chunk_elems
            row, target = states[param], targets[param] if apart else no_targets
            last = min(first + chunk_elems, row[5])
            for start in range(first, last, BLOCK_ELEMS if apart else chunk_elems):
                size = min(last - start, BLOCK_ELEMS) if apart else last - start
                _enter(places, memory.ctypes.data, row, target, start, size, moment_bytes)
                grad = carray(pointer(grads[param] + start * grad_bytes), size, grad_type)
                work = carray(pointer(places[0]), size, np.uint16)
                state = carray(pointer(places[1]), size, np.float32)
                remainder = carray(pointer(places[2]), size, np.int16)
                m = carray(pointer(places[3]), size, moment_type)
                v = carray(pointer(places[4]), size, moment_type)
                index, seed = row[6] + start, np.uint32(seeds[param])
                scale, b1, c1, b2, c2, root, eps, decay, rate = coefficients[rows[param]]
                for i in range(size):
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
                        noise = _mix(np.uint32(np.uint32(index + i) ^ seed))
                        m[i] = np.uint16(
                            (np.float32(m_new).view(np.uint32) + (noise & np.uint32(0xFFFF))) >> np.uint32(16)
                        )
                        v[i] = np.uint16(
                            (np.float32(v_new).view(np.uint32) + (noise >> np.uint32(16))) >> np.uint32(16)
                        )
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
                if apart:
                    _leave(places, target, start, size, moment_bytes)

    tables = "int64[:, ::1], int64[:, ::1], int32[:, ::1], int64, int64, int64"
    of_step = "int64[::1], int64[::1], int64[::1], float32[:, ::1]"
    return compiled(kernel, f"void({tables}, {of_step})", grad_bf16, master, moments_bf16, follows, apart)


LANES = 256
"""Running sums of a chunk: element i is added to lane i mod LANES."""


@cache
def _sum_squares_kernel(*, bf16: bool) -> Callable[[Array, Array, Array], None]:
    """Compile the fp64 sums of squares, which add each chunk's lanes in order, and then the chunks in order."""
    dtype = np.uint16 if bf16 else np.float32

    def kernel(addresses, sizes, sums):  # type: ignore[no-untyped-def]
        lanes = np.zeros(LANES)
        for each in range(sizes.size):
            whole = carray(pointer(addresses[each]), sizes[each], dtype)
            squares = 0.0
            for begin in range(0, whole.size, CHUNK_ELEMS):
                x = whole[begin : begin + CHUNK_ELEMS]
                lanes[:] = 0.0
                for start in range(0, x.size, LANES):
                    block = x[start : start + LANES]
                    for i in range(block.size):
                        value = np.float64(from_bf16(block[i]) if bf16 else block[i])
                        lanes[i] += value * value
                total = 0.0
                for lane in lanes:
                    total += lane
                squares += total
            sums[each] = squares

    return compiled(kernel, "void(int64[::1], int64[::1], float64[::1])", bf16)


@cache
def _accumulate_kernel() -> Callable[[Array, Array, Array, Array], None]:
    """Compile `acc += grad` (both fp32) with the sum of squares of the new acc, in the same order."""

    def kernel(accs, grads, sizes, sums):  # type: ignore[no-untyped-def]
        lanes = np.zeros(LANES)
        for each in range(sizes.size):
            acc = carray(pointer(accs[each]), sizes[each], np.float32)
            grad = carray(pointer(grads[each]), sizes[each], np.float32)
            squares = 0.0
            for begin in range(0, acc.size, CHUNK_ELEMS):
                old, more = acc[begin : begin + CHUNK_ELEMS], grad[begin : begin + CHUNK_ELEMS]
                lanes[:] = 0.0
                for start in range(0, old.size, LANES):
                    a, g = old[start : start + LANES], more[start : start + LANES]
                    for i in range(a.size):
                        value = a[i] + g[i]
                        a[i] = value
                        wide = np.float64(value)
                        lanes[i] += wide * wide
                total = 0.0
                for lane in lanes:
                    total += lane
                squares += total
            sums[each] = squares

    return compiled(kernel, "void(int64[::1], int64[::1], int64[::1], float64[::1])")


def sum_squares(grads: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sum of squares of each gradient, fp64 [len(grads)], in an order that depends only on its length.

    Args:
        grads: Contiguous CPU tensors of one dtype: fp32, bf16 or fp16.
    """
    sums = torch.zeros(len(grads), dtype=torch.float64)
    if grads and has_memory(grads[0]):
        wide = [grad.float() for grad in grads] if grads[0].dtype == torch.float16 else grads
        _sum_squares_kernel(bf16=grads[0].dtype == torch.bfloat16)(_addresses(wide), _sizes(wide), sums.numpy())
    return sums


def accumulate(accs: Sequence[torch.Tensor], grads: Sequence[torch.Tensor]) -> torch.Tensor:
    """Add each of `grads` to its acc in place, and return `sum_squares(accs)`, fp64 [len(accs)].

    All are contiguous CPU tensors of one dtype. fp32 tensors take one pass over memory.
    """
    if accs and accs[0].dtype != torch.float32:
        add_each([*accs], [*grads])
        return sum_squares(accs)
    sums = torch.zeros(len(accs), dtype=torch.float64)
    if accs and has_memory(accs[0]):
        _accumulate_kernel()(_addresses(accs), _addresses(grads), _sizes(accs), sums.numpy())
    return sums


def _addresses(tensors: Sequence[torch.Tensor]) -> Array:
    return np.array([tensor.data_ptr() for tensor in tensors], dtype=np.int64)


def _sizes(tensors: Sequence[torch.Tensor]) -> Array:
    return np.array([tensor.numel() for tensor in tensors], dtype=np.int64)
