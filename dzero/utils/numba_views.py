"""Helpers of CPU kernels: flat NumPy views of tensors, tensors by address, bf16 bit patterns, and numba's options.

Kernels release the GIL. They round according to IEEE 754, without fast-math and contraction. So the vector body and the
scalar tail of a loop give the same bits, and a slice gives the same bits as the whole.

Note: cache of compiled kernels between processes, so that only the first run on a machine compiles them.

    $XDG_CACHE_HOME/dzero/kernels/<digest>/     mode 0700; ~/.cache if XDG_CACHE_HOME is unset

The digest covers this package's sources and the versions of numba and Python, because numba itself only checks the file
of a kernel, not the functions that it calls. numba writes files under temporary names and renames them, so several
processes may share the folder. Each kernel has an index file of its own there (`compiled`).

A cached kernel is code, and numba reads it with pickle. So the folder must be a directory of this user that nobody else
can write to, and nobody else can replace a part of its path by a link. Otherwise kernels are compiled in every process.
If NUMBA_CACHE_DIR is set, the user has chosen the folder, and it is not checked.
"""

from __future__ import annotations

import os
import shutil
import stat
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import numba
import numpy as np
import torch
import xxhash
from llvmlite import ir
from numba import carray
from numba.core import cgutils, types
from numba.core.registry import cpu_target
from numba.extending import intrinsic
from numpy.typing import NDArray

PACKAGE = Path(__file__).parents[1]
KEPT = 8
"""Number of folders with other digests that are kept, for example of other checkouts."""


def enable_cache() -> bool:
    """Make numba cache the kernels that are compiled from now on; return whether it does."""
    _digest()  # now: a source that is edited later is not what this process runs
    if "NUMBA_CACHE_DIR" in os.environ:
        return True
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    try:
        folder = _private_folder(home / "dzero" / "kernels" / _digest())
    except (OSError, RuntimeError):  # no home directory, a full or read-only disk, or another user's folder
        return False
    numba.config.CACHE_DIR = str(folder)
    return True


@cache
def _digest() -> str:
    """Return a digest that identifies this version of the kernels, as it was when this module was imported."""
    found = xxhash.xxh3_128(f"{numba.__version__} {sys.version}".encode())
    for path in sorted(PACKAGE.rglob("*.py")):
        found.update(path.read_bytes())
    return found.hexdigest()


def _private_folder(folder: Path) -> Path:
    """Create the folder and its parent for this user only, and remove the oldest folders of other digests.

    Raise OSError if it cannot be created, or other users could write to it.
    """
    folder.parent.parent.mkdir(parents=True, exist_ok=True)
    folder = folder.parent.parent.resolve() / folder.parent.name / folder.name
    for above in folder.parent.parents:
        found = above.stat()
        shared = found.st_mode & 0o022 and not found.st_mode & stat.S_ISVTX
        if found.st_uid not in (0, os.getuid()) or shared:
            raise PermissionError(f"{above}: others could put another directory in the place of one in it")
    for each in (folder.parent, folder):
        with suppress(FileExistsError):
            each.mkdir(mode=0o700)
        found = each.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
            raise PermissionError(f"{each} is not a directory of this user's alone")
    others = [each for each in folder.parent.iterdir() if each != folder]
    for old in sorted(others, key=lambda each: each.stat().st_mtime)[:-KEPT]:
        shutil.rmtree(old, ignore_errors=True)
    return folder


JIT = {"nogil": True, "error_model": "numpy", "cache": enable_cache()}
Array = NDArray[Any]


def compiled(kernel: Callable[..., None], signature: str, *variant: object) -> Callable[..., None]:
    """Compile a kernel for the types of `signature`, or load it from the cache, and return it.

    numba lists all kernels of one name in one index, and numbers their files. Two processes that save different kernels
    of one name at the same time could take the same number, and one kernel would later be loaded in place of the other.
    Therefore each kernel gets a name of its own, with a hash of its variant, signature, processor and sources. The
    sources matter if NUMBA_CACHE_DIR is set, because the folder then serves several versions of them.

    Args:
        kernel: Function that numba can compile. Its `__qualname__` is changed.
        signature: Types of its arguments, in numba's notation. Calls with other types raise TypeError.
        variant: Values by which kernels of the same source differ, such as dtypes.
    """
    processor = cpu_target.target_context.codegen().magic_tuple()
    kernel.__qualname__ += "_" + xxhash.xxh3_64(repr((signature, variant, processor, _digest())).encode()).hexdigest()
    return numba.njit(signature, **JIT)(kernel)  # type: ignore[no-any-return]


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


@numba.njit(inline="always")
def to_bf16(value):  # type: ignore[no-untyped-def]
    """Return the bf16 pattern that torch's cast of an fp32 value gives: ties to even; every NaN becomes 0x7FC0."""
    bits = np.float32(value).view(np.uint32)
    rounded = np.uint32(bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.uint16(rounded) if value == value else np.uint16(0x7FC0)


@intrinsic
def pointer(typing_context, address):  # type: ignore[no-untyped-def]
    """Convert an integer address to a pointer inside a kernel: `carray(pointer(a), n, dtype)` is the array there."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(types.intp), generate


STREAMED_BYTES = 64
"""Size and alignment of the blocks of `stream`."""


@intrinsic
def _stream_blocks(typing_context, target, source, blocks):  # type: ignore[no-untyped-def]
    """Copy `blocks` blocks between addresses by non-temporal stores; `target` is a multiple of STREAMED_BYTES."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        to, of, count = arguments
        kind = ir.VectorType(ir.IntType(64), STREAMED_BYTES // 8)
        hint = builder.module.add_metadata([ir.IntType(32)(1)])
        with cgutils.for_range(builder, count) as loop:
            start = builder.mul(loop.index, ir.IntType(64)(STREAMED_BYTES))
            block = builder.load(builder.inttoptr(builder.add(of, start), kind.as_pointer()), align=1)
            store = builder.store(block, builder.inttoptr(builder.add(to, start), kind.as_pointer()))
            store.align = STREAMED_BYTES
            store.set_metadata("nontemporal", hint)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


@numba.njit(inline="always")
def stream(target, source, count):  # type: ignore[no-untyped-def]
    """Copy `count` bytes between addresses, past the caches where `target` is aligned.

    An ordinary store first reads the line that it writes. For memory that nobody reads soon, this is twice the traffic.
    """
    blocks = count // STREAMED_BYTES if target % STREAMED_BYTES == 0 else 0
    _stream_blocks(target, source, blocks)
    done = blocks * STREAMED_BYTES
    to, of = carray(pointer(target), count, np.uint8), carray(pointer(source), count, np.uint8)
    for i in range(done, count):
        to[i] = of[i]
