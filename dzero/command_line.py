"""The command line of a run, checked before anything starts: one error that says what is allowed.

Hydra finds the same mistakes later, run by run, and tells them with its own internals. Here every run that a command
line asks for (several with --multirun) is composed and validated first.
"""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import os
import signal
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, ValueType
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException, ValidationError

from dzero.config import ConfigError, RunConfig, register, resolve
from dzero.errors import RunError
from dzero.launch import launched

NO_RUN = {"-h", "--help", "--hydra-help", "--version", "-sc", "--shell-completion"}
OTHER_CONFIG = {"-cp", "--config-path", "-cn", "--config-name", "-cd", "--config-dir"}
MULTIRUN = {"-m", "--multirun"}
KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a word", type(None): "null"}


def run(main: Callable[[], Any], conf: Path) -> None:
    """Check the command line, then run Hydra's `main`; exits with a message where the user has something to mend."""
    wants_internals = "HYDRA_FULL_ERROR" in os.environ
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises what it would otherwise print with a stack trace
    sys.argv += _without_folders_of_their_own()
    try:
        try:
            check(sys.argv[1:], conf)
        except ConfigError as error:
            # torchrun starts this on every rank, and all of them find the same: one per node says it.
            sys.exit(f"error: {error}" if os.environ.get("LOCAL_RANK", "0") == "0" else 1)
        main()
    except (HydraException, OmegaConfBaseException) as error:
        if wants_internals:
            raise
        sys.exit(f"error: {_essence(error)}")
    except RunError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)


def composed(
    settings: Sequence[str], conf: Path, schema: type[RunConfig] = RunConfig, *, here: bool = True
) -> RunConfig:
    """The checked configuration that `settings` make, for commands that start no run of Hydra's. Raises ConfigError.

    here: as a run on this machine, with its files.
    """
    register(schema)
    try:
        check(settings, conf, schema, here=here)
        with initialize_config_dir(str(conf), version_base="1.3"):
            return resolve(compose("config", overrides=[*settings]))
    except HydraException as error:
        raise ConfigError(_essence(error)) from error


def check(arguments: Sequence[str], conf: Path, schema: type[RunConfig] = RunConfig, *, here: bool = True) -> None:
    """Raises ConfigError for the first setting in `arguments` that is unknown, mistyped or impossible.

    conf: the folder of config groups. schema: what is registered. here: as `composed`. Command lines that do not run
    or bring another configuration are left to Hydra.
    """
    flags = {word.split("=")[0] for word in arguments if word.startswith("-")}
    if flags & (NO_RUN | OTHER_CONFIG):
        return
    if launched() and flags & MULTIRUN:
        raise ConfigError("--multirun starts workers of its own for each run: leave torchrun away")
    words = [word for word in arguments if not word.startswith("-") and ("=" in word or word.startswith("~"))]
    overrides = OverridesParser.create().parse_overrides(words)
    for override in overrides:
        _check_override(override, conf, schema)
    with initialize_config_dir(str(conf), version_base="1.3"):
        for settings in _runs(overrides, multirun=bool(flags & MULTIRUN)):
            _check_run(settings, schema, here=here)


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
    hint = _hint(key, schema)
    if override.is_delete() and hint is not Any:
        raise ConfigError(f"{override.input_line}: a setting cannot be deleted; leave it away for its default")
    if dataclasses.is_dataclass(hint) and not override.is_sweep_override() and not isinstance(values[0], dict):
        names = [f"{key}.{field.name}" for field in dataclasses.fields(hint)]
        raise ConfigError(f"{override.input_line}: {key} is a group; set one of {names}")


def _values(override: Override) -> list[Any]:
    """What one setting takes in turn: one value, or those of its sweep. Hydra alone can tell those of a glob."""
    if not override.is_sweep_override():
        return [override.value()]
    tellable = override.is_discrete_sweep() and override.value_type is not ValueType.GLOB_CHOICE_SWEEP
    return list(override.sweep_string_iterator()) if tellable else []


def _runs(overrides: list[Override], *, multirun: bool) -> Iterator[list[str]]:
    """The settings of each run: the product of all sweeps, as Hydra makes it."""
    choices = [
        [f"{override.get_key_element()}={value}" for value in _values(override)]
        if multirun and override.is_sweep_override()
        else [str(override.input_line)]
        for override in overrides
    ]
    yield from (list(choice) for choice in itertools.product(*choices))


def _check_run(settings: list[str], schema: type[RunConfig], *, here: bool) -> None:
    _check_figures(settings)
    try:
        config = resolve(compose("config", overrides=settings))
        if here:
            config.check_here()
    except (ValueError, OSError) as error:
        raise ConfigError(str(error)) from error
    except HydraException as error:
        key = str(getattr(error.__cause__, "full_key", None) or "").split("[")[0]
        hint = _hint(key, schema) if key else Any
        if hint is Any or not isinstance(error.__cause__, ValidationError):
            raise ConfigError(_essence(error)) from error
        given = [line.partition("=")[2] for line in settings if line.lstrip("+").startswith(f"{key}=")]
        raise ConfigError(f"{key}={given[-1] if given else '...'}: must be {_kind(hint)}") from error


def _check_figures(settings: list[str]) -> None:
    """A figure of the hardware can be changed where a node is chosen; those of this machine are measured."""
    chosen = {key: value for key, _, value in (line.partition("=") for line in settings)}
    changed = [line for line in settings if line.lstrip("+").startswith("hardware.")]
    if changed and chosen.get("hardware", "found") in ("found", "null"):
        raise ConfigError(f"{changed[0]}: this machine's figures are measured; choose a node as well, hardware=...")


def _hint(key: str, schema: type[RunConfig]) -> Any:
    """The declared type of a setting; Any inside a free mapping. Raises ConfigError for a key that does not exist."""
    owner: Any = schema
    done: list[str] = []
    for part in key.split("."):
        if not dataclasses.is_dataclass(owner):
            return Any
        hints = get_type_hints(owner)
        if part not in hints:
            where = ".".join(done) or "the configuration"
            raise ConfigError(f"{key}: unknown key; {where} has {sorted(hints)}{_closest(part, list(hints))}")
        owner = _present(hints[part])
        done.append(part)
    return owner


def _present(hint: Any) -> Any:
    """`Config` for `Config | None`, a group that may be absent; any other type as it is."""
    groups = [arm for arm in get_args(hint) if dataclasses.is_dataclass(arm)]
    return groups[0] if groups else hint


def _kind(hint: Any) -> str:
    """`a whole number or null` for `int | None`."""
    if get_origin(hint) in (types.UnionType, Union):
        return " or ".join(_kind(arm) for arm in get_args(hint))
    if get_origin(hint) is list:
        return f"a list [...], each {_kind(get_args(hint)[0])}"
    if get_origin(hint) is dict:
        return "a mapping {key: value}"
    return KINDS.get(hint, str(hint))


def _essence(error: Exception) -> str:
    """What Hydra or OmegaConf say, without their internals."""
    said = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else error
    lines = [line for line in str(said).splitlines() if "reference_type=" not in line and "object_type=" not in line]
    return "\n".join(line for line in lines if line and not line.startswith("See https://"))


def _closest(word: str, allowed: Sequence[str]) -> str:
    close = difflib.get_close_matches(word, allowed, n=1)
    return f"; did you mean {close[0]}?" if close else ""


def _without_folders_of_their_own() -> list[str]:
    """Overrides with which workers of torchrun other than rank 0 keep Hydra from making output folders."""
    if os.environ.get("RANK", "0") == "0":
        return []
    return ["hydra.run.dir=.", "hydra.output_subdir=null", "hydra/job_logging=none", "hydra/hydra_logging=none"]
