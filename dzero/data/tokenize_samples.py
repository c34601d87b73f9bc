"""Tokenizing ahead of a run: builds the cache of samples, and shows what the loss will count."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np

from dzero.data.chat_template import ChatEncoder
from dzero.data.files import FoundFiles
from dzero.data.sample_builder import Report
from dzero.data.sample_cache import build_or_open
from dzero.data.samples import Samples

SHOWN_TOKENS = 400


def tokenize(
    found: FoundFiles,
    encoder: ChatEncoder,
    *,
    folder: Path | None,
    on_bad_row: str,
    max_tokens: int | None,
    report: Report,
) -> Samples:
    """Build or open the cache of samples, and report their number, their lengths and the first one.

    Arguments, result and errors are those of `data.sample_cache.build_or_open`.
    """
    samples = build_or_open(found, encoder, folder=folder, on_bad_row=on_bad_row, max_tokens=max_tokens, report=report)
    report(samples.summary)
    half, most, longest = np.quantile(samples.lengths, [0.5, 0.95, 1.0], method="nearest")
    report(f"tokens in a sample: {half} in the middle one, at most {most} in 95 % of them, {longest} in the longest")
    report(f"the first sample, with what the loss counts in ⟦ ⟧: {marked(samples, encoder, 0)}")
    return samples


def marked(samples: Samples, encoder: ChatEncoder, index: int) -> str:
    """Return the text of a sample on one line, with each run of tokens that count between ⟦ and ⟧."""
    ids, counts = samples.ids(index)[:SHOWN_TOKENS], samples.counts(index)[:SHOWN_TOKENS]
    edges = [0, *(np.flatnonzero(np.diff(counts)) + 1), len(ids)]
    runs = [(counts[start], encoder.decode(ids[start:end])) for start, end in pairwise(edges)]
    text = "".join(f"⟦{run}⟧" if counted else run for counted, run in runs)
    rest = samples.lengths[index] - len(ids)
    return text.replace("\n", "\\n") + (f" ... and {rest} more tokens" if rest else "")
