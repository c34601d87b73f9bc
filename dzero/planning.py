"""From a run's configuration to its forecast: the same settings, on hardware that need not be here."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

from dzero.comm.ledger import Traffic
from dzero.config import RunConfig
from dzero.data.corpus import vocab_size_of
from dzero.errors import RunError, user_errors
from dzero.hardware import dtype_of
from dzero.launch import launched
from dzero.mesh import TENSOR, local_ranks, make_mesh
from dzero.models.build import build, flops_per_token
from dzero.models.llama import Llama
from dzero.monitor.board import TensorBoardSink
from dzero.parallel.blocks import apply_blocks
from dzero.parallel.parts import Parts, cut_parts
from dzero.parallel.pipeline import Hidden, expected_pipeline, order_of
from dzero.parallel.tensor import parallelize
from dzero.plan.costs import Costs, costs_of
from dzero.plan.explain import actions, tables
from dzero.plan.fake import fake_group
from dzero.plan.flights import Flights
from dzero.plan.forecast import Forecast, forecast
from dzero.plan.machine import HardwareConfig
from dzero.plan.measure import cached, measured, unmeasured
from dzero.plan.picture import pixels
from dzero.plan.tables import tables as plan_tables
from dzero.sources import sources, stands_for
from dzero.terminal import Table
from dzero.zero.layout import Layout
from dzero.zero.shapes import UnitShape
from dzero.zero.units import ROOT, find_units, shapes_of, slots_by_unit


def ranks_of(config: RunConfig) -> int:
    """Data-parallel ones of the run that is planned: those of `mesh.dp`, or what torchrun's, or those that a plain run
    would start here, leave for it."""
    if config.mesh.dp is not None:
        return config.mesh.dp * config.mesh.cp
    return config.mesh.data_ranks(int(os.environ["WORLD_SIZE"]) if launched() else config.worker_count)


def layout_of(config: RunConfig, device_type: str) -> Layout:
    """The table as these settings fill it. Raises ValueError for ranks that do not divide."""
    return config.layout(ranks_of(config), device_type)


def model_of(config: RunConfig, vocab_size: int | None = None) -> nn.Module:
    """As a run would train it, on meta and in fp32. vocab_size: of the data; None: as they say."""
    if vocab_size is None and config.model.vocab_size is None:
        vocab_size = vocab_size_of(config.data)
    model = build(config.model, vocab_size)
    apply_blocks(model, config.block, "cpu")
    return model


def units_of(config: RunConfig, model: nn.Module, parts: Parts | None = None) -> list[UnitShape]:
    """Its units, the root last. parts: what was cut between its layers."""
    units = [*find_units(model, config.zero.units), (ROOT, [model])]
    return shapes_of(slots_by_unit(model, units, parts.aliases if parts else None))


@contextmanager
def as_on_a_rank(config: RunConfig, model: nn.Module, part: int = 0) -> Iterator[Parts | None]:
    """Inside, `model` is what a rank of `mesh.tp` has of it, with that part of `mesh.pp`, and only shapes and operators
    may be asked of it.

    Raises RunError for a model that cannot be cut so, RuntimeError in a process that is in a group.
    """
    mesh = config.mesh
    with ExitStack() as inside:
        tensor = None
        if mesh.tp > 1:
            inside.enter_context(fake_group(mesh.tp))
            with user_errors():
                tensor = parallelize(model, make_mesh("cpu", tp=mesh.tp)[TENSOR])
        with user_errors():
            parts = cut_parts(model, part, mesh.pp, tokens=config.train.sequence_tokens) if mesh.pp > 1 else None
        if isinstance(model, Llama):
            model.shape = replace(model.shape, max_tokens=None)  # to be held against positions, which have no values
        if tensor is not None:
            inside.enter_context(tensor.loss())
        yield parts


def parts_of(config: RunConfig) -> Sequence[int]:
    """Of a pipeline those that may need most: with the embedding and the most microbatches, with blocks alone, and with
    the loss."""
    return sorted({0, min(1, config.mesh.pp - 1), config.mesh.pp - 1})


def explained(config: RunConfig, settings: Sequence[str], conf: Path) -> tuple[list[Table], list[str]]:
    """What a run with these settings is and does; and its actions off the device, a line each."""
    layout = layout_of(config, config.launch.device_type if config.hardware is None else config.hardware.device_type)
    model = model_of(config)
    with as_on_a_rank(config, model) as parts:
        units = units_of(config, model, parts)
    told = [sources(config, settings, conf), stands_for(config, layout)]
    return [table for table in [*told, *tables(layout, units)] if table.rows], actions(layout, units)


def planned(config: RunConfig, hardware: HardwareConfig, vocab_size: int | None = None) -> Forecast:
    """What a run with these settings needs of `hardware`.

    Raises ValueError for ranks that do not divide, RunError for activations that leave the device.
    """
    check_foreseen(config)
    ranks, train = ranks_of(config), config.train
    layout, found = layout_of(config, hardware.device_type), list[Forecast]()
    for part in parts_of(config):
        model = model_of(config, vocab_size)
        flops = flops_per_token(model, train.sequence_tokens)
        with as_on_a_rank(config, model, part) as parts:
            units, costs = units_of(config, model, parts), costs_for(config, model, parts)
        found.append(
            forecast(
                layout,
                units,
                costs,
                hardware,
                step_tokens=train.sequences(ranks) * train.sequence_tokens,
                model_flops=flops,
                moments=config.optim.moments,
                flights=flights_of(config, parts, layout),
            )
        )
    slowest = max(found, key=lambda each: each.pace.step_s or 0.0)
    return replace(max(found, key=lambda each: each.peak_bytes), pace=slowest.pace)


def flights_of(config: RunConfig, parts: Parts | None, layout: Layout) -> Flights:
    """What a rank of a pipeline has of several microbatches at once."""
    if parts is None:
        return Flights()
    hidden, count = hidden_of(config, parts, layout.param.dtype), layout.microbatches
    order = order_of(config.mesh.pp_schedule, count, parts.own[0].index, parts.count)
    neighbours = 2 - parts.has_first - parts.has_last
    moved = expected_pipeline(parts, hidden, microbatches=count)
    return Flights(
        ahead=next((index for index, (what, _) in enumerate(order) if what == "backward"), 1),
        room_bytes=neighbours * count * hidden.bytes,
        names=len(parts.names),
        shared=parts.shared,
        sent=sum((each for each in moved.values()), Traffic()),
    )


def hidden_of(config: RunConfig, parts: Parts, dtype: torch.dtype) -> Hidden:
    """What travels between parts."""
    tokens = config.train.sequence_tokens // (config.mesh.cp * config.mesh.tp)
    return Hidden((config.train.microbatch_sequences, tokens, parts.width), dtype)


def check_foreseen(config: RunConfig) -> None:
    """Raises RunError for activations that leave the device, and for sequences that are cut."""
    if (cp := config.mesh.cp) > 1:
        raise RunError(f"what mesh.cp={cp} leaves of a sequence on each rank is not foreseen; it is with mesh.cp=1")
    if config.mesh.parts_of_a_rank > 1:
        raise RunError(
            f"what mesh.pp_schedule={config.mesh.pp_schedule} holds at once is not foreseen; with "
            "mesh.pp_schedule=1f1b it is, which needs less"
        )
    if config.offload.activations != "device":
        raise RunError(
            f"what offload.activations={config.offload.activations} takes off the device is not foreseen; with "
            "offload.activations=device it is, which needs more of the device and less of the host"
        )


def costs_for(config: RunConfig, model: nn.Module | None = None, parts: Parts | None = None) -> Costs:
    """Of one microbatch of the run. model: as `model_of` makes it, as on a rank with `parts`; it is used up."""
    if model is None:
        model = model_of(config)
        with as_on_a_rank(config, model) as parts:
            return costs_for(config, model, parts)
    return costs_of(model.to(dtype_of(config.precision.param)), _Loss(config, parts), config.zero.units)


def hardware_of(config: RunConfig) -> HardwareConfig:
    """What the settings name; by default this machine, measured once."""
    if config.hardware is not None:
        return config.hardware
    ranks = local_ranks() if launched() else config.launch.workers
    known = cached(ranks)
    if known is None and not launched():
        print("measuring this machine, once, for about half a minute", file=sys.stderr)
    return (known or measured(ranks)).hardware


def planned_under_way(config: RunConfig, ranks: int, device_type: str, vocab_size: int) -> Forecast:
    """The same of a run, by one of its ranks: on the hardware that its settings name, if it is of this kind, else here.

    Nothing is measured, and no random number is taken.
    """
    local, hardware = local_ranks(), config.hardware
    if hardware is None or hardware.device_type != device_type:
        known = cached(local)
        hardware = known.hardware if known else None
    if hardware is None or hardware.device_type != device_type:
        hardware = unmeasured(local, device_type)
    mesh, block = replace(config.mesh, dp=ranks), replace(config.block, compile=None)
    with torch.random.fork_rng(devices=[]):
        return planned(replace(config, mesh=mesh, block=block), hardware, vocab_size)


def tell_plan(
    board: TensorBoardSink, step: int, config: RunConfig, ranks: int, device_type: str, vocab_size: int
) -> tuple[int | None, str | None]:
    """The plan of a run under way, onto its board: the device's peak that it predicts, and a line on what is lacking.

    The run goes on whatever happens here.
    """
    try:
        forecast = planned_under_way(config, ranks, device_type, vocab_size)
        return forecast.peak_bytes, onto_board(board, forecast, step)
    except Exception as error:
        reason = (str(error).splitlines() or [""])[0]
        return None, f"TensorBoard has no plan of this run: {type(error).__name__}: {reason}"


def onto_board(board: TensorBoardSink, forecast: Forecast, step: int = 0) -> str | None:
    """Write it there; what the board lacks where matplotlib is not installed."""
    picture, lacks = None, None
    logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)  # that it builds its cache is no news of a run
    try:
        picture = pixels(forecast)
    except RunError as error:
        lacks = str(error)
    board.plan(step, plan_tables(forecast), forecast.verdict(), picture, forecast.peak_bytes)
    return lacks


class _Loss:
    """Mean cross-entropy of one microbatch, as the trainer takes it; of a part that is not the last, any scalar of what
    comes out."""

    def __init__(self, config: RunConfig, parts: Parts | None) -> None:
        self._shape = config.train.microbatch_sequences, config.train.sequence_tokens
        self._tiled, self._parts = config.block.loss_tiles > 1, parts
        self._hidden = None if parts is None else hidden_of(config, parts, dtype_of(config.precision.param))

    def __call__(self, model: nn.Module) -> torch.Tensor:
        tokens, targets = (torch.empty(self._shape, dtype=torch.int64) for _ in range(2))
        if self._parts is not None and self._hidden is not None:
            x = tokens if self._parts.has_first else self._hidden.on("cpu").requires_grad_()
            out: torch.Tensor = model(x, torch.arange(self._shape[1])) if isinstance(model, Llama) else model(x)
            if not self._parts.has_last:
                return out.sum()
            return functional.cross_entropy(out.float().flatten(0, 1), targets.flatten())
        if self._tiled:
            loss: torch.Tensor = model(tokens, targets)
            return loss
        return functional.cross_entropy(model(tokens).float().flatten(0, 1), targets.flatten())
