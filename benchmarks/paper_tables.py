"""Show the ZeRO papers' tables from their assumptions (papers/papers.toml), beside dzero's own bytes.

python benchmarks/paper_tables.py
"""

from __future__ import annotations

from papers.assumptions import read_papers
from papers.tables import paper_tables

from dzero.utils.terminal import show

if __name__ == "__main__":
    show(paper_tables(read_papers()))
