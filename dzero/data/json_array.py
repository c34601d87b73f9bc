"""Elements of a .json file that is one array, read in bounded memory, and exactly as they were written.

Libraries that put rows into columns give all rows one schema: they fill keys that a row lacks with null, and refuse
tool calls whose arguments differ in type. Here each element is decoded by itself, from a part of the text that grows
until the element is whole.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

CHUNK = 1 << 20
MOST_CHARACTERS = 256 * 2**20
SPACE = re.compile(r"\s*")


def is_array(path: Path) -> bool:
    """Return whether a .json file begins as an array; other files have a JSON object on each line."""
    with path.open("rb") as file:
        start = file.read(CHUNK).removeprefix(b"\xef\xbb\xbf").lstrip()
    return start.startswith(b"[")


def read_elements(path: Path) -> Iterator[tuple[Any, int]]:
    """Yield each element of the array in a file, and about how many bytes have been read with it.

    Raises:
        ValueError: The file is no JSON array in UTF-8; the message names the first element that cannot be read.
    """
    number = 0
    with path.open("rb") as file, io.TextIOWrapper(file, encoding="utf-8-sig") as characters:
        text = _Text(characters)
        try:
            text.skip("[")
            while not text.begins("]"):
                if number:
                    text.skip(",")
                yield text.value(), file.tell()
                number += 1
            text.skip("]")
            if not text.ended():
                raise ValueError("there is more after the array")
        except (ValueError, RecursionError) as error:
            why = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
            raise ValueError(
                f"{path} element {number} is not JSON in UTF-8 ({why}); a .json file is one array of rows, or has an "
                "object on each line"
            ) from error


class _Text:
    """Part of a text from `at` on, to which more of the file is added when it is needed."""

    def __init__(self, file: TextIO) -> None:
        self._file, self._part, self._at = file, "", 0

    def begins(self, word: str) -> bool:
        """Return whether `word`, one character, comes next after white space."""
        while (self._at_next()) == len(self._part) and self._more():
            pass
        return self._part.startswith(word, self._at)

    def ended(self) -> bool:
        """Return whether nothing but white space is left."""
        return not self.begins("") or self._at == len(self._part)

    def skip(self, word: str) -> None:
        """Go past `word`; raise ValueError if something else comes next."""
        if not self.begins(word):
            raise ValueError(f"expected {word!r}")
        self._at += len(word)

    def value(self) -> Any:
        """Return the next value and go past it; raise ValueError if it is no JSON, or too long."""
        self.begins("")
        while True:
            try:
                found, end = json.JSONDecoder().raw_decode(self._part, self._at)
            except json.JSONDecodeError:
                if not self._more():
                    raise
            else:
                if end < len(self._part) or not self._more():  # a number at the end may go on
                    self._at = end
                    return found

    def _at_next(self) -> int:
        space = SPACE.match(self._part, self._at)
        assert space is not None
        self._at = space.end()
        return self._at

    def _more(self) -> bool:
        """Read on, as much again as is waiting to be decoded; return whether there was anything."""
        waiting = len(self._part) - self._at
        if waiting > MOST_CHARACTERS:
            raise ValueError(f"it is longer than {MOST_CHARACTERS} characters, or never ends")
        added = self._file.read(max(CHUNK, waiting))
        self._part, self._at = self._part[self._at :] + added, 0
        return bool(added)
