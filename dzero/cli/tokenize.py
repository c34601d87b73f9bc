"""Command `dzero tokenize`: conversations are tokenized ahead of a run, into the cache that the run then reads."""

from __future__ import annotations

import argparse
from functools import partial

from dzero.config import CONF
from dzero.data.chats import encoder_of, samples_of
from dzero.data.tokenize_samples import tokenize as tokenize_samples
from dzero.errors import RunError
from dzero.overrides import composed


def tokenize(options: argparse.Namespace) -> None:
    """Tokenize data.path, and print its size and the first conversation with what the loss counts."""
    config = composed(options.settings, CONF)
    if config.data.kind != "chat":
        raise RunError(f"data.kind={config.data.kind}: only data.kind=chat is tokenized ahead")
    encoder, tell = encoder_of(config.data, config.model_folder), partial(print, flush=True)
    samples_of(config.data, encoder, config.train.sequence_tokens, tell, tokenize_samples)
