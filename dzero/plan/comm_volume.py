"""Traffic within the model in a step, by formula: between ranks that share sequences, matrices or layers.

`zero/cost_model.py` has the traffic of model states, `parallel/expert/dispatch.py` that of tokens sent to experts.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from dzero.comm.ledger import Entry, Traffic
from dzero.config import RunConfig
from dzero.models.adapters import has_adapters
from dzero.models.llama import Block, Llama
from dzero.models.merged_weights import lora_layers
from dzero.models.moe import MoE
from dzero.parallel.context.parallelize import AttentionSizes, expected_context
from dzero.parallel.pipeline.schedule import HiddenStates, expected_pipeline
from dzero.parallel.pipeline.split import ModelStages
from dzero.parallel.tensor.traffic import Float8Sizes, TensorSizes, expected_scales, expected_tensor
from dzero.parallel.tiling.loss import head_of
from dzero.zero.cost_model import expected_copies
from dzero.zero.float8_layers import Float8Layers
from dzero.zero.layout import Layout
from dzero.zero.unit_shapes import UnitShape

Moved = dict[Entry, Traffic]


def context_traffic(config: RunConfig, model: nn.Module, layout: Layout, stages: ModelStages | None = None) -> Moved:
    """Return the traffic of context-parallel attention per rank; empty for models other than Llama."""
    mesh, train = config.mesh, config.train
    if mesh.cp == 1 or not isinstance(model, Llama):
        return {}
    sizes = AttentionSizes(
        tokens=train.microbatch_sequences * train.sequence_tokens // mesh.cp,
        heads=model.shape.heads // mesh.tp,
        kv_heads=model.shape.kv_heads // mesh.tp,
        head_dim=model.shape.head_dim,
        dtype=layout.param.dtype,
    )
    layers = model.shape.layers if stages is None else stages.blocks
    calls, recomputed = layers * layout.microbatches, config.block.activation_checkpoint != "none"
    return expected_context(mesh.cp_attention, sizes, ranks=mesh.cp, calls=calls, recomputed=recomputed)


def tensor_traffic(
    config: RunConfig,
    model: nn.Module,
    layout: Layout,
    units: Sequence[UnitShape],
    stages: ModelStages | None = None,
    float8: Float8Layers | None = None,
) -> Moved:
    """Return the traffic of tensor parallelism per rank; empty for models other than Llama."""
    mesh, train = config.mesh, config.train
    if mesh.tp == 1 or not isinstance(model, Llama):
        return {}
    sizes = TensorSizes(
        tokens=train.microbatch_sequences * train.sequence_tokens // mesh.cp,
        width=model.shape.hidden_size,
        blocks=model.shape.layers if stages is None else stages.blocks,
        cuts_ffn=not isinstance(model, MoE) or model.shape.shared_experts > 0,
        experts=model.shape.experts if isinstance(model, MoE) and model.shape.balance == "loss" else 0,
        has_first=stages is None or stages.has_first,
        has_last=stages is None or stages.has_last,
        dtype=layout.param.dtype,
        **_adapters(model),
        untrained=_untrained(model, stages),
        tiles_loss=hasattr(head_of(model), "loss_targets"),
    )
    recomputed = config.block.activation_checkpoint != "none"
    moved = expected_tensor(sizes, ranks=mesh.tp, microbatches=layout.microbatches, recomputed=recomputed)
    for entry, traffic in expected_copies(layout, units).items():
        moved[entry] = moved.get(entry, Traffic()) + traffic
    if float8 is not None:
        moved |= expected_scales(
            _float8_sizes(float8, units),
            tensorwise=float8.compute == "fp8_tensorwise",
            tokens=sizes.tokens,
            ranks=mesh.tp,
            microbatches=layout.microbatches,
            recomputed=recomputed,
        )
    return moved


def _float8_sizes(float8: Float8Layers, units: Sequence[UnitShape]) -> list[Float8Sizes]:
    """Return the sizes of the layers that multiply in 8 bits and whose matrices ranks share."""
    found = []
    for param in (each for unit in units for each in unit.params):
        if param.name.removesuffix(".weight") in float8.converted and param.split and param.split.dim is not None:
            outputs, inputs = param.whole
            found.append(Float8Sizes(dim=param.split.dim, inputs=inputs, outputs=outputs))
    return found


def _adapters(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the ranks of the adapters on this rank whose results are exchanged, by the name of their module."""
    found: dict[str, tuple[int, ...]] = {}
    for name, layer in (lora_layers(model) if has_adapters(model) else {}).items():
        kind, ranks = name.rpartition(".")[2], layer.r
        assert isinstance(ranks, dict)
        if kind in ("out", "down", "head"):
            found[kind] = (*found.get(kind, ()), *ranks.values())
    return found


def _untrained(model: Llama, stages: ModelStages | None) -> tuple[int, int]:
    """Return how many all_gather and reduce_scatter of tp have no backward, as nothing before them is trained."""
    gathers = reduces = 0
    if stages is not None and not stages.has_first:
        return 0, 0  # hidden states of the stage before have gradients
    seen = any(param.requires_grad for param in model.embedding.parameters())
    gathers += not seen
    for block in model.layers:
        parts = (block.attention_norm, block.attention, block.ffn_norm, block.ffn) if isinstance(block, Block) else ()
        for index, part in enumerate(parts):
            seen = seen or any(param.requires_grad for param in part.parameters())
            sent = index < 2 or not isinstance(model, MoE) or model.shape.shared_experts > 0
            reduces += not seen and sent and index % 2 == 0
            gathers += not seen and sent and index % 2 == 1
    return gathers, reduces


def pipeline_traffic(stages: ModelStages | None, hidden: HiddenStates | None, layout: Layout) -> Moved:
    """Return the traffic of hidden states and their gradients between pipeline stages per rank."""
    if stages is None or hidden is None:
        return {}
    return expected_pipeline(stages, hidden, microbatches=layout.microbatches)
