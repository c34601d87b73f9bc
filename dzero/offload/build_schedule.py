"""The actions of a step, from the places: what a schedule is made of.

Parameters come for forward, and again, in the other order, for backward; gradients leave in backward, last unit first;
updates run in the order in which the next forward needs them. What is on disk is loaded in front of its use, and
spilled behind it: over units that take turns with their host slots, load, update and spill run at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from dzero.offload.buffer_layout import BufferLayout
from dzero.offload.schedule import ActionKey, ActionKind, OffloadAction, OffloadSchedule
from dzero.zero.unit_shapes import UnitShape

Unit = TypeVar("Unit")
GRADS = ("grad", "passing")


def schedule_of(places: BufferLayout) -> OffloadSchedule:
    """A step of all units."""
    actions: dict[ActionKey, OffloadAction] = {}
    for unit in update_order(places.units):
        for action in _params(places, unit):
            actions.setdefault(action.key, action)
    for unit in reversed(places.units):
        for action in _backward(places, unit):
            actions.setdefault(action.key, action)
    for unit in update_order(places.units):
        for action in _update(places, unit):
            actions.setdefault(action.key, action)
    return OffloadSchedule(places.slots(), tuple(actions.values()))


def _params(places: BufferLayout, unit: UnitShape) -> list[OffloadAction]:
    if not any(places.on_host("param", param.name) for param in unit.params):
        return []
    load = _from_disk(places, "param", unit)
    source = ["param", "frozen"] + (["master"] if places.own and not places.waiting and not load else [])
    fill = _visit(places, "param", unit) if load else []
    return [*fill, *load, *_on(places, ActionKind.FETCH, "param", unit, source)]


def _backward(places: BufferLayout, unit: UnitShape) -> list[OffloadAction]:
    used = {slot.split(" ")[0] for slot in places.slots_of(unit.name)}
    actions = _on(places, ActionKind.EVICT, "grad", unit, [*GRADS])
    if "landing" in used:
        actions += _on(places, ActionKind.EVICT, "landing", unit, ["landing"])
        actions += _from_disk(places, "grad", unit)
        actions += _on(places, ActionKind.COMPUTE, "accumulate", unit, ["landing", "grad"])
    if places.pairs("grad", unit.name):
        actions += _from_disk(places, "grad", unit) + _visit(places, "grad", unit)
    if unit.name in places.early:
        actions += _from_disk(places, "grad", unit) + _from_disk(places, "states", unit)
        actions += _on(places, ActionKind.COMPUTE, "ahead", unit, ["grad", "master", "moments", "work", "undo"])
        actions += _to_disk(places, "states", unit)
    return actions


def _update(places: BufferLayout, unit: UnitShape) -> list[OffloadAction]:
    names = [param.name for param in unit.params if param.trainable]
    here = any(places.updated_on_host(name) for name in names)
    fetched = any(places.travels("grad", name) and not places.updated_on_host(name) for name in names)
    actions = _from_disk(places, "grad", unit) + _from_disk(places, "states", unit)
    if unit.name in places.early:
        actions += _on(places, ActionKind.COMPUTE, "undo", unit, ["master", "moments", "work", "undo"])
    if any(places.travels("moments", name) for name in names):
        actions += _on(places, ActionKind.EVICT, "moments", unit, ["stage", "moments"])
        actions += _on(places, ActionKind.FETCH, "moments", unit, ["stage", "moments"])
    if fetched:
        actions += _on(places, ActionKind.FETCH, "grad", unit, ["grad"])
    if here:
        in_place = [] if places.waiting or places.pairs("param", unit.name) else ["param"]
        actions += _on(
            places, ActionKind.COMPUTE, "update", unit, [*GRADS, "master", "moments", "work", "stage", *in_place]
        )
    actions += _to_disk(places, "states", unit)
    made = "master" if places.own else "work"
    if any(places.published(name) for name in names):
        actions += _on(places, ActionKind.COMPUTE, "publish", unit, [made, "param"])
    if spilled := _to_disk(places, "work", unit):
        actions += [*spilled, *_on(places, ActionKind.COMPUTE, "merge", unit, [made, "param"])]
    if any(places.updated_on_host(name) and not places.on_host("param", name) for name in names):
        actions += _on(places, ActionKind.FETCH, "work", unit, [made])
    return actions + (_visit(places, "states", unit) if places.pairs("states", unit.name) else [])


def _on(
    places: BufferLayout, kind: ActionKind, what: str, unit: UnitShape, wanted: Sequence[str]
) -> list[OffloadAction]:
    """An action on the unit's own host slots of some kinds, if it has any."""
    used = tuple(slot for slot in places.slots_of(unit.name) if slot.split(" ")[0] in wanted)
    return [OffloadAction(ActionKey(kind, what, unit.name), used)] if used else []


def _from_disk(places: BufferLayout, what: str, unit: UnitShape) -> list[OffloadAction]:
    slots = tuple(slot for pair in places.pairs(what, unit.name) for slot in (pair.disk, pair.host))
    return [OffloadAction(ActionKey(ActionKind.LOAD, what, unit.name), slots)] if slots else []


def _to_disk(places: BufferLayout, what: str, unit: UnitShape) -> list[OffloadAction]:
    slots = tuple(slot for pair in places.going(what, unit.name) for slot in (pair.host, pair.disk))
    return [OffloadAction(ActionKey(ActionKind.SPILL, what, unit.name), slots)] if slots else []


def _visit(places: BufferLayout, what: str, unit: UnitShape) -> list[OffloadAction]:
    """Between steps: somebody outside reads values, or puts them in."""
    slots = tuple(pair.host for pair in places.pairs(what, unit.name))
    return [
        OffloadAction(ActionKey(ActionKind.COMPUTE, f"visit {what}", unit.name), slots),
        *_to_disk(places, what, unit),
    ]


def update_order(units: Sequence[Unit]) -> list[Unit]:
    """As the next forward gathers them: the root, which comes last among the units, first."""
    return [*units[-1:], *units[:-1]]
