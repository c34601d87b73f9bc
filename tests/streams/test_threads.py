"""Threads of a rank use its own device: a new thread of CUDA's uses the first, and takes half a gigabyte there."""

from __future__ import annotations

import threading
from concurrent.futures import Future, wait
from unittest import mock

import torch
from simulation import Simulation

from dzero import streams
from dzero.offload.executor import ScheduleExecutor
from dzero.offload.memory_pool import HostMemoryPool
from dzero.offload.schedule import ActionKey, ActionKind, BufferSlot, OffloadAction, OffloadSchedule


def test_every_lane_uses_the_device_of_its_rank() -> None:
    """Also one that was opened later, and before it does anything."""
    chosen: dict[str, torch.device] = {}
    worked: list[str] = []

    def set_device(device: torch.device) -> None:
        chosen[threading.current_thread().name] = device

    kinds = [ActionKind.EVICT, ActionKind.FETCH, ActionKind.COMPUTE, ActionKind.LOAD, ActionKind.SPILL]
    keys = [ActionKey(kind, "work", "unit") for kind in kinds]
    actions = tuple(OffloadAction(key, ("slot",)) for key in keys)
    with Simulation().running(), mock.patch.object(streams, "set_device", set_device):
        memory_pool = HostMemoryPool(4096)
        executor = ScheduleExecutor(
            OffloadSchedule((BufferSlot("slot", 4096),), actions[:2]), memory_pool, torch.device("cpu")
        )
        executor.add((), actions[2:], None)
        futures: list[Future[None]] = [
            executor.compute(key, lambda: worked.append(threading.current_thread().name)) for key in keys
        ]
        wait(futures)
        executor.close()
    assert len(set(worked)) == len(kinds)
    assert {name: chosen.get(name) for name in worked} == dict.fromkeys(worked, torch.device("cpu", 0))
