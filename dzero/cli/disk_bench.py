"""Command `dzero disk-bench`: measure scratch disks, and find the best settings for them."""

from __future__ import annotations

import argparse

from dzero.offload.disk_speed import bench


def run(options: argparse.Namespace) -> None:
    """Print a line for each setting that was tried."""
    for line in bench(options.paths, sample_bytes=options.mib << 20, rounds=options.rounds):
        print(line, flush=True)
