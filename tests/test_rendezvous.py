"""Ranks that do not come to the meeting are named."""

from __future__ import annotations

from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from dzero import RunError
from dzero.rendezvous import rendezvous


@pytest.mark.parametrize(("here", "missing"), [(0, "1, 2"), (1, "0, 2")])
def test_a_rank_that_does_not_come_is_named(here: int, missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    agent = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": agent.port, "RANK": here, "WORLD_SIZE": 3}
    for name, value in (env | {"TORCHELASTIC_USE_AGENT_STORE": "True"}).items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(RunError, match=rf"^rank {missing} of 3 did not come within launch\.timeout_s=0\.5$"):
        rendezvous("test", timedelta(seconds=0.5))
