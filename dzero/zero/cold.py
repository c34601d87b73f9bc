"""What waits on disk from shard() until an optimizer takes it: parameters and fp32 origins of units that live there.

A file without a name, mapped into memory: written through, dropped from memory, and paged in again when it is read. It
takes no memory meanwhile, ends with its last tensor, and the kernel has it gone when the process ends.
"""

from __future__ import annotations

import mmap
import os
import tempfile

import torch

from dzero.hardware import format_bytes


def to_disk(tensor: torch.Tensor, folder: str) -> torch.Tensor:
    """A copy of `tensor` that takes no memory until it is read. Raises OSError where `folder` has no room.

    Refuses a `folder` that is a symbolic link.
    """
    if not tensor.nbytes:
        return tensor.cpu()
    if os.path.islink(os.path.abspath(folder)):  # which drops a trailing slash
        raise OSError(f"{folder}: a symbolic link is not followed: name the directory itself")
    with tempfile.TemporaryFile(dir=folder) as file:
        try:
            os.posix_fallocate(file.fileno(), 0, tensor.nbytes)
        except OSError as error:
            what = f"{error.strerror}: {format_bytes(tensor.nbytes)} of scratch space for initial values"
            raise OSError(error.errno, what, folder) from error
        mapped = mmap.mmap(file.fileno(), tensor.nbytes)
    cold = torch.frombuffer(mapped, dtype=tensor.dtype).view(tensor.shape)
    cold.copy_(tensor)
    mapped.flush()
    mapped.madvise(mmap.MADV_DONTNEED)
    return cold
