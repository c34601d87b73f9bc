"""Rendezvous of ranks: the store that torchrun's environment variables name, without data of earlier attempts.

torchrun keeps its store when it restarts workers, and offers no value that identifies an attempt on all nodes (its
restart count differs between nodes). Addresses of dead workers in the store would cost a restart, or a hang. So:

    rank r      writes a new random name, and waits until the list contains it
    rank 0      writes the list of all ranks' names repeatedly, until every rank has found its own

A list that contains a rank's new name was written in this attempt, so rank 0's name in the list identifies the attempt.
"""

from __future__ import annotations

import os
import time
import uuid
from datetime import timedelta

from torch.distributed import DistError, PrefixStore  # type: ignore[attr-defined]  # public, but not in __all__
from torch.distributed.rendezvous import rendezvous as open_store

from dzero.errors import RunError, converting

POLL_S = 0.02
VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def rendezvous(purpose: str, timeout: timedelta) -> tuple[PrefixStore, int, int]:
    """Connect to the empty store for `purpose` that this attempt's ranks share; return it, this rank, and their number.

    Raise RunError if a rank does not join in time.
    """
    until_s = time.monotonic() + timeout.total_seconds()
    where = ", ".join(f"{key}={os.environ[key]}" for key in VARIABLES if key in os.environ)
    repair = "start workers with torchrun, or leave RANK and WORLD_SIZE unset"
    with converting(f"no store to meet at with {where}", ValueError, DistError, repair=repair):
        store, rank, ranks = next(open_store("env://", timeout=timeout))
    name, names_key = uuid.uuid4().hex, f"meeting/{purpose}/names"
    store.set(f"meeting/{purpose}/{rank}", name)
    attempt, keys = "", [f"meeting/{purpose}/{each}" for each in range(ranks)]
    while time.monotonic() < until_s:
        if rank == 0 and store.check(keys):
            store.set(names_key, b" ".join(store.multi_get(keys)))
        listed = store.get(names_key).decode().split() if store.check([names_key]) else []
        if not attempt and listed[rank : rank + 1] == [name]:
            attempt = listed[0]
            store.add(f"meeting/{purpose}/found/{attempt}", 1)
        if attempt and (rank != 0 or store.add(f"meeting/{purpose}/found/{attempt}", 0) == ranks):
            return PrefixStore(f"{purpose}/{attempt}", store), rank, ranks
        time.sleep(POLL_S)
    missing = ", ".join(str(each) for each, key in enumerate(keys) if not store.check([key]))
    who = f"rank {missing} of {ranks} did not come" if missing else f"not all of {ranks} ranks came"
    raise RunError(f"{who} within launch.timeout_s={timeout.total_seconds():g}")
