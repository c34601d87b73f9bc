"""Rules about settings that do not go together: what a rule is, and how settings are checked against it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass, replace
from functools import cached_property
from typing import Any

CONDITION = re.compile(r"(?P<key>[\w.]+)((?P<operator>!=|=|>)(?P<values>\S+))?")


@dataclass(frozen=True)
class Settings:
    """Plain values of settings, as far as they are known.

    Attributes:
        values: Values by key, such as `{"zero.stage": 3}`; derived facts have keys too.
        changed: Keys whose value is not the default.
        defaults: Defaults by key.
    """

    values: Mapping[str, Any]
    changed: frozenset[str] = frozenset()
    defaults: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, **groups: Any) -> Settings:
        """Return the fields of configuration dataclasses, by the names of their groups."""
        found = [
            (f"{group}.{each.name}", _listed(getattr(config, each.name)), _default(each))
            for group, config in groups.items()
            for each in fields(config)
        ]
        changed = frozenset(key for key, value, default in found if value != default)
        return cls({key: value for key, value, _ in found}, changed, {key: default for key, _, default in found})

    def having(self, facts: Mapping[str, Any]) -> Settings:
        """Return these settings and `facts`."""
        return replace(self, values={**self.values, **facts})

    def with_changed(self, keys: Iterable[str]) -> Settings:
        """Return these settings, of which `keys` count as changed too."""
        return replace(self, changed=self.changed | frozenset(keys))

    def __getitem__(self, key: str) -> Any:
        return self.values[key]


def _listed(value: Any) -> Any:
    return [*value] if isinstance(value, tuple) else value


def _default(of: Field[Any]) -> Any:
    return of.default if of.default_factory is MISSING else of.default_factory()


@dataclass(frozen=True)
class Rule:
    """Settings that are refused together, as one row of a table.

    Attributes:
        when: Conditions on settings, separated by spaces: `key=a|b`, `key!=a|b`, `key>1`, or `key` for any value. The
            message is about the first. A rule does not apply where one of its settings is unknown.
        why: Reason, as a clause.
        take: Settings to take instead, or a function that finds them.
        example: Command line that the rule refuses; empty if only Python can make such settings.
        also: Relation between the settings that must hold too.
        idle: Whether the first setting is refused only because it would have no effect; a default is not.
    """

    when: str
    why: str
    take: str | Callable[[Settings], str]
    example: str
    also: Callable[[Settings], bool] | None = None
    idle: bool = False

    @cached_property
    def conditions(self) -> dict[str, tuple[str, frozenset[str]]]:
        """Operator and values of the condition on each setting, by its key."""
        found = {}
        for each in self.when.split():
            match = CONDITION.fullmatch(each)
            assert match is not None, each
            found[match["key"]] = match["operator"] or "", frozenset((match["values"] or "").split("|"))
        return found

    def refuses(self, settings: Settings) -> bool:
        """Return whether `settings` are refused."""
        if not self.conditions.keys() <= settings.values.keys():
            return False
        if self.idle and next(iter(self.conditions)) not in settings.changed:
            return False
        holds = all(_holds(settings[key], *condition) for key, condition in self.conditions.items())
        return holds and (self.also is None or self.also(settings))

    def named(self, settings: Settings, facts: Mapping[str, str], but: str | None = None) -> list[str]:
        """Return the settings of this rule with their values, as `message` shows them, `but` for one."""
        return [facts.get(key, f"{key}={{}}").format(shown(settings[key])) for key in self.conditions if key != but]

    def message(self, settings: Settings, facts: Mapping[str, str]) -> str:
        """Return the error message: the settings with their values, the reason, and what to take instead.

        Args:
            settings: The refused settings.
            facts: Phrase for each derived fact, with `{}` for its value. A fact with an empty phrase is not named.
        """
        first, *others = [each for each in self.named(settings, facts) if each]
        together = f" with {' and '.join(others)}" if others else ""
        take = self.take if isinstance(self.take, str) else self.take(settings)
        if not self.idle:
            return f"{first}{together}: {self.why}; take {take}"
        why, instead = f", {self.why}" if self.why else "", f", or take {take}" if take else ""
        return f"{first} has no effect{together}{why}; remove it{instead}"


class IncompatibleError(ValueError):
    """Error for settings that a rule refuses together; it has the rule and the settings that were known."""

    def __init__(self, message: str, rule: Rule, settings: Settings) -> None:
        super().__init__(message)
        self.rule, self.settings = rule, settings


def _holds(value: Any, operator: str, values: frozenset[str]) -> bool:
    """Return whether a condition holds for `value`."""
    if operator == ">":
        return value is not None and value > int(*values)
    return not operator or (shown(value) in values) == (operator == "=")


def shown(value: Any) -> str:
    """Format a value as it is written on a command line."""
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, list | tuple):
        return f"[{','.join(map(shown, value))}]"
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    if is_dataclass(value):
        given = {each.name: getattr(value, each.name) for each in fields(value)}
        defaults = {each.name: _default(each) for each in fields(value)}
        return shown({name: each for name, each in given.items() if each != defaults[name]})
    if isinstance(value, Mapping):
        return f"{{{','.join(f'{key}:{shown(each)}' for key, each in value.items())}}}"
    return str(value)
