"""Model of CUDA's caching allocator (c10), which replays allocations and frees and counts the bytes of the device.

    rule              what the model does
    size              rounded up to 512 B
    pools             one per stream for requests of at most 1 MiB (small), and one for larger requests
    search            best fit: the smallest free block that is large enough, of these the one at the lowest address
    free              joins the free neighbours in the same segment
    out of memory     gives all free segments (or pages) back to the device and tries once more

                      segments of fixed size              expandable segments
    growth            a new segment: 2 MiB (small),       one range of addresses per pool, which grows by pages of
                      20 MiB for requests below 10 MiB,   2 MiB (small) or 20 MiB; of the places where mapping pages
                      otherwise the request in 2 MiB      makes room, the one at the lowest address
    a block is split  from a rest of 512 B (small), or    from a rest of 512 B
                      above 1 MiB

Left out are `record_stream`, settings other than `expandable_segments`, the memory of the CUDA context, and the end of
the addresses. The device has no fragmentation of its own, and the addresses of new segments increase.

Note: best fit with expandable segments. A free block that can grow counts as large as it could become, so that a
request rather takes another block that is large enough, and leaves the one that can grow to larger requests.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterator
from itertools import takewhile
from typing import NamedTuple

MIN_BLOCK = 512
SMALL_REQUEST, SMALL_SEGMENT = 1 << 20, 2 << 20
LARGE_SEGMENT = 20 << 20
OWN_SEGMENT, ROUND_SEGMENT = 10 << 20, 2 << 20
"""Requests of 10 MiB or more get a segment of their own size, rounded up to 2 MiB."""
SPACE = LARGE_SEGMENT << 26
"""Bytes of addresses of an expandable segment: whole pages, more than any device has."""


class OutOfMemory(Exception):
    """A request for which the device has no memory, even after all that was cached is given back."""


class PoolKey(NamedTuple):
    """Pool of a stream, for small or for large requests."""

    stream: str
    small: bool


class Block:
    """Range of addresses in a segment: allocated, free or, in expandable segments, unmapped."""

    __slots__ = ("address", "allocated", "before", "behind", "mapped", "pool", "size")

    def __init__(self, pool: PoolKey, address: int, size: int, *, mapped: bool = True) -> None:
        self.pool, self.address, self.size, self.mapped = pool, address, size, mapped
        self.allocated = False
        self.before: Block | None = None
        self.behind: Block | None = None

    @property
    def growable_size(self) -> int:
        """Size with the unmapped addresses behind."""
        behind = self.behind
        return self.size + (0 if behind is None or behind.mapped else behind.size)


class BlockSet:
    """Blocks in order of their size and address, or of their address alone."""

    def __init__(self, *, by_size: bool) -> None:
        self._by_size = by_size
        self._order: list[tuple[int, int]] = []
        self._blocks: dict[int, Block] = {}

    def at_least(self, size: int = 0) -> Iterator[Block]:
        """Yield the blocks in order, from the first of at least `size` bytes on."""
        start = bisect_left(self._order, (size, 0))
        return (self._blocks[self._order[index][1]] for index in range(start, len(self._order)))

    def add(self, block: Block) -> None:
        """Add a block, whose size must not change while it is here."""
        insort(self._order, self._key(block))
        self._blocks[block.address] = block

    def remove(self, block: Block) -> None:
        """Remove a block."""
        del self._order[bisect_left(self._order, self._key(block))]
        del self._blocks[block.address]

    def _key(self, block: Block) -> tuple[int, int]:
        return (block.size if self._by_size else 0, block.address)


class CachingAllocator:
    """Allocator of one device.

    Args:
        capacity: Bytes of the device; None for more than enough.
        expandable: Whether segments are expandable.

    Attributes:
        allocated: Bytes of allocated blocks, with what was not split off.
        reserved: Bytes that the device has given out.
        peak_allocated, peak_reserved: Maxima of these.
        unused_at_peak: Bytes of free blocks when `reserved` first was at its peak.
        retries: Number of times that cached memory was given back because the device had none.
    """

    def __init__(self, capacity: int | None = None, *, expandable: bool = False) -> None:
        self.capacity, self.expandable = capacity, expandable
        self.allocated = self.reserved = self.peak_allocated = self.peak_reserved = 0
        self.unused_at_peak = self.retries = 0
        self._end = SPACE  # of all addresses that segments have had
        self._free: defaultdict[PoolKey, BlockSet] = defaultdict(lambda: BlockSet(by_size=True))
        self._unmapped: defaultdict[PoolKey, BlockSet] = defaultdict(lambda: BlockSet(by_size=False))

    def malloc(self, size: int, stream: str = "") -> Block:
        """Return an allocated block of at least `size` bytes; raises OutOfMemory."""
        size = round_up(max(size, 1), MIN_BLOCK)
        pool = PoolKey(stream, size <= SMALL_REQUEST)
        block = self._best_fit(pool, size) or self._grow(pool, size)
        if block is None:
            self.retries += 1
            self._give_back()
            block = self._grow(pool, size)
        if block is None:
            raise OutOfMemory(f"{size} bytes asked for, with {self.reserved} of {self.capacity} given out")
        self._free[pool].remove(block)
        if self._is_split(block, size):
            self._free[pool].add(_cut(block, size))
        block.allocated = True
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        if self.reserved > self.peak_reserved:
            self.peak_reserved, self.unused_at_peak = self.reserved, self.reserved - self.allocated
        return block

    def free(self, block: Block) -> None:
        """Free an allocated block."""
        block.allocated = False
        self.allocated -= block.size
        self._add_free(block)

    def _best_fit(self, pool: PoolKey, size: int) -> Block | None:
        found = None
        for block in self._free[pool].at_least(size):
            if found is not None and block.growable_size >= found.growable_size:
                break
            found = block
        return found

    def _is_split(self, block: Block, size: int) -> bool:
        rest = block.size - size
        return rest >= MIN_BLOCK if self.expandable or block.pool.small else rest > SMALL_REQUEST

    def _grow(self, pool: PoolKey, size: int) -> Block | None:
        """Return a free block of at least `size` bytes from more of the device, or None if that has too little."""
        if self.expandable:
            return self._expand(pool, size)
        if not self._take(count := segment_bytes(size)):
            return None
        block = Block(pool, self._end, count)
        self._end += count
        self._free[pool].add(block)
        return block

    def _expand(self, pool: PoolKey, size: int) -> Block | None:
        block: Block | None = self._place(pool, size)
        while block is not None and not (block.mapped and block.size >= size):
            hole = block if not block.mapped else block.behind
            assert hole is not None  # behind a free block are unmapped addresses, or `_place` had not chosen it
            block = self._map(hole, size - block.size if block.mapped else size)
        return block

    def _place(self, pool: PoolKey, size: int) -> Block:
        """Return the first block from which on `size` bytes are free or unmapped, some of them unmapped."""
        for hole in self._unmapped[pool].at_least():
            first = hole.before if hole.before is not None and not hole.before.allocated else hole
            room = takewhile(lambda each: not each.allocated, _from(first))
            if sum(each.size for each in room) >= size:
                return first
        segment = Block(pool, self._end, SPACE, mapped=False)
        self._end += SPACE
        self._unmapped[pool].add(segment)
        return segment

    def _map(self, hole: Block, size: int) -> Block | None:
        """Map pages from the start of a hole, at most all, and return the free block that they are part of."""
        count = min(round_up(size, page_bytes(hole.pool)), hole.size)
        if not self._take(count):
            return None
        self._unmapped[hole.pool].remove(hole)
        if count < hole.size:
            self._unmapped[hole.pool].add(_cut(hole, count))
        hole.mapped = True
        return self._add_free(hole)

    def _take(self, count: int) -> bool:
        """Take bytes from the device, if it has them."""
        if self.capacity is not None and self.reserved + count > self.capacity:
            return False
        self.reserved += count
        return True

    def _add_free(self, block: Block) -> Block:
        """Add a block to the free ones, joined with its free neighbours; return what became of it."""
        return self._join(block, self._free[block.pool])

    def _join(self, block: Block, others: BlockSet) -> Block:
        before, behind = block.before, block.behind
        if behind is not None and _alike(block, behind):
            others.remove(behind)
            _absorb(block, behind)
        if before is not None and _alike(block, before):
            others.remove(before)
            _absorb(before, block)
            block = before
        others.add(block)
        return block

    def _give_back(self) -> None:
        """Give free segments, or pages that are entirely free, back to the device."""
        for blocks in self._free.values():
            for block in list(blocks.at_least()):
                if self.expandable:
                    self._unmap(block)
                elif block.before is None and block.behind is None:
                    blocks.remove(block)
                    self.reserved -= block.size

    def _unmap(self, block: Block) -> None:
        page, free = page_bytes(block.pool), self._free[block.pool]
        start, end = round_up(block.address, page), (block.address + block.size) // page * page
        if start >= end:
            return
        free.remove(block)
        if start > block.address:
            middle = _cut(block, start - block.address)
            free.add(block)
            block = middle
        if end < block.address + block.size:
            free.add(_cut(block, end - start))
        block.mapped = False
        self.reserved -= block.size
        self._join(block, self._unmapped[block.pool])


def round_up(size: int, unit: int) -> int:
    """Return the least multiple of `unit` that is at least `size`."""
    return -(-size // unit) * unit


def segment_bytes(size: int) -> int:
    """Return the size of the segment of fixed size that is made for a rounded request."""
    if size <= SMALL_REQUEST:
        return SMALL_SEGMENT
    return LARGE_SEGMENT if size < OWN_SEGMENT else round_up(size, ROUND_SEGMENT)


def page_bytes(pool: PoolKey) -> int:
    """Return the size of the pages that expandable segments grow by."""
    return SMALL_SEGMENT if pool.small else LARGE_SEGMENT


def _from(block: Block | None) -> Iterator[Block]:
    """Yield a block and all behind it."""
    while block is not None:
        yield block
        block = block.behind


def _alike(one: Block, other: Block) -> bool:
    return not other.allocated and one.mapped == other.mapped


def _cut(block: Block, size: int) -> Block:
    """Shorten a block to `size` bytes and return the rest, a block behind it."""
    rest = Block(block.pool, block.address + size, block.size - size, mapped=block.mapped)
    rest.before, rest.behind = block, block.behind
    if rest.behind is not None:
        rest.behind.before = rest
    block.behind, block.size = rest, size
    return rest


def _absorb(block: Block, behind: Block) -> None:
    """Extend a block by the one behind it."""
    block.size += behind.size
    block.behind = behind.behind
    if block.behind is not None:
        block.behind.before = block
