"""Command `dzero hardware`: measure this machine once, for predictions."""

from __future__ import annotations

import argparse
import sys

from dzero.estimate.measure_hardware import cached, measured
from dzero.plan.hardware_tables import as_yaml, machine_table
from dzero.utils.terminal import show


def run(options: argparse.Namespace) -> None:
    """Print the measurement of this machine; measure if there is none or `options.measure` is set."""
    known = None if options.measure else cached(options.ranks)
    if known is None:
        print("measuring, for about half a minute", file=sys.stderr)
    measurement = known or measured(options.ranks, disk=options.disk)
    show([machine_table(measurement)])
    print(f"\nAs a file, conf/hardware/<name>.yaml:\n\n{as_yaml(measurement)}")
