"""`dzero verify`: compare a run's first steps with stage 0 on the device."""

from __future__ import annotations

import argparse
import sys

from dzero.verify.verify import verify


def run(options: argparse.Namespace) -> None:
    """Compare; exit with 0 where they agree, 1 where they differ, 2 where they were not compared."""
    sys.exit(verify(options.settings))
