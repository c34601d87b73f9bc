"""Triton kernels for the sums of squares of many gradients in two launches.

`optim/cuda_sums.py` fills the table and launches them:

    table       int64 [3 * grads + 1 + chunks]   addresses [grads], lengths [grads], the first chunk of each gradient
                                                 and the end of the last [grads + 1], then as int32 [chunks, 2] the
                                                 gradient of each chunk and the chunk's number in it
    partials    fp64 [LANES + 1, chunks]         sums of the lanes of each chunk; the last row is for their totals
    sums        fp64 [grads]                     the result

The bits are those of `cpu_kernels.sum_squares`, because every fp64 addition has the same operands: element i of a
chunk belongs to lane i mod LANES, a lane adds its squares in order, and then lanes and chunks are added in order, each
sum beginning at 0.0. Masked elements add 0.0, which changes nothing, because no sum of squares is -0.0. The square of
an fp32, bf16 or fp16 value is exact in fp64, so a fused product and sum would give the same bits. `OPTIONS` forbids it
nevertheless, so that the compiled code has the operations of the CPU kernel. The bit pattern of a NaN may differ.

Note: how a fixed order keeps a GPU busy. A lane is one chain of dependent additions, which cannot be split over
threads. A program therefore sums a GROUP of lanes, one per thread of a warp: a chunk of 2^20 elements has 8 programs,
and all chunks of all gradients run concurrently. A whole chunk still takes the time of 4096 dependent additions, about
40 us at 16 cycles each, even on an idle GPU. For a small unit this is latency only, because nothing waits for its sums
during backward.

Note: why the loop carries the values that it has read. Loads must run ahead of the additions, or each addition waits
for memory. If a loop adds values in the iteration that reads them, ptxas moves each load down to its addition to save
registers. It cannot do so if the values come from the previous iteration. Tests check this in the machine code.
"""

from __future__ import annotations

import triton
import triton.language as tl

OPTIONS = {"enable_fp_fusion": False}
"""Compiler options of both kernels."""


@triton.jit  # type: ignore[untyped-decorator]
def _read_rows(pointer, begin, end, stride, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return a tuple of the ROWS values at positions `begin`, `begin + stride`, ..., with 0 from position `end` on."""
    first, rows = pointer + begin, ()
    for row in tl.static_range(ROWS):
        value = tl.load(first + row * stride, mask=begin + row * stride < end, other=0)
        rows = rows + (value,)  # type: ignore[assignment]  # noqa: RUF005
    return rows


@triton.jit  # type: ignore[untyped-decorator]
def _add_in_order(sums, pointer, begin, end, stride, count, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return fp64 `sums` after adding the values at `begin`, `begin + stride`, ... before `end`, in this order.

    fp64 values are added as they are. For fp32, fp16 and uint16 (bf16 patterns), squares are added. `begin` is a
    vector as long as `sums`, or a scalar. `count` is the maximum number of values that are added to one sum.
    """
    rows = _read_rows(pointer, begin, end, stride, ROWS)
    for _ in range(0, count, ROWS):
        begin += ROWS * stride
        later = _read_rows(pointer, begin, end, stride, ROWS)
        for row in tl.static_range(ROWS):
            value = rows[row]
            if value.dtype == tl.uint16:
                value = (value.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
            if value.dtype == tl.float64:
                sums += value
            else:
                value = value.to(tl.float64)
                sums += value * value
        rows = later
    return sums


@triton.jit(do_not_specialize=["grads", "chunks"])  # type: ignore[untyped-decorator]
def lane_sums_kernel(  # type: ignore[no-untyped-def]
    table,
    partials,
    grads,
    chunks,
    DTYPE: tl.constexpr,
    CHUNK: tl.constexpr,
    LANES: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Sum the squares in GROUP lanes of one chunk per program, with LANES / GROUP programs per chunk.

    DTYPE is "fp32", "bf16" or "fp16". CHUNK is the maximum length of a chunk. ROWS is the elements of a lane per read.
    """
    program = tl.program_id(0)
    chunk = program // (LANES // GROUP)
    lanes = program % (LANES // GROUP) * GROUP + tl.arange(0, GROUP)
    of_chunk = (table + 3 * grads + 1).to(tl.pointer_type(tl.int32)) + 2 * chunk
    grad = tl.load(of_chunk)
    start = tl.load(of_chunk + 1).to(tl.int64) * CHUNK
    address = tl.load(table + grad)
    elems = tl.minimum(tl.load(table + grads + grad) - start, CHUNK).to(tl.int32)
    if DTYPE == "bf16":
        pointer = address.to(tl.pointer_type(tl.uint16)) + start
    elif DTYPE == "fp16":
        pointer = address.to(tl.pointer_type(tl.float16)) + start
    else:
        pointer = address.to(tl.pointer_type(tl.float32)) + start
    sums = tl.zeros([GROUP], tl.float64)
    sums = _add_in_order(sums, pointer, lanes, elems, LANES, tl.cdiv(elems, LANES), ROWS)
    tl.store(partials + lanes.to(tl.int64) * chunks + chunk, sums)


@triton.jit(do_not_specialize=["grads", "chunks"])  # type: ignore[untyped-decorator]
def totals_kernel(  # type: ignore[no-untyped-def]
    table,
    partials,
    sums,
    grads,
    chunks,
    LANES: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Sum one gradient per program: the lanes of BLOCK chunks concurrently, then these chunks, each in order."""
    grad = tl.program_id(0)
    first, last = tl.load(table + 2 * grads + grad), tl.load(table + 2 * grads + grad + 1)
    end = LANES * chunks.to(tl.int64)  # end of the lanes, where their totals begin
    total = tl.zeros([], tl.float64)
    for begin in range(first, last, BLOCK):
        chunk = begin + tl.arange(0, BLOCK)
        held = chunk < last
        of_chunks = tl.zeros([BLOCK], tl.float64)
        of_chunks = _add_in_order(of_chunks, partials, tl.where(held, chunk, end), end, chunks, LANES, ROWS)
        tl.store(partials + end + chunk, of_chunks, mask=held)
        tl.debug_barrier()  # below, threads read values that other threads of the program have written
        until = tl.minimum(begin + BLOCK, last)
        total = _add_in_order(total, partials + end, begin, until, 1, until - begin, ROWS)
    tl.store(sums + grad, total)
