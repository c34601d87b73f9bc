"""Command `dzero explain`: show units, placements and the actions of a step for given settings."""

from __future__ import annotations

import argparse

from dzero.config import CONF
from dzero.overrides import composed, spelt_out
from dzero.plan.auto import resolve_auto
from dzero.plan.plan_run import explain_run
from dzero.utils.terminal import show


def run(options: argparse.Namespace) -> None:
    """Print units, placements, and the actions of a step in order."""
    settings = spelt_out(options.settings)
    config = resolve_auto(composed(settings, CONF), settings)
    shown, off_device = explain_run(config, settings, CONF)
    show(shown)
    if off_device:
        print("\nslots and actions off the device, in order\n  " + "\n  ".join(off_device), flush=True)
