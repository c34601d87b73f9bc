"""Run a command in a network namespace whose only address is ::1: `python ipv6_only.py COMMAND ...`."""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
import sys

CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000
SIOCSIFADDR, SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP = 0x8916, 0x8913, 0x8914, 1
NOT_PERMITTED = 77


def leave_the_network() -> None:
    """Raises OSError where this system lets no user make a namespace."""
    wanted = CLONE_NEWNET | (CLONE_NEWUSER if os.getuid() != 0 else 0)
    if ctypes.CDLL(None, use_errno=True).unshare(wanted) != 0:
        raise OSError(ctypes.get_errno(), "unshare")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sh22x", b"lo", IFF_UP))
        no_address = struct.pack("16sHH4s16x", b"lo", socket.AF_INET, 0, bytes(4))
        fcntl.ioctl(any_socket, SIOCSIFADDR, no_address)


if __name__ == "__main__":
    try:
        leave_the_network()
    except OSError as error:
        print(error)
        sys.exit(NOT_PERMITTED)
    os.execv(sys.argv[1], sys.argv[1:])
