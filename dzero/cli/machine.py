"""Commands `dzero hardware` and `dzero disk-bench`: measure this machine for predictions, and its scratch disks."""

from __future__ import annotations

import argparse
import sys

from dzero.estimate.measure_hardware import cached, measured
from dzero.offload.disk_speed import bench
from dzero.plan.hardware_tables import as_yaml, machine_table
from dzero.utils.terminal import show


def hardware(options: argparse.Namespace) -> None:
    """Print the measurement of this machine; measure if there is none or `options.measure` is set."""
    known = None if options.measure else cached(options.ranks, options.disk)
    if known is None:
        print("measuring, for about half a minute", file=sys.stderr)
    measurement = known or measured(options.ranks, options.disk)
    show([machine_table(measurement)])
    print(f"\nAs a file, conf/hardware/<name>.yaml:\n\n{as_yaml(measurement)}")


def disk_bench(options: argparse.Namespace) -> None:
    """Print a line for each setting that was tried."""
    for line in bench(options.paths, sample_bytes=options.mib << 20, rounds=options.rounds):
        print(line, flush=True)
