"""Host memory pool for all offloaded data: huge pages, touched once, and page-locked if there is a GPU.

    capacity     fixed at construction, as the sum of the schedule's slots
    lease        exclusive use of a part, aligned for direct I/O, with a phase that defines who may access it
    high water   largest number of bytes leased at one time

The first touch of a page takes 13 times as long as the second, so all pages are touched before the first step. The
pages of a lease are touched at its first `view`, so that tensors that move in can be freed one by one, and the rest by
`settle`. Pages are touched by threads on the cores that will update them, because a page is allocated in the memory of
the core that touches it first.
"""

from __future__ import annotations

import mmap
import os
import warnings
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from functools import partial

import torch

from dzero.hardware import format_bytes

ALIGNMENT_BYTES = 4096
HUGE_PAGE_BYTES = 2 << 20
TOUCHED_BYTES = 64 << 20
TOUCHING_THREADS = 16


def aligned(count: int) -> int:
    """Return the number of bytes that a lease of `count` bytes takes."""
    return -(-count // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


class LeasePhase(Enum):
    """Current access to a lease."""

    HELD = "held"
    """No action uses it: the host may read and write."""
    ARRIVING = "arriving"
    """A copy writes it."""
    LEAVING = "leaving"
    """A copy reads it."""
    COMPUTING = "computing"
    """A computation on the host uses it."""
    GIVEN_BACK = "given back"


@dataclass(eq=False)
class Lease:
    """Part of the pool: `data` is uint8 [bytes], valid until `release`."""

    what: str
    data: torch.Tensor
    offset: int
    memory_pool: HostMemoryPool = field(repr=False)
    phase: LeasePhase = LeasePhase.HELD
    touched: bool = False

    def view(self, dtype: torch.dtype, elems: int, start_bytes: int = 0) -> torch.Tensor:
        """Return elements as a flat tensor with a storage of its own, so that saving it does not save its neighbours.

        Args:
            dtype: Type of the elements.
            elems: Number of elements.
            start_bytes: Offset within the lease.
        """
        self.memory_pool.touch(self)
        piece = self.data[start_bytes : start_bytes + elems * dtype.itemsize]
        return torch.from_numpy(piece.numpy()).view(dtype) if elems else torch.empty(0, dtype=dtype)

    def enter(self, phase: LeasePhase) -> None:
        """Enter `phase`.

        Raises:
            RuntimeError: The lease is in use, so that the slot would be used twice, or it has been released.
        """
        if self.phase is LeasePhase.GIVEN_BACK or (self.phase is not LeasePhase.HELD and phase is not LeasePhase.HELD):
            raise RuntimeError(f"{self.what} is {self.phase.value}; it cannot be {phase.value} as well")
        self.phase = phase

    def release(self) -> None:
        """Return the memory to the pool; raises RuntimeError while a copy is in progress, and the second time."""
        self.enter(LeasePhase.GIVEN_BACK if self.phase is LeasePhase.HELD else self.phase)
        self.memory_pool._give_back(self)


class HostMemoryPool:
    """Host memory of `capacity_bytes`, leased first-fit.

    Args:
        capacity_bytes: Size, rounded up to huge pages.
        pin: Whether to page-lock the memory, so that GPU copies are asynchronous.
        cores: Cores near which (NUMA node) pages are allocated; by default those of the calling thread.
    """

    def __init__(self, capacity_bytes: int, *, pin: bool = False, cores: Sequence[int] = ()) -> None:
        self.capacity_bytes = -(-capacity_bytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        self.leased_bytes = self.high_water_bytes = 0
        self.pinned = False
        self._pin, self._cores = pin, cores
        self._leases: list[Lease] = []
        self._gaps = [(0, self.capacity_bytes)]
        self._memory = _huge_pages(self.capacity_bytes)

    def touch(self, lease: Lease) -> None:
        """Allocate the pages of a lease, unless it has them."""
        if not lease.touched:
            lease.touched = True
            _touch(lease.data, self._cores)

    def settle(self) -> None:
        """Allocate the pages of all leases and page-lock the pool; nothing is allocated afterwards."""
        for lease in self._leases:
            self.touch(lease)
        if self._pin and self.capacity_bytes and not self.pinned:
            self.pinned = _page_lock(self._memory)
            if self.pinned:
                weakref.finalize(self, _page_unlock, self._memory)

    def lease(self, count: int, what: str) -> Lease:
        """Lease `count` bytes, which are zero at the first `view`; raises MemoryError beyond the capacity."""
        size = aligned(count)
        for index, (start, length) in enumerate(self._gaps):
            if length >= size:
                self._gaps[index : index + 1] = [(start + size, length - size)] if length > size else []
                self.leased_bytes += size
                self.high_water_bytes = max(self.high_water_bytes, self.leased_bytes)
                self._leases.append(Lease(what, self._memory[start : start + count], start, self))
                return self._leases[-1]
        raise MemoryError(
            f"{what}: {format_bytes(size)} do not fit the host memory pool of {format_bytes(self.capacity_bytes)}, of "
            f"which {format_bytes(self.leased_bytes)} are leased"
        )

    def _give_back(self, lease: Lease) -> None:
        size = aligned(lease.data.numel())
        self.leased_bytes -= size
        self._leases.remove(lease)
        merged: list[tuple[int, int]] = []
        for start, length in sorted([*self._gaps, (lease.offset, size)]):
            if merged and merged[-1][0] + merged[-1][1] == start:
                merged[-1] = (merged[-1][0], merged[-1][1] + length)
            elif length:
                merged.append((start, length))
        self._gaps = merged
        lease.data = torch.empty(0, dtype=torch.uint8)


LESS_STATE = (
    "Keep more on the device (offload.*_fraction), shard over more ranks or hosts, or store less "
    "(precision.master=remainder, precision.moments=bf16)"
)


def require(capacity_bytes: int, available_bytes: int, ranks: int, repair: str = LESS_STATE) -> None:
    """Raise MemoryError if the host cannot give each of its ranks a pool of this size.

    Args:
        capacity_bytes: Size of the pool of one rank.
        available_bytes: Available memory of the host.
        ranks: Number of ranks on the host.
        repair: Advice to the user in the message.
    """
    if capacity_bytes * ranks > available_bytes:
        raise MemoryError(
            f"offload needs {format_bytes(capacity_bytes)} of host memory for each of {ranks} ranks, "
            f"{format_bytes(capacity_bytes * ranks)} in all; {format_bytes(available_bytes)} are available. {repair}"
        )


def _huge_pages(count: int) -> torch.Tensor:
    """Return uint8 [count] in anonymous memory, 2 MiB-aligned: zeros, for which no page is allocated yet."""
    if not count:
        return torch.empty(0, dtype=torch.uint8)
    mapped = mmap.mmap(-1, count + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mapped.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(mapped, dtype=torch.uint8)
    skip = -whole.data_ptr() % HUGE_PAGE_BYTES
    return whole[skip : skip + count]


def _touch(memory: torch.Tensor, cores: Sequence[int]) -> None:
    """Write zeros with one thread per core, restricted to `cores` if there are any."""
    pieces = torch.split(memory, TOUCHED_BYTES)
    bind = partial(os.sched_setaffinity, 0, cores) if cores else None
    threads = min(TOUCHING_THREADS, len(cores) or torch.get_num_threads(), len(pieces))
    with ThreadPoolExecutor(threads, initializer=bind) as pool:
        for done in [pool.submit(piece.numpy().fill, 0) for piece in pieces]:
            done.result()


def _page_lock(memory: torch.Tensor) -> bool:
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    code = int(runtime.cudaHostRegister(memory.data_ptr(), memory.numel(), 0))
    if code != 0:
        with suppress(RuntimeError):  # the runtime keeps the error for the next kernel, which must not be another's
            torch.ones(1, device="cuda")
        warnings.warn(
            f"the system refuses to page-lock {format_bytes(memory.numel())} (CUDA error {code}): copies go through "
            "pageable memory, at about half the speed and without overlap; raise `ulimit -l` or the container's limit",
            stacklevel=3,
        )
    return code == 0


def _page_unlock(memory: torch.Tensor) -> None:
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())  # type: ignore[no-untyped-call]
