"""Command `dzero verify`: compare a run's first steps with stage 0 on the device."""

from __future__ import annotations

import argparse
import sys

from dzero.verify import verify as verification


def verify(options: argparse.Namespace) -> None:
    """Compare the runs; exit with 0 if they agree, 1 if they differ, 2 if they could not be compared."""
    sys.exit(verification.verify(options.settings))
