"""python -m dzero disk-bench [PATH ...]: how fast scratch paths are, and the block size and threads that suit them."""

from __future__ import annotations

import argparse
import sys

from dzero.errors import RunError, user_errors
from dzero.offload.disk_speed import bench


def main() -> None:
    """The command line. A path that cannot be used ends it with a message."""
    parser = argparse.ArgumentParser(prog="python -m dzero", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    disk = commands.add_parser("disk-bench", help="read and write GB/s by block size and threads")
    disk.add_argument("paths", nargs="*", default=["."], metavar="PATH", help="a directory on each disk; default: .")
    disk.add_argument("--mib", type=int, default=512, help="MiB written and read at a time")
    disk.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    try:
        with user_errors():
            for line in bench(options.paths, sample_bytes=options.mib << 20, rounds=options.rounds):
                print(line, flush=True)
    except RunError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
