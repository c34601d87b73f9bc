"""Seconds of each piece of a step on some hardware: a unit's compute, a collective, what moves of a unit's states.

The same work over the same rates as `pace.py`, which adds it up; here it is told piece by piece.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dzero.mesh import REPLICATE, SHARD
from dzero.offload.actions import update_order
from dzero.offload.places import Places
from dzero.plan.costs import Span
from dzero.plan.explain import Collective
from dzero.plan.machine import HardwareConfig
from dzero.zero.layout import Layout
from dzero.zero.shapes import UnitShape
from dzero.zero.tiers import names_off_device


@dataclass(frozen=True)
class Moves:
    """Bytes of one unit and rank, on their way from tier to tier, and the elements that the host updates.

    param: to the device for each use, of those on disk before that to the host. grad: at each reduction; late_grad:
    once, for the update. moments: to where the update runs, and back. work: new working copies, to the device.
    states: of a unit on disk, for an update. `disk_work`: new working copies, to disk.
    """

    param: int
    disk_param: int
    grad: int
    disk_grad: int
    late_grad: int
    grad_back: int
    moments: int
    updated_elems: int
    work: int
    disk_work: int
    read_states: int
    written_states: int


def moves_of(layout: Layout, units: Sequence[UnitShape]) -> dict[str, Moves]:
    """By unit."""
    away, places = names_off_device(layout.tiers, units), Places(layout, units)
    read = _states_read(places, units)
    sizes, on_disk = places.piece_bytes(), {kind: tier == "disk" for kind, (tier, _) in layout.tiers.items()}
    gradient, working, moment = layout.grad.dtype.itemsize, layout.param.dtype.itemsize, layout.moments.dtype.itemsize
    found = {}
    for unit in units:
        shards = {param.name: param.shard_elems(layout.shard) for param in unit.params}

        def elems(names: frozenset[str], shards: dict[str, int] = shards) -> int:
            return sum(count for name, count in shards.items() if name in names)

        param, grad = elems(away["param"]) * working, elems(away["grad"]) * gradient
        found[unit.name] = Moves(
            param=param,
            disk_param=param if on_disk["param"] else 0,
            grad=grad,
            disk_grad=grad if on_disk["grad"] else 0,
            late_grad=elems(away["master"] - away["grad"]) * gradient,
            grad_back=elems(away["grad"] - away["master"]) * gradient,
            moments=2 * elems(away["master"] ^ away["moments"]) * moment,
            updated_elems=elems(away["master"]),
            work=elems(away["master"] - away["param"]) * working,
            disk_work=param if on_disk["param"] else 0,
            read_states=read[unit.name],
            written_states=sum(sizes[pair.disk] for pair in places.going("states", unit.name)),
        )
    return found


def _states_read(places: Places, units: Sequence[UnitShape]) -> dict[str, int]:
    """Bytes by unit, in a step after the first; what its host slot still holds is not read again."""
    read: dict[str, int] = {}
    sizes, holds = places.piece_bytes(), dict[str, str]()
    for _ in range(2):
        for unit in update_order(units):
            pairs = places.pairs("states", unit.name)
            read[unit.name] = sum(sizes[pair.disk] for pair in pairs if holds.get(pair.host) != unit.name)
            holds |= {pair.host: unit.name for pair in pairs}
    return read


class Durations:
    """Seconds on `hardware`. Raises ValueError for a rate that is needed and unknown."""

    def __init__(self, layout: Layout, hardware: HardwareConfig) -> None:
        self._share, self._latency_s = hardware.share(layout.ranks), hardware.collective_latency_s
        self._flops = hardware.reachable_flops(layout.param.dtype)
        degrees, strides = {SHARD: layout.shard, REPLICATE: layout.replicate}, {SHARD: 1, REPLICATE: layout.shard}
        self._links = {
            axis: hardware.link(degree, stride=strides[axis], world=layout.ranks) for axis, degree in degrees.items()
        }

    def span(self, span: Span) -> float:
        """Of a unit at work in one direction, for one microbatch."""
        return _over(span.flops, self._flops)

    def collective(self, each: Collective) -> float:
        """Of one call."""
        return _over(each.sent_bytes, self._links[each.axis]) + self._latency_s

    def copied(self, count: int) -> float:
        """Of bytes between device and host, either way."""
        return _over(count, self._share.host_link)

    def updated(self, elems: int) -> float:
        """Of the host's update."""
        return _over(elems, self._share.update_elems_per_s)

    def read(self, count: int) -> float:
        """Of bytes from disk."""
        return _over(count, self._share.disk_read)

    def written(self, count: int) -> float:
        """Of bytes to disk."""
        return _over(count, self._share.disk_write)


def _over(work: float, rate: float | None) -> float:
    if work and rate is None:
        raise ValueError("a rate is unknown that the step needs")
    return work / rate if work and rate else 0.0
