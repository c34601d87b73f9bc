"""Parked states on a host that has too little memory: each rank sees it before it takes what others need."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from pool import Pool
from training_loops import sharded_net, snapshot, unequal

from dzero import AdamW
from dzero.zero import parking


def refused(rank: int, ranks: int) -> tuple[str, list[str]]:
    """What is said where 1,000 bytes are free, and what differs after it."""
    sharded = sharded_net("uneven", stage=1)
    optim = AdamW(sharded)
    want = snapshot(sharded, optim)
    with patch.object(parking, "host_available_bytes", lambda: 1000), pytest.raises(MemoryError) as told:
        sharded.park("host")
    return str(told.value), unequal(want, snapshot(sharded, optim))


def test_too_little_memory_is_one_line_and_loses_nothing(pool: Pool) -> None:
    ((said, differ),) = pool.run(refused, 1)
    assert differ == []
    assert said.startswith("park(where='host') needs")
    assert "1000 B are available now: take park(where='disk')" in said
    assert "\n" not in said


def test_a_rank_that_is_late_may_take_what_the_others_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 10 units of host memory, each of 2 ranks takes 4; of 7, the second one is refused in time."""
    unit = parking.CHUNK_BYTES // 4096
    monkeypatch.setattr(parking, "CHUNK_BYTES", unit)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    for total, is_refused in ((10, False), (7, True)):
        taken: list[int] = []
        monkeypatch.setattr(parking, "host_available_bytes", lambda total=total, taken=taken: total * unit - sum(taken))
        monkeypatch.setattr(parking.streams, "pin_memory", lambda new, _, taken=taken: taken.append(len(new)) or new)
        data = torch.arange(4 * unit).to(torch.uint8)
        parking.HostCopies(len(data), data.device).save(0, data)
        if is_refused:
            with pytest.raises(MemoryError, match="on each rank"):
                parking.HostCopies(len(data), data.device).save(0, data)
            continue
        late = parking.HostCopies(len(data), data.device)
        late.save(0, data)
        late.load(0, loaded := torch.empty_like(data))
        assert torch.equal(loaded, data)
