"""Old names of settings, which are accepted with a warning for one minor release (CHANGELOG.md)."""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

Config = TypeVar("Config")


@dataclass(frozen=True)
class Renamed:
    """New name of a setting; `values` has the new value of each old one that changed."""

    new: str
    values: Mapping[str, Sequence[str]] = field(default_factory=dict)


RENAMED = {
    "zero.states_over": Renamed("optimizer_shard_axes", {"shard": ["shard"], "all": ["replicate", "shard"]}),
    "mesh.pp_parts": Renamed("pp_stages_per_rank"),
}
"""New names by old keys."""
OLD = re.compile(rf"(\+{{0,2}})({'|'.join(map(re.escape, RENAMED))})=(.*)", re.DOTALL)


def accepts_old_names(group: str) -> Callable[[type[Config]], type[Config]]:
    """Return a decorator of the configuration of `group`, whose constructor then takes old names too."""

    def decorate(cls: type[Config]) -> type[Config]:
        init = cls.__init__

        @functools.wraps(init)
        def accept(self: Config, *args: Any, **values: Any) -> None:
            for key in [key for key in values if f"{group}.{key}" in RENAMED]:
                renamed, value = RENAMED[f"{group}.{key}"], values.pop(key)
                if renamed.new in values:
                    raise ValueError(f"{group}.{key} is the old name of {group}.{renamed.new}; give one of them")
                warnings.warn(f"{group}.{key} is now {group}.{renamed.new}", FutureWarning, stacklevel=2)
                values[renamed.new] = renamed.values.get(value, value) if isinstance(value, str) else value
            init(self, *args, **values)

        cls.__init__ = accept  # type: ignore[assignment, method-assign]
        return cls

    return decorate


def renewed_settings(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a saved run, by key, under their new names."""
    found = {}
    for key, value in saved.items():
        renamed = RENAMED.get(key)
        found[key if renamed is None else new_key(key)] = value if renamed is None else renamed.values.get(value, value)
    return found


def new_key(key: str) -> str:
    """Return the new key of a setting whose old key this is."""
    return f"{key.partition('.')[0]}.{RENAMED[key].new}"


def renewed(word: str) -> tuple[str, str | None]:
    """Return a word of the command line under its new name, and a warning if it had an old one."""
    match = OLD.fullmatch(word)
    if match is None:
        return word, None
    plus, key, values = match.groups()
    renamed = RENAMED[key]
    new = new_key(key)
    found = [f"[{','.join(renamed.values[each])}]" if each in renamed.values else each for each in values.split(",")]
    return f"{plus}{new}={','.join(found)}", f"{key} is now {new}: the old name goes with the next minor release"
