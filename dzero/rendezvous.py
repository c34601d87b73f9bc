"""Rendezvous of ranks: the store that torchrun's environment variables name, without data of earlier attempts.

torchrun keeps its store when it restarts workers, and offers no value that identifies an attempt on all nodes (its
restart count differs between nodes). Addresses of dead workers in the store would cost a restart, or a hang. So:

    rank r      writes a new random name, and waits until the list contains it
    rank 0      writes the list of all ranks' names repeatedly, until every rank has found its own

A list that contains a rank's new name was written in this attempt, so rank 0's name in the list identifies the attempt.

A store whose host is stopped or out of reach is waited for without a limit by torch: until the kernel gives up the
connection, after a quarter of an hour. `BoundedStore` waits in a thread of its own.
"""

from __future__ import annotations

import os
import threading
import time
import uuid
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NoAnswer
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

from torch.distributed import (  # type: ignore[attr-defined]  # public, but not in __all__
    DistError,
    PrefixStore,
    Store,
    TCPStore,
)
from torch.distributed.rendezvous import rendezvous as open_store

from dzero.errors import RunError, converting

POLL_S = 0.02
ANSWER_S = 1.5
"""Seconds within which a store answers, unless its host is stopped, out of reach, or gone."""
VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class StoreLost(Exception):
    """The store of the ranks is gone (`is_gone`), or does not answer."""

    def __init__(self, address: str, *, is_gone: bool) -> None:
        at = f" at {address}" if address else ""
        super().__init__(f"the store of the ranks{at} {'is gone' if is_gone else 'does not answer'}")
        self.is_gone = is_gone


class BoundedStore:
    """A store of ranks that is waited for no longer than `ANSWER_S`; for use by several threads.

    What could not be answered in time is done once the store answers again.
    """

    def __init__(self, store: Store) -> None:
        self._calls: SimpleQueue[tuple[Future[Any], str, tuple[Any, ...]] | None] = SimpleQueue()
        self._unanswered: Future[Any] | None = None
        self._address = _address(store)
        threading.Thread(target=_serve, args=(store, self._calls), name="store", daemon=True).start()

    def set(self, key: str, value: str | bytes) -> None:
        """Set a value. This and all others raise StoreLost if the store is gone or does not answer."""
        self._call("set", key, value)

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys have values."""
        return bool(self._call("check", keys))

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Return the values of keys that have some."""
        found: list[bytes] = self._call("multi_get", keys)
        return found

    def add(self, key: str, number: int) -> int:
        """Add to the number at `key`, which is 0 at first, and return the sum."""
        return int(self._call("add", key, number))

    def compare_set(self, key: str, expected: str, value: str) -> str:
        """Set `value` if the value is `expected`, empty where there is none; return the value."""
        return bytes(self._call("compare_set", key, expected, value)).decode()

    def delete_key(self, key: str) -> None:
        """Delete a key, if it is there."""
        self._call("delete_key", key)

    def close(self) -> None:
        """End the thread, and with it the connection."""
        self._calls.put(None)

    def _call(self, name: str, *args: Any) -> Any:
        if self._unanswered is not None and not self._unanswered.done():
            raise StoreLost(self._address, is_gone=False)
        call: Future[Any] = Future()
        self._calls.put((call, name, args))
        try:
            return call.result(ANSWER_S)
        except NoAnswer as silent:
            self._unanswered = call
            raise StoreLost(self._address, is_gone=False) from silent
        except DistError as gone:
            raise StoreLost(self._address, is_gone=True) from gone


def _address(store: Store) -> str:
    """Return HOST:PORT of a store; empty if it has none."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return f"{store.host}:{store.port}" if isinstance(store, TCPStore) else ""


def _serve(store: Store, calls: SimpleQueue[tuple[Future[Any], str, tuple[Any, ...]] | None]) -> None:
    while (asked := calls.get()) is not None:
        call, name, args = asked
        try:
            call.set_result(getattr(store, name)(*args))
        except Exception as error:  # raised again where the call is waited for
            call.set_exception(error)


def rendezvous(purpose: str, timeout: timedelta) -> tuple[PrefixStore, int, int]:
    """Connect to the empty store for `purpose` that this attempt's ranks share; return it, this rank, and their number.

    Raise RunError if a rank does not join in time.
    """
    until_s = time.monotonic() + timeout.total_seconds()
    where = ", ".join(f"{key}={os.environ[key]}" for key in VARIABLES if key in os.environ)
    repair = "start workers with torchrun, or leave RANK and WORLD_SIZE unset"
    with converting(f"no store to meet at with {where}", ValueError, DistError, repair=repair):
        store, rank, ranks = next(open_store("env://", timeout=timeout))
    bounded = BoundedStore(store)
    meeting = _Meeting(bounded, f"meeting/{purpose}", rank, ranks)
    lost: StoreLost | None = None
    try:
        while time.monotonic() < until_s:
            try:
                if meeting.is_complete():
                    return PrefixStore(f"{purpose}/{meeting.attempt}", store), rank, ranks
                lost = None
            except StoreLost as error:  # a link may come back
                lost = error
                if error.is_gone:
                    break
            time.sleep(POLL_S)
        missing = "" if lost else ", ".join(map(str, meeting.missing()))
    finally:
        bounded.close()
    if lost is not None:
        raise RunError(f"rank {rank} of {ranks} could not meet the others: {lost}") from lost
    who = f"rank {missing} of {ranks} did not come" if missing else f"not all of {ranks} ranks came"
    raise RunError(f"{who} within launch.timeout_s={timeout.total_seconds():g}")


class _Meeting:
    """What this rank says and reads at a meeting; every call may be made again after StoreLost.

    Attributes:
        attempt: Name of this attempt, once it is known.
    """

    def __init__(self, store: BoundedStore, at: str, rank: int, ranks: int) -> None:
        self._store, self._at, self._rank, self._name = store, at, rank, uuid.uuid4().hex
        self._keys = [f"{at}/{each}" for each in range(ranks)]
        self.attempt = ""

    def is_complete(self) -> bool:
        """Say that this rank is here; return whether all others may begin, or, on rank 0, have found their names."""
        store, names = self._store, f"{self._at}/names"
        if not self.attempt:
            store.set(self._keys[self._rank], self._name)
        if self._rank == 0 and store.check(self._keys):
            store.set(names, b" ".join(store.multi_get(self._keys)))
        listed = store.multi_get([names])[0].decode().split() if store.check([names]) else []
        if not self.attempt and listed[self._rank : self._rank + 1] == [self._name]:
            self.attempt = listed[0]
        if not self.attempt:
            return False
        found = [f"{self._at}/found/{self.attempt}/{each}" for each in range(len(self._keys))]
        store.set(found[self._rank], "")
        return self._rank != 0 or store.check(found)

    def missing(self) -> list[int]:
        """Return the ranks that have not come."""
        return [rank for rank, key in enumerate(self._keys) if not self._store.check([key])]
