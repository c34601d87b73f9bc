"""CPU kernels of block-quantized payloads; comm/wire.py describes the format.

A kernel makes one pass over a part. It takes two tables:

    blocks   int64 [blocks, 3]   first element, number of elements, and place of the codes of each block
    whole    int64 [runs, 3]     the same of each run of elements that are sent whole, with their place in `wide`

and the two sections of a payload: `wide`, fp32, which begins with the scales of the blocks, and `codes`, uint8.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numba
import numpy as np

from dzero.utils.numba_views import compiled, from_bf16, to_bf16

BLOCK_ELEMS = 256
"""Largest number of elements that share a scale."""
TINY = np.float32(2.0**-100)
"""Largest magnitude of a block that is sent as zeros; the reciprocal of a smaller one could overflow."""
TO_INTEGER = np.float32(1.5 * 2**23)
"""Number whose addition and subtraction rounds an fp32 number below 2^22 to an integer, ties to even."""
NOT_FINITE = np.uint32(0x7F800000)
E4M3_ROOM = np.uint32(0x1FFFFF)
"""Carries a magnitude above 1.75 x 2^e to the next exponent, since 448 = 1.75 x 2^8 is the largest 8-bit float."""


@numba.njit(inline="always")
def _to_e4m3(value):  # type: ignore[no-untyped-def]
    """Return the 8-bit float nearest to a number of at most 448, ties to even: 1 bit of sign, 4 of exponent, 3 more."""
    pattern = np.float32(value).view(np.uint32)
    sign, pattern = (pattern >> np.uint32(24)) & np.uint32(0x80), pattern & np.uint32(0x7FFFFFFF)
    magnitude = np.uint32(pattern).view(np.float32)
    subnormal = np.uint32((magnitude * np.float32(512) + TO_INTEGER) - TO_INTEGER)
    pattern += np.uint32(0x7FFFF) + ((pattern >> np.uint32(20)) & np.uint32(1))
    normal = (pattern >> np.uint32(20)) - np.uint32(120 << 3)  # the exponents' biases are 127 and 7
    return np.uint8(sign | (subnormal if magnitude < np.float32(2.0**-6) else normal))


@numba.njit(inline="always")
def _from_e4m3(code):  # type: ignore[no-untyped-def]
    """Return the number of an 8-bit float."""
    code = np.uint32(code)
    rest = code & np.uint32(0x7F)
    normal = np.uint32((rest << np.uint32(20)) + np.uint32(120 << 23)).view(np.float32)
    magnitude = np.float32(rest) * np.float32(2.0**-9) if rest < np.uint32(8) else normal
    return -magnitude if code & np.uint32(0x80) else magnitude


def _signature(*, bf16: bool) -> str:
    """Return the types of a kernel: the tables, the payload's sections, and the tensor, as bf16 patterns or fp32."""
    return f"void(int64[:, ::1], int64[:, ::1], float32[::1], uint8[::1], {'uint16' if bf16 else 'float32'}[::1])"


@cache
def encode_kernel(*, code: str, bf16: bool) -> Callable[..., None]:
    """Compile `encode(blocks, whole, wide, codes, source)`, which writes the payload of `source`, fp32 or bf16."""
    is_float, bits, most = code == "fp8", 4 if code == "int4" else 8, np.float32(7 if code == "int4" else 127)

    def kernel(blocks, whole, wide, codes, source):  # type: ignore[no-untyped-def]
        """Write scales and whole elements to `wide`, and codes to `codes`."""
        levels = np.zeros(BLOCK_ELEMS, np.int8)
        for run in range(whole.shape[0]):
            start, elems, at = whole[run]
            for i in range(elems):
                wide[at + i] = from_bf16(source[start + i]) if bf16 else source[start + i]
        for block in range(blocks.shape[0]):
            start, elems, at = blocks[block]
            values = source[start : start + elems]
            largest = np.uint32(0)  # patterns of magnitudes are ordered as the magnitudes, NaN last
            for i in range(elems):
                value = from_bf16(values[i]) if bf16 else values[i]
                largest = max(largest, np.float32(value).view(np.uint32) & np.uint32(0x7FFFFFFF))
            magnitude = np.uint32(largest).view(np.float32)
            if largest >= NOT_FINITE:
                wide[block], inverse = np.float32(np.nan), np.float32(0)
            elif magnitude < TINY:
                wide[block], inverse = np.float32(0), np.float32(0)
            elif is_float:
                exponent = (largest + E4M3_ROOM) >> np.uint32(23)
                wide[block] = np.uint32((exponent - np.uint32(8)) << np.uint32(23)).view(np.float32)
                inverse = np.uint32((np.uint32(254 + 8) - exponent) << np.uint32(23)).view(np.float32)
            else:
                wide[block], inverse = magnitude / most, most / magnitude
            into = codes[at : at + (elems * bits + 7) // 8]
            if largest >= NOT_FINITE:
                into[:] = 0
                continue
            if is_float:
                for i in range(elems):
                    value = from_bf16(values[i]) if bf16 else values[i]
                    into[i] = _to_e4m3(value * inverse)
                continue
            for i in range(elems):
                value = from_bf16(values[i]) if bf16 else values[i]
                levels[i] = np.int8(np.int32((value * inverse + TO_INTEGER) - TO_INTEGER))
            if bits == 8:
                for i in range(elems):
                    into[i] = np.uint8(levels[i])
            else:
                if elems % 2:
                    levels[elems] = 0
                for i in range(into.size):
                    into[i] = np.uint8((levels[2 * i] & 15) | ((levels[2 * i + 1] & 15) << 4))

    return compiled(kernel, _signature(bf16=bf16), code)


@cache
def decode_kernel(*, code: str, adds: bool, bf16: bool) -> Callable[..., None]:
    """Compile `decode(blocks, whole, wide, codes, target)`, which writes values to `target`, or adds them to it.

    Args:
        code: Format of a code (comm/wire.py).
        adds: Whether values are added to `target`, which is then fp32.
        bf16: Whether `target` is bf16.
    """
    is_float, bits = code == "fp8", 4 if code == "int4" else 8

    def kernel(blocks, whole, wide, codes, target):  # type: ignore[no-untyped-def]
        """Read a payload into `target`."""
        levels = np.zeros(BLOCK_ELEMS, np.int8)
        for run in range(whole.shape[0]):
            start, elems, at = whole[run]
            for i in range(elems):
                _put(target, start + i, wide[at + i], adds, bf16)
        for block in range(blocks.shape[0]):
            start, elems, at = blocks[block]
            of, scale, into = codes[at : at + (elems * bits + 7) // 8], wide[block], target[start : start + elems]
            if is_float:
                for i in range(elems):
                    _put(into, i, _from_e4m3(of[i]) * scale, adds, bf16)
                continue
            if bits == 8:
                for i in range(elems):
                    levels[i] = np.int8(of[i])
            else:
                for i in range(of.size):
                    levels[2 * i] = np.int8(np.uint8(of[i] << 4)) >> 4
                    levels[2 * i + 1] = np.int8(of[i]) >> 4
            for i in range(elems):
                _put(into, i, np.float32(levels[i]) * scale, adds, bf16)

    return compiled(kernel, _signature(bf16=bf16), code, adds)


@numba.njit(inline="always")
def _put(target, index, value, adds, bf16):  # type: ignore[no-untyped-def]
    """Write or add `value` to an element of `target`."""
    if adds:
        target[index] += value
    elif bf16:
        target[index] = to_bf16(value)
    else:
        target[index] = value
