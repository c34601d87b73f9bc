"""One arena of host memory for all that is offloaded: huge pages, touched once, page-locked where a GPU reads it.

    capacity   fixed at the start, from the schedule's sum of slots; never more
    lease      the right to a piece of it, aligned for direct I/O, with a phase that says who may touch it
    high water the most that was leased at once

Fresh pages cost 13 times a second touch, so all are touched before the first step: a lease's when it is first looked
at, so that what moves in can be freed outside as it goes, the rest by `settle`. It is done by threads on the cores that
will update them: a page lies in the memory of the core that touched it first.
"""

from __future__ import annotations

import mmap
import os
import warnings
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
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
    """Bytes that a lease of `count` bytes takes."""
    return -(-count // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


class LeasePhase(Enum):
    """Who may touch a lease now."""

    HELD = "held"
    """Nobody is moving it: the host may read and write."""
    ARRIVING = "arriving"
    """A copy is filling it."""
    LEAVING = "leaving"
    """A copy is reading it."""
    COMPUTING = "computing"
    """The host works on it."""
    GIVEN_BACK = "given back"


@dataclass
class Lease:
    """`data` uint8 [bytes], valid until `release`."""

    what: str
    data: torch.Tensor
    offset: int
    memory_pool: HostMemoryPool = field(repr=False)
    phase: LeasePhase = LeasePhase.HELD
    touched: bool = False

    def view(self, dtype: torch.dtype, elems: int, start_bytes: int = 0) -> torch.Tensor:
        """`elems` elements of `dtype` from `start_bytes` on, as a storage of its own: saving it saves no neighbours."""
        self.memory_pool.touch(self)
        piece = self.data[start_bytes : start_bytes + elems * dtype.itemsize]
        return torch.from_numpy(piece.numpy()).view(dtype) if elems else torch.empty(0, dtype=dtype)

    def enter(self, phase: LeasePhase) -> None:
        """Move to `phase`. Raises RuntimeError from one copy into another: the slot would be used twice."""
        if self.phase is LeasePhase.GIVEN_BACK or (self.phase is not LeasePhase.HELD and phase is not LeasePhase.HELD):
            raise RuntimeError(f"{self.what} is {self.phase.value}; it cannot be {phase.value} as well")
        self.phase = phase

    def release(self) -> None:
        """Give the memory back. Raises RuntimeError while a copy runs, and the second time."""
        self.enter(LeasePhase.GIVEN_BACK if self.phase is LeasePhase.HELD else self.phase)
        self.memory_pool._give_back(self)


class HostMemoryPool:
    """`capacity_bytes` of host memory, leased first-fit. `pin`: page-lock it, for copies that a GPU makes by itself.

    cores: the pages come from the memory (NUMA node) next to them; none for wherever this thread runs.
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
        """Give a lease its pages, if it has none yet."""
        if not lease.touched:
            lease.touched = True
            _touch(lease.data, self._cores)

    def settle(self) -> None:
        """Give every lease its pages and lock them all: nothing is allocated from here on."""
        for lease in self._leases:
            self.touch(lease)
        if self._pin and self.capacity_bytes and not self.pinned:
            self.pinned = _page_lock(self._memory)
            if self.pinned:
                weakref.finalize(self, _page_unlock, self._memory)

    def lease(self, count: int, what: str) -> Lease:
        """`count` bytes, zeros at the first `view`. Raises MemoryError beyond the capacity."""
        size = aligned(count)
        for index, (start, length) in enumerate(self._gaps):
            if length >= size:
                self._gaps[index : index + 1] = [(start + size, length - size)] if length > size else []
                self.leased_bytes += size
                self.high_water_bytes = max(self.high_water_bytes, self.leased_bytes)
                self._leases.append(Lease(what, self._memory[start : start + count], start, self))
                return self._leases[-1]
        raise MemoryError(
            f"{what}: {format_bytes(size)} do not fit the arena of {format_bytes(self.capacity_bytes)}, of which "
            f"{format_bytes(self.leased_bytes)} are leased"
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
    """Raises MemoryError where a host with `available_bytes` cannot give each of its `ranks` such an arena.

    repair: what the user may do about it.
    """
    if capacity_bytes * ranks > available_bytes:
        raise MemoryError(
            f"offload needs {format_bytes(capacity_bytes)} of host memory for each of {ranks} ranks, "
            f"{format_bytes(capacity_bytes * ranks)} in all; {format_bytes(available_bytes)} are available. {repair}"
        )


def _huge_pages(count: int) -> torch.Tensor:
    """uint8 [count] in anonymous memory, 2 MiB-aligned; zeros, none of which takes a page yet."""
    if not count:
        return torch.empty(0, dtype=torch.uint8)
    mapped = mmap.mmap(-1, count + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mapped.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(mapped, dtype=torch.uint8)
    skip = -whole.data_ptr() % HUGE_PAGE_BYTES
    return whole[skip : skip + count]


def _touch(memory: torch.Tensor, cores: Sequence[int]) -> None:
    """Write zeros, by one thread per core, each on `cores` (where any are given)."""
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
        warnings.warn(
            f"the system refuses to page-lock {format_bytes(memory.numel())} (CUDA error {code}): copies go through "
            "pageable memory, at about half the speed and without overlap; raise `ulimit -l` or the container's limit",
            stacklevel=3,
        )
    return code == 0


def _page_unlock(memory: torch.Tensor) -> None:
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())  # type: ignore[no-untyped-call]
