"""Reading a DeepSpeed configuration, as a file or as a mapping.

A file is JSON, or Hjson as DeepSpeed reads it: with comments, trailing commas, and quotes left away.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dzero.errors import import_optional, in_short
from dzero.integrations.deepspeed.verdicts import shown_key

MOST_BYTES = 1 << 20
MOST_DEPTH = 20
MOST_BITS = 64
ALIASES = {"bfloat16": "bf16"}
"""Old names of sections."""
NEVER = "steps_per_print"
"""Key that may be infinite, as accelerate writes it."""


def read(given: str | Path | Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration, with sections under their present names.

    Args:
        given: A JSON or Hjson file, or its content as a mapping.

    Raises:
        ValueError: It is no file, neither JSON nor Hjson, no mapping, or has a key twice; the message is one line.
        TypeError: `given` is neither a path nor a mapping.
    """
    if isinstance(given, Mapping):
        what, found = "deepspeed={...}", given
    elif isinstance(given, str | Path):
        what, found = str(given), _parsed(Path(given))
    else:
        raise TypeError(f"deepspeed={given!r}: a JSON file of DeepSpeed, or its content as a mapping")
    if found.get(NEVER) == math.inf:
        found = {**found, NEVER: sys.maxsize}
    config: dict[str, Any] = _plain(found, what, "", 0)
    for old, new in ALIASES.items():
        if old in config and new in config:
            raise ValueError(f"{what}: {old} and {new} are one section; leave {old} away")
        config = {new if key == old else key: value for key, value in config.items()}
    if isinstance(config.get("zero_optimization"), bool):
        config["zero_optimization"] = {"stage": int(config["zero_optimization"])}  # as DeepSpeed took it long ago
    return config


def _parsed(path: Path) -> Mapping[str, Any]:
    if not path.is_file():
        raise ValueError(f"{path}: no such file; name the JSON file of a DeepSpeed configuration")
    with path.open("rb") as file:
        data = file.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise ValueError(f"{path}: larger than {MOST_BYTES} bytes, which no configuration is")
    try:
        text = data.decode("utf-8-sig")
        config = _json_or_hjson(text)
    except (ValueError, RecursionError, ModuleNotFoundError) as error:
        raise ValueError(f"{path}: {in_short(error)}; write JSON or Hjson, not base64") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path}: a {type(config).__name__}, not a mapping {{...}} of DeepSpeed's keys")
    return config


def _json_or_hjson(text: str) -> Any:
    """Parse JSON, or else Hjson; raise the error of JSON if the text is neither."""
    try:
        return json.loads(text, object_pairs_hook=_without_repeats)
    except (ValueError, RecursionError) as error:
        if not text.strip() or isinstance(error, RecursionError):
            raise
        hjson = import_optional("hjson", "a configuration that is no JSON", "deepspeed")
        try:
            return hjson.loads(text, object_pairs_hook=_without_repeats)
        except (ValueError, RecursionError):
            raise error from None


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"{json.dumps(key)} is there twice; keep one")
        found[key] = value
    return found


def _plain(value: Any, what: str, key: str, depth: int) -> Any:
    """Return a copy that JSON could hold; raise ValueError for depths, keys and numbers that no configuration has."""
    if depth > MOST_DEPTH:
        raise ValueError(f"{what}: sections lie deeper than {MOST_DEPTH} levels, which no configuration needs")
    where = f"{what}: {shown_key(key)}" if key else what
    if isinstance(value, int) and value.bit_length() > MOST_BITS:
        raise ValueError(f"{where} is a number of {value.bit_length()} bits, larger than any setting")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{where} is {value}, or larger than any setting; write a finite number")
    if isinstance(value, list | tuple):
        return [_plain(each, what, key, depth + 1) for each in value]
    if not isinstance(value, Mapping):
        return value
    for each in value:
        if not isinstance(each, str):
            raise ValueError(f"{what}: the key {each!r} is no text")
    return {name: _plain(each, what, f"{key}.{name}".strip("."), depth + 1) for name, each in value.items()}
