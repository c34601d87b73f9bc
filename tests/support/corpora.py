"""Data as a run reads it: corpora of settings `data.*`, rows of files, conversations of rows, and their tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dzero.data import corpus as reading
from dzero.data.chat_template import ChatEncoder
from dzero.data.config import DataConfig
from dzero.data.conversations import conversation_of
from dzero.data.files import find
from dzero.data.rows import read_rows

IGNORED = -100
"""What a target is that counts for no loss, in torch's cross entropy."""


def load(length: int = 1, **settings: Any) -> Any:
    """What these settings of the group `data` name, for sequences of this length."""
    return reading.load(DataConfig(**settings), None, length)


def rows(path: Path | str) -> list[Any]:
    """The rows of a file, of a folder or of a glob: `value`, `where`, and the `problem` of one that is no object."""
    return [*read_rows(find(str(path)))]


def found(path: Path | str) -> tuple[Path, ...]:
    """The files that a path stands for."""
    return find(str(path)).paths


def conversation(row: dict[str, Any]) -> Any:
    """The conversation of a row; ValueError if it is none."""
    return conversation_of(row)


def encoder(folder: Path, loss_on: str = "assistant", template: str | None = None) -> ChatEncoder:
    """What makes tokens of conversations, with the tokenizer and the template of a model's folder."""
    return ChatEncoder(folder, loss_on, template)
