"""Forms that values of a DeepSpeed configuration may have; the table of keys names one for each key."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dzero.utils.ranges import BELOW_1, MOST_COUNT, Range, number, whole

AUTO = "auto"
FLOATS = {
    **dict.fromkeys(("fp32", "float32", "float", "torch.float32"), "fp32"),
    **dict.fromkeys(("bf16", "bfloat16", "torch.bfloat16"), "bf16"),
    **dict.fromkeys(("fp16", "float16", "half", "torch.float16"), "fp16"),
}
"""Names of dtypes in DeepSpeed, and dzero's."""


@dataclass(frozen=True)
class Form:
    """Values that a key takes.

    Attributes:
        name: Phrase for messages.
        fits: Whether a value has this form.
    """

    name: str
    fits: Callable[[Any], bool]


def is_number(value: Any) -> bool:
    """Return whether a value is a number that fits a float; truth values are none."""
    if isinstance(value, int):
        return not isinstance(value, bool) and abs(value) <= 1 << 63
    return isinstance(value, float) and math.isfinite(value)


def numbers(allowed: Range) -> Form:
    """Return the form of numbers in a range; of whole ones if the range is of whole ones, which may be written 5e8."""
    is_whole = isinstance(allowed.most, int)
    return Form(str(allowed), lambda value: is_number(value) and value in allowed and not (is_whole and value % 1))


def one_of(*allowed: str) -> Form:
    """Return the form of words from a list, in any case."""
    return Form(f"one of {[*allowed]}", lambda value: isinstance(value, str) and value.lower() in allowed)


def _are_betas(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(is_number(each) and each in BELOW_1 for each in value)


def is_switched_on(value: Any) -> bool:
    """Return whether a section has `enabled: true` at any depth."""
    if isinstance(value, dict):
        return value.get("enabled") is True or any(map(is_switched_on, value.values()))
    return isinstance(value, list) and any(map(is_switched_on, value))


ANY = Form("anything", lambda _: True)
FLAG = Form("true or false", lambda value: isinstance(value, bool))
OFF = Form("false", lambda value: value is False)
TEXT = Form("a text", lambda value: isinstance(value, str))
PATH = Form(
    "a folder, without quotes, backslashes or $",
    lambda value: isinstance(value, str) and value.strip() != "" and value.isprintable() and not {*value} & {*"'\"\\$"},
)
NAMES = Form("a list of texts", lambda value: isinstance(value, list) and all(isinstance(each, str) for each in value))
BETAS = Form("two numbers in [0, 1)", _are_betas)
DTYPE = one_of(*FLOATS)
SECTION = Form("a section {...}", lambda value: isinstance(value, dict))
COUNT = numbers(whole(0, 1 << 63))
POSITIVE = numbers(whole(1, MOST_COUNT))
SIGNED = Form("a number", is_number)
RATE = numbers(number(1e6))
