"""Where ranks meet: the store that the environment (torchrun's variables) names, without what earlier attempts left.

torchrun keeps its store when it restarts workers, and says nothing that all of them could tell the attempts apart by
(its restart count differs from node to node). Read there, the addresses of dead workers cost a restart, or hang. So:

    rank r      writes a name it has just made up; waits until the list holds it
    rank 0      writes the list of all ranks' names, again and again, until every rank has found its own

A list with a rank's own new name was written in this attempt, so rank 0's name in it is the attempt's.
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
    """A connection of its own to an empty store, this rank, and the number of ranks. Each `purpose` has a store.

    Raises RunError where a rank does not come in time.
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
