"""The lanes in which an optimizer moves and updates states off the device: watched, slowed, or made to fail.

Tests reach them here alone. An action is named by its kind, what it takes, and its unit: "FETCH param layers.0".
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def before(optim: Any, call: Callable[[str], object] | None) -> None:
    """Call `call` with the name of each action from here on, in its lane, before it runs; None: nothing any more."""
    optim.offload.executor.before = None if call is None else lambda key: call(str(key))


def slow(optim: Any, *kinds: str, seconds: float = 0.02) -> None:
    """Make each action late, or those whose names begin with one of `kinds`."""
    before(optim, lambda action: time.sleep(seconds if action.startswith(kinds or "") else 0.0))


def fail(optim: Any, name: str) -> None:
    """Make the action of this name fail with an OSError: the cable is out."""

    def raise_at(action: str) -> None:
        if action == name:
            raise OSError("the cable is out")

    before(optim, raise_at)


def drain(optim: Any) -> None:
    """Wait for every action."""
    optim.offload.executor.drain()


def moved(optim: Any) -> dict[str, int]:
    """Bytes by lane since this was last asked; lanes in which nothing ran are left out."""
    return {lane: use.moved_bytes for lane, use in optim.offload.take_use().items()}


def host_bytes(optim: Any) -> int:
    """The most host memory that was in use at once for what is off the device."""
    found: int = optim.offload.host_bytes
    return found
