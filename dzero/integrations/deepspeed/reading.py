"""Reading a DeepSpeed configuration: strict JSON, as a file or as a mapping."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dzero.errors import in_short

MOST_BYTES = 1 << 20
MOST_DEPTH = 20
MOST_BITS = 64
ALIASES = {"bfloat16": "bf16"}
"""Old names of sections."""


def read(given: str | Path | Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration, with sections under their present names.

    Args:
        given: A JSON file, or its content as a mapping.

    Raises:
        ValueError: It is no file, no JSON, no mapping, or has a key twice; the message is one line.
        TypeError: `given` is neither a path nor a mapping.
    """
    if isinstance(given, Mapping):
        what, found = "deepspeed={...}", dict(given)
    elif isinstance(given, str | Path):
        what, found = str(given), _parsed(Path(given))
    else:
        raise TypeError(f"deepspeed={given!r}: a JSON file of DeepSpeed, or its content as a mapping")
    _check(found, what, 0)
    config = copy.deepcopy(found)
    for old, new in ALIASES.items():
        if old in config and new in config:
            raise ValueError(f"{what}: {old} and {new} are one section; leave {old} away")
        config = {new if key == old else key: value for key, value in config.items()}
    if isinstance(config.get("zero_optimization"), bool):
        config["zero_optimization"] = {"stage": int(config["zero_optimization"])}  # as DeepSpeed took it long ago
    return config


def _parsed(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ValueError(f"{path}: no such file; name the JSON file of a DeepSpeed configuration")
    with path.open("rb") as file:
        data = file.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise ValueError(f"{path}: larger than {MOST_BYTES} bytes, which no configuration is")
    try:
        config = json.loads(data.decode("utf-8-sig"), object_pairs_hook=_without_repeats, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        told = "write strict JSON (no comments; neither hjson nor base64)"
        raise ValueError(f"{path}: {in_short(error)}; {told}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path}: a {type(config).__name__}, not a mapping {{...}} of DeepSpeed's keys")
    return config


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"{json.dumps(key)} is there twice; keep one")
        found[key] = value
    return found


def _refuse(word: str) -> None:
    raise ValueError(f"{word} is no number of JSON")


def _check(value: Any, what: str, depth: int) -> None:
    """Raise ValueError for depths, keys and numbers that no configuration has."""
    if depth > MOST_DEPTH:
        raise ValueError(f"{what}: sections lie deeper than {MOST_DEPTH} levels, which no configuration needs")
    if isinstance(value, int) and value.bit_length() > MOST_BITS:
        raise ValueError(f"{what}: a number of {value.bit_length()} bits, larger than any setting")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{what}: a number that is not finite, or larger than any setting")
    if isinstance(value, Mapping) and (odd := [key for key in value if not isinstance(key, str)]):
        raise ValueError(f"{what}: the key {odd[0]!r} is no text")
    for each in value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ():
        _check(each, what, depth + 1)
