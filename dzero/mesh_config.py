"""Settings of the mesh: the number of ranks along each axis, checks, and alternatives for error messages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dzero.compatibility import check_compatible
from dzero.utils.ranges import MOST_RANKS, check, divisors, whole
from dzero.utils.renamed import accepts_old_names
from dzero.utils.rules import Settings

CP_ATTENTIONS = ("all_gather", "ulysses", "ring")
STAGES_PER_RANK = {"1f1b": 1, "gpipe": 1, "interleaved": 2, "zero_bubble": 2}
"""Default number of pipeline stages per rank, by schedule."""


@accepts_old_names("mesh")
@dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """Degrees of parallelism: dp x cp x tp x pp is the number of ranks.

    Stage 0 replicates over all data-parallel ranks (dp x cp) by itself, so it takes no `replicate`.
    """

    dp: int | None = None
    """Ranks, or groups of ranks, that read their own sequences. null: all remaining ranks."""
    replicate: int = 1
    """Replicas of the sharded model (hybrid sharding). 1: shard over all data-parallel ranks."""
    cp: int = 1
    """Ranks that share every sequence (context parallelism)."""
    cp_attention: str = "all_gather"
    """Attention over shared sequences: all_gather, ulysses or ring."""
    tp: int = 1
    """Ranks that share every matrix (tensor and sequence parallelism)."""
    ep: int = 1
    """Ranks, out of dp x cp x tp, that share the experts (expert parallelism)."""
    pp: int = 1
    """Ranks that share the layers (pipeline parallelism)."""
    pp_schedule: str = "1f1b"
    """Order in which pipeline stages run microbatches: 1f1b, gpipe, interleaved or zero_bubble."""
    pp_stages_per_rank: int | None = None
    """Pipeline stages per rank. null: 1 for 1f1b and gpipe, 2 for interleaved and zero_bubble."""

    def __post_init__(self) -> None:
        degree = whole(1, MOST_RANKS)
        keys = ("dp", "replicate", "cp", "tp", "ep", "pp", "pp_stages_per_rank")
        check("mesh", self, **dict.fromkeys(keys, degree))
        if self.cp_attention not in CP_ATTENTIONS:
            raise ValueError(f"mesh.cp_attention={self.cp_attention!r}: choose one of {[*CP_ATTENTIONS]}")
        if self.pp_schedule not in STAGES_PER_RANK:
            raise ValueError(f"mesh.pp_schedule={self.pp_schedule!r}: choose one of {[*STAGES_PER_RANK]}")
        check_compatible(Settings.of(mesh=self))

    @property
    def stages_per_rank(self) -> int:
        """Number of pipeline stages per rank."""
        return self.pp_stages_per_rank or STAGES_PER_RANK[self.pp_schedule]

    @property
    def to_a_sequence(self) -> int:
        """Number of neighboring data-parallel ranks that read the same sequences."""
        return self.cp

    @property
    def inner(self) -> int:
        """Number of ranks that process one sequence."""
        return self.cp * self.tp * self.pp

    @property
    def sharing(self) -> int:
        """Smallest number of ranks with the same layers that share experts, sequences and matrices among themselves."""
        return math.lcm(self.cp, -(-self.ep // self.tp)) * self.tp

    @property
    def ranks(self) -> int | None:
        """Number of ranks that the degrees require; None if dp is not set."""
        return None if self.dp is None else self.dp * self.inner

    def data_ranks(self, world: int) -> int:
        """Return the data-parallel ranks among `world` ranks; raise ValueError if the degrees do not fit `world`."""
        if world % self.inner == 0 and self.dp in (None, world // self.inner):
            return world // (self.tp * self.pp)
        degrees = {"dp": self.dp, "cp": self.cp, "tp": self.tp, "pp": self.pp}
        given = " x ".join(f"mesh.{key}={value}" for key, value in degrees.items() if value not in (None, 1))
        start = f", or start {self.ranks} (without torchrun launch.workers={self.ranks})" if self.ranks else ""
        raise ValueError(
            f"{given or 'mesh.dp=1'}, but there are {world} ranks: (dp, cp, tp, pp) that make as many, the nearest "
            f"first: {_nearest(world, [*degrees.values()])}{start}"
        )

    def readers(self, data_ranks: int) -> int:
        """Return the number of groups, among `data_ranks` ranks, that read their own sequences."""
        return data_ranks // self.to_a_sequence

    @property
    def token_multiple(self) -> int:
        """Number of tokens of which sequences have a multiple, so that the ranks that share them have equal parts."""
        return self.tp if self.cp == 1 else self.cp * math.lcm(2, self.tp)

    def check_tokens(self, tokens: int) -> None:
        """Raise ValueError if sequences of `tokens` tokens do not divide equally among the ranks that share them."""
        unit = self.token_multiple
        if tokens % unit:
            parts = {"cp": "2 of 2 x cp chunks of every sequence", "tp": "an equal part of it between blocks"}
            cutting = {f"mesh.{key}={degree}": parts[key] for key in parts if (degree := getattr(self, key)) > 1}
            raise ValueError(
                f"{' x '.join(cutting)} does not divide train.sequence_tokens={tokens}: a rank has "
                f"{', '.join(cutting.values())}; take a multiple of {unit}, as train.sequence_tokens="
                f"{tokens // unit * unit or unit}"
            )

    def degrees(self, ranks: int, *, stage: int) -> tuple[int, int]:
        """Return (replicate, shard) for `ranks` data-parallel ranks; raise ValueError if they cannot be divided so."""
        if stage == 0:
            check_compatible(Settings.of(mesh=self).having({"zero.stage": stage}))
            return ranks, 1
        if ranks % self.replicate:
            allowed = divisors(ranks)
            raise ValueError(f"mesh.replicate={self.replicate} does not divide the {ranks} ranks; allowed: {allowed}")
        return self.replicate, ranks // self.replicate


def factorings(number: int, factors: int = 2) -> list[tuple[int, ...]]:
    """Return all ordered products of `factors` whole numbers that equal `number`."""
    if factors == 1:
        return [(number,)]
    return [(each, *rest) for each in divisors(number) for rest in factorings(number // each, factors - 1)]


def _nearest(number: int, wanted: Sequence[int | None], most: int = 12) -> str:
    """Format products that equal `number`, those that keep most `wanted` factors first, simple ones before others.

    Factors of None and 1 were not asked for.
    """
    asked = [index for index, each in enumerate(wanted) if each not in (None, 1)]
    kept = {each: sum(each[index] == wanted[index] for index in asked) for each in factorings(number, len(wanted))}
    found = sorted(kept, key=lambda each: (-kept[each], -each.count(1)))
    more = f" and {len(found) - most} more" if len(found) > most else ""
    return f"{found[:most]}{more}"
