"""Bytes by kind."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch
from allocated_peak import allocated_peak_bytes
from pool import Pool
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from dzero.monitor.memory import MemoryMeter, storage_bytes

CPU = torch.device("cpu")
MIB = 2**20


def test_a_shared_storage_counts_once_and_whole() -> None:
    base = torch.zeros(1000, dtype=torch.bfloat16)
    assert storage_bytes([base, base[10:], base.view(10, 100), base.detach()]) == 2000
    assert storage_bytes([base[:10]]) == 2000
    assert storage_bytes([base, torch.zeros(1000)]) == 2000 + 4000


def test_freed_and_meta_tensors_occupy_nothing() -> None:
    freed = torch.zeros(1000)
    freed.untyped_storage().resize_(0)
    assert storage_bytes([freed, torch.zeros(1000, device="meta"), torch.zeros(0)]) == 0


def sharded_bytes(rank: int, ranks: int) -> int:
    mesh = init_device_mesh("cpu", (ranks,))
    return storage_bytes([distribute_tensor(torch.zeros(100, 7), mesh, [Shard(0)])])


def test_a_dtensor_counts_as_its_local_shard(pool: Pool) -> None:
    assert pool.run(sharded_bytes, 2) == [50 * 7 * 4] * 2


def test_the_allocation_peak_is_exact() -> None:
    def run() -> None:
        a = torch.zeros(MIB, dtype=torch.uint8)
        b = torch.zeros(3 * MIB, dtype=torch.uint8)
        del a
        c = torch.zeros(2 * MIB, dtype=torch.uint8)
        del b, c

    assert allocated_peak_bytes(run, CPU) == 5 * MIB


def test_the_allocation_peak_sees_autograd() -> None:
    x = torch.zeros(256, 1024, requires_grad=True)  # 1 MiB

    def run() -> None:
        (x.exp().exp()).backward(torch.zeros(256, 1024))  # kept: 2 results, gradient in; made: one, then x.grad
        x.grad = None

    assert 4 * MIB <= allocated_peak_bytes(run, CPU) <= 5 * MIB


def split_of_a_peak() -> tuple[dict[str, int], int]:
    meter = MemoryMeter(CPU)
    # Above 32 MiB glibc always asks the system for fresh pages; below it may reuse what earlier tests freed.
    states = torch.ones(10 * MIB)  # 40 MiB, touched
    meter.reset()
    temporary = torch.ones(16 * MIB)  # 64 MiB
    del temporary
    return meter.split({"param": states.nbytes}), meter.peak_bytes()


def test_the_kinds_add_up_to_the_peak() -> None:
    # In a process of its own: what earlier tests hold may be freed at any moment, and lower this one's memory.
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as fresh:
        kinds, peak_bytes = fresh.submit(split_of_a_peak).result()
    assert list(kinds) == ["param", "activations", "process"]
    assert kinds["activations"] >= 60 * MIB
    assert sum(kinds.values()) == pytest.approx(peak_bytes, abs=2 * MIB)


@pytest.mark.gpu
def test_the_kinds_add_up_to_the_peak_on_cuda() -> None:
    device = torch.device("cuda", 0)
    meter = MemoryMeter(device)
    states = torch.ones(8 * MIB, device=device)
    assert meter.reset()
    temporary = torch.ones(16 * MIB, device=device)
    del temporary
    kinds = meter.split({"param": states.nbytes})
    assert kinds["activations"] == 64 * MIB
    assert sum(kinds.values()) == meter.peak_bytes()
    assert allocated_peak_bytes(lambda: torch.ones(MIB, device=device), device) == 4 * MIB
