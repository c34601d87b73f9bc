"""Tokenizing of rows to samples, in batches of bounded size and with progress."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np

from dzero.data.chat_template import EncodedSample
from dzero.data.conversations import Conversation, conversation_of
from dzero.data.files import FoundFiles
from dzero.data.rows import Row, read_rows
from dzero.data.samples import SamplesMeta, SamplesWriter

BATCH_ROWS = 1024
BATCH_CHARACTERS = 2**20
REPORT_SECONDS = 5.0

Report = Callable[[str], None]


class Encoder(Protocol):
    """Methods of `data.chat_template.ChatEncoder` that make and cache samples."""

    fingerprint: str
    vocab_size: int
    dtype: np.dtype[Any]

    def encode_batch(
        self, conversations: list[Conversation], *, stop: bool = False
    ) -> list[EncodedSample | ValueError]:
        """Return for each of the first conversations its sample, or the error that keeps it from being encoded.

        These are all, or as many as a few seconds allow, and with `stop` none behind the first error.
        """

    def close(self) -> None:
        """Release what encoding needs."""


def write_samples(
    found: FoundFiles, encoder: Encoder, writer: SamplesWriter, on_bad_row: str, report: Report
) -> SamplesMeta:
    """Tokenize all rows and write them, and return the description of the samples.

    Raises:
        ValueError: A row cannot be used, and `on_bad_row` is `stop`; or a file cannot be read.
        DiskError: The samples cannot be written.
    """
    progress = _Progress(sum(path.stat().st_size for path in found.paths), report)
    bad_rows, first_bad = 0, ""
    for batch in _batches(read_rows(found)):
        rest = deque(batch)
        while rest:
            conversations = [each for _, each in rest if isinstance(each, Conversation)]
            encoded = deque(encoder.encode_batch(conversations, stop=on_bad_row == "stop"))
            samples = []
            while rest and (encoded or not isinstance(rest[0][1], Conversation)):
                row, made = rest.popleft()
                sample = encoded.popleft() if isinstance(made, Conversation) else made
                if isinstance(sample, EncodedSample):
                    samples.append((sample.ids, sample.counts))
                    continue
                bad_rows, first_bad = bad_rows + 1, first_bad or f"{row.where}: {sample}"
                if on_bad_row == "stop":
                    raise ValueError(f"{first_bad}; repair that row, or set data.on_bad_row=skip")
            if samples:
                writer.add(samples)
            progress.at(row.read_bytes, writer.samples)
    return writer.finish(bad_rows=bad_rows, first_bad=first_bad)


def _batches(rows: Iterator[Row]) -> Iterator[list[tuple[Row, Conversation | str]]]:
    """Yield rows with their conversations, or the reason that there is none."""
    batch: list[tuple[Row, Conversation | str]] = []
    characters = 0
    for row in rows:
        made = _conversation(row)
        batch.append((Row({}, row.where, read_bytes=row.read_bytes), made))
        characters += 0 if isinstance(made, str) else _characters(made)
        if len(batch) >= BATCH_ROWS or characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _conversation(row: Row) -> Conversation | str:
    if row.problem:
        return row.problem
    try:
        return conversation_of(row.value)
    except ValueError as error:
        return str(error)


def _characters(conversation: Conversation) -> int:
    """Return about how long the text of a conversation is."""
    texts = [text for message in conversation.messages for text in message.values() if isinstance(text, str)]
    return sum(map(len, (*texts, *(conversation.text or ()))))


class _Progress:
    """Lines on how far the tokenizing is and how long it still takes, at most one every few seconds."""

    def __init__(self, total_bytes: int, report: Report) -> None:
        self._total_bytes, self._report = max(total_bytes, 1), report
        self._began = self._last = time.monotonic()

    def at(self, read_bytes: int, samples: int) -> None:
        now = time.monotonic()
        if now - self._last < REPORT_SECONDS:
            return
        self._last = now
        done = max(min(read_bytes / self._total_bytes, 1.0), 1e-6)
        minutes, seconds = divmod(round((now - self._began) * (1 - done) / done), 60)
        self._report(f"tokenizing: {done:.0%} read, {samples:,} samples, about {minutes}:{seconds:02d} min left")
