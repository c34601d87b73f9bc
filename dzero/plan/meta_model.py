"""Model of a run as one of its ranks has it, on the meta device, to get shapes and operators.

axis        how the model is built
tp, cp, ep  cut by a fake group of as many ranks
pp          cut to one pipeline stage
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import nn

from dzero.comm.ledger import Ledger, Traffic
from dzero.config import RunConfig
from dzero.data.corpus import vocab_size_of
from dzero.errors import user_errors
from dzero.estimate.fake_group import fake_group
from dzero.estimate.microbatch_costs import InFlight, Loss, MicrobatchCosts, costs_of
from dzero.hardware import dtype_of
from dzero.mesh import CONTEXT, EXPERT, make_mesh
from dzero.models.adapters import add_adapters
from dzero.models.build import build
from dzero.models.llama import Llama
from dzero.models.moe import with_added
from dzero.parallel.blocks import apply_blocks
from dzero.parallel.parallelize import parallelize
from dzero.parallel.pipeline.schedule import HiddenStates, expected_pipeline, order_of
from dzero.parallel.pipeline.split import ModelStages
from dzero.parallel.tiling.loss import losses_of
from dzero.plan.run_layout import block_of, parallel_of, tile_loss_of
from dzero.zero.float8_layers import Float8Layers, convert_linear_layers
from dzero.zero.quantized_weights import CODECS
from dzero.zero.unit_shapes import UnitShape
from dzero.zero.units import ROOT, UnitChoice, find_units, roots_of, shapes_of, slots_by_unit


@dataclass(frozen=True)
class RankView:
    """One rank's view of the model.

    Attributes:
        stages: Pipeline stages of the rank, or None without a pipeline.
        ledger: Ledger that counts the traffic of cp attention and of tokens sent to experts.
        experts: Expert modules that ranks share, by name.
    """

    stages: ModelStages | None
    ledger: Ledger
    experts: Mapping[str, nn.Module]


def model_of(config: RunConfig, vocab_size: int | None = None) -> nn.Module:
    """Return the model that a run trains, on meta in fp32; the data determine `vocab_size` if it is None."""
    has_own = config.model.vocab_size is not None or (config.model.kind == "hf" and config.data.kind == "chat")
    if vocab_size is None and not has_own:
        vocab_size = vocab_size_of(config.data, config.model_folder)
    # Positions of fake tokens cannot be checked against max_tokens; the configuration has checked the sequence length.
    cut = config.mesh.cp * config.mesh.pp > 1
    model = build(replace(config.model, max_tokens=None) if cut else config.model, vocab_size)
    add_adapters(model, config.adapter)
    tile_loss_of(config, model)
    apply_blocks(model, replace(config.block, loss_tiles=1), "cpu")
    return model


def units_of(config: RunConfig, model: nn.Module, rank: RankView | None = None) -> list[UnitShape]:
    """Return the shapes of the units of `model`, as `rank` has it, the root last."""
    stages, experts = (None, {}) if rank is None else (rank.stages, rank.experts)
    units = [*find_units(model, UnitChoice.of(config.zero, config.precision), experts), (ROOT, [model])]
    slots = slots_by_unit(model, units, stages.aliases if stages else None)
    return shapes_of(slots, units, [model], CODECS.get(config.precision.frozen))


@contextmanager
def as_on_a_rank(config: RunConfig, model: nn.Module, pipeline_stage: int = 0) -> Iterator[RankView]:
    """Reduce `model`, on meta, to what a rank of `pipeline_stage` has of mesh.tp, mesh.cp, mesh.ep and mesh.pp.

    It is changed in place, and only shapes and operators are valid, within the context alone. RunError is raised if it
    cannot be cut like this, RuntimeError if this process is in a process group already.
    """
    mesh = config.mesh
    with ExitStack() as inside:
        if mesh.sharing > 1:
            inside.enter_context(fake_group(mesh.sharing))
        with user_errors():
            of_ranks = make_mesh("cpu", tp=mesh.tp) if mesh.sharing > 1 else None
            cut = parallelize(model, of_ranks, parallel_of(config), pipeline=(pipeline_stage, mesh.pp))
            ledger = Ledger() if cut.experts is None else cut.experts.ledger
            if mesh.cp > 1:
                group = dist.new_group(range(0, mesh.tp * mesh.cp, mesh.tp))
                assert isinstance(group, dist.ProcessGroup)
                cut.cut_sequences(ledger, exact=True, group=group)
        inside.enter_context(cut.loss())
        yield RankView(cut.stages, ledger, {} if cut.experts is None else cut.experts.modules)


def float8_of(config: RunConfig, model: nn.Module, rank: RankView, *, emulate: bool) -> Float8Layers | None:
    """Let linear layers of `model`, as `rank` has it, multiply as precision.compute says; return which do."""
    roots = roots_of(model, rank.stages) if rank.stages else ()
    return convert_linear_layers(model, config.precision, emulate=emulate, roots=roots)


def pipeline_stages_of(config: RunConfig) -> Sequence[int]:
    """Return the pipeline stages that may need most memory or time.

    These are the first (embedding, most microbatches in flight), the second (blocks alone) and the last (loss).
    """
    return sorted({0, min(1, config.mesh.pp - 1), config.mesh.pp - 1})


def hidden_of(config: RunConfig, stages: ModelStages) -> HiddenStates:
    """Return the hidden states that are sent between pipeline stages."""
    tokens = config.train.sequence_tokens // (config.mesh.cp * config.mesh.tp)
    return HiddenStates((config.train.microbatch_sequences, tokens, stages.width), dtype_of(config.precision.param))


def _flights(config: RunConfig, stages: ModelStages | None, count: int | None) -> InFlight:
    """Return what a rank has in flight in a step of `count` microbatches."""
    if stages is None or count is None:
        return InFlight()
    hidden = hidden_of(config, stages)
    order = order_of(config.mesh.pp_schedule, count, stages.own[0].index, stages.count)
    neighbours = 2 - stages.has_first - stages.has_last
    moved = expected_pipeline(stages, hidden, microbatches=count)
    return InFlight(
        ahead=next((index for index, (what, _) in enumerate(order) if what == "backward"), 1),
        room_bytes=neighbours * count * hidden.bytes,
        names=len(stages.names),
        shared=stages.shared,
        sent=sum((each for each in moved.values()), Traffic()),
    )


def costs_for(
    config: RunConfig,
    model: nn.Module | None = None,
    rank: RankView | None = None,
    microbatches: int | None = None,
    *,
    has_fp8: bool,
) -> MicrobatchCosts:
    """Return the costs of one microbatch of the run; `microbatches` of a step add those that a pipeline has in flight.

    `model` and `rank` are those of `as_on_a_rank`, by default of the first pipeline stage. The model is consumed.
    `has_fp8` tells whether the device multiplies in 8 bits, or emulates it.
    """
    if model is None or rank is None:
        model = model_of(config)
        with as_on_a_rank(config, model) as rank:
            return costs_for(config, model, rank, has_fp8=has_fp8)
    float8_of(config, model, rank, emulate=not has_fp8)
    working, loss = model.to(dtype_of(config.precision.param)), _loss_of(config, rank.stages)
    beside = {CONTEXT: config.mesh.cp, EXPERT: config.mesh.ep}
    costs = costs_of(
        working,
        loss,
        UnitChoice.of(config.zero, config.precision),
        ledger=rank.ledger,
        beside=beside,
        experts=rank.experts,
        fuses_casts=has_fp8 and block_of(config).compiles("cuda"),
    )
    return replace(costs, flights=_flights(config, rank.stages, microbatches))


def _loss_of(config: RunConfig, stages: ModelStages | None) -> Loss:
    """Return the sum of the cross-entropies of a rank's tokens of one microbatch, as in the trainer.

    For a pipeline stage other than the last it is any scalar of the output.
    """
    hidden = None if stages is None else hidden_of(config, stages)

    def loss(model: nn.Module) -> torch.Tensor:
        shape = config.train.microbatch_sequences, config.train.sequence_tokens // config.mesh.cp
        tokens, targets = (torch.empty(shape, dtype=torch.int64) for _ in range(2))
        if stages is None or hidden is None:
            return with_added(losses_of(model, targets, lambda: model(tokens)), model)
        x = tokens if stages.has_first else hidden.on("cpu").requires_grad_()

        def run() -> torch.Tensor:
            positions = {"positions": torch.arange(shape[1])} if isinstance(model, Llama) else {}
            out: torch.Tensor = model(x, **positions)
            return out

        return with_added(losses_of(model, targets, run) if stages.has_last else run().sum(), model)

    return loss
