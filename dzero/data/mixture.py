"""Corpus of several sources, each read, packed and held out by itself; `data/mixed_sequences.py` orders them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Protocol

from dzero.data.chats import ChatCorpus
from dzero.data.mixed_sequences import MixedSequences, shares_of
from dzero.data.sequences import Sequences
from dzero.data.tokens import Array


class Source(Protocol):
    """Corpus of one source: `corpus.Corpus` or `chats.ChatCorpus`."""

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""

    @property
    def summary(self) -> str:
        """One line on what was read."""

    def train_sequences(self, length: int, multiple: int, /) -> Sequences:
        """Return the sequences to train on."""

    def held_out_sequences(self, length: int, multiple: int, /) -> Sequences | None:
        """Return the sequences to evaluate; None if there are none."""


class MixedCorpus:
    """Several sources, by name, that are read in proportion to weights.

    Attributes:
        sources: The corpora by name.
        vocab_size: The largest of the sources.
        summary: One line on what was read of each.
    """

    def __init__(self, sources: Mapping[str, Source], weights: Sequence[float] | None) -> None:
        """Join sources; without `weights`, each has the number of its sequences as weight."""
        self.sources, self._weights = dict(sources), weights
        self.vocab_size = max(source.vocab_size for source in sources.values())
        told = [""] * len(sources)
        if weights is not None:
            told = [f"{share / sum(shares_of(weights)):.1%} from " for share in shares_of(weights)]
        self.summary = "; ".join(f"{share}{each.summary}" for share, each in zip(told, sources.values(), strict=True))

    def train_sequences(self, length: int, multiple: int = 1) -> MixedSequences:
        """Return the sequences of all sources to train on."""
        sources = {name: source.train_sequences(length, multiple) for name, source in self.sources.items()}
        return MixedSequences(sources, self._weights)

    def held_out_sources(self, length: int, multiple: int = 1) -> dict[str, tuple[Sequences, float]]:
        """Return the held-out sequences of each source that has some, and the weight of its loss.

        The weights are those of the sources in training, and add up to 1 over the sources that are returned.

        Raises:
            ValueError: If only sources of weight 0 have something held out.
        """
        shares = dict(zip(self.sources, self.train_sequences(length, multiple).shares, strict=True))
        found = {name: source.held_out_sequences(length, multiple) for name, source in self.sources.items()}
        kept = {name: sequences for name, sequences in found.items() if sequences is not None}
        total = sum(shares[name] for name in kept)
        if kept and not total:
            raise ValueError(
                f"only {[*kept]}, of weight 0, have anything held out; give the others more data, or take another "
                "data.held_out"
            )
        return {name: (sequences, shares[name] / total) for name, sequences in kept.items()}

    def prompts(self, count: int, room: int) -> list[Array]:
        """Return `count` prompts of the sources in turn, as `ChatCorpus.prompts`; none of sources of text."""
        chats = [source for source in self.sources.values() if isinstance(source, ChatCorpus)]
        rounds = zip_longest(*(source.prompts(count, room) for source in chats))
        return [prompt for each in rounds for prompt in each if prompt is not None][:count]

    def shown(self, prompt: Array, answer: Array) -> str:
        """Return a line with a prompt and an answer, as `ChatCorpus.shown`; all sources have the same tokenizer."""
        chat = next(source for source in self.sources.values() if isinstance(source, ChatCorpus))
        return chat.shown(prompt, answer)


def held_out_of(corpus: Source | MixedCorpus, length: int, multiple: int) -> dict[str, tuple[Sequences, float]]:
    """Return the held-out sequences of a corpus by source, and the weight of each loss; one source has no name."""
    if isinstance(corpus, MixedCorpus):
        return corpus.held_out_sources(length, multiple)
    sequences = corpus.held_out_sequences(length, multiple)
    return {} if sequences is None else {"": (sequences, 1.0)}
