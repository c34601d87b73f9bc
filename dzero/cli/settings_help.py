"""Help of `dzero train`: every setting of a run with its meaning, by group, from the configuration dataclasses."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import shutil
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

from dzero.config import CONF, RunConfig

KEY_WIDTH, LEAST_WIDTH = 34, 60
USAGE = """\
Train a model, with its states sharded by ZeRO stage 0, 1, 2 or 3.

  dzero train zero.stage=3                         on this machine, with what it has (or: python train.py zero.stage=3)
  dzero train zero=auto                            the fastest settings that fit this machine
  dzero train model=gpt2_124m optim.lr=1e-3        another option of a group, another value
  dzero train experiment=gpus_512                  settings that belong together (conf/experiment)
  dzero train --multirun zero.stage=0,1,2,3        a run for each value
  dzero train --cfg job                            show the settings, do not run
  torchrun --nproc-per-node=8 -m dzero train       join a group on one node or many
"""


@dataclasses.dataclass(frozen=True)
class Setting:
    """One key of the configuration, with its default as the command line writes it, and its meaning."""

    key: str
    default: str
    meaning: str


@dataclasses.dataclass(frozen=True)
class Group:
    """Settings of one dataclass.

    Attributes:
        meaning: First line of the dataclass's docstring.
        options: Names of the files in conf/ that fill the group.
    """

    name: str
    meaning: str
    options: tuple[str, ...]
    settings: tuple[Setting, ...]


def show() -> None:
    """Print the help at the width of the terminal."""
    width = max(LEAST_WIDTH, min(120, shutil.get_terminal_size((100, 24)).columns))
    print(help_text(groups(), width), end="", flush=True)


def help_text(found: list[Group], width: int) -> str:
    """Return the whole help, wrapped at `width` columns."""
    lines = [USAGE]
    for group in found:
        lines.append(f"{group.name}: {group.meaning}" if group.meaning else group.name)
        if group.options:
            takes = f"{group.name}=... takes {', '.join(group.options)}"
            lines += textwrap.wrap(takes, width - 2, initial_indent="  ", subsequent_indent="    ")
        for setting in group.settings:
            head = f"  {setting.key}={setting.default}"
            gap = " " * max(2, KEY_WIDTH - len(head))
            lines += textwrap.wrap(f"{head}{gap}{setting.meaning}", width, subsequent_indent=" " * KEY_WIDTH)
        lines.append("")
    lines.append("Options of Hydra, such as --cfg, --multirun and --info: dzero train --hydra-help")
    return "\n".join(lines) + "\n"


def groups() -> list[Group]:
    """Return all settings of a run, group by group."""
    found = [Group("run", "Settings of no group.", (), tuple(_settings(RunConfig, "", only_own=True)))]
    for name, kind in get_type_hints(RunConfig).items():
        if (owner := _dataclass_in(kind)) is not None:
            settings = tuple(_settings(owner, f"{name}."))
            meaning = (inspect.getdoc(owner) or "").partition("\n")[0]
            found.append(Group(name, meaning, _options(CONF / name), settings))
    extra = Group("experiment", "Settings of several groups that belong together.", _options(CONF / "experiment"), ())
    return [*found, extra]


def _settings(owner: type[Any], prefix: str, *, only_own: bool = False) -> Iterator[Setting]:
    """Yield the settings of a dataclass and, unless `only_own`, of the dataclasses in it."""
    meanings, hints = meanings_of(owner), get_type_hints(owner)
    for field in dataclasses.fields(owner):
        inner = _dataclass_in(hints[field.name])
        if inner is None:
            yield Setting(prefix + field.name, _default(field), meanings.get(field.name, ""))
        elif not only_own:
            yield from _settings(inner, f"{prefix}{field.name}.")


def meanings_of(owner: type[Any]) -> dict[str, str]:
    """Return the string below each field in the source of a dataclass, on one line, by field name."""
    found: dict[str, str] = {}
    for kind in reversed([each for each in owner.__mro__ if dataclasses.is_dataclass(each)]):
        (body,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
        assert isinstance(body, ast.ClassDef)
        for statement, after in zip(body.body, body.body[1:], strict=False):
            match statement, after:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    found[name] = " ".join(text.split())
    return found


def _dataclass_in(hint: Any) -> type[Any] | None:
    """Return `Config` for the types `Config` and `Config | None`."""
    return next((each for each in (hint, *get_args(hint)) if dataclasses.is_dataclass(each)), None)  # type: ignore[return-value]


def _default(field: dataclasses.Field[Any]) -> str:
    value = field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
    if value is dataclasses.MISSING:
        return "..."
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _options(folder: Path) -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in folder.glob("*.yaml")))
