"""Checks that ranks divide the sizes that mesh axes split: matrices, heads, layers and microbatches."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dzero.mesh_config import STAGES_PER_RANK, MeshConfig
from dzero.models.config import ModelConfig
from dzero.utils.ranges import divisors

FP8_MULTIPLE = 16
"""Number that must divide the dims of matrices of 8-bit floats, and what their products sum over."""


@dataclass(frozen=True)
class Sizes:
    """Sizes that the ranks of an axis must divide, by the name of the setting; 0 if a model does not have them."""

    heads: int
    kv_heads: int
    ffn_size: int
    vocab_size: int

    def check(self, ranks: int, axis: str) -> None:
        """Raise ValueError with the sizes that `ranks` does not divide."""
        wrong = {name: size for name, size in vars(self).items() if size % ranks}
        if wrong:
            told = ", ".join(f"{name}={size}" for name, size in wrong.items())
            allowed = divisors(math.gcd(*vars(self).values()))
            raise ValueError(f"{axis}={ranks} does not divide the model's {told}; allowed: {allowed}")


def check_heads(heads: int, kv_heads: int, ranks: int) -> None:
    """Raise ValueError if `ranks` does not divide the heads, as ulysses attention needs."""
    if heads % ranks or kv_heads % ranks:
        allowed = divisors(math.gcd(heads, kv_heads))
        raise ValueError(
            f"mesh.cp_attention=ulysses with mesh.cp={ranks}, which does not divide heads={heads} and "
            f"kv_heads={kv_heads} of a rank: take a cp of {allowed}, or mesh.cp_attention=all_gather"
        )


def check_blocks(blocks: int, ranks: int, stages_per_rank: int = 1) -> None:
    """Raise ValueError if there are fewer blocks than pipeline stages."""
    count, several = ranks * stages_per_rank, stages_per_rank > 1
    if blocks < count:
        of_rank = f" with {stages_per_rank} stages on each rank" if several else ""
        raise ValueError(
            f"mesh.pp={ranks}{of_rank}: {count} pipeline stages of a model of {blocks} blocks; take at most "
            f"{max(1, blocks // stages_per_rank)} ranks{', or fewer stages' if several else ''}"
        )


def check_microbatches(schedule: str, microbatches: int, ranks: int) -> None:
    """Raise ValueError if the schedule cannot order this number of microbatches over `ranks`."""
    rounds = max(1, microbatches // ranks)
    fitting = {
        "gpipe": True,
        "1f1b": microbatches >= ranks,
        **dict.fromkeys(("interleaved", "zero_bubble"), microbatches >= ranks and microbatches % rounds == 0),
    }
    if not fitting[schedule]:
        repair = f"a multiple of {ranks}" if STAGES_PER_RANK[schedule] > 1 else f"at least {ranks}"
        raise ValueError(
            f"mesh.pp_schedule={schedule} over mesh.pp={ranks} ranks with {microbatches} microbatches to a step: take "
            f"{repair} (train.accumulate), or mesh.pp_schedule=gpipe, which takes any number and keeps the activations "
            "of all"
        )


def check_sizes(mesh: MeshConfig, model: ModelConfig) -> None:
    """Raise ValueError if a mesh does not divide the sizes in a model's settings.

    Sizes that the settings do not contain, such as those of a folder, are checked when the model is cut.
    """
    if mesh.tp > 1 and model.heads is not None:
        dense = model.shared_experts or 0 if model.kind == "moe" else 1
        ffn_size = dense * (model.ffn_size or 0)
        Sizes(model.heads, model.kv_heads or model.heads, ffn_size, model.vocab_size or 0).check(mesh.tp, "mesh.tp")
    if mesh.pp > 1 and model.layers is not None:
        check_blocks(model.layers, mesh.pp, mesh.stages_per_rank)
    if mesh.cp_attention == "ulysses" and model.heads is not None:
        check_heads(model.heads // mesh.tp, (model.kv_heads or model.heads) // mesh.tp, mesh.cp)


def check_fp8_tokens(compute: str, tokens: int, ranks: int) -> None:
    """Raise ValueError if gradients of weights would sum over tokens that `FP8_MULTIPLE` does not divide.

    `tokens` are those of a microbatch, which `ranks` of cp share, and `compute` is the value of precision.compute.
    """
    if tokens // ranks % FP8_MULTIPLE:
        raise ValueError(
            f"precision.compute={compute}: products in 8 bits sum over multiples of {FP8_MULTIPLE} tokens, but "
            f"train.microbatch_sequences x train.sequence_tokens / mesh.cp = {tokens // ranks}; make "
            f"train.sequence_tokens a multiple of {FP8_MULTIPLE * ranks}"
        )
