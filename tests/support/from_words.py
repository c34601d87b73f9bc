"""What dzero makes of the words of a command line, in this process: a run's configuration, its refusal, its plan.

Words are those that a user types after `train.py` or `python -m dzero plan`. A test that asks what the whole command
does, its exit code and what it leaves, types it with typed_commands.py.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from torch import nn

from dzero import RunError, config, overrides
from dzero.__main__ import parsed
from dzero.estimate.measure_hardware import unmeasured
from dzero.models.build import build
from dzero.monitor.tensorboard import TensorBoardSink
from dzero.plan import auto, plan_run, preflight, provenance, run_layout
from dzero.utils.terminal import Table
from dzero.verify.config import VerifyRun

CONF = Path(__file__).parents[2] / "conf"


def run_of(*words: str, schema: type[Any] = config.RunConfig) -> Any:
    """The configuration that these words describe; as `python -m dzero verify` reads them with `schema=VerifyRun`."""
    return overrides.composed(words, CONF, schema)


def to_verify(*words: str) -> Any:
    """The configuration that `python -m dzero verify` makes of the words."""
    return run_of(*words, schema=VerifyRun)


def started(*words: str, conf: Path = CONF) -> tuple[Any, list[Any]]:
    """The run that `train.py` starts, on as many ranks as it says, and the settings of presets that gave way to it."""
    (run,) = overrides.check(words, conf)
    found, gave_way = run_layout.settled(run, overrides.typed_keys(words, conf))
    return found, list(gave_way)


def runs_of(*words: str) -> list[Any]:
    """The runs of a sweep, each as it starts."""
    return overrides.check(words, CONF)


def model_of(vocab_size: int, *words: str) -> nn.Module:
    """The decoder that the words describe, with values."""
    meant: Any = build(run_of(*words).model, vocab_size)
    return type(meant)(meant.shape)


def settings_of(*words: str) -> list[str]:
    """The settings among the words of `python -m dzero COMMAND`, whose options are checked."""
    return list(getattr(parsed([*words]), "settings", []))


def resolved(*words: str) -> Any:
    """The configuration that is trained, with what `zero=auto` chose."""
    return preflight.resolve_run(run_of(*words), words)


def refusal(*words: str, conf: Path = CONF) -> str:
    """What a user reads who types the words after `train.py`; empty if the run would start."""
    config.register()
    try:
        run_layout.check_all_here(overrides.check(words, conf), overrides.typed_keys(words, conf))
    except RunError as error:
        return str(error)
    return ""


def forecast(*words: str, **figures: Any) -> Any:
    """The plan of a run on the hardware that its words name, with other `figures`; without one on nothing measured."""
    run = run_of(*words)
    hardware = run.hardware or unmeasured(run_layout.ranks_of(run), "cpu")
    return plan_run.forecast_run(run, replace(hardware, **figures))


def planned_under_way(run: Any, ranks: int, folder: Path) -> tuple[int | None, str | None]:
    """The peak that a run in its first step writes to its board, and what it says is missing there."""
    board = TensorBoardSink(folder)
    told = plan_run.log_plan(board, 1, run, ranks, "cpu", 256)
    board.close()
    return told


def explained(*words: str) -> tuple[dict[str, Table], list[str]]:
    """The tables of `python -m dzero explain`, by the first word of their titles, and the actions of offload."""
    tables, actions = plan_run.explain_run(run_of(*words), words, CONF)
    return {table.title.split(maxsplit=1)[0].rstrip(","): table for table in reversed(tables)}, actions


def last_explained(*words: str) -> Table:
    """The last table, which tells what ranks pass on that share something."""
    return plan_run.explain_run(run_of(*words), words, CONF)[0][-1]


def sources(*words: str) -> Table:
    """The table of settings: value, and the file or the command line that made it."""
    return provenance.settings_table(run_of(*words), words, CONF)


def chosen(*words: str) -> Any:
    """What `zero=auto` chooses for the words, and what it ranked below."""
    return auto.choose(run_of(*words), words)


def predicted_bytes(run: Any) -> int:
    """The device's peak that a run is checked with before it starts, without what the allocator loses."""
    memory = preflight.needed(run)
    return memory.peak.total_bytes + memory.staging


def predicted_kinds(run: Any) -> dict[str, int]:
    """The same, by kind."""
    return dict(preflight.needed(run).peak.kinds)


def check_memory(run: Any, host_bytes: int) -> Any:
    """Check a run as before it starts, on a machine that has so much memory; the configuration that is trained."""
    has = {"host_memory_bytes": lambda: host_bytes, "host_available_bytes": lambda: host_bytes}
    with patch.multiple(preflight, **has):
        return preflight.resolve_run(run, [])
