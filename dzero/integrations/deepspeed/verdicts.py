"""What becomes of each key of a DeepSpeed configuration, by the table of keys."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dzero.integrations.deepspeed.config_keys import NEEDLESS, REFUSED, SECTIONS, SWITCHED, TABLE, TAKEN
from dzero.integrations.deepspeed.forms import AUTO

MOST_SHOWN, MOST_KEY = 60, 200
"""Characters of a value, and of a key with its sections, that are shown."""
REMARKS = ("_", "//", "#", "comment")
"""Starts of names that are remarks, in files that cannot hold comments."""


@dataclass(frozen=True)
class Verdict:
    """Decision on one key of a configuration.

    Attributes:
        key: Its name, with those of its sections before it.
        value: Its value.
        kind: `taken`, `needless` or `refused`.
        text: As what it is taken, why it is needless, or what to do in its place.
    """

    key: str
    value: Any
    kind: str
    text: str

    def __str__(self) -> str:
        return f"{shown_key(self.key)}={shown(self.value)}: {self.text}"


class Conflict(ValueError):
    """Values that are taken each, but do not go together.

    Args:
        key: The key that is refused for it.
        text: What to do.
    """

    def __init__(self, key: str, text: str) -> None:
        super().__init__(f"{key}: {text}")
        self.key, self.text = key, text


def shown_key(key: str) -> str:
    """Return the whole name of a key on one line, unless it is longer than any of DeepSpeed's."""
    return shown(key, MOST_KEY)[1:-1]


def shown(value: Any, most: int = MOST_SHOWN) -> str:
    """Return a value as JSON on one line, in short."""
    text = json.dumps(value, default=repr)
    return text if len(text) <= most else f"{text[: most - 4]} ..."


def judge(config: Mapping[str, Any], section: str = "") -> Iterator[Verdict]:
    """Yield the verdict of every key; a section that the table does not read key by key has one."""
    for name, value in config.items():
        key = f"{section}.{name}" if section else name
        if name.startswith(REMARKS) and key not in TABLE:
            yield Verdict(key, value, NEEDLESS, "a remark")
        elif value is None and (key in TABLE or key in SECTIONS):
            yield Verdict(key, value, NEEDLESS, "null, as if it were not there")
        elif key not in SECTIONS:
            yield _judged(key, value, section)
        elif not isinstance(value, dict):
            yield Verdict(key, value, REFUSED, "write a section {...}")
        elif not value:
            yield Verdict(key, value, NEEDLESS, "empty, as if it were not there")
        elif key in SWITCHED and value.get("enabled", False) is False:
            for inner, each in value.items():
                yield Verdict(f"{key}.{inner}", each, TAKEN if inner == "enabled" else NEEDLESS, f"{key} is off")
        else:
            yield from judge(value, key)


def _judged(key: str, value: Any, section: str) -> Verdict:
    row = TABLE.get(key)
    if row is None:
        return Verdict(key, value, REFUSED, _unknown(key, section))
    if value == AUTO and row.verdict != REFUSED and isinstance(value, str):
        if row.verdict == NEEDLESS:
            return Verdict(key, value, NEEDLESS, row.text)
        if row.auto is None:
            return Verdict(key, value, REFUSED, f"transformers fills in nothing here; write {row.form.name}")
        return Verdict(key, value, TAKEN, f"the trainer's: {row.text}")
    if row.asks_nothing(value):
        return Verdict(key, value, NEEDLESS, "asks for nothing")
    if not row.form.fits(value):
        return Verdict(key, value, REFUSED, f"write {row.form.name}")
    return Verdict(key, value, row.verdict, row.text)


def _unknown(key: str, section: str) -> str:
    """Return the advice for a key that DeepSpeed does not have: the nearest one, of its section if there is any."""
    here = {name.rpartition(".")[2]: name for name in (*TABLE, *SECTIONS) if name.rpartition(".")[0] == section}
    last = key.rpartition(".")[2]
    if close := difflib.get_close_matches(last, here, n=1, cutoff=0.75):
        return f"DeepSpeed has no such key; did you mean {here[close[0]]}?"
    if elsewhere := [name for name in (*TABLE, *SECTIONS) if name.rpartition(".")[2] == last]:
        return f"DeepSpeed has no such key here; did you mean {elsewhere[0]}?"
    if not section and (close := difflib.get_close_matches(key, [*TABLE, *SECTIONS], n=1)):
        return f"DeepSpeed has no such key; did you mean {close[0]}?"
    return "DeepSpeed has no such key; remove it"
