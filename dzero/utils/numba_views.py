"""What CPU kernels share: flat NumPy views of tensors, tensors by address, bf16 as patterns, how numba compiles.

Kernels are compiled once per machine and combination of dtypes (kernel_cache.py), release the GIL, and round as IEEE
says: no fast-math, no contraction, so the vector body and the scalar tail of a loop give the same bits, and a slice
those of the whole.
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
    """Whether a tensor has any. A simulated one has none: kernels have nothing to do on it."""
    return tensor.untyped_storage().device.type != "meta"


def as_array(tensor: torch.Tensor) -> Array:
    """A NumPy view of a contiguous CPU tensor, of its shape; bfloat16 as uint16 patterns, which NumPy lacks."""
    tensor = tensor.detach()
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


@numba.njit(inline="always")
def from_bf16(pattern):  # type: ignore[no-untyped-def]
    """The fp32 value of a bf16 pattern."""
    return np.uint32(np.uint32(pattern) << np.uint32(16)).view(np.float32)


@intrinsic
def pointer(typing_context, address):  # type: ignore[no-untyped-def]
    """Turn an integer address into a pointer, inside a kernel: `carray(pointer(a), n, dtype)` is the array there."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(types.intp), generate
