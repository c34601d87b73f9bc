"""Forecast of a run from its configuration, on hardware that need not be this machine."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from dzero.comm.ledger import Entry, Traffic
from dzero.config import RunConfig
from dzero.errors import RunError
from dzero.estimate.explain import actions, collectives_table
from dzero.estimate.forecast import Forecast
from dzero.estimate.hardware_spec import HardwareConfig
from dzero.estimate.measure_hardware import cached, key_of, measured, unmeasured
from dzero.hardware import format_bytes
from dzero.launch.devices import device_type
from dzero.mesh import PIPELINE
from dzero.models.build import flops_per_token
from dzero.models.moe import MoE
from dzero.monitor.tensorboard import TensorBoardSink
from dzero.optim.build import owned_states
from dzero.parallel.expert.dispatch import expected_experts
from dzero.parallel.pipeline.split import ModelStages
from dzero.plan.comm_volume import context_traffic, pipeline_traffic, tensor_traffic
from dzero.plan.meta_model import (
    as_on_a_rank,
    costs_for,
    float8_of,
    hidden_of,
    model_of,
    pipeline_stages_of,
    units_of,
)
from dzero.plan.picture import pixels
from dzero.plan.provenance import auto_values, settings_table
from dzero.plan.run_layout import layout_of, ranks_of
from dzero.plan.tables import tables
from dzero.utils.launched import is_first_of_node, launched, local_ranks
from dzero.utils.terminal import Table
from dzero.zero.cost_model import expected_traffic
from dzero.zero.describe import kinds_table, units_table
from dzero.zero.layout import Layout
from dzero.zero.unit_shapes import UnitShape

MANY_LAYERS, LAYERS_PER_S = 300, 10
MOST_RANKS_HERE = 8
"""Runs of more ranks than this are assumed to be on a cluster's GPUs, unless the settings say otherwise."""


def target_of(config: RunConfig) -> tuple[str, str]:
    """Return the device type that a run with these settings is meant for, and the machine in words.

    The type is that of the chosen hardware, or `launch.device`. If neither is chosen, it is this machine's for as many
    ranks as this machine may start, and cuda for more ranks.
    """
    if config.hardware is not None:
        return config.hardware.device_type, config.hardware.name
    ranks = config.mesh.ranks
    if config.launch.device == "auto" and ranks is not None and ranks > MOST_RANKS_HERE:
        return "cuda", f"{ranks} GPUs (or say hardware=NODE, or launch.device=cpu)"
    kind = device_type(config.launch)
    return kind, f"this machine's {'GPUs' if kind == 'cuda' else 'processor'}"


def explain_run(config: RunConfig, settings: Sequence[str], conf: Path) -> tuple[list[Table], list[str]]:
    """Return tables that describe the run, and its offload actions, one per line."""
    kind, where = target_of(config)
    layout = layout_of(config, kind)
    model = model_of(config)
    with as_on_a_rank(config, model) as rank:
        units = units_of(config, model, rank)
        float8 = float8_of(config, model, rank, emulate=False)
    told = [
        settings_table(config, settings, conf),
        auto_values(config, layout, kind, where),
        kinds_table(layout, units),
        units_table(layout, units),
        *([] if float8 is None else [float8.table()]),
        collectives_table(layout, units),
        _moved("what cut matrices exchange", tensor_traffic(config, model, layout, units, rank.stages, float8)),
        _moved("what attention passes on", context_traffic(config, model, layout, rank.stages)),
        _moved("what tokens move to experts, all chosen alike,", _routed_alike(config, model, layout, rank.stages)),
        _moved(
            "what the first rank of the pipeline, whose units these are, passes on",
            _passed_on(config, layout, units, rank.stages),
        ),
    ]
    return [table for table in told if table.rows], actions(layout, units)


def _routed_alike(
    config: RunConfig, model: nn.Module, layout: Layout, stages: ModelStages | None
) -> dict[Entry, Traffic]:
    """Return the traffic per rank and step of tokens sent to experts, if all experts are chosen equally often."""
    mesh, train = config.mesh, config.train
    if mesh.ep == 1 or not isinstance(model, MoE):
        return {}
    calls = layout.microbatches * (model.shape.layers if stages is None else stages.blocks)
    rows = train.microbatch_sequences * train.sequence_tokens // (mesh.cp * mesh.tp) * model.shape.top_k
    return expected_experts(
        ranks=mesh.ep,
        experts=model.shape.experts,
        calls=calls,
        rows_moved=calls * 2 * rows * (mesh.ep - 1) // mesh.ep,
        row_elems=model.shape.hidden_size,
        dtype=layout.param.dtype,
        recomputed=config.block.activation_checkpoint != "none",
    )


def _passed_on(
    config: RunConfig, layout: Layout, units: Sequence[UnitShape], stages: ModelStages | None
) -> dict[Entry, Traffic]:
    """Return the traffic of hidden states and their gradients, and of tied parameters' gradients to the other end."""
    if stages is None:
        return {}
    ends = expected_traffic(layout, units, stages.shared)
    moved = {entry: each for entry, each in ends.items() if entry.axis == PIPELINE}
    return moved | pipeline_traffic(stages, hidden_of(config, stages), layout)


def _moved(what: str, traffic: Mapping[Entry, Traffic]) -> Table:
    rows = tuple(
        (entry.kind, entry.axis, entry.dtype, str(each.calls), format_bytes(each.sent_bytes))
        for entry, each in traffic.items()
    )
    header = ("collective", "axis", "dtype", "calls", "a rank sends")
    return Table(f"{what} in a step, in forward and backward", header, rows, left=3)


def forecast_run(config: RunConfig, hardware: HardwareConfig, vocab_size: int | None = None) -> Forecast:
    """Predict what a run with these settings needs of `hardware`; raises as `check_foreseen` and `layout_of` do."""
    check_foreseen(config)
    announce_long_layout(config)
    ranks, train = ranks_of(config), config.train
    layout, found = layout_of(config, hardware.device_type), list[Forecast]()
    for part in pipeline_stages_of(config):
        model = model_of(config, vocab_size)
        flops = flops_per_token(model, train.sequence_tokens)
        with as_on_a_rank(config, model, part) as rank:
            units = units_of(config, model, rank)
            costs = costs_for(config, model, rank, layout.microbatches, has_fp8=hardware.fp8_flops is not None)
        found.append(
            Forecast(
                layout=layout,
                units=units,
                costs=costs,
                hardware=hardware,
                step_tokens=train.sequences(config.mesh.readers(ranks)) * train.sequence_tokens,
                model_flops=flops,
                owned=owned_states(config.optim),
            )
        )
    fullest, slowest = max(found, key=lambda each: each.peak_bytes), max(found, key=lambda each: each.pace.step_s or 0)
    return fullest if fullest is slowest else replace(fullest, slowest=slowest)


def announce_long_layout(config: RunConfig) -> None:
    """Report on stderr that laying out a model of very many layers takes a while."""
    layers = config.model.layers or 0
    if layers > MANY_LAYERS and is_first_of_node():
        print(f"laying out {layers} layers, which takes about {layers // LAYERS_PER_S} s or more", file=sys.stderr)


def check_foreseen(config: RunConfig) -> None:
    """Raise RunError for offloaded activations, and for several pipeline stages per rank, which are not predicted."""
    if config.mesh.stages_per_rank > 1:
        raise RunError(
            f"what mesh.pp_schedule={config.mesh.pp_schedule} holds at once is not foreseen; with "
            "mesh.pp_schedule=1f1b it is, which needs less"
        )
    if config.offload.activations != "device":
        raise RunError(
            f"what offload.activations={config.offload.activations} takes off the device is not foreseen; with "
            "offload.activations=device it is, which needs more of the device and less of the host"
        )


def hardware_of(config: RunConfig) -> HardwareConfig:
    """Return the hardware that the settings name, by default this machine, measured once."""
    if config.hardware is not None:
        return config.hardware
    ranks = local_ranks() if launched() else config.launch.workers
    folders = scratch_folders(config)
    known = cached(ranks, folders)
    if known is None and not launched():
        disks = ", ".join(key_of(ranks, folders).disks)
        print(f"measuring this machine, with the disk of {disks}, once, for about half a minute", file=sys.stderr)
    return (known or measured(ranks, folders)).hardware


def scratch_folders(config: RunConfig) -> list[str]:
    """Return directories on the scratch disks of a run: its scratch paths, or where it will make them."""
    paths = config.offload.disk.paths
    return [path if os.path.lexists(path) else os.path.dirname(os.path.abspath(path)) for path in paths]


def forecast_running(config: RunConfig, ranks: int, device_type: str, vocab_size: int) -> Forecast:
    """Predict the memory and time of a run from within one of its ranks.

    The hardware is the one that the settings name if it has this device type, or else this machine. Nothing is
    measured, and the state of the random number generator is kept.
    """
    local, hardware = local_ranks(), config.hardware
    if hardware is None or hardware.device_type != device_type:
        known = cached(local, scratch_folders(config))
        hardware = known.hardware if known else None
    if hardware is None or hardware.device_type != device_type:
        hardware = unmeasured(local, device_type)
    mesh, block = replace(config.mesh, dp=config.mesh.readers(ranks)), replace(config.block, compile=None)
    with torch.random.fork_rng(devices=[]):
        return forecast_run(replace(config, mesh=mesh, block=block), hardware, vocab_size)


def log_plan(
    board: TensorBoardSink, step: int, config: RunConfig, ranks: int, device_type: str, vocab_size: int
) -> tuple[int | None, str | None]:
    """Write the plan of a running run to TensorBoard; errors do not stop the run.

    The predicted peak of the device in bytes is returned, and a line about what is missing; either may be None.
    """
    if config.mesh.sharing > 1:  # their plan needs a process without a process group
        return None, (
            "TensorBoard has no plan of a run whose ranks share sequences, matrices or experts: "
            "python -m dzero plan, with the same settings, makes it"
        )
    try:
        forecast = forecast_running(config, ranks, device_type, vocab_size)
        return forecast.peak_bytes, onto_board(board, forecast, step)
    except Exception as error:
        reason = (str(error).splitlines() or [""])[0]
        return None, f"TensorBoard has no plan of this run: {type(error).__name__}: {reason}"


def onto_board(board: TensorBoardSink, forecast: Forecast, step: int = 0) -> str | None:
    """Write the plan to TensorBoard; return what is missing there without matplotlib."""
    picture, lacks = None, None
    logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)  # hides the message about building its cache
    try:
        picture = pixels(forecast)
    except RunError as error:
        lacks = str(error)
    board.plan(step, tables(forecast), forecast.verdict(), picture, forecast.peak_bytes)
    return lacks
