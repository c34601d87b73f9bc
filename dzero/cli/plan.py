"""Commands that start no run: `dzero plan` predicts its memory, traffic and time, `dzero explain` shows its steps."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace

from dzero.config import CONF, RunConfig
from dzero.monitor.tensorboard import TensorBoardSink, check_folder
from dzero.optim.build import check_options
from dzero.overrides import composed, spelt_out, tell, typed_keys
from dzero.plan.auto import choose, resolve_auto
from dzero.plan.picture import check_file, draw
from dzero.plan.plan_run import explain_run, forecast_run, hardware_of, onto_board
from dzero.plan.run_layout import settled
from dzero.plan.search_tables import ranking_tables
from dzero.plan.tables import tables
from dzero.utils.launched import launched
from dzero.utils.terminal import show


def plan(options: argparse.Namespace) -> None:
    """Print tables, write the picture and TensorBoard files that `options` name; exit with 1 if it does not fit."""
    if options.picture is not None:
        check_file(options.picture)
    if options.tensorboard is not None:
        check_folder(options.tensorboard)
    config = _settled(options.settings)
    check_options(config.optim)
    if config.auto:
        choice = choose(config, options.settings)
        show(ranking_tables(choice.ranking, choice.defaults))
        print(f"\n{choice.line}\n", flush=True)
        found = choice.ranking.best[0].forecast
    else:
        found = forecast_run(config, hardware_of(config))
    show(tables(found))
    if options.picture is not None:
        draw(found, options.picture)
    if options.tensorboard is not None:
        board = TensorBoardSink(options.tensorboard)
        lacks = onto_board(board, found)
        board.close()
        if lacks:
            print(lacks, file=sys.stderr)
    print(f"\n{found.verdict()}", flush=True)
    sys.exit(0 if found.fits else 1)


def on_one_node(config: RunConfig) -> RunConfig:
    """Return the run on all devices of the node that hardware= names, unless mesh.dp says how many there are."""
    if config.hardware is None or config.mesh.dp is not None or launched():
        return config
    return replace(config, mesh=replace(config.mesh, dp=max(1, config.hardware.devices_per_node // config.mesh.inner)))


def _settled(settings: Sequence[str]) -> RunConfig:
    """Return the run of these settings, in which presets gave way to them."""
    config, gave_way = settled(on_one_node(composed(settings, CONF)), typed_keys(spelt_out(settings)))
    tell(gave_way)
    return config


def explain(options: argparse.Namespace) -> None:
    """Print units, placements, and the actions of a step in order."""
    settings = spelt_out(options.settings)
    config = resolve_auto(_settled(settings), settings)
    shown, off_device = explain_run(config, settings, CONF)
    show(shown)
    if off_device:
        print("\nslots and actions off the device, in order\n  " + "\n  ".join(off_device), flush=True)
