"""Arithmetic of the ZeRO papers on memory and bandwidth, from their assumptions (`papers.toml`), beside dzero's bytes.

    paper                      question                                              function
    ZeRO 2020, table 1         bytes per rank of three models, stages 1-3            `zero_bytes`
    ZeRO-Offload 2021, 6.2     largest model on one 32 GB GPU                        `largest`, `deepest`
    ZeRO-Infinity 2021, 3      disk, host and device memory of a model               `infinity_need`
    ZeRO-Infinity 2021, 4      efficiency at a bandwidth, bandwidth for efficiency   `efficiency`, `bandwidth_for`

The papers use formulas. `own_bytes` follows dzero's table (`zero/layout.py`) for the same shapes, with FSDP2's buffers,
padding, and the unit in flight. No result of a paper enters a computation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from dzero.zero.config import PrecisionConfig, ZeroConfig
from dzero.zero.cost_model import KINDS, peak_bytes
from dzero.zero.layout import Layout
from dzero.zero.offload_config import TIERS, OffloadConfig
from papers.assumptions import Infinity, RunModel, Shape, ShardedModel, Zero, ZeroOffload

COPIES_IN_FLIGHT = 2
"""Buffers of the largest unit: FSDP2's gather buffer and the parameters made from it, or gradients and their buffer."""
STAGED_UNITS = 3
"""Units of a kind on disk that are in host memory: one being loaded, one in use, one being written back."""


def layout_of(stage: int, ranks: int, offload: OffloadConfig | None = None) -> Layout:
    """Return dzero's table at `stage`, sharded over `ranks`: bf16 with fp32 masters and moments, one microbatch."""
    replicate, shard = (ranks, 1) if stage == 0 else (1, ranks)
    return Layout.of(ZeroConfig(stage=stage), PrecisionConfig(), offload, replicate=replicate, shard=shard)


def zero_bytes(zero: Zero, elems: int, stage: int, ranks: int) -> float:
    """Return the bytes of one rank's states by ZeRO's formulas (section 5): each kind whole, or cut by `ranks`."""
    layout = layout_of(stage, ranks)
    return sum(zero.bytes[kind] * elems / (ranks if getattr(layout, kind).sharded else 1) for kind in KINDS)


def own_bytes(layout: Layout, shape: Shape, *, tiles: int = 1) -> dict[str, int]:
    """Return the bytes that dzero takes of each tier on one rank, before the update of a step, without activations."""
    units = shape.units(tiles)
    widest = max(units, key=lambda unit: unit.shard_elems(1))
    states, staged = peak_bytes(layout, units), peak_bytes(layout, [widest])
    took = dict.fromkeys(TIERS, 0)
    for kind in KINDS:
        tier = getattr(layout, kind).tier
        took[tier] += getattr(states, kind)
        took["host"] += STAGED_UNITS * getattr(staged, kind) if tier == "disk" else 0
    took["device"] += COPIES_IN_FLIGHT * widest.shard_elems(1) * layout.param.dtype.itemsize
    return took


def checkpoint_bytes(shape: Shape, batch: float, tokens: int) -> float:
    """Return the bytes of the fp16 inputs of all blocks, kept for recomputation (ZeRO-Infinity, eq. 3)."""
    return 2 * batch * tokens * shape.hidden * shape.layers


def operator_bytes(shape: Shape, tiles: int = 1) -> float:
    """Return the fp16 bytes of the largest operator, hidden to 4 hidden, in tiles, with gradients (same, eq. 4)."""
    return 16 * shape.hidden**2 / tiles


def activation_bytes(shape: Shape, batch: float, tokens: int, head_features: int) -> float:
    """Return the bytes of activations of the one block that runs (ZeRO-Infinity, eq. 5)."""
    return batch * tokens * (16 * shape.hidden + 2 * (shape.hidden // head_features) * tokens)


def deepest(need: Callable[[Shape], float], hidden: int, capacity: float) -> Shape | None:
    """Return the deepest model of this width with need(shape) ≤ capacity, or None if one block is too large.

    `need` must not decrease with depth.
    """
    low, high = 0, 1
    while need(Shape(layers=high, hidden=hidden)) <= capacity:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        fits = need(Shape(layers=middle, hidden=hidden)) <= capacity
        low, high = (middle, high) if fits else (low, middle)
    return Shape(layers=low, hidden=hidden) if low else None


def largest(offload: ZeroOffload, device_bytes: Callable[[Shape], float]) -> RunModel | None:
    """Return the largest model of the paper's table that fits, or None if none does.

    `device_bytes` returns the bytes of states that a shape has on the device.
    """
    need = {model.name: on_device(offload, device_bytes, model)(model.shape) for model in offload.models}
    fits = [model for model in offload.models if need[model.name] <= offload.device_bytes]
    return max(fits, key=lambda model: model.shape.elems, default=None)


def on_device(
    offload: ZeroOffload, device_bytes: Callable[[Shape], float], model: RunModel
) -> Callable[[Shape], float]:
    """Return a function of a shape's device bytes: states, checkpoints and working memory at this model's batch."""

    def need(shape: Shape) -> float:
        tokens = offload.sequence_tokens
        active = activation_bytes(shape, model.batch, tokens, offload.head_features)
        kept = checkpoint_bytes(shape, model.batch, tokens)
        return device_bytes(shape) + kept + active + operator_bytes(shape)

    return need


def infinity_need(infinity: Infinity, model: ShardedModel) -> dict[str, float]:
    """Return ZeRO-Infinity's count: states on a node's disks, checkpoints in its host memory, work on each device."""
    shape, tokens = model.shape, infinity.sequence_tokens
    return {
        "disk": infinity.bytes * model.elems / model.nodes,
        "host": infinity.devices_per_node * checkpoint_bytes(shape, model.batch, tokens),
        "device": operator_bytes(shape, infinity.tiles)
        + activation_bytes(shape, model.batch, tokens, infinity.head_features),
    }


def own_infinity_need(infinity: Infinity, model: ShardedModel) -> dict[str, float]:
    """Return dzero's count with all states and the checkpoints on disk, and the MLPs in tiles."""
    everything = OffloadConfig(param="disk", grad="disk", master="disk", moments="disk", activations="disk")
    local, shape, tokens = infinity.devices_per_node, model.shape, infinity.sequence_tokens
    took = own_bytes(layout_of(3, model.nodes * local, everything), shape, tiles=infinity.tiles)
    kept = checkpoint_bytes(shape, model.batch, tokens)
    waiting = (everything.prefetch_units + 2) / shape.layers  # fraction of block inputs in host memory
    return {
        "disk": local * (took["disk"] + kept),
        "host": local * (took["host"] + kept * waiting),
        "device": took["device"] + activation_bytes(shape, model.batch, tokens, infinity.head_features),
    }


def missing_tiers(infinity: Infinity, need: dict[str, float]) -> list[str]:
    """Return the tiers of the paper's node that are too small."""
    has = {"disk": infinity.disk_bytes, "host": infinity.host_bytes, "device": infinity.device_bytes}
    return [tier for tier in has if need[tier] > has[tier]]


def widest_that_fits(infinity: Infinity, model: ShardedModel) -> ShardedModel | None:
    """Return the widest model with the same parameters and at most this width that dzero can train on the paper's node.

    The width decreases in steps of 4096 features; None if no width fits. Attention is not tiled, so a unit grows with 4
    hidden^2 regardless of the tiles.
    """
    for hidden in range(model.hidden, 0, -4096):
        narrower = replace(model, hidden=hidden)
        if not missing_tiers(infinity, own_infinity_need(infinity, narrower)):
            return narrower
    return None


def efficiency(intensity: float, bandwidth: float, flops: float) -> float:
    """Return the fraction of time that is compute if nothing overlaps (ZeRO-Infinity, eq. 6).

    Args:
        intensity: FLOP per byte moved.
        bandwidth: Bytes/s.
        flops: FLOP/s while computing.
    """
    return intensity * bandwidth / (intensity * bandwidth + flops)


def bandwidth_for(target: float, intensity: float, flops: float) -> float:
    """Return the bytes/s at which `efficiency` is `target`, in (0, 1)."""
    return flops / intensity * target / (1 - target)
