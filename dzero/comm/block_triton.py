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


@triton.jit
def _to_e4m3(value):  # type: ignore[no-untyped-def]
    """Return the 8-bit float nearest to a number of at most 448, ties to even, as int32."""
    bits = value.to(tl.int32, bitcast=True)
    pattern = bits & 0x7FFFFFFF
    magnitude = pattern.to(tl.float32, bitcast=True)
    normal = ((pattern + 0x7FFFF + ((pattern >> 20) & 1)) >> 20) - 960  # 120 << 3
    return ((bits >> 24) & 0x80) | tl.where(magnitude < 0.015625, _code(magnitude, 512.0), normal)  # 2^-6


@triton.jit
def _from_e4m3(code):  # type: ignore[no-untyped-def]
    """Return the number of an 8-bit float, given as int32."""
    rest = code & 0x7F
    normal = ((rest << 20) + 1006632960).to(tl.float32, bitcast=True)  # 120 << 23
    magnitude = tl.where(rest < 8, rest.to(tl.float32) * 0.001953125, normal)  # 2^-9
    return tl.where(code < 128, magnitude, -magnitude)


@triton.jit  # type: ignore[untyped-decorator]
def encode_kernel(blocks, wide, codes, source, CODE: tl.constexpr, BF16: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Write the scale and the codes of one block."""
    block = tl.program_id(0)
    start, elems, at = tl.load(blocks + 3 * block), tl.load(blocks + 3 * block + 1), tl.load(blocks + 3 * block + 2)
    half = tl.arange(0, BLOCK // 2)
    first, second = (2 * half, 2 * half + 1) if CODE == "int4" else (half, half + BLOCK // 2)
    low, high = _read(source + start, first, elems, BF16), _read(source + start, second, elems, BF16)
    largest = tl.maximum(_largest(low), _largest(high))
    is_finite = largest < 0x7F800000
    magnitude = tl.where(is_finite, largest, 0x3F800000).to(tl.float32, bitcast=True)
    most = tl.full([], 7.0 if CODE == "int4" else 127.0, tl.float32)
    is_tiny = magnitude < 7.888609052210118e-31  # 2^-100
    safe = tl.where(is_tiny, 1.0, magnitude)
    if CODE == "fp8":
        exponent = (safe.to(tl.int32, bitcast=True) + 0x1FFFFF) >> 23  # above 1.75 x 2^e the next one
        scale = ((exponent - 8) << 23).to(tl.float32, bitcast=True)
        inverse = ((262 - exponent) << 23).to(tl.float32, bitcast=True)
    else:
        scale, inverse = tl.div_rn(safe, most), tl.div_rn(most, safe)
    scale, inverse = tl.where(is_tiny, 0.0, scale), tl.where(is_tiny, 0.0, inverse)
    tl.store(wide + block, tl.where(is_finite, scale, float("nan")))
    low, high = tl.where(is_finite, low, 0.0), tl.where(is_finite, high, 0.0)
    if CODE == "fp8":
        tl.store(codes + at + first, _to_e4m3(low * inverse).to(tl.uint8), mask=first < elems)
        tl.store(codes + at + second, _to_e4m3(high * inverse).to(tl.uint8), mask=second < elems)
    elif CODE == "int8":
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
    blocks, wide, codes, target, CODE: tl.constexpr, ADDS: tl.constexpr, BF16: tl.constexpr, BLOCK: tl.constexpr
):
    """Write, or add to fp32, the values of one block."""
    block = tl.program_id(0)
    start, elems, at = tl.load(blocks + 3 * block), tl.load(blocks + 3 * block + 1), tl.load(blocks + 3 * block + 2)
    scale = tl.load(wide + block)
    half = tl.arange(0, BLOCK // 2)
    if CODE == "int4":
        first, second = 2 * half, 2 * half + 1
        pair = tl.load(codes + at + half, mask=first < elems, other=0).to(tl.int32)
        low, high = (((pair & 15) ^ 8) - 8).to(tl.float32), (((pair >> 4) ^ 8) - 8).to(tl.float32)
    else:
        first, second = half, half + BLOCK // 2
        low = tl.load(codes + at + first, mask=first < elems, other=0)
        high = tl.load(codes + at + second, mask=second < elems, other=0)
        if CODE == "fp8":
            low, high = _from_e4m3(low.to(tl.int32)), _from_e4m3(high.to(tl.int32))
        else:
            low, high = low.to(tl.int8, bitcast=True).to(tl.float32), high.to(tl.int8, bitcast=True).to(tl.float32)
    _write(target + start, first, low * scale, elems, ADDS, BF16)
    _write(target + start, second, high * scale, elems, ADDS, BF16)
