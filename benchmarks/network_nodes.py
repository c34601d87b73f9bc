"""Nodes of a cluster as network namespaces of this machine, joined by a link that `tc` throttles. Needs Linux and root.

    namespace of node 0: ranks 0, 1, ...                    namespace of node 1
    loopback, not throttled    10.10.10.1 across <-- veth --> across 10.10.10.2

Ranks of a node talk over its address, which the kernel leads over loopback; only what goes to the other node passes the
link. Each direction has the whole rate.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

LINK = "across"
"""Name of each node's end of the link."""
ADDRESSES = ("10.10.10.1", "10.10.10.2")
NEW_NETWORK = 0x40000000  # CLONE_NEWNET of sched.h
BURST_BYTES = 128 << 10  # two of the largest packets, as the kernel hands them over before it cuts them


@contextmanager
def two_nodes() -> Iterator[tuple[str, str]]:
    """Make two nodes and yield the names of their namespaces, which are removed at the end, also after a signal."""
    names = (f"dzero-{os.getpid()}-0", f"dzero-{os.getpid()}-1")
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        for name in names:
            _call("ip", "netns", "add", name)
        _call("ip", "link", "add", LINK, "netns", names[0], "type", "veth", "peer", "name", LINK, "netns", names[1])
        for name, address in zip(names, ADDRESSES, strict=True):
            _call("ip", "-n", name, "address", "add", f"{address}/24", "dev", LINK)
            _call("ip", "-n", name, "link", "set", "lo", "up")
            _call("ip", "-n", name, "link", "set", LINK, "up")
        yield names
    finally:
        for name in names:  # the link goes with them
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)
        signal.signal(signal.SIGTERM, before)


def throttle(nodes: Sequence[str], mbit: int) -> None:
    """Give each direction of the link `mbit` Mbit/s (10^6 bit)."""
    for name in nodes:
        shape = ["tbf", "rate", f"{mbit}mbit", "burst", str(BURST_BYTES), "latency", "50ms"]
        _call("tc", "-n", name, "qdisc", "replace", "dev", LINK, "root", *shape)


def crossed_bytes(nodes: Sequence[str]) -> int:
    """Return the bytes that all nodes have sent over the link, with the headers of TCP, IP and Ethernet."""
    counted = (json.loads(_call("ip", "-n", name, "-s", "-j", "link", "show", LINK)) for name in nodes)
    return sum(each[0]["stats64"]["tx"]["bytes"] for each in counted)


def enter(node: str) -> None:
    """Move this thread, and those it starts from now on, into the node; gloo then uses the node's address."""
    handle = os.open(Path("/run/netns") / node, os.O_RDONLY)
    try:
        libc = ctypes.CDLL(None, use_errno=True)  # os.setns came with Python 3.12
        if libc.setns(handle, NEW_NETWORK):
            raise OSError(ctypes.get_errno(), f"cannot enter the namespace {node}")
    finally:
        os.close(handle)
    os.environ["GLOO_SOCKET_IFNAME"] = LINK


def _call(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt
