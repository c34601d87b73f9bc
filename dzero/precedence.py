"""What a user types wins over what a preset says, where settings do not go together.

A preset is a configuration (`--config-name`), a group's settings of other groups (an experiment), or a default. If a
rule of `compatibility.py` refuses a typed setting with one of a preset, the preset's gives way, and a line says so:

    what gives way                       to which value
    a setting that the repair names      the value that the repair names
    any other setting of the rule        its default, if it has another value

Only a change after which no rule refuses the settings is made. Refused stay settings that are all typed, those that
say what is trained (`WHAT_IS_TRAINED`), and a typed setting that has no effect because something else is off by
default: it is switched on by who wants it. A group that is named on the command line counts as typed with the
settings that its file says.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from dzero.compatibility import FACTS, FOLLOWS_FROM, RULES
from dzero.utils.rules import IncompatibleError, Settings, shown

State = TypeVar("State")
Result = TypeVar("Result")

WHAT_IS_TRAINED = ("model", "adapter.kind", "data.kind", "optim.rule")
"""Settings, and the group, that give way to no other: how to train does not decide what is trained."""
NAMED = re.compile(r"\b(?P<key>[a-z_]+\.[a-z_]+)=(?P<value>\[[\w,]+\]|-?[\w.]*\w)(?![\w.]*[\[<(])")


@dataclass(frozen=True)
class Typed:
    """Settings that were typed.

    Attributes:
        keys: The settings, and those that the named groups' files say.
        groups: Groups that were named, such as `offload`.
    """

    keys: frozenset[str] = frozenset()
    groups: frozenset[str] = frozenset()

    def __contains__(self, key: str) -> bool:
        """Return whether a setting, or a part of it, was typed."""
        return any(_is_part(key, typed) or _is_part(typed, key) for typed in self.keys)

    def decides(self, key: str) -> bool:
        """Return whether what was typed decides a setting: it was typed, or its group was named."""
        return key in self or any(_is_part(key, group) for group in self.groups)

    def having(self, key: str) -> Typed:
        """Return these settings and another."""
        return replace(self, keys=self.keys | {key})


def _is_part(key: str, whole: str) -> bool:
    return key == whole or key.startswith(f"{whole}.")


NOTHING_TYPED = Typed()


@dataclass(frozen=True)
class GaveWay:
    """Setting of a preset that gave way to a typed one.

    Attributes:
        key: The setting.
        value: Its value now.
        line: What the user is told.
    """

    key: str
    value: Any
    line: str

    @property
    def word(self) -> str:
        """The setting as it is written on a command line."""
        return f"{self.key}={shown(self.value)}"


def settle(
    state: State, check: Callable[[State], Result], change: Callable[[State, GaveWay], State], typed: Typed
) -> tuple[Result, tuple[GaveWay, ...]]:
    """Return what `check` makes of settings in which presets gave way to typed settings, and those that did.

    Args:
        state: The settings.
        check: Function that raises IncompatibleError for settings that a rule refuses.
        change: Function that returns the settings with one that gave way.
        typed: What was typed.

    Raises:
        IncompatibleError: No setting can give way, or none that helps.
    """
    try:
        return check(state), ()
    except IncompatibleError as error:
        for way in ways(error, typed):
            try:
                result, others = settle(change(state, way), check, change, typed.having(way.key))
            except IncompatibleError as next_error:
                if way.key not in _settings_of(next_error):
                    raise
            else:
                return result, (way, *others)
        raise


def typed_in_vain(settings: Settings, typed: Typed) -> IncompatibleError | None:
    """Return the error of a rule by which a setting that was typed with its default would have no effect.

    By default such a setting is no error. It is one if a preset decided so, which then gives way, or if what is trained
    does: who types `adapter.r=8` believes to train an adapter.
    """
    as_typed = settings.with_changed(key for key in typed.keys if settings.values.get(key) is not None)
    for rule in RULES:
        if rule.idle and rule.refuses(as_typed) and not rule.refuses(settings):
            error = IncompatibleError(rule.message(as_typed, FACTS), rule, as_typed)
            decides = any(_is_part(key, what) for key in _settings_of(error) for what in WHAT_IS_TRAINED)
            if decides or any(True for _ in ways(error, typed)):
                return error
    return None


def ways(error: IncompatibleError, typed: Typed) -> Iterator[GaveWay]:
    """Yield each setting of a rule that may give way to the typed ones, the values that the repair names first."""
    settings, idle = error.settings, error.rule.idle
    values, defaults = settings.values, settings.defaults
    if not any(typed.decides(key) for key in _settings_of(error)):
        return
    is_idle = next(iter(error.rule.conditions)) if idle else None
    for key, value in [*_named(error), *_defaults(error)]:
        if key in typed or any(_is_part(key, what) for what in WHAT_IS_TRAINED):
            continue
        if key in values and shown(value) == shown(values[key]):
            continue
        if idle and (key not in defaults or values[key] == defaults[key]):
            continue  # it would switch on what the typed setting belongs to
        others = " and ".join(each for each in error.rule.named(settings, FACTS, but=key) if each)
        here = f" in place of {shown(values[key])}" if key in values else ""
        if not idle:
            why = f"which does not go with {others}: {error.rule.why}"
        elif key == is_idle:
            why = f"which would have no effect with {others}"
        else:
            why = f"with which {others} would have no effect"
        yield GaveWay(key, value, f"note: {key}={shown(value)}{here}, {why}")


def _settings_of(error: IncompatibleError) -> list[str]:
    """Return the settings of a refusal: those of the rule, and those that its facts follow from."""
    return [source for key in error.rule.conditions for source in FOLLOWS_FROM.get(key, (key,))]


def _named(error: IncompatibleError) -> Iterator[tuple[str, Any]]:
    """Yield the settings that the repair names, with their values."""
    take = error.rule.take if isinstance(error.rule.take, str) else error.rule.take(error.settings)
    for match in NAMED.finditer(take):
        if match["key"] in _settings_of(error):
            yield match["key"], _read(match["value"])


def _read(word: str) -> Any:
    """Return the value of a word of a repair."""
    if word.startswith("["):
        return word[1:-1].split(",")
    return {"null": None, "true": True, "false": False}.get(word, int(word) if word.isdecimal() else word)


def _defaults(error: IncompatibleError) -> Iterator[tuple[str, Any]]:
    for key in error.rule.conditions:
        if key in error.settings.defaults:
            yield key, error.settings.defaults[key]


def keys_of(values: Any, key: str) -> Sequence[str]:
    """Return the settings that a value gives to `key`: those in a mapping, or `key` itself."""
    if not isinstance(values, dict):
        return [key]
    return [inner for name, value in values.items() for inner in keys_of(value, f"{key}.{name}")]
