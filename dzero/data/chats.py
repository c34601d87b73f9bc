"""Conversations of a run as sequences of tokens: read, encoded by the model's chat template, and packed or padded."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

from dzero.data.chat_template import ChatEncoder
from dzero.data.config import DataConfig
from dzero.data.files import find
from dzero.data.packing import SampleSequences
from dzero.data.sample_cache import build_or_open
from dzero.data.samples import Samples
from dzero.data.tokens import Array

SHOWN_CHARACTERS = 120


class ChatCorpus:
    """Conversations for training and for evaluation; the counterpart of `corpus.Corpus`.

    Attributes:
        vocab_size: One more than the largest id of the tokenizer.
        summary: One line on what was read.
    """

    def __init__(self, config: DataConfig, model_folder: str | None, length: int) -> None:
        """Read the conversations of `config`, tokenized now or before.

        Args:
            config: Settings, with `kind` chat.
            model_folder: Folder of the model, whose tokenizer is used unless `config` names another.
            length: Tokens of a sequence; longer conversations lose their end.

        Raises:
            FileNotFoundError: If a file, or the tokenizer, is missing.
            ValueError: If a row or the template cannot be used, or no sample is left.
        """
        encoder = encoder_of(config, model_folder)
        self._samples, self._encoder, self._length = samples_of(config, encoder, length, tell), encoder, length
        self._pack, self._name = config.pack is not False, str(config.path)
        held_out = self._samples.is_held_out(config.held_out)
        if config.held_out and not held_out.any() and len(held_out) > 1:
            held_out[-max(1, round(config.held_out * len(held_out))) :] = True
        self._train, self._held_out = np.flatnonzero(~held_out), np.flatnonzero(held_out)
        self.vocab_size = encoder.vocab_size
        self.summary = f"{config.path}: {self._samples.summary}; {len(self._held_out):,} of them held out"

    def train_sequences(self, length: int, multiple: int) -> SampleSequences:
        """Return the sequences to train on; padded ones have a multiple of `multiple` tokens, 0 for `length`."""
        return self._sequences(self._train, length, multiple, "train")

    def held_out_sequences(self, length: int, multiple: int) -> SampleSequences | None:
        """Return the sequences to evaluate; None if there are none."""
        return self._sequences(self._held_out, length, multiple, "held out") if len(self._held_out) else None

    def prompts(self, count: int, room: int) -> list[Array]:
        """Return the ids [tokens] of `count` held-out samples up to what counts first, at most `room` below the length.

        Without held-out samples, they are of the samples to train on.
        """
        chosen = self._held_out if len(self._held_out) else self._train
        found = []
        for index in chosen[:count].tolist():
            first = int(np.argmax(self._samples.counts(index)))
            found.append(self._samples.ids(index)[max(0, first - max(1, self._length - room)) : max(1, first)])
        return found

    def shown(self, prompt: Array, answer: Array) -> str:
        """Return a line with the end of a prompt, and the answer up to the end of the turn."""
        ends = np.flatnonzero(answer == self._encoder.eos_id)
        said = self._encoder.decode(answer[: ends[0]] if len(ends) else answer)
        asked = self._encoder.decode(prompt)[-SHOWN_CHARACTERS:]
        return f"answers {asked!r} with {said!r}"

    def _sequences(self, chosen: np.ndarray, length: int, multiple: int, side: str) -> SampleSequences:
        name = f"{self._name} ({side})"
        return SampleSequences(self._samples, chosen, length, pack=self._pack, multiple=multiple, name=name)


def encoder_of(config: DataConfig, model_folder: str | None) -> ChatEncoder:
    """Return the tokenizer and chat template of data.tokenizer, or else of the model's folder."""
    folder = config.tokenizer or model_folder
    if folder is None:
        raise ValueError("data.kind=chat: the model has no folder with a tokenizer; set data.tokenizer to one")
    try:
        return ChatEncoder(Path(folder), config.loss_on or "assistant", config.chat_template)
    except FileNotFoundError as error:
        if config.tokenizer is not None or config.chat_template is not None:
            raise
        raise FileNotFoundError(
            f"{folder} has no tokenizer.json; set data.tokenizer to a folder with the model's tokenizer"
        ) from error


def samples_of(
    config: DataConfig,
    encoder: ChatEncoder,
    length: int,
    report: Callable[[str], None],
    make: Callable[..., Samples] = build_or_open,
) -> Samples:
    """Return the encoded samples of data.path, cut to sequences of `length` tokens and the target of the last.

    `make` is `build_or_open`, or a function with its arguments.
    """
    if config.path is None:
        raise ValueError("data.kind=chat: set data.path to a .jsonl, .json or .parquet file of chats, or a folder")
    return make(
        find(config.path),
        encoder,
        folder=None if config.cache is None else Path(config.cache),
        on_bad_row=config.on_bad_row or "stop",
        max_tokens=length + 1,
        report=report,
    )


def tell(line: str) -> None:
    """Print progress on stderr."""
    print(line, file=sys.stderr, flush=True)
