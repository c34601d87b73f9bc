"""Comparison of two traces: the first mark that differs, or the size of the differences; the same on all ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from dzero.checkpoint.box import Box
from dzero.verify.trace import LOSS, MEAN, NORM, SCALE, Mark, Trace, of_all_ranks, squared
from dzero.zero.units import ROOT


@dataclass(frozen=True)
class Gap:
    """Measured or allowed differences of two runs: relative, each the largest over steps, ranks and parameters.

    Attributes:
        loss: Difference of a rank's losses; of mean losses if the ranks read different tokens.
        norm: Difference of gradient norms.
        unit_norm: Difference of the gradient norms of a unit.
        masters: Root mean square difference of a parameter's masters at the end, relative to how far training moved
            them.
        param: Parameter with the largest difference in `masters`.
        unit: Unit with the largest difference in `unit_norm`.
        step: Step with the largest difference in `unit_norm`.
    """

    loss: float
    norm: float
    unit_norm: float
    masters: float
    param: str = ""
    unit: str = ""
    step: int = 0

    @property
    def sizes(self) -> tuple[float, float, float, float]:
        """Differences of loss, norm, norm of a unit, and masters."""
        return self.loss, self.norm, self.unit_norm, self.masters

    def within(self, allowed: Gap) -> bool:
        """Return whether no difference is larger than allowed."""
        return all(mine <= its for mine, its in zip(self.sizes, allowed.sizes, strict=True))

    def widened(self, spread: Gap, factor: float) -> Gap:
        """Return a gap whose sizes are at least `factor` times those of `spread`."""
        pairs = zip(self.sizes, spread.sizes, strict=True)
        loss, norm, unit_norm, masters = (max(mine, factor * its) for mine, its in pairs)
        return Gap(loss, norm, unit_norm, masters)


@dataclass(frozen=True)
class Difference:
    """First difference of two runs that should have the same bits.

    Attributes:
        mark: First mark that differs.
        param: First parameter of the unit that differs; empty if none did when both ran again.
        largest: Largest difference; 0 if none was found.
        ulps: Largest difference in units in the last place of its dtype; 0 if none was found.
    """

    mark: Mark
    param: str = ""
    largest: float = 0.0
    ulps: int = 0


MISSING = 2**32
"""Difference in ulps between a tensor and a missing one: more than that between any two floats."""


def first_difference(one: Trace, other: Trace, device: torch.device) -> Mark | None:
    """Return the first mark in which the traces differ on any rank, or None. Collective."""
    marks = one.ordered()
    differing = (index for index, mark in enumerate(marks) if one.marks.get(mark) != other.marks.get(mark))
    first = int(_most([next(differing, len(marks))], device, dist.ReduceOp.MIN)[0])
    return marks[first] if first < len(marks) else None


def by_how_much(mark: Mark, one: Trace, other: Trace, device: torch.device) -> Difference:
    """Return the difference at `mark`, whose tensors both traces kept. Collective."""
    if not mark.unit:
        return Difference(mark, largest=_most([_scalar_gap(mark, one, other)], device)[0])
    names = [*_named_anywhere(dict.fromkeys(one.kept))]
    pairs = [(one.kept.get(name), other.kept.get(name)) for name in names]
    apart = [_apart(*pair) for pair in pairs]
    ulps, largest = (_most([each[at] for each in apart], device) for at in range(2))
    for name, most, by in zip(names, ulps, largest, strict=True):
        if most:
            return Difference(mark, name, by, int(most))
    return Difference(mark)


def gap(one: Trace, other: Trace, device: torch.device, allowed: Gap | None = None) -> Gap:
    """Return the differences of `other` from `one`, the lower rung, over the parameters that both have. Collective.

    If the gradient norm of a unit exceeds what is `allowed`, only the first such step counts, because later steps
    inherit the difference.
    """
    masters, param = _masters(one, other, device)
    pair = (one.losses, other.losses) if one.mesh == other.mesh else (one.means, other.means)
    losses = _most([_worst(*pair)], device)
    unit_norm, unit, step = _unit_norms(one, other, device, allowed.unit_norm if allowed else math.inf)
    return Gap(losses[0], _worst(one.norms, other.norms), unit_norm, masters, param if masters else "", unit, step)


def _masters(one: Trace, other: Trace, device: torch.device) -> tuple[float, str]:
    """Return the largest difference relative to how far `one` moved, and the parameter.

    The rows of all ranks are compared, replicas included. If both runs have the same rows on each rank, they are
    compared directly, otherwise with the whole tensor of `one`.
    """
    of_one, of_other = (_named_anywhere(_shapes(trace)) for trace in (one, other))
    same_rows = (one.mesh, one.tiles) == (other.mesh, other.tiles)
    apart, moved = {}, {}
    for name, shape in of_one.items():
        if name in of_other:
            before = one.masters.__getitem__
            if not same_rows:
                before = partial(_part_of, _whole(one, name, shape, device), other)
            apart[name] = sum(
                other.rows.weight[own] * squared(other.masters[own] - before(own)) for own in _parts(other, name)
            )
            moved[name] = sum(one.moved[own] for own in _parts(one, name))
    pairs = zip(_summed([*apart.values()], device), _summed([*moved.values()], device), apart, strict=True)
    return max(((_ratio(math.sqrt(by), math.sqrt(way)), name) for by, way, name in pairs), default=(0.0, ""))


def _shapes(trace: Trace) -> dict[str, tuple[int, ...]]:
    """Return the shapes, as the model was built, of the parameters that have masters."""
    held = [trace.rows.held[own] for own in trace.masters]
    return {each.name: each.shape for each in held}


def _parts(trace: Trace, name: str) -> list[str]:
    """Return what this rank has of a parameter: the parameter itself, its tiles, or nothing."""
    return [own for own in trace.masters if trace.rows.held[own].name == name]


def _part_of(whole: torch.Tensor, trace: Trace, own: str) -> torch.Tensor:
    """Return the elements of a whole parameter that this rank holds in `trace`, flat."""
    held, everything = trace.rows.held[own], Box.whole(tuple(whole.shape))
    return held.together([whole[box.slices(everything)].reshape(-1) for box in held.boxes]).reshape(-1)


def _whole(trace: Trace, name: str, shape: Sequence[int], device: torch.device) -> torch.Tensor:
    """Return a parameter's masters, fp32 [shape] in host memory; each element is from the first rank that has it."""
    whole = torch.zeros(*shape)
    for own in _parts(trace, name):
        if own in trace.rows.first:
            held = trace.rows.held[own]
            for box, values in zip(held.boxes, held.apart(trace.masters[own]), strict=True):
                whole[box.slices(Box.whole(tuple(shape)))] = values.view(box.size)
    there = whole.to(device)
    dist.all_reduce(there)
    return there.cpu()


def _unit_norms(one: Trace, other: Trace, device: torch.device, limit: float) -> tuple[float, str, int]:
    """Return the largest difference, its unit and step; if any exceeds `limit`, only the first such step counts."""
    of_one, of_other = (_named_anywhere(trace.squares[0]) for trace in (one, other))
    both = [unit for unit in of_one if unit in of_other]
    places = [(unit, step) for step in range(1, len(one.squares) + 1) for unit in both]
    squares = [total for trace in (one, other) for step in trace.squares for total in _by_unit(step, both)]
    norms = [math.sqrt(total) for total in _summed(squares, device)]
    pairs = zip(norms[: len(places)], norms[len(places) :], strict=True)
    found = [(_relative(*pair), *place) for pair, place in zip(pairs, places, strict=True)]
    first = next((step for size, _, step in found if size > limit), None)
    most = max((it for it in found if first in (None, it[2])), key=lambda it: it[0], default=(0.0, "", 0))
    return most if most[0] else (0.0, "", 0)


def _by_unit(squares: dict[str, float], units: Sequence[str]) -> list[float]:
    """Sum the squares of `units` and of the units within each, since tiles are units in only one of the runs."""
    totals = dict.fromkeys(units, 0.0)
    for unit, total in squares.items():
        while unit and unit not in totals:
            unit = unit.rpartition(".")[0]
        totals[unit or ROOT] += total
    return [*totals.values()]


def _scalar_gap(mark: Mark, one: Trace, other: Trace) -> float:
    series = {LOSS: (one.losses, other.losses), MEAN: (one.means, other.means), NORM: (one.norms, other.norms)}
    if mark.what == SCALE:
        return 0.0
    a, b = series[mark.what]
    return abs(a[mark.step - 1] - b[mark.step - 1])


def _worst(one: Sequence[float], other: Sequence[float]) -> float:
    return max((_relative(a, b) for a, b in zip(one, other, strict=True)), default=0.0)


def _relative(a: float, b: float) -> float:
    if a == b or (math.isnan(a) and math.isnan(b)):
        return 0.0
    return _ratio(abs(a - b), abs(a))


def _ratio(part: float, whole: float) -> float:
    """Return part / whole; infinite if it is not finite, or if only `whole` is 0."""
    if part == 0:
        return 0.0
    ratio = part / whole if whole else math.inf
    return ratio if math.isfinite(ratio) else math.inf


def _apart(one: torch.Tensor | None, other: torch.Tensor | None) -> tuple[int, float]:
    """Return the largest difference in units in the last place, and the largest; None is a missing tensor."""
    if one is None or other is None:
        return (0, 0.0) if one is other else (MISSING, math.inf)
    if not one.numel():
        return 0, 0.0
    ulps = int((_places(one) - _places(other)).abs().max())
    return ulps, float((one.double() - other.double()).abs().nan_to_num(nan=math.inf).max())


def _places(tensor: torch.Tensor) -> torch.Tensor:
    """Map floats of 16 or 32 bits to int64, so that neighbors differ by one; 0 and -0 are neighbors too."""
    bits = tensor.contiguous().view({2: torch.int16, 4: torch.int32}[tensor.itemsize])
    return torch.where(bits < 0, bits ^ torch.iinfo(bits.dtype).max, bits).to(torch.int64)


def _named_anywhere(values: Mapping[str, Any]) -> dict[str, Any]:
    """Gather JSON values by the names that any rank has, in the same order on every rank. Collective."""
    return {name: value for of_rank in of_all_ranks(dict(values)) for name, value in of_rank.items()}


def _summed(values: Sequence[float], device: torch.device) -> list[float]:
    """Add `values` [n] of all ranks in rank order, so that equal values have equal sums at any position. Collective."""
    mine = torch.tensor([*values], dtype=torch.float64, device=device)
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(every, mine)
    return [float(value) for value in torch.stack(every).cumsum(0)[-1].tolist()]


def _most(
    values: Sequence[float], device: torch.device, how: dist.ReduceOp.RedOpType = dist.ReduceOp.MAX
) -> list[float]:
    """Reduce `values` [n] over all ranks, by default to the largest. Collective."""
    reduced = torch.tensor([*values], dtype=torch.float64, device=device)
    dist.all_reduce(reduced, how)
    return [float(value) for value in reduced.tolist()]
