"""Checks of a run's command line before anything starts, with one error that says what is allowed.

Hydra finds the same mistakes later, run by run, and reports them with its internals. Here every run that a command line
starts (several with --multirun) is composed and validated first.
"""

from __future__ import annotations

import dataclasses
import difflib
import errno
import itertools
import math
import os
import re
import sys
import traceback
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, ValueType
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException, ValidationError

from dzero.config import CONF, ConfigError, RunConfig, register, resolve_typed
from dzero.errors import REPAIRS, RunError, is_raised_here
from dzero.precedence import GaveWay, Typed, keys_of
from dzero.utils.launched import is_first_of_node, launched
from dzero.utils.renamed import RENAMED, new_key, renewed

NO_RUN = {"-h", "--help", "--hydra-help", "--version", "-sc", "--shell-completion"}
OTHER_CONFIG = {"-cp", "--config-path", "-cd", "--config-dir"}
CONFIG_NAME = ("-cn", "--config-name")
DEFAULT_CONFIG = "config"
MULTIRUN = {"-m", "--multirun"}
SHOWS = {"-c", "--cfg", "-i", "--info"}
"""Options with which Hydra shows the configuration and runs nothing."""
WITH_VALUE = {*OTHER_CONFIG, *CONFIG_NAME, *SHOWS, "-p", "--package"}
OPTIONS = NO_RUN | MULTIRUN | WITH_VALUE | {"-r", "--run", "--resolve", "--experimental-rerun"}
SHORT = re.compile(r"^(\+{0,2})resume=(?!\{)")
EQUALS = re.compile(r"""^([^-=][^=]*=)([^'"()\[\]{},]*=[^'"()\[\]{},]*)$""")
HOME = re.compile(r"""([=,\[]['"]?)~(?=/)""")
SUGGESTED = 3
LIKE = 0.75
"""Least likeness of the letters of two names of which one may stand for the other."""
UNITS = {"k": 1e3, "m": 1e6, "g": 1e9, "b": 1e9, "t": 1e12}
NAME_PARTS = re.compile(r"(\d+)(?:([kmgbt])(?![a-z]))?|([a-z]+)")
"""A number and its unit, or letters, in the name of an option such as mixtral_8x7b."""
PACKAGE_OF_ALL = "# @package _global_"
"""First line of a group's file that gives settings of other groups too."""
USUAL_NAMES = {
    "batch_size": "train.microbatch_sequences",
    "micro_batch_size": "train.microbatch_sequences",
    "global_batch_size": "train.global_sequences",
    "gradient_accumulation_steps": "train.accumulate",
    "learning_rate": "optim.lr",
    "max_steps": "train.steps",
    "seq_len": "train.sequence_tokens",
    "grad_clip": "optim.max_norm",
    "optimizer": "optim.rule",
    "num_layers": "model.layers",
}
"""Settings by their names in other trainers."""
KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a word", type(None): "null"}


def run(main: Callable[[], Any], conf: Path, check_here: Callable[[list[RunConfig], Typed], None]) -> None:
    """Check the command line, then run Hydra's `main`; exit with a message for errors that the user can fix.

    `check_here` is called once with all runs of the command line and what was typed; it raises RunError if this machine
    cannot run them.
    """
    wants_internals = "HYDRA_FULL_ERROR" in os.environ
    os.environ["HYDRA_FULL_ERROR"] = "1"  # makes Hydra raise errors that it would otherwise print with a stack trace
    sys.argv[1:] = spelt_out(sys.argv[1:])
    if os.environ.get("RANK", "0") != "0":  # of torchrun's workers, rank 0 alone makes Hydra's output folders
        sys.argv += [
            "hydra.run.dir=.",
            "hydra.output_subdir=null",
            "hydra/job_logging=none",
            "hydra/hydra_logging=none",
        ]
    try:
        try:
            runs = check(sys.argv[1:], conf)
            if runs and not flags_of(sys.argv[1:]) & SHOWS:
                check_here(runs, typed_keys(sys.argv[1:]))
        except RunError as error:
            # Under torchrun, every rank finds the same error: one per node prints it.
            sys.exit(f"error: {error}" if is_first_of_node() else 1)
        main()
    except (HydraException, OmegaConfBaseException) as error:
        if wants_internals:
            raise
        sys.exit(f"error: {_essence(error)}")
    except yaml.YAMLError as error:  # of a file in a folder that the user named
        sys.exit(f"error: {' '.join(str(error).split())}")
    except UnicodeDecodeError as error:
        if not any("/hydra/_internal/" in frame.filename for frame in traceback.extract_tb(error.__traceback__)[-3:]):
            raise
        sys.exit(f"error: a YAML file of the configuration is not UTF-8: {error}")
    except RunError as error:
        sys.exit(f"error: {error}")
    except OSError as error:
        unusable = {*REPAIRS, errno.ENOENT, errno.ENOTDIR, errno.EEXIST, errno.ELOOP}
        if error.errno not in unusable or error.filename is None or is_raised_here(error):
            raise
        where = "name another folder for this run's output, hydra.run.dir=FOLDER"
        sys.exit(f"error: {Path(error.filename).absolute()}: {error.strerror}; {where}")


def composed(settings: Sequence[str], conf: Path, schema: type[RunConfig] = RunConfig) -> RunConfig:
    """Return the checked configuration that words KEY=VALUE make, for commands that start no Hydra run.

    Raise ConfigError if a setting is unknown, has a wrong type, or is impossible.
    """
    register(schema)
    settings = spelt_out(settings)
    try:
        check(settings, conf, schema)
        name, settings = config_name(settings, conf)
        with initialize_config_dir(str(conf), version_base="1.3"):
            run, gave_way = resolve_typed(compose(name, overrides=settings), typed_keys(settings, conf))
    except HydraException as error:
        raise ConfigError(_essence(error)) from error
    tell(gave_way)
    return run


def typed_keys(arguments: Sequence[str], conf: Path = CONF) -> Typed:
    """Return the settings and groups that a command line gives."""
    keys: list[str] = []
    groups: list[str] = []
    for override in map(_parsed, _settings_of(arguments)):
        key = override.key_or_group.split("@")[0]
        if (conf / key).is_dir():
            groups.append(key)
            for option in _values(override):
                keys += _said_of(key, conf / key / f"{option}.yaml")
        else:
            keys += keys_of(None if override.is_delete() or override.is_sweep_override() else override.value(), key)
    return Typed(frozenset(keys), frozenset(groups))


def _said_of(group: str, file: Path) -> Sequence[str]:
    """Return the settings of `group` that an option's file gives."""
    if not file.is_file():
        return []
    said: Any = OmegaConf.to_container(OmegaConf.load(file))
    return keys_of(said.get(group, {}) if PACKAGE_OF_ALL in file.read_text(encoding="utf-8") else said, group)


def tell(gave_way: Iterable[GaveWay]) -> None:
    """Print a line for each setting of a preset that gave way to a typed one, once on each node."""
    for way in gave_way if is_first_of_node() else ():
        print(way.line, file=sys.stderr, flush=True)


def spelt_out(words: Sequence[str]) -> list[str]:
    """Expand short forms on a command line, `resume=WORD` and `~` in KEY=~/FOLDER, and replace old names.

    A value with "=", such as a folder of a run, is put into the quotes that Hydra wants around it.
    """
    home = os.path.expanduser("~")
    spelt = [HOME.sub(lambda found: found[1] + home, SHORT.sub(r"\1resume.source=", word)) for word in words]
    spelt = [EQUALS.sub(r"\1'\2'", word) for word in spelt]
    found = [renewed(word) for word in spelt]
    for _, warning in found:
        if warning is not None and is_first_of_node():
            print(f"warning: {warning}", file=sys.stderr)
    return [word for word, _ in found]


def check(arguments: Sequence[str], conf: Path, schema: type[RunConfig] = RunConfig) -> list[RunConfig]:
    """Return the runs that a command line starts, composed and validated.

    No runs are returned if the words start none or select another configuration: Hydra handles them. Raise ConfigError
    for the first setting that is unknown, has a wrong type, or is impossible.
    """
    flags = flags_of(arguments)
    if flags & (NO_RUN | OTHER_CONFIG):
        return []
    if launched() and flags & MULTIRUN:
        raise ConfigError("--multirun starts workers of its own for each run: leave torchrun away")
    _check_words(arguments)
    overrides = [_parsed(word) for word in _settings_of(arguments)]
    for override in overrides:
        if override.is_sweep_override() and not flags & MULTIRUN and not override.is_hydra_override():
            line, key = override.input_line, override.key_or_group
            raise ConfigError(f"{line}: several values are several runs, --multirun {line}; a list is {key}=[...]")
        _check_override(override, conf, schema)
    name, _ = config_name(arguments, conf)
    typed = typed_keys(arguments, conf)
    with initialize_config_dir(str(conf), version_base="1.3"):
        return [
            _checked_run(name, settings, typed, schema)
            for settings in _runs(overrides, multirun=bool(flags & MULTIRUN))
        ]


def _check_words(arguments: Sequence[str]) -> None:
    """Raise ConfigError for the first word that is neither KEY=VALUE, nor an option of Hydra or its value."""
    for index, word in enumerate(arguments):
        option, given, value = word.partition("=")
        following = "".join(arguments[index + 1 : index + 3]).removeprefix("=")
        if word.startswith("-") and option not in OPTIONS:
            written = f"{option.lstrip('-')}={value if given else following or 'VALUE'}"
            raise ConfigError(f"{word}: a setting is written without dashes, {written}; see dzero train --help")
        if word.startswith(("-", "~")) or (index and arguments[index - 1] in WITH_VALUE):
            continue
        after = arguments[index + 1] if index + 1 < len(arguments) else ""
        if not given and after.startswith("="):
            raise ConfigError(f"{word} {after}: a setting is written without spaces, {word}={following}")
        if not given:
            written = f"{word}={after}" if after and "=" not in after else "KEY=VALUE, such as zero.stage=3"
            raise ConfigError(f"{word}: a setting is written {written}; see dzero train --help")
        if not value and after and "=" not in after and not after.startswith("-"):
            raise ConfigError(f"{word} {after}: a setting is written without spaces, {word}{after}")


def config_name(arguments: Sequence[str], conf: Path) -> tuple[str, list[str]]:
    """Return the configuration that `--config-name NAME` selects, and the other words; ConfigError if it is none."""
    name, others, coming = DEFAULT_CONFIG, [], False
    for word in arguments:
        option, given, value = word.partition("=")
        if coming:
            name, coming = word, False
        elif option in CONFIG_NAME:
            name, coming = value, not given
        else:
            others.append(word)
    known = sorted(path.stem for path in conf.glob("*.yaml"))
    if coming or name.removesuffix(".yaml") not in known:
        raise ConfigError(f"--config-name {name}: choose one of {known}{_closest(name, known)}")
    return name.removesuffix(".yaml"), others


def _settings_of(arguments: Sequence[str]) -> list[str]:
    return [word for word in arguments if not word.startswith("-") and ("=" in word or word.startswith("~"))]


def _parsed(word: str) -> Override:
    try:
        return OverridesParser.create().parse_override(word)
    except ValueError as error:  # e.g. an integer with thousands of digits
        raise ConfigError(f"{word[:40]}...: the value cannot be read: {error}") from error
    except HydraException as error:
        key, _, value = word.partition("=")
        quoted = f"""'{key}="{value}"'"""
        raise ConfigError(
            f"{word}: not a value as Hydra writes them; a text with such characters takes {quoted}"
        ) from error


def flags_of(arguments: Sequence[str]) -> set[str]:
    """Return the options on a command line, without their values."""
    return {word.split("=")[0] for word in arguments if word.startswith("-")}


def _check_override(override: Override, conf: Path, schema: type[RunConfig]) -> None:
    key = override.key_or_group.split("@")[0]
    if override.is_hydra_override():
        return
    values = _values(override)
    if (conf / key).is_dir():
        options = sorted(path.stem for path in (conf / key).glob("*.yaml"))
        if override.is_add():
            raise ConfigError(f"{override.input_line}: {key} is chosen already; leave the + away")
        for value in values:
            if not isinstance(value, dict) and not str(value).startswith("{") and str(value) not in options:
                raise ConfigError(f"{key}={value}: choose one of {options}{_closest(str(value), options)}")
        return
    hint = _hint(key, schema, str(override.input_line).partition("=")[2])
    if override.is_delete() and hint is not Any:
        raise ConfigError(f"{override.input_line}: a setting cannot be deleted; leave it away for its default")
    if list in {get_origin(arm) for arm in (hint, *get_args(hint))} and any(isinstance(each, dict) for each in values):
        raise ConfigError(f"{override.input_line}: must be {_kind(hint)}")
    if dataclasses.is_dataclass(hint) and not override.is_sweep_override() and not isinstance(values[0], dict):
        names = [f"{key}.{field.name}" for field in dataclasses.fields(hint)]
        raise ConfigError(f"{override.input_line}: {key} is a group; set one of {names}")


def _values(override: Override) -> list[Any]:
    """Return the value of a setting, or the values of its sweep; none for a glob, which only Hydra can expand."""
    if not override.is_sweep_override():
        return [override.value()]
    tellable = override.is_discrete_sweep() and override.value_type is not ValueType.GLOB_CHOICE_SWEEP
    return list(override.sweep_string_iterator()) if tellable else []


def _runs(overrides: list[Override], *, multirun: bool) -> Iterator[list[str]]:
    """Yield the settings of each run: the product of all sweeps, in Hydra's order."""
    choices = [
        [f"{override.get_key_element()}={value}" for value in _values(override)]
        if multirun and override.is_sweep_override()
        else [str(override.input_line)]
        for override in overrides
    ]
    yield from map(list, itertools.product(*choices))


def _checked_run(name: str, settings: list[str], typed: Typed, schema: type[RunConfig]) -> RunConfig:
    _check_figures(settings)
    try:
        return resolve_typed(compose(name, overrides=settings), typed)[0]
    except ValueError as error:
        raise ConfigError(str(error)) from error
    except HydraException as error:
        key = str(getattr(error.__cause__, "full_key", None) or "").split("[")[0]
        hint = _hint(key, schema) if key else Any
        if hint is Any or not isinstance(error.__cause__, ValidationError):
            raise ConfigError(_essence(error)) from error
        given = [line.partition("=")[2] for line in settings if line.lstrip("+").startswith(f"{key}=")]
        value = given[-1] if given else "..."
        such = f", such as {key}=[{value}]" if get_origin(hint) is list and not value.startswith("[") else ""
        raise ConfigError(f"{key}={value}: must be {_kind(hint)}{such}") from error


def _check_figures(settings: list[str]) -> None:
    """Raise ConfigError if a figure of this machine is set; only those of a chosen node can be changed."""
    chosen = {key: value for key, _, value in (line.partition("=") for line in settings)}
    changed = [line for line in settings if line.lstrip("+").startswith("hardware.")]
    if changed and chosen.get("hardware", "found") in ("found", "null"):
        raise ConfigError(f"{changed[0]}: this machine's figures are measured; choose a node as well, hardware=...")


def _hint(key: str, schema: type[RunConfig], value: str = "") -> Any:
    """Return the declared type of a setting; Any inside a free mapping.

    Raise ConfigError, which suggests other keys with the given `value`, if the key does not exist.
    """
    owner: Any = schema
    done: list[str] = []
    for part in key.split("."):
        if not dataclasses.is_dataclass(owner):
            return Any
        hints = get_type_hints(owner)
        if part not in hints:
            where = ".".join(done) or "the configuration"
            meant = _meant(key, [".".join([*done, name]) for name in hints], list(_keys(schema)))
            told = " or ".join(f"{each}={value}" if value else each for each in meant)
            suggestion = f"; did you mean {told}?" if told else ""
            raise ConfigError(f"{key}: unknown key; {where} has {sorted(hints)}{suggestion}")
        owner = _present(hints[part])
        done.append(part)
    return owner


def _present(hint: Any) -> Any:
    """Return `Config` for `Config | None`, an optional group; any other type unchanged."""
    groups = [arm for arm in get_args(hint) if dataclasses.is_dataclass(arm)]
    return groups[0] if groups else hint


def _kind(hint: Any) -> str:
    """Describe a type, e.g. `int | None` as `a whole number or null`."""
    if get_origin(hint) in (types.UnionType, Union):
        return " or ".join(_kind(arm) for arm in get_args(hint))
    if get_origin(hint) is list:
        return f"a list [...], each {_kind(get_args(hint)[0])}"
    if get_origin(hint) is dict:
        return "a mapping {key: value}"
    return KINDS.get(hint, str(hint))


def _essence(error: Exception) -> str:
    """Return the message of a Hydra or OmegaConf error without their internals."""
    said = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else error
    lines = [line for line in str(said).splitlines() if "reference_type=" not in line and "object_type=" not in line]
    return "\n".join(line for line in lines if line and not line.startswith("See https://"))


def _keys(owner: Any, prefix: str = "") -> Iterator[str]:
    """Yield the names of all settings and groups; each group before its settings."""
    for name, hint in get_type_hints(owner).items():
        yield f"{prefix}{name}"
        if dataclasses.is_dataclass(inner := _present(hint)):
            yield from _keys(inner, f"{prefix}{name}.")


def _meant(key: str, here: Sequence[str], everywhere: Sequence[str]) -> list[str]:
    """Return at most three keys that an unknown key may stand for, from the most likely kind of match only.

    `here` are the keys of the group that the key names, and `everywhere` all keys.
    """
    if key in RENAMED:
        return [new_key(key)]
    last = key.rpartition(".")[2]
    if last.lower() in USUAL_NAMES:
        return [USUAL_NAMES[last.lower()]]
    named = [each for each in everywhere if each.rpartition(".")[2] == last]
    if shallowest := [each for each in named if each.count(".") == min(other.count(".") for other in named)]:
        return shallowest[:SUGGESTED]
    for keys in (here, everywhere):
        by_last = {each.rpartition(".")[2]: each for each in reversed(keys)}
        if close := difflib.get_close_matches(last, by_last, n=1):
            return [by_last[close[0]]]
    return []


def _closest(word: str, allowed: Sequence[str]) -> str:
    """Return the question for the allowed names that a wrong one may stand for; empty if none is like it.

    Names that begin with the word come first. Else it is the name with the most similar letters, and of several sizes
    of a family the nearest, by their ratio: for llama_7b it is llama_8b, not llama_70b, which has the same letters too.
    """
    longer = sorted((name for name in allowed if word and name.startswith(word)), key=lambda name: _letters(name)[1])
    close = longer[:SUGGESTED] or [name for name in [_nearest(word, allowed)] if name is not None]
    return f"; did you mean {' or '.join(close)}?" if close else ""


def _nearest(word: str, allowed: Sequence[str]) -> str | None:
    letters, numbers = _letters(word)
    likeness = {name: difflib.SequenceMatcher(None, letters, _letters(name)[0]).ratio() for name in allowed}
    most = max(likeness.values(), default=0.0)

    def apart(name: str) -> float:
        both = zip(reversed(numbers), reversed(_letters(name)[1]), strict=False)
        return sum(abs(math.log(max(one, 1) / max(other, 1))) for one, other in both)

    return min((name for name in allowed if likeness[name] == most), key=apart) if most >= LIKE else None


def _letters(name: str) -> tuple[str, list[float]]:
    """Return the letters of a name and its numbers, of which `8b` is 8e9."""
    letters, numbers = "", list[float]()
    for number, unit, others in NAME_PARTS.findall(name.lower()):
        if number:
            numbers.append(float(number) * UNITS.get(unit, 1.0))
        letters += others
    return letters, numbers
