"""The model of CUDA's caching allocator does what its rules say, in cases worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest
from simulator.caching_allocator import CachingAllocator, OutOfMemory

KIB, MIB = 1 << 10, 1 << 20
in_both_modes = pytest.mark.parametrize("expandable", [False, True])


def taken(allocator: CachingAllocator, *sizes: int) -> list[Any]:
    """Blocks of so many MiB."""
    return [allocator.malloc(size * MIB) for size in sizes]


def test_sizes_are_rounded_up_to_512_bytes() -> None:
    allocator = CachingAllocator()
    assert [allocator.malloc(size).size for size in (1, 512, 513)] == [512, 512, 1024]
    assert (allocator.allocated, allocator.reserved) == (2048, 2 * MIB)


def test_small_requests_share_segments_of_2_mib_and_larger_ones_of_20() -> None:
    allocator = CachingAllocator()
    taken(allocator, 1, 1)
    assert allocator.reserved == 2 * MIB
    allocator.malloc(MIB + 1)
    taken(allocator, 6, 6, 6)  # 18 MiB behind the first block, which has 1 MiB and 512 B
    assert allocator.reserved == (2 + 20) * MIB


def test_requests_from_10_mib_on_have_segments_of_their_own_in_units_of_2_mib() -> None:
    allocator = CachingAllocator()
    assert allocator.malloc(10 * MIB).size == 10 * MIB
    assert allocator.malloc(11 * MIB + 512).size == 12 * MIB  # the rest of less than 1 MiB is not split off
    assert allocator.allocated == allocator.reserved == 22 * MIB


@pytest.mark.parametrize(("expandable", "size"), [(False, 4 * MIB), (True, 3 * MIB)])
def test_a_rest_of_1_mib_is_split_off_in_expandable_segments_only(expandable: bool, size: int) -> None:
    allocator = CachingAllocator(expandable=expandable)
    first, _ = taken(allocator, 4, 2)
    allocator.free(first)
    (again,) = taken(allocator, 3)
    assert (again.address, again.size) == (first.address, size)


@in_both_modes
def test_the_smallest_block_that_is_large_enough_is_taken(expandable: bool) -> None:
    allocator = CachingAllocator(expandable=expandable)
    four, _, three, _ = taken(allocator, 4, 2, 3, 2)
    for block in (four, three):
        allocator.free(block)
    assert allocator.malloc(3 * MIB).address == three.address
    assert allocator.malloc(2 * MIB + 512 * KIB).address == four.address


def test_free_neighbours_become_one_block() -> None:
    allocator = CachingAllocator()
    blocks = taken(allocator, 5, 5, 5, 5)
    for index in (0, 2, 1, 3):
        allocator.free(blocks[index])
    assert allocator.malloc(20 * MIB).address == blocks[0].address
    assert allocator.reserved == 20 * MIB


@in_both_modes
def test_a_stream_does_not_use_what_another_one_freed(expandable: bool) -> None:
    allocator = CachingAllocator(expandable=expandable)
    allocator.free(allocator.malloc(20 * MIB, "gather"))
    allocator.malloc(20 * MIB)
    assert allocator.reserved == 40 * MIB


def test_free_segments_are_given_back_where_the_device_is_full_but_none_in_use() -> None:
    allocator = CachingAllocator(40 * MIB)
    for block in [allocator.malloc(20 * MIB, stream) for stream in ("", "gather")]:
        allocator.free(block)
    allocator.malloc(40 * MIB)
    assert (allocator.reserved, allocator.retries) == (40 * MIB, 1)
    allocator = CachingAllocator(40 * MIB)
    _, twenty = taken(allocator, 6, 20)
    allocator.free(twenty)
    with pytest.raises(OutOfMemory):
        allocator.malloc(22 * MIB)
    assert allocator.malloc(20 * MIB).size == 20 * MIB


@pytest.mark.parametrize(("expandable", "reserved"), [(False, 80), (True, 40)])
def test_two_free_segments_hold_a_request_of_their_sum_if_they_are_expandable(expandable: bool, reserved: int) -> None:
    allocator = CachingAllocator(expandable=expandable)
    for block in taken(allocator, 20, 20):
        allocator.free(block)
    allocator.malloc(40 * MIB)
    assert allocator.reserved == reserved * MIB
    assert allocator.unused_at_peak == (reserved - 40) * MIB


def test_an_expandable_segment_grows_by_the_pages_that_its_last_block_lacks() -> None:
    allocator = CachingAllocator(expandable=True)
    first, second = taken(allocator, 6, 30)  # of the first page 14 MiB are there, and 16 lack
    assert second.address == first.address + 6 * MIB
    assert allocator.reserved == 40 * MIB
    allocator.malloc(KIB)
    assert allocator.reserved == 42 * MIB


def test_a_block_that_cannot_grow_is_taken_before_a_smaller_one_that_can() -> None:
    allocator = CachingAllocator(expandable=True)
    eight, _ = taken(allocator, 8, 7)
    allocator.free(eight)  # the last 5 MiB of the page are free too, and can grow
    assert allocator.malloc(4 * MIB).address == eight.address


def test_pages_that_are_entirely_free_are_given_back_and_mapped_again_from_the_lowest_address_on() -> None:
    allocator = CachingAllocator(60 * MIB, expandable=True)
    first, second = taken(allocator, 45, 15)
    allocator.free(first)  # of its third page, 5 MiB
    small = allocator.malloc(KIB)
    assert (allocator.reserved, allocator.retries) == (22 * MIB, 1)
    allocator.free(small)
    assert allocator.malloc(5 * MIB).address == second.address - 5 * MIB
    assert allocator.malloc(40 * MIB).address == first.address
    assert (allocator.reserved, allocator.retries) == (60 * MIB, 2)
