"""Conversion of text to token ids, with the bytes themselves or a `tokenizers` file.

Every document ends with a separator token, so that a model can learn where texts end. For bytes it is 0, which text
does not use. For a tokenizer it is data.separator, else the eos_token of a tokenizer_config.json in the same folder,
else the first of `END_TOKENS` that is in the vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dzero.data.documents import Document, is_held_out
from dzero.data.tokens import Array
from dzero.errors import converting, import_optional

END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]", "[SEP]")
BATCH_BYTES = 4 * 2**20
PIECE_CHARACTERS = 2**20
TOKENIZER_CONFIG = "tokenizer_config.json"
CHOOSE = "set data.separator to the token that ends a document"


class ByteTokenizer:
    """Tokenizer with one token per byte; ids are in [0, vocab_size) and of `dtype`."""

    vocab_size = 256
    dtype: np.dtype[Any] = np.dtype(np.uint8)
    separator = 0

    def encode(self, documents: list[Document]) -> list[Array]:
        """Return one array [tokens] for each document, a read-only view of its bytes."""
        return [np.frombuffer(document.text, np.uint8) for document in documents]


class FileTokenizer:
    """Tokenizer from a JSON file of `tokenizers` or `transformers`; it never truncates or pads.

    The special tokens of its template are not added. A document longer than a million characters is encoded in pieces
    that end at line ends, because the encoder needs about a hundred bytes of memory per token of its input. Without a
    `separator`, the token that ends a document is found as the module's docstring describes.
    """

    def __init__(self, path: str, separator: str | None) -> None:
        file = Path(path).expanduser()
        tokenizers = import_optional("tokenizers", f"data.tokenizer={path}", "data")
        if not file.is_file():
            raise FileNotFoundError(f"data.tokenizer={path}: no such file (looked from {Path.cwd()})")
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # tokenizers raises no narrower class
            raise ValueError(f"data.tokenizer={path} is no tokenizers JSON file: {error}") from error
        self._path = path
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        vocab = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocab.values(), default=-1) + 1
        self.dtype = np.dtype(np.uint16 if self.vocab_size <= 2**16 else np.int32)
        self.separator = _separator(vocab, separator, file)

    def encode(self, documents: list[Document]) -> list[Array]:
        """Encode all documents as one batch, on the tokenizer's own threads; raise ValueError if one is not UTF-8."""
        pieces = [list(_pieces(_text(document))) for document in documents]
        flat = [piece for of_document in pieces for piece in of_document]
        with converting(f"data.tokenizer={self._path} cannot encode {documents[0].name}", Exception):  # as above
            encoded = iter(self._tokenizer.encode_batch_fast(flat, add_special_tokens=False))
        return [
            np.concatenate([np.array(next(encoded).ids, self.dtype) for _ in of_document]) for of_document in pieces
        ]


Tokenizer = ByteTokenizer | FileTokenizer


def encode_split(
    documents: Iterable[Document], codec: Tokenizer, held_out: float
) -> tuple[NDArray[Any], NDArray[Any], int]:
    """Encode documents with their separators, each as a whole on one side of the split.

    Return train ids [tokens], held-out ids [tokens], and the number of documents.
    """
    sides = bytearray(), bytearray()
    separator = np.array(codec.separator, codec.dtype).tobytes()
    count = 0
    for batch in _batches(documents):
        for document, ids in zip(batch, codec.encode(batch), strict=True):
            side = sides[is_held_out(document.key, held_out)]
            side += ids.tobytes()
            side += separator
        count += len(batch)
    return np.frombuffer(sides[0], codec.dtype), np.frombuffer(sides[1], codec.dtype), count


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    batch, size_bytes = [], 0
    for document in documents:
        if document.text:
            batch.append(document)
            size_bytes += len(document.text)
        if size_bytes >= BATCH_BYTES:
            yield batch
            batch, size_bytes = [], 0
    if batch:
        yield batch


def _separator(vocab: dict[str, int], token: str | None, tokenizer: Path) -> int:
    """Return the id that ends a document: that of `token`, else that of the first declared or usual end token."""
    if token is not None:
        if token not in vocab:
            raise ValueError(f"data.separator={token} is not in the vocabulary of {tokenizer}: {CHOOSE}")
        return vocab[token]
    declared = _declared_end(tokenizer.with_name(TOKENIZER_CONFIG))
    known = [name for name in (declared, *END_TOKENS) if name is not None]
    for name in known:
        if name in vocab:
            return vocab[name]
    raise ValueError(
        f"none of {known} is in the vocabulary of {tokenizer}, and no {TOKENIZER_CONFIG} beside it names its "
        f"eos_token: {CHOOSE}"
    )


def _declared_end(config: Path) -> str | None:
    """Return the eos_token of a tokenizer_config.json, a string or an object with "content"; None if it has none."""
    if not config.is_file():
        return None
    repair = "repair it, or set data.separator"
    with converting(f"{config} is no JSON object", ValueError, RecursionError, repair=repair):
        found = json.loads(config.read_bytes())
    token = found.get("eos_token") if isinstance(found, dict) else None
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None


def _text(document: Document) -> str:
    try:
        return document.text.decode()
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{document.name} is not UTF-8 ({error}), which data.tokenizer needs; convert it, or "
            "train on its bytes without data.tokenizer"
        ) from error


def _pieces(text: str) -> Iterator[str]:
    start = 0
    while start < len(text):
        end = text.find("\n", start + PIECE_CHARACTERS) + 1 or len(text)
        yield text[start:end]
        start = end
