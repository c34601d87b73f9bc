"""Triton kernels of block-quantized payloads, with the operations, and so the bits, of comm/block_kernels.py.

A program has one block: row `program_id` of the table of blocks. bf16 sources and targets are uint16 patterns. In 4
bits a program reads the even and the odd elements apart, because two neighbors share a byte. `OPTIONS` forbids the
compiler to fuse the product and the sum that rounds it, and `div_rn` is the correctly rounded division.
"""

from __future__ import annotations

import triton
import triton.language as tl

OPTIONS = {"enable_fp_fusion": False}


@triton.jit  # type: ignore[untyped-decorator]
def _read(source, index, elems, BF16: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return elements as fp32, and 0 from `elems` on."""
    value = tl.load(source + index, mask=index < elems, other=0)
    if BF16:
        value = (value.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    return value


@triton.jit
def _largest(value):  # type: ignore[no-untyped-def]
    """Return the largest pattern of a magnitude; NaN is above infinity."""
    return tl.max(value.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=0)


@triton.jit
def _code(value, inverse):  # type: ignore[no-untyped-def]
    """Return round(value * inverse), ties to even, as int32."""
    magic = 12582912.0  # 1.5 * 2^23
    return ((value * inverse + magic) - magic).to(tl.int32)


@triton.jit  # type: ignore[untyped-decorator]
def encode_kernel(blocks, wide, codes, source, BITS: tl.constexpr, BF16: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Write the scale and the codes of one block."""
    block = tl.program_id(0)
    start, elems, at = tl.load(blocks + 3 * block), tl.load(blocks + 3 * block + 1), tl.load(blocks + 3 * block + 2)
    half = tl.arange(0, BLOCK // 2)
    first, second = (half, half + BLOCK // 2) if BITS == 8 else (2 * half, 2 * half + 1)
    low, high = _read(source + start, first, elems, BF16), _read(source + start, second, elems, BF16)
    largest = tl.maximum(_largest(low), _largest(high))
    is_finite = largest < 0x7F800000
    magnitude = tl.where(is_finite, largest, 0x3F800000).to(tl.float32, bitcast=True)
    most = tl.full([], 127.0 if BITS == 8 else 7.0, tl.float32)
    is_tiny = magnitude < 7.888609052210118e-31  # 2^-100
    safe = tl.where(is_tiny, 1.0, magnitude)
    scale = tl.where(is_tiny, 0.0, tl.div_rn(safe, most))
    inverse = tl.where(is_tiny, 0.0, tl.div_rn(most, safe))
    tl.store(wide + block, tl.where(is_finite, scale, float("nan")))
    low, high = tl.where(is_finite, low, 0.0), tl.where(is_finite, high, 0.0)
    if BITS == 8:
        tl.store(codes + at + first, _code(low, inverse).to(tl.uint8), mask=first < elems)
        tl.store(codes + at + second, _code(high, inverse).to(tl.uint8), mask=second < elems)
    else:
        pair = (_code(low, inverse) & 15) | ((_code(high, inverse) & 15) << 4)
        tl.store(codes + at + half, pair.to(tl.uint8), mask=first < elems)


@triton.jit  # type: ignore[untyped-decorator]
def _write(target, index, value, elems, ADDS: tl.constexpr, BF16: tl.constexpr):  # type: ignore[no-untyped-def]
    """Write or add values to elements before `elems`; a bf16 pattern is rounded to the nearest, ties to even."""
    if ADDS:
        value += tl.load(target + index, mask=index < elems, other=0)
    if BF16:
        bits = value.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        tl.store(target + index, tl.where(value == value, rounded, 0x7FC0).to(tl.uint16), mask=index < elems)
    else:
        tl.store(target + index, value, mask=index < elems)


@triton.jit  # type: ignore[untyped-decorator]
def decode_kernel(  # type: ignore[no-untyped-def]
    blocks, wide, codes, target, BITS: tl.constexpr, ADDS: tl.constexpr, BF16: tl.constexpr, BLOCK: tl.constexpr
):
    """Write, or add to fp32, the values of one block."""
    block = tl.program_id(0)
    start, elems, at = tl.load(blocks + 3 * block), tl.load(blocks + 3 * block + 1), tl.load(blocks + 3 * block + 2)
    scale = tl.load(wide + block)
    half = tl.arange(0, BLOCK // 2)
    if BITS == 8:
        first, second = half, half + BLOCK // 2
        low = tl.load(codes + at + first, mask=first < elems, other=0).to(tl.int8, bitcast=True)
        high = tl.load(codes + at + second, mask=second < elems, other=0).to(tl.int8, bitcast=True)
    else:
        first, second = 2 * half, 2 * half + 1
        pair = tl.load(codes + at + half, mask=first < elems, other=0).to(tl.int32)
        low, high = ((pair & 15) ^ 8) - 8, ((pair >> 4) ^ 8) - 8
    _write(target + start, first, low.to(tl.float32) * scale, elems, ADDS, BF16)
    _write(target + start, second, high.to(tl.float32) * scale, elems, ADDS, BF16)
