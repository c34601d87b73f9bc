"""Search space of `zero=auto`: all combinations of these settings, except those that the user gives.

    setting        values, simplest first
    tiers          rows of TIERS: all states on the device, part of them on the host, ..., all on disk
    recomputation  none, selective, full
    stage          0, 1, 2, 3
    microbatch     every divisor of a rank's sequences per step, largest first

Candidates are ordered from simple to complex. The tiers vary slowest, the microbatch fastest.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dzero.parallel.config import ACTIVATIONS
from dzero.utils.ranges import divisors
from dzero.zero.layout import Layout
from dzero.zero.offload_config import KINDS

STAGES = (0, 1, 2, 3)
STAGE, RECOMPUTE = "zero.stage", "block.activation_checkpoint"
MICROBATCH, ACCUMULATE = "train.microbatch_sequences", "train.accumulate"
TIERS = (  # tiers of param, grad, master and moments; fraction that leaves the device
    ("device", "device", "device", "device", 1.0),
    ("device", "host", "host", "host", 0.25),
    ("device", "host", "host", "host", 0.5),
    ("device", "host", "host", "host", 0.75),
    ("device", "host", "host", "host", 1.0),
    ("host", "host", "host", "host", 1.0),
    ("device", "host", "host", "disk", 1.0),
    ("device", "host", "disk", "disk", 0.5),
    ("device", "host", "disk", "disk", 1.0),
    ("host", "host", "disk", "disk", 1.0),
    ("disk", "disk", "disk", "disk", 1.0),
)
Settings = Mapping[str, Any]
"""Values by their names on the command line."""


def space(sequences: int) -> Iterator[Settings]:
    """Yield every combination of the searched settings for `sequences` per rank and step, simplest first."""
    for *tiers, fraction in TIERS:
        away = dict(zip(KINDS, tiers, strict=True))
        places: Settings = {f"offload.{kind}": tier for kind, tier in away.items()}
        parts = {f"offload.{kind}_fraction": fraction if tier != "device" else 1.0 for kind, tier in away.items()}
        for recompute in ACTIVATIONS:
            for stage in STAGES:
                for microbatch in reversed(divisors(sequences)):
                    batch = {MICROBATCH: microbatch, ACCUMULATE: sequences // microbatch}
                    yield {**places, **parts, RECOMPUTE: recompute, STAGE: stage, **batch}


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """Point of the search space.

    Attributes:
        settings: Values of the searched settings.
        microbatch: Sequences per rank and microbatch.
        simplicity: Position in the order of `space`; 0 is the simplest.
    """

    settings: Settings
    layout: Layout
    recompute: str
    microbatch: int
    simplicity: int

    @property
    def table(self) -> tuple[Any, ...]:
        """Key of the settings that determine `layout`."""
        return tuple(value for key, value in self.settings.items() if key != RECOMPUTE)

    @property
    def kind(self) -> tuple[Any, ...]:
        """Key of all settings except fractions and microbatches."""
        portions = (MICROBATCH, ACCUMULATE, *(f"offload.{kind}_fraction" for kind in KINDS))
        return tuple(value for key, value in self.settings.items() if key not in portions)
