"""Command `dzero tokenize`: conversations are tokenized ahead of a run, into the cache that the run then reads."""

from __future__ import annotations

import argparse
from functools import partial

from dzero.config import CONF
from dzero.data.chats import encoder_of, samples_of
from dzero.data.corpus import sources_of
from dzero.data.tokenize_samples import tokenize as tokenize_samples
from dzero.errors import RunError
from dzero.overrides import composed
from dzero.plan.run_layout import check_tokenizer


def tokenize(options: argparse.Namespace) -> None:
    """Tokenize each source, and print its size and the first conversation with what the loss counts."""
    config = composed(options.settings, CONF)
    if config.data.kind != "chat":
        raise RunError(f"data.kind={config.data.kind}: only data.kind=chat is tokenized ahead")
    if config.model_folder is not None:
        check_tokenizer(config)
    tell = partial(print, flush=True)
    for name, data in sources_of(config.data).items():
        if name:
            tell(f"{name}:")
        samples_of(data, encoder_of(data, config.model_folder), config.train.sequence_tokens, tell, tokenize_samples)
