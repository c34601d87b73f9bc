"""Search for the fastest settings that fit given hardware, for `zero=auto`.

Candidates are tried in the order of their predicted pace; if paces are equal to `DIGITS` digits, the simplest comes
first (`candidates.py`). The first fitting candidate of each kind is kept, for `BEST` kinds and all further ones whose
pace is within `TIE` of the first. These are then ranked by their timelines, in which units wait for each other.
Candidates within `TIE` of the shortest timeline count as equally fast, since predictions are not more precise, and the
simplest of them is best. Candidates whose pace needs a figure that the hardware lacks come last, simplest first.

Memory is checked in three steps, because a run of the model on fake tensors (`microbatch_costs.py`) takes seconds:

    bound     computed from                                 refuses
    floor     states alone                                  candidates that no activations could make fit
    at least  runs with the two smallest microbatches,      candidates that the same operators overfill: sums of tensors
              extrapolated linearly                         are linear in the sequences, and their maximum is convex
    exact     a run with this microbatch                    all others that do not fit; required before a choice

Work is linear in the number of sequences, so the extrapolation also gives the pace that orders the candidates.

`HEADROOM` of every tier stays free.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

from dzero.estimate.candidates import Candidate
from dzero.estimate.forecast import Forecast, Tier, tiers_of
from dzero.estimate.hardware_spec import HardwareConfig
from dzero.estimate.memory import StepMemory, off_device, on_device, staging_bytes
from dzero.estimate.microbatch_costs import STATES_ALONE, MicrobatchCosts, UnitSpan
from dzero.estimate.operator_work import OperatorWork
from dzero.optim.owned_states import OwnedStates
from dzero.zero.layout import Layout
from dzero.zero.unit_shapes import UnitShape

HEADROOM = 0.05
"""Fraction of each tier's capacity that is kept free (assumed)."""
DIGITS, TIE, BEST = 3, 0.05, 5


@dataclass(frozen=True, kw_only=True)
class Refused:
    """Candidate that does not fit.

    Attributes:
        step_s: Predicted seconds of a step, or None if unknown.
        short: Lower bound of the bytes that are missing, by tier.
    """

    candidate: Candidate
    step_s: float | None
    short: Mapping[str, int]


@dataclass(frozen=True, kw_only=True)
class Fits:
    """Candidate that fits with headroom."""

    candidate: Candidate
    forecast: Forecast

    @cached_property
    def step_s(self) -> float | None:
        """Seconds to the end of its timeline, or None if unknown."""
        timeline = self.forecast.timeline()
        return None if timeline is None else timeline.end_s


@dataclass(frozen=True, kw_only=True)
class Ranking:
    """Result of a search.

    Attributes:
        best: Best candidate of each kind, best kind first.
        refused: Candidates that were tried before any that fits, fastest first.
        candidates: Number of candidates.
        closest: Candidate with the fewest missing bytes if nothing fits.
    """

    best: tuple[Fits, ...]
    refused: tuple[Refused, ...]
    candidates: int
    closest: Fits | None = None


@dataclass(frozen=True, kw_only=True)
class Subject:
    """Model and hardware that candidates are evaluated on.

    Attributes:
        costs: Returns the costs of a microbatch, given recomputation and sequences.
        step_tokens: Tokens per step of all ranks.
        model_flops: FLOPs per token by the convention of MFU, or None if unknown.
        owned: States that owners of whole parameters keep, if the update rule needs them whole.
    """

    units: Sequence[UnitShape]
    costs: Callable[[str, int], MicrobatchCosts]
    hardware: HardwareConfig
    step_tokens: int
    model_flops: float | None
    owned: OwnedStates | None = None

    def forecast(self, layout: Layout, costs: MicrobatchCosts) -> Forecast:
        """Return the prediction for a ZeRO table and the costs of a microbatch."""
        return Forecast(
            layout=layout,
            units=self.units,
            costs=costs,
            hardware=self.hardware,
            step_tokens=self.step_tokens,
            model_flops=self.model_flops,
            owned=self.owned,
        )


def room_bytes(tier: Tier) -> int:
    """Return the usable bytes of a tier, without headroom; 0 if its size is unknown."""
    return int((1 - HEADROOM) * (tier.capacity_bytes or 0))


def short_bytes(tiers: Mapping[str, Tier]) -> dict[str, int]:
    """Return the bytes that each tier lacks, where it does not fit with headroom."""
    return {name: short for name, tier in tiers.items() if (short := tier.total_bytes - room_bytes(tier)) > 0}


def search(candidates: Sequence[Candidate], subject: Subject) -> Ranking:
    """Return the best candidates that fit."""
    judge = _Judge(candidates, subject)
    if all(map(judge.floor, candidates)):
        return Ranking(best=(), refused=(), candidates=len(candidates), closest=judge.closest())
    expected = {candidate.simplicity: judge.expected_s(candidate) for candidate in candidates}
    best: list[Fits] = []
    refused: list[Refused] = []
    for candidate in sorted(candidates, key=lambda each: _order(expected[each.simplicity], each.simplicity)):
        if any(candidate.kind == each.candidate.kind for each in best):
            continue
        step_s = expected[candidate.simplicity]
        first_s = expected[best[0].candidate.simplicity] if best else None
        if len(best) >= BEST and (step_s is None or first_s is None or step_s > (1 + TIE) * first_s):
            break
        judged = judge(candidate)
        if isinstance(judged, Fits):
            best.append(judged)
        elif not best:
            refused.append(Refused(candidate=candidate, step_s=step_s, short=judged))
    closest = None if best else judge.closest()
    ranked = tuple(ranked_by_timeline(best)[:BEST])
    return Ranking(best=ranked, refused=tuple(refused), candidates=len(candidates), closest=closest)


def ranked_by_timeline(fits: Sequence[Fits]) -> list[Fits]:
    """Sort by the end of the timelines, those within `TIE` of the shortest by simplicity; unknown lengths come last."""
    shortest = min((each.step_s for each in fits if each.step_s is not None), default=0.0)

    def order(each: Fits) -> tuple[float, int]:
        if each.step_s is None:
            return math.inf, each.candidate.simplicity
        return (0.0 if each.step_s <= (1 + TIE) * shortest else each.step_s), each.candidate.simplicity

    return sorted(fits, key=order)


def fitting(candidates: Sequence[Candidate], subject: Subject) -> Iterator[Fits]:
    """Return the candidates that fit, in their order and checked lazily."""
    judge = _Judge(candidates, subject)
    return (judged for judged in map(judge, candidates) if isinstance(judged, Fits))


class _Judge:
    """Memory check of candidates, with as few runs of the model as possible."""

    def __init__(self, candidates: Sequence[Candidate], subject: Subject) -> None:
        self._candidates, self._subject = candidates, subject
        self._smallest = sorted({candidate.microbatch for candidate in candidates})[:2]
        self._exact = cache(subject.costs)
        self._floors: dict[tuple[Any, ...], dict[str, int]] = {}
        self._off_device: dict[tuple[Any, ...], tuple[dict[str, int], dict[str, int]]] = {}

    def __call__(self, candidate: Candidate) -> Fits | dict[str, int]:
        """Return the candidate as one that fits, or a lower bound of the bytes that each rank lacks."""
        if short := self.floor(candidate) or self._at_least(candidate):
            return short
        found = self._forecast(candidate)
        return short_bytes(found.tiers) or Fits(candidate=candidate, forecast=found)

    def floor(self, candidate: Candidate) -> dict[str, int]:
        """Return the bytes that states alone lack, which do not depend on recomputation."""
        if candidate.table not in self._floors:
            self._floors[candidate.table] = self._short(candidate, STATES_ALONE)
        return self._floors[candidate.table]

    def _at_least(self, candidate: Candidate) -> dict[str, int]:
        """Return a lower bound of the bytes that are missing, from the two smallest microbatches."""
        first = self._exact(candidate.recompute, self._smallest[0])
        return self._short(candidate, first) or self._short(candidate, self._foreseen(candidate))

    def _foreseen(self, candidate: Candidate) -> MicrobatchCosts:
        """Return the costs of its microbatch, extrapolated from the two smallest."""
        costs = [self._exact(candidate.recompute, microbatch) for microbatch in self._smallest]
        if candidate.microbatch in self._smallest:
            return costs[self._smallest.index(candidate.microbatch)]
        first, second = costs
        return drawn_out(first, second, self._smallest, candidate.microbatch)

    def _short(self, candidate: Candidate, costs: MicrobatchCosts) -> dict[str, int]:
        """Return the bytes missing on the device, or else on the other tiers, whose schedule is slower to compute."""
        layout, subject = candidate.layout, self._subject
        units, hardware, owned = subject.units, subject.hardware, subject.owned
        staging = staging_bytes(layout, units, hardware.device_type)
        memory = StepMemory(on_device(layout, units, costs, owned), {}, {}, staging)
        if lacking := short_bytes(tiers_of(memory, hardware, layout.world)):
            return lacking
        if candidate.table not in self._off_device:
            self._off_device[candidate.table] = off_device(layout, units, owned)
        host, disk = self._off_device[candidate.table]
        return short_bytes(tiers_of(replace(memory, host=host, disk=disk), hardware, layout.world))

    def expected_s(self, candidate: Candidate) -> float | None:
        """Return the predicted seconds of a step, or None if unknown."""
        return self._subject.forecast(candidate.layout, self._foreseen(candidate)).pace.step_s

    def _forecast(self, candidate: Candidate) -> Forecast:
        return self._subject.forecast(candidate.layout, self._exact(candidate.recompute, candidate.microbatch))

    def closest(self) -> Fits:
        """Return the candidate with the fewest missing bytes among those with the smallest microbatch."""
        smallest = [each for each in self._candidates if each.microbatch == self._smallest[0]]
        lacks = self.floor if all(map(self.floor, self._candidates)) else self._at_least
        least = min(smallest, key=lambda each: (sum(lacks(each).values()), -each.simplicity))
        return Fits(candidate=least, forecast=self._forecast(least))


def _order(step_s: float | None, simplicity: int) -> tuple[bool, float, int]:
    return step_s is None, float(f"{step_s or 0.0:.{DIGITS - 1}e}"), simplicity


def drawn_out(
    first: MicrobatchCosts, second: MicrobatchCosts, microbatches: Sequence[int], microbatch: int
) -> MicrobatchCosts:
    """Extrapolate peaks and work of two `microbatches` linearly to `microbatch` sequences.

    If the two run different operators, the second's costs are returned.
    """
    if [(s.direction, s.unit) for s in first.spans] != [(s.direction, s.unit) for s in second.spans]:
        return second
    one, two = microbatches
    further = (microbatch - two) / (two - one)

    def along(a: float, b: float) -> float:
        return b + further * (b - a)

    def between(a: UnitSpan, b: UnitSpan) -> UnitSpan:
        drawn = OperatorWork(*map(along, a.work, b.work))  # type: ignore[arg-type]
        work = drawn._replace(
            **{name: round(getattr(drawn, name)) for name in ("calls", "exchanges", "passes", "routes")}
        )
        return replace(b, peak_bytes=int(along(a.peak_bytes, b.peak_bytes)), work=work)

    return replace(second, spans=tuple(map(between, first.spans, second.spans)))
