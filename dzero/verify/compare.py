"""Two traces of one run: the first mark that differs, or how far apart they are. All ranks find the same."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from dzero.verify.trace import LOSS, MEAN, NORM, SCALE, Mark, Trace
from dzero.zero.units import ROOT


@dataclass(frozen=True)
class Gap:
    """How far apart two runs are, or may be; relative, the largest of all steps, ranks and parameters.

    loss: of a rank's losses, or of their means where ranks saw other tokens. norm: of the gradient norms. unit_norm: of
    a unit's gradient norms; `unit`, `step`: which. masters: of a parameter's masters at the end, root mean square, by
    how far training had moved them; `param`: which.
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
        """Of loss, norm, the norm of a unit, and masters."""
        return self.loss, self.norm, self.unit_norm, self.masters

    def within(self, allowed: Gap) -> bool:
        """Whether none is larger."""
        return all(mine <= its for mine, its in zip(self.sizes, allowed.sizes, strict=True))

    def widened(self, spread: Gap, factor: float) -> Gap:
        """At least `factor` times `spread`."""
        pairs = zip(self.sizes, spread.sizes, strict=True)
        loss, norm, unit_norm, masters = (max(mine, factor * its) for mine, its in pairs)
        return Gap(loss, norm, unit_norm, masters)


@dataclass(frozen=True)
class Apart:
    """Where two runs that should be alike differ first, and by how much; `param`: the first of the unit's.

    largest: the largest difference; ulps: in units of the last place of its dtype. Both 0 where it was not found again.
    """

    mark: Mark
    param: str = ""
    largest: float = 0.0
    ulps: int = 0


def first_difference(one: Trace, other: Trace, device: torch.device) -> Mark | None:
    """The first mark in which the traces differ on any rank; None where none does. Collective."""
    marks = one.ordered()
    differing = (index for index, mark in enumerate(marks) if one.marks[mark] != other.marks.get(mark))
    first = int(_over_ranks([next(differing, len(marks))], dist.ReduceOp.MIN, device)[0])
    return marks[first] if first < len(marks) else None


def by_how_much(mark: Mark, one: Trace, other: Trace, device: torch.device) -> Apart:
    """What differs at `mark`, which both traces kept. Collective."""
    if not mark.unit:
        return Apart(mark, largest=_over_ranks([_scalar_gap(mark, one, other)], dist.ReduceOp.MAX, device)[0])
    names = [*one.kept]
    pairs = [(one.kept[name], other.kept[name]) for name in names]
    ulps = _over_ranks([_most_ulps(*pair) for pair in pairs], dist.ReduceOp.MAX, device)
    largest = _over_ranks([_largest(*pair) for pair in pairs], dist.ReduceOp.MAX, device)
    for name, most, by in zip(names, ulps, largest, strict=True):
        if most:
            return Apart(mark, name, by, int(most))
    return Apart(mark)


def gap(one: Trace, other: Trace, device: torch.device, allowed: Gap | None = None) -> Gap:
    """How far `other` is from `one`, over parameters that both have. Collective.

    allowed: where a unit's gradient norm is further off, the first such step counts alone: later ones only inherit it.
    """
    names = [name for name in one.masters if name in other.masters]
    squares = [float((one.masters[name] - other.masters[name]).double().square().sum()) for name in names]
    moved = [one.moved[name] for name in names]
    totals = _over_ranks([*squares, *moved], dist.ReduceOp.SUM, device)
    pairs = zip(totals[: len(names)], totals[len(names) :], strict=True)
    masters, param = max(
        ((_ratio(math.sqrt(apart), math.sqrt(by)), name) for name, (apart, by) in zip(names, pairs, strict=True)),
        default=(0.0, ""),
    )
    alike = one.sharing == other.sharing
    pair = (one.losses, other.losses) if alike else (one.means, other.means)
    losses = _over_ranks([_worst(*pair)], dist.ReduceOp.MAX, device)
    unit_norm, unit, step = _unit_norms(one, other, device, allowed.unit_norm if allowed else math.inf)
    return Gap(losses[0], _worst(one.norms, other.norms), unit_norm, masters, param if masters else "", unit, step)


def _unit_norms(one: Trace, other: Trace, device: torch.device, limit: float) -> tuple[float, str, int]:
    """The largest difference, of which unit, in which step; of the first step with one over `limit`, if any is."""
    both = [unit for unit in one.squares[0] if unit in other.squares[0]]
    places = [(unit, step) for step in range(1, len(one.squares) + 1) for unit in both]
    squares = [total for trace in (one, other) for step in trace.squares for total in _by_unit(step, both)]
    norms = [math.sqrt(total) for total in _over_ranks(squares, dist.ReduceOp.SUM, device)]
    pairs = zip(norms[: len(places)], norms[len(places) :], strict=True)
    found = [(_relative(*pair), *place) for pair, place in zip(pairs, places, strict=True)]
    first = next((step for size, _, step in found if size > limit), None)
    most = max((it for it in found if first in (None, it[2])), key=lambda it: it[0], default=(0.0, "", 0))
    return most if most[0] else (0.0, "", 0)


def _by_unit(squares: dict[str, float], units: Sequence[str]) -> list[float]:
    """The sums of squares of `units`, each with those of other units within it: tiles are units that one run has."""
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
    """Infinite for what is no number, and for part of nothing."""
    if part == 0:
        return 0.0
    ratio = part / whole if whole else math.inf
    return ratio if math.isfinite(ratio) else math.inf


def _largest(one: torch.Tensor, other: torch.Tensor) -> float:
    if not one.numel():
        return 0.0
    return float((one.double() - other.double()).abs().nan_to_num(nan=math.inf).max())


def _most_ulps(one: torch.Tensor, other: torch.Tensor) -> int:
    return int((_places(one) - _places(other)).abs().max()) if one.numel() else 0


def _places(tensor: torch.Tensor) -> torch.Tensor:
    """Floats of 16 or 32 bits -> int64, neighbours one apart, the two zeros too."""
    bits = tensor.contiguous().view({2: torch.int16, 4: torch.int32}[tensor.itemsize])
    return torch.where(bits < 0, bits ^ torch.iinfo(bits.dtype).max, bits).to(torch.int64)


def _over_ranks(values: Sequence[float], how: dist.ReduceOp.RedOpType, device: torch.device) -> list[float]:
    """`values` [n] of all ranks as one list, the same on every rank."""
    reduced = torch.tensor([*values], dtype=torch.float64, device=device)
    dist.all_reduce(reduced, how)
    return [float(value) for value in reduced.tolist()]
