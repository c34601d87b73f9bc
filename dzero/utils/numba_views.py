"""Helpers of CPU kernels: flat NumPy views of tensors, tensors by address, bf16 bit patterns, and numba's options.

Kernels are compiled once per machine and combination of dtypes (`utils/kernel_cache.py`), and release the GIL. They
round according to IEEE 754, without fast-math and contraction. So the vector body and the scalar tail of a loop give
the same bits, and a slice gives the same bits as the whole.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import torch
from numba.core import cgutils, types
from numba.extending import intrinsic
from numpy.typing import NDArray

from dzero.utils import kernel_cache

JIT = {"nogil": True, "error_model": "numpy", "cache": kernel_cache.enable()}
Array = NDArray[Any]


def has_memory(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has memory; kernels do nothing on simulated tensors, which have none."""
    return tensor.untyped_storage().device.type != "meta"


def as_array(tensor: torch.Tensor) -> Array:
    """Return a NumPy view of a contiguous CPU tensor in its shape; bfloat16, which NumPy lacks, as uint16 patterns."""
    tensor = tensor.detach()
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


@numba.njit(inline="always")
def from_bf16(pattern):  # type: ignore[no-untyped-def]
    """Return the fp32 value of a bf16 bit pattern."""
    return np.uint32(np.uint32(pattern) << np.uint32(16)).view(np.float32)


@intrinsic
def pointer(typing_context, address):  # type: ignore[no-untyped-def]
    """Convert an integer address to a pointer inside a kernel: `carray(pointer(a), n, dtype)` is the array there."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(types.intp), generate
