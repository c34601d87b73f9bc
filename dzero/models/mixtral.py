"""Published form of the mixtures in models/moe.py: Mixtral, which computes the same where these settings agree.

    model.scores=softmax         its router normalizes the scores of the chosen experts, as ours does
    model.top_k≥2                with one expert, its weight is 1, and that of ours is the score
    model.shared_experts=0       it has none
    model.balance=loss or none   it has no bias for the choice of experts

Other published mixtures compute something else: Qwen's normalize queries and keys, or have shared experts of another
width; DeepSeek's have another attention. `model=hf` reads those.

    ours, of a block                      published
    ffn.router.weight                     block_sparse_moe.gate.weight
    ffn.experts.gate [experts * ffn, …]   block_sparse_moe.experts.0.w1.weight [ffn, …] and so on
    ffn.experts.up                        block_sparse_moe.experts.0.w3.weight …
    ffn.experts.down                      block_sparse_moe.experts.0.w2.weight …
"""

from __future__ import annotations

from dzero.models.config import MoEShape
from dzero.models.conversions import Conversion, Step

LAYER = "model.layers.#"
EXPERTS = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
"""Names of an expert's matrices in Mixtral, by those that published llamas have."""


def settings_to_change(shape: MoEShape) -> list[str]:
    """Return the settings with which the model would be a Mixtral; empty if it is one."""
    allowed = {
        "model.scores=softmax": shape.scores == "softmax",
        "model.top_k=2": shape.top_k > 1,
        "model.shared_experts=0": not shape.shared_experts,
        "model.balance=loss": shape.balance != "auxiliary-loss-free",
    }
    return [setting for setting, agrees in allowed.items() if not agrees]


def to_published(shape: MoEShape) -> tuple[Conversion, ...]:
    """Return the conversions to Mixtral's layout from the names that `published_name` makes."""
    router = Conversion((f"{LAYER}.mlp.router.weight",), (f"{LAYER}.block_sparse_moe.gate.weight",))
    return (router, *(_experts(shape, ours, theirs) for ours, theirs in EXPERTS.items()))


def from_published(shape: MoEShape) -> tuple[Conversion, ...]:
    """Return the reverse of `to_published`, for each layer of its own."""
    return tuple(_reverse(each, str(layer)) for layer in range(shape.layers) for each in to_published(shape))


def _reverse(conversion: Conversion, layer: str) -> Conversion:
    """Return the reverse of a conversion for one layer."""
    sources = tuple(name.replace("#", layer) for name in conversion.targets)
    targets = tuple(name.replace("#", layer) for name in conversion.sources)
    return Conversion(sources, targets, (Step("concatenate", 0),) if conversion.steps else ())


def _experts(shape: MoEShape, ours: str, theirs: str) -> Conversion:
    """Return the conversion of one matrix of all experts of a layer."""
    experts = (f"{LAYER}.block_sparse_moe.experts.{index}.{theirs}.weight" for index in range(shape.experts))
    return Conversion((f"{LAYER}.mlp.experts.{ours}",), tuple(experts), (Step("chunk", 0),))
