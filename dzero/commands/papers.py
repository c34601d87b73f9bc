"""`dzero papers`: show the ZeRO papers' tables from their assumptions, beside dzero's bytes."""

from __future__ import annotations

import argparse

from dzero.plan.assumptions import read_papers
from dzero.plan.paper_tables import paper_tables
from dzero.terminal import show


def run(options: argparse.Namespace) -> None:
    """Print the tables."""
    del options
    show(paper_tables(read_papers()))
