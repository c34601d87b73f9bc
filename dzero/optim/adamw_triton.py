"""Triton kernel that updates many parameters by AdamW in one launch.

`optim/cuda_kernels.py` fills its tables and launches it:

    states    int64 [params, 7]   addresses of work, master, remainder, m, v (0: none), then elems and first
    chunks    int32 [grid, 2]     the parameter, and the number of the chunk in it, that each program updates
    dynamic   int64 [...]         gradient addresses [params] (0: no update), noise seeds [params], coefficient rows
                                  [params], then the coefficients of this step, fp32 [rows, 9]

The arithmetic is `adamw_math.adamw`, one rounded fp32 operation after the other, so a GPU gives the bits of the CPU
kernels. `div_rn` and `sqrt_rn` round correctly, whereas Triton's `/` and `sqrt` approximate. `OPTIONS` forbids the
compiler to fuse a product and a sum. bf16 is read and written as 16-bit patterns, because it is rounded by integer
arithmetic. The kernel therefore also runs on GPUs without bf16 units.

Addresses and lengths are read from memory, so the compiler can infer neither alignment nor the absence of a mask. A
program with a whole chunk at 16-byte aligned addresses takes a branch that declares both, and moves up to 16 bytes per
instruction. Other programs access single elements.
"""

from __future__ import annotations

import triton
import triton.language as tl

OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}
"""Compiler options. `enable_fp_fusion` is part of the numerics contract."""


@triton.jit
def _from_bf16(pattern):  # type: ignore[no-untyped-def]
    """Return the fp32 value of a bf16 pattern."""
    return (pattern.to(tl.uint32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def _to_bf16(value):  # type: ignore[no-untyped-def]
    """Return the pattern of the nearest bf16, ties away from zero, as `zero/rounding.py` does."""
    return ((value.to(tl.uint32, bitcast=True) + 0x8000) >> 16).to(tl.uint16)


@triton.jit
def _mix(x):  # type: ignore[no-untyped-def]
    """Return 32 well-mixed bits of a uint32, as `adamw_math.mix` does."""
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit  # type: ignore[untyped-decorator]
def _pointers(address, start, KIND: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return pointers [BLOCK] to the elements from `start` (int64) on of the array at `address`, of dtype KIND."""
    if KIND == "bf16":
        pointer = address.to(tl.pointer_type(tl.uint16))
    elif KIND == "fp16":
        pointer = address.to(tl.pointer_type(tl.float16))
    elif KIND == "int16":
        pointer = address.to(tl.pointer_type(tl.int16))
    else:
        pointer = address.to(tl.pointer_type(tl.float32))
    if WHOLE:
        pointer = tl.multiple_of(pointer, 16)
    return pointer + start + tl.arange(0, BLOCK)


@triton.jit  # type: ignore[untyped-decorator]
def _update_chunk(  # type: ignore[no-untyped-def]
    at,
    elems,
    first,
    seed,
    scalars,
    start,
    GRAD: tl.constexpr,
    WORK: tl.constexpr,
    MASTER: tl.constexpr,
    MOMENTS_BF16: tl.constexpr,
    FOLLOWS: tl.constexpr,
    BLOCK: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Update elements [start, start + BLOCK) of the arrays `at` (addresses of grad, work, master, remainder, m, v).

    WHOLE promises that all of these elements exist and that the addresses are multiples of 16.
    """
    grad, work, master, remainder, m, v = at
    grads = _pointers(grad, start, GRAD, BLOCK, WHOLE)
    works = _pointers(work, start, WORK, BLOCK, WHOLE)
    masters = _pointers(master, start, "fp32", BLOCK, WHOLE)
    remainders = _pointers(remainder, start, "int16", BLOCK, WHOLE)
    ms = _pointers(m, start, "bf16" if MOMENTS_BF16 else "fp32", BLOCK, WHOLE)
    vs = _pointers(v, start, "bf16" if MOMENTS_BF16 else "fp32", BLOCK, WHOLE)
    index = start + tl.arange(0, BLOCK)
    mask = None if WHOLE else index < elems

    scale, beta1, blend1 = tl.load(scalars), tl.load(scalars + 1), tl.load(scalars + 2)
    beta2, blend2, root = tl.load(scalars + 3), tl.load(scalars + 4), tl.load(scalars + 5)
    eps, keep, rate = tl.load(scalars + 6), tl.load(scalars + 7), tl.load(scalars + 8)

    g = tl.load(grads, mask=mask)
    m_old = tl.load(ms, mask=mask)
    v_old = tl.load(vs, mask=mask)
    g = _from_bf16(g) if GRAD == "bf16" else g.to(tl.float32)
    if MOMENTS_BF16:
        m_old = _from_bf16(m_old)
        v_old = _from_bf16(v_old)
    if MASTER == "remainder":
        low = tl.load(remainders, mask=mask).to(tl.int32).to(tl.uint32, bitcast=True)
        high = tl.load(works, mask=mask).to(tl.uint32) << 16
        old = (high + low).to(tl.float32, bitcast=True)
    else:
        old = tl.load(masters, mask=mask)
        if FOLLOWS:  # an element that differs from its rounded master was edited and replaces it
            held = tl.load(works, mask=mask)
            if WORK == "bf16":
                old = tl.where(_to_bf16(old) == held, old, _from_bf16(held))
            else:
                old = tl.where(old.to(tl.float16) == held, old, held.to(tl.float32))

    g = g * scale
    m_new = m_old * beta1 + g * blend1
    v_new = v_old * beta2 + (g * g) * blend2
    denominator = tl.sqrt_rn(v_new) * root + eps
    new = old * keep - tl.div_rn(m_new, denominator) * rate

    if MOMENTS_BF16:
        noise = _mix((first + index).to(tl.uint32) ^ seed)
        tl.store(ms, ((m_new.to(tl.uint32, bitcast=True) + (noise & 0xFFFF)) >> 16).to(tl.uint16), mask=mask)
        tl.store(vs, ((v_new.to(tl.uint32, bitcast=True) + (noise >> 16)) >> 16).to(tl.uint16), mask=mask)
    else:
        tl.store(ms, m_new, mask=mask)
        tl.store(vs, v_new, mask=mask)
    if MASTER == "remainder":
        tl.store(remainders, new.to(tl.uint32, bitcast=True).to(tl.int16), mask=mask)
    else:
        tl.store(masters, new, mask=mask)
    if WORK == "bf16":
        tl.store(works, _to_bf16(new), mask=mask)
    elif WORK == "fp16":
        tl.store(works, new.to(tl.float16), mask=mask)


@triton.jit(do_not_specialize=["param_count"])  # type: ignore[untyped-decorator]
def adamw_kernel(  # type: ignore[no-untyped-def]
    states,
    chunks,
    dynamic,
    param_count,
    GRAD: tl.constexpr,
    WORK: tl.constexpr,
    MASTER: tl.constexpr,
    MOMENTS_BF16: tl.constexpr,
    FOLLOWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Update one chunk of BLOCK elements of one parameter per program, with the tables described above.

    The dtypes GRAD and WORK are "fp32", "bf16" or "fp16". MASTER is "param" (the fp32 working copy is the master),
    "fp32" or "remainder". FOLLOWS: edited elements of the working copy replace the master's before the update.
    """
    program = tl.program_id(0).to(tl.int64)
    param = tl.load(chunks + 2 * program).to(tl.int64)
    start = tl.load(chunks + 2 * program + 1).to(tl.int64) * BLOCK
    grad = tl.load(dynamic + param)
    if grad != 0:
        seed = tl.load(dynamic + param_count + param).to(tl.uint32)
        row = tl.load(dynamic + 2 * param_count + param)
        scalars = (dynamic + 3 * param_count).to(tl.pointer_type(tl.float32)) + 9 * row
        state = states + 7 * param
        work, master, remainder = tl.load(state), tl.load(state + 1), tl.load(state + 2)
        m, v = tl.load(state + 3), tl.load(state + 4)
        elems, first = tl.load(state + 5), tl.load(state + 6)
        at = (grad, work, master, remainder, m, v)
        unaligned = (grad | work | master | remainder | m | v) & 15
        if (unaligned == 0) & (start + BLOCK <= elems):
            _update_chunk(
                at, elems, first, seed, scalars, start, GRAD, WORK, MASTER, MOMENTS_BF16, FOLLOWS, BLOCK, WHOLE=True
            )
        else:
            _update_chunk(
                at, elems, first, seed, scalars, start, GRAD, WORK, MASTER, MOMENTS_BF16, FOLLOWS, BLOCK, WHOLE=False
            )
