"""Two machines, as two network namespaces with two wires between them."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

NODES = ("10.77.0.1", "10.77.0.2")
"""Their addresses on the first wire."""
WIRES = ("eth0", "eth1")


def ip(*words: str) -> None:
    """Run `ip`, or raise CalledProcessError with what it says."""
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@contextmanager
def two_nodes() -> Iterator[tuple[str, str]]:
    """The names of two namespaces; each has an interface on either wire, as on machines with a network for data."""
    names = (f"cut{os.getpid()}a", f"cut{os.getpid()}b")
    try:
        for name in names:
            ip("netns", "add", name)
        for wire in WIRES:
            ip("link", "add", wire, "netns", names[0], "type", "veth", "peer", "name", wire, "netns", names[1])
        for name, address in zip(names, NODES, strict=True):
            ip("-n", name, "address", "add", f"{address}/24", "dev", WIRES[0])
            ip("-n", name, "address", "add", f"{address.replace('77', '78')}/24", "dev", WIRES[1])
            for device in ("lo", *WIRES):
                ip("-n", name, "link", "set", device, "up")
        yield names
    except subprocess.CalledProcessError as error:
        raise OSError(f"network namespaces are not permitted here: {error.stderr}") from error
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)
