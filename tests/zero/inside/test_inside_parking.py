"""Parked states on a host that has too little memory: each rank sees it before it takes what others need."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from on_ranks import on_ranks
from training_loops import sharded_net, snapshot, unequal

from dzero import AdamW
from dzero.zero import parking


@on_ranks(1)
def test_too_little_memory_is_one_line_and_loses_nothing(rank: int, ranks: int) -> list[str]:
    """What differs after 1,000 bytes were free."""
    sharded = sharded_net("uneven", stage=1)
    optim = AdamW(sharded)
    want = snapshot(sharded, optim)
    says = r"\Apark\(where='host'\) needs [^\n]*1000 B are available now: take park\(where='disk'\)[^\n]*\Z"
    with patch.object(parking, "host_available_bytes", lambda: 1000), pytest.raises(MemoryError, match=says):
        sharded.park("host")
    return unequal(want, snapshot(sharded, optim))


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
