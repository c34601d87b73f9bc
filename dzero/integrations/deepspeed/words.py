"""Settings as Python, and as words of a command line of `dzero train`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any


def as_code(value: Any) -> str:
    """Return a setting as Python; of a config, the fields that differ from its defaults."""
    if not dataclasses.is_dataclass(value):
        return repr(value)
    default: Any = type(value)
    fields = ", ".join(f"{key}={as_code(each)}" for key, each in differing(value, default()))
    return f"dzero.{type(value).__name__}({fields})"


def differing(value: Any, base: Any) -> Iterator[tuple[str, Any]]:
    """Yield names and values of the fields in which two configs of a class differ."""
    for each in dataclasses.fields(value):
        if getattr(value, each.name) != getattr(base, each.name):
            yield each.name, getattr(value, each.name)


def words_of(group: str, value: Any, base: Any) -> list[str]:
    """Return settings of a command line for what differs between two configs of a group."""
    words = []
    for key, each in differing(value, base):
        if dataclasses.is_dataclass(each):
            words += words_of(f"{group}.{key}", each, getattr(base, key))
        else:
            words.append(f"{group}.{key}={word_of(each)}")
    return words


def word_of(value: Any) -> str:
    """Return a value as Hydra reads it."""
    if isinstance(value, list | tuple):
        return f"[{','.join(repr(each) if isinstance(each, str) else word_of(each) for each in value)}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{key}:{word_of(each)}' for key, each in value.items())}}}"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def preset_words(group: str, value: Any, presets: Mapping[str, Any]) -> list[str]:
    """Return the nearest preset of a group, and what differs from it."""
    if isinstance(value, str):
        return [f"{group}={value}"]
    name = min(presets, key=lambda each: len(words_of(group, value, presets[each])))
    return [f"{group}={name}", *words_of(group, value, presets[name])]
