"""Corpus of a run: train and held-out tokens, which `load(config)` reads from its source or sources.

    source    selected by  contents                                   settings besides held_out and shuffle
    python    default      the running Python's own standard library  tokenizer, separator
    texts     path         .txt, .jsonl, .json, .parquet              tokenizer, separator, field (not .txt)
    tokens    path         memory-mapped .npy and raw .bin ids        vocab_size, token_dtype (.bin)
    dataset   name         a Hugging Face dataset or a folder of one  tokenizer, separator, field, config, split
    chat      kind, path   conversations in .jsonl, .json, .parquet   see `data/chats.py`
    mixture   paths        several sources of path, of one kind       those of its sources, and weights

Whole documents are held out, by a hash that does not depend on the machine, the order or the other documents
(`data/documents.py`; a token file counts as a document). If one side would be empty, as with a single file, the tail of
all tokens is held out instead. Texts are tokenized at load time and kept in memory: 1 to 4 bytes per token in every
process. A corpus that does not fit in memory should be stored as token files, which are memory-mapped.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from dzero.data.chats import ChatCorpus, encoder_of
from dzero.data.config import DataConfig
from dzero.data.documents import Document, is_held_out, python_library, read_dataset, read_files
from dzero.data.files import TOKEN_SUFFIXES, FoundFiles, find, find_sources
from dzero.data.mixture import MixedCorpus
from dzero.data.sequences import TextSequences
from dzero.data.tokenizer import ByteTokenizer, FileTokenizer, Tokenizer, encode_split
from dzero.data.tokens import Tokens, largest_id, map_tokens
from dzero.utils.rules import shown


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Tokens of a run, whose ids are in [0, vocab_size), and one line on what was read."""

    train: Tokens
    held_out: Tokens
    vocab_size: int
    summary: str

    def train_sequences(self, length: int, _: int = 1) -> TextSequences:
        """Return the sequences of `length` tokens to train on."""
        return TextSequences(self.train, length)

    def held_out_sequences(self, length: int, _: int = 1) -> TextSequences | None:
        """Return the sequences to evaluate; None if nothing is held out."""
        return TextSequences(self.held_out, length) if len(self.held_out) else None


def load(config: DataConfig, model_folder: str | None = None, length: int = 1) -> Corpus | ChatCorpus | MixedCorpus:
    """Read the corpus that `config` describes; the result is the same on every rank that sees the same files.

    A mixture of one source is that source. Errors name the file or row that cannot be used, or the extra of a package
    that is missing.

    Args:
        config: Settings of the data.
        model_folder: Folder of the model, whose tokenizer encodes conversations.
        length: Tokens of a sequence, to which conversations are cut.
    """
    if config.paths is None:
        return _load_one(config, model_folder, length)
    sources = {}
    for name, each in sources_of(config).items():
        try:
            sources[name] = _load_one(each, model_folder, length)
        except ValueError as error:
            if name in str(error):
                raise
            raise ValueError(f"{each.path}: {error}") from error
    return MixedCorpus(sources, config.weights) if len(sources) > 1 else next(iter(sources.values()))


def _load_one(config: DataConfig, model_folder: str | None, length: int) -> Corpus | ChatCorpus:
    return ChatCorpus(config, model_folder, length) if config.kind == "chat" else read_text(config)


def sources_of(config: DataConfig) -> dict[str, DataConfig]:
    """Return the settings of each source of a mixture, by its name, or of the only source, without a name.

    Raises:
        FileNotFoundError: A source has no files.
        ValueError: A file is in two sources, or a setting has no effect on any of them.
    """
    if config.paths is None:
        return {"": config}
    found = find_sources(config.paths)
    if config.kind == "text":
        every = {suffix for files in found.values() for suffix in files.suffixes}
        config.refuse_idle(f"the {sorted(every)} of data.paths={shown(config.paths)}", every)
    each = zip(found.items(), config.paths, strict=True)
    return {name: config.of_source(path, files.suffixes) for (name, files), path in each}


def read_text(config: DataConfig) -> Corpus:
    """Read the text or the token files that `config` describes."""
    field = config.field or "text"
    if config.name is not None:
        return _encode(config, read_dataset(config.name, config.config, config.split, field), config.name)
    if config.path is None:
        found = python_library()
        return _encode(config, read_files(found, field), f"the Python library in {found.root}")
    found = find(config.path)
    config.refuse_idle(f"the {sorted(found.suffixes)} of data.path={config.path}", found.suffixes)
    if found.suffixes <= set(TOKEN_SUFFIXES):
        return _map(config, found, _label(config.path, found))
    return _encode(config, read_files(found, field), _label(config.path, found))


def vocab_size_of(config: DataConfig, model_folder: str | None = None) -> int:
    """Return the vocabulary size of the corpus that `load` would read; only token files are read for it."""
    if config.kind == "chat":
        return encoder_of(config, model_folder).vocab_size
    return max(map(_vocab_size, sources_of(config).values()))


def tokenizer_size(config: DataConfig, model_folder: str | None = None) -> int | None:
    """Return one more than the largest id of the tokenizer; None for token files, which have ids already."""
    if config.kind == "chat":
        return encoder_of(config, model_folder).vocab_size
    return None if any(map(_has_ids, sources_of(config).values())) else _codec(config).vocab_size


def _vocab_size(config: DataConfig) -> int:
    return read_text(config).vocab_size if _has_ids(config) else _codec(config).vocab_size


def _has_ids(config: DataConfig) -> bool:
    return config.path is not None and find(config.path).suffixes <= set(TOKEN_SUFFIXES)


def _codec(config: DataConfig) -> Tokenizer:
    return ByteTokenizer() if config.tokenizer is None else FileTokenizer(config.tokenizer, config.separator)


def _encode(config: DataConfig, documents: Iterable[Document], label: str) -> Corpus:
    codec = _codec(config)
    train, held_out, count = encode_split(documents, codec, config.held_out)
    sides = Tokens((train,), label), Tokens((held_out,), label)
    return _corpus(config, *sides, codec.vocab_size, f"{label}, {count:,} documents")


def _map(config: DataConfig, found: FoundFiles, label: str) -> Corpus:
    """Memory-map token files; read every id once, in sequence, to find the largest."""
    sides: tuple[list[Path], list[Path]] = [], []
    arrays = {path: map_tokens(path, config.token_dtype or "uint16") for path in found.paths}
    largest = {path: largest_id(array, path) for path, array in arrays.items()}
    vocab_size = config.vocab_size or max(largest.values()) + 1
    for path in found.paths:
        if largest[path] >= vocab_size:
            raise ValueError(
                f"data.vocab_size={vocab_size}: {path} holds the id {largest[path]}; raise it above that, "
                "or correct data.token_dtype"
            )
        sides[is_held_out(found.key(path).encode(), config.held_out)].append(path)
    train, held_out = (Tokens(tuple(arrays[path] for path in side), label) for side in sides)
    return _corpus(config, train, held_out, vocab_size, label)


def _corpus(config: DataConfig, train: Tokens, held_out: Tokens, vocab_size: int, label: str) -> Corpus:
    """Name the sides; if the hash left one of them empty, split off the tail of all tokens instead."""
    names = f"{train.name} (train)", f"{train.name} (held out)"
    total = len(train) + len(held_out)
    if total == 0:
        raise ValueError(f"{train.name}: there is no text in it; choose another data.path or data.name")
    if not len(train) or (not len(held_out) and config.held_out > 0.0):
        whole = train if len(train) else held_out
        train, held_out = whole.split(total - round(total * config.held_out), names)
    return Corpus(
        train=Tokens(train.parts, names[0]),
        held_out=Tokens(held_out.parts, names[1]),
        vocab_size=vocab_size,
        summary=f"{label}: {len(train):,} tokens and {len(held_out):,} held out, of {vocab_size:,} ids",
    )


def _label(path: str, found: FoundFiles) -> str:
    if not found.ignored:
        return path
    others = ", ".join(f"{count} {suffix}" for suffix, count in sorted(found.ignored.items()))
    return f"{path} ({len(found.paths)} files; not read: {others})"
