"""Which numbers of ranks divide what the axes of a mesh cut: matrices, heads, layers and microbatches."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dzero.mesh_config import PARTS_OF_A_RANK
from dzero.utils.ranges import divisors


@dataclass(frozen=True)
class Sizes:
    """The sizes that the ranks of an axis must divide, by the name of the setting; 0 for what a model does not have."""

    heads: int
    kv_heads: int
    ffn_size: int
    vocab_size: int

    def check(self, ranks: int, axis: str) -> None:
        """Raises ValueError naming those that are not divided."""
        wrong = {name: size for name, size in vars(self).items() if size % ranks}
        if wrong:
            told = ", ".join(f"{name}={size}" for name, size in wrong.items())
            allowed = divisors(math.gcd(*vars(self).values()))
            raise ValueError(f"{axis}={ranks} does not divide the model's {told}; allowed: {allowed}")


def check_heads(heads: int, kv_heads: int, ranks: int) -> None:
    """Raises ValueError for those that ulysses cannot share out."""
    if heads % ranks or kv_heads % ranks:
        allowed = divisors(math.gcd(heads, kv_heads))
        raise ValueError(
            f"mesh.cp_attention=ulysses with mesh.cp={ranks}, which does not divide heads={heads} and "
            f"kv_heads={kv_heads} of a rank: take a cp of {allowed}, or mesh.cp_attention=all_gather"
        )


def check_blocks(blocks: int, ranks: int, parts_of_a_rank: int = 1) -> None:
    """Raises ValueError where there are fewer than parts."""
    count, several = ranks * parts_of_a_rank, parts_of_a_rank > 1
    if blocks < count:
        of_rank = f" with {parts_of_a_rank} parts on each rank" if several else ""
        raise ValueError(
            f"mesh.pp={ranks}{of_rank}: {count} parts of a model of {blocks} blocks; take at most "
            f"{max(1, blocks // parts_of_a_rank)} ranks{', or fewer parts' if several else ''}"
        )


def check_microbatches(schedule: str, microbatches: int, ranks: int) -> None:
    """Raises ValueError where the schedule cannot order so many over so many ranks."""
    rounds = max(1, microbatches // ranks)
    fitting = {
        "gpipe": True,
        "1f1b": microbatches >= ranks,
        **dict.fromkeys(("interleaved", "zero_bubble"), microbatches >= ranks and microbatches % rounds == 0),
    }
    if not fitting[schedule]:
        repair = f"a multiple of {ranks}" if PARTS_OF_A_RANK[schedule] > 1 else f"at least {ranks}"
        raise ValueError(
            f"mesh.pp_schedule={schedule} over mesh.pp={ranks} ranks with {microbatches} microbatches to a step: take "
            f"{repair} (train.accumulate), or mesh.pp_schedule=gpipe, which takes any number and keeps the activations "
            "of all"
        )
