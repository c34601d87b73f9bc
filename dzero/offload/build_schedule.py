"""Construction of a step's schedule from the buffer layout.

Parameters are fetched for forward, and again in reverse order for backward; if they are fetched in blocks, they are
encoded first. Gradients are evicted in backward, last unit first. Updates run in the order of `update_order`. Those
that run in backward already do so in the order in which the next forward needs the units, among the units whose
gradients have arrived. States on disk are loaded before their use and spilled after it. Units share host slots in turn,
so that load, update and spill of different units overlap.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from dzero.offload.buffer_layout import BufferLayout
from dzero.offload.schedule import ActionKey, ActionKind, OffloadAction, OffloadSchedule
from dzero.zero.offload_config import FROZEN
from dzero.zero.unit_shapes import UnitShape

Unit = TypeVar("Unit")
GRADS = ("grad", "passing")


def schedule_of(buffer_layout: BufferLayout) -> OffloadSchedule:
    """Return the schedule of one step over all units."""
    actions: dict[ActionKey, OffloadAction] = {}
    for unit in update_order(buffer_layout.units):
        for action in _params(buffer_layout, unit):
            actions.setdefault(action.key, action)
    for unit in reversed(buffer_layout.units):
        for action in _backward(buffer_layout, unit):
            actions.setdefault(action.key, action)
    for unit in update_order(buffer_layout.units, buffer_layout.layout.offload.mode):
        for action in _update(buffer_layout, unit):
            actions.setdefault(action.key, action)
    return OffloadSchedule(buffer_layout.slots(), tuple(actions.values()))


def _params(buffer_layout: BufferLayout, unit: UnitShape) -> list[OffloadAction]:
    if not any(buffer_layout.on_host(kind, param.name) for param in unit.params for kind in ("param", FROZEN)):
        return []
    load = _from_disk(buffer_layout, "param", unit)
    source = ["param", FROZEN, *(["master"] if buffer_layout.own and _in_place(buffer_layout, unit) else [])]
    fill = _visit(buffer_layout, "param", unit) if load else []
    encode: list[OffloadAction] = []
    if buffer_layout.payloads[unit.name]:
        encode = _on(buffer_layout, ActionKind.COMPUTE, "encode", unit, [*source, "payload"])
        source = ["payload", FROZEN]
    return [*fill, *load, *encode, *_on(buffer_layout, ActionKind.FETCH, "param", unit, source)]


def _backward(buffer_layout: BufferLayout, unit: UnitShape) -> list[OffloadAction]:
    used = {slot.split(" ")[0] for slot in buffer_layout.slots_of(unit.name)}
    actions = _on(buffer_layout, ActionKind.EVICT, "grad", unit, [*GRADS])
    if "landing" in used:
        actions += _on(buffer_layout, ActionKind.EVICT, "landing", unit, ["landing"])
        actions += _from_disk(buffer_layout, "grad", unit)
        actions += _on(buffer_layout, ActionKind.COMPUTE, "accumulate", unit, ["landing", "grad"])
    if buffer_layout.pairs("grad", unit.name):
        actions += _from_disk(buffer_layout, "grad", unit) + _visit(buffer_layout, "grad", unit)
    if unit.name in buffer_layout.early:
        actions += _from_disk(buffer_layout, "grad", unit) + _from_disk(buffer_layout, "states", unit)
        wanted = ["grad", "master", "moments", "work", "undo"]
        ahead = _on(buffer_layout, ActionKind.COMPUTE, "ahead", unit, wanted)
        actions += [replace(each, order=1 + update_order(buffer_layout.units).index(unit)) for each in ahead]
        actions += _to_disk(buffer_layout, "states", unit)
    return actions


def _update(buffer_layout: BufferLayout, unit: UnitShape) -> list[OffloadAction]:
    names = [param.name for param in unit.params if param.trainable]
    here = any(buffer_layout.updated_on_host(name) for name in names)
    fetched = any(buffer_layout.travels("grad", name) and not buffer_layout.updated_on_host(name) for name in names)
    actions = _from_disk(buffer_layout, "grad", unit) + _from_disk(buffer_layout, "states", unit)
    if any(buffer_layout.travels("moments", name) for name in names):
        actions += _on(buffer_layout, ActionKind.EVICT, "moments", unit, ["stage", "moments"])
        actions += _on(buffer_layout, ActionKind.FETCH, "moments", unit, ["stage", "moments"])
    if fetched:
        actions += _on(buffer_layout, ActionKind.FETCH, "grad", unit, ["grad"])
    if here:
        in_place = ["param"] if _in_place(buffer_layout, unit) else []
        actions += _on(
            buffer_layout,
            ActionKind.COMPUTE,
            "update",
            unit,
            [*GRADS, "master", "moments", "work", "undo", "stage", *in_place],
        )
    actions += _to_disk(buffer_layout, "states", unit)
    made = ["master", "undo"] if buffer_layout.own else ["work", "undo"] if buffer_layout.layout.remainder else ["work"]
    if any(buffer_layout.published(name) for name in names):
        actions += _on(buffer_layout, ActionKind.COMPUTE, "publish", unit, [*made, "param"])
    if spilled := _to_disk(buffer_layout, "work", unit):
        actions += [*spilled, *_on(buffer_layout, ActionKind.COMPUTE, "merge", unit, [*made, "param"])]
    if any(buffer_layout.updated_on_host(name) and not buffer_layout.on_host("param", name) for name in names):
        actions += _on(buffer_layout, ActionKind.FETCH, "work", unit, made)
    return actions + (_visit(buffer_layout, "states", unit) if buffer_layout.pairs("states", unit.name) else [])


def _in_place(buffer_layout: BufferLayout, unit: UnitShape) -> bool:
    """Return whether updates on the host write where parameters are fetched from."""
    spilled = any(param.trainable and buffer_layout.on_disk("param", param.name) for param in unit.params)
    return not (buffer_layout.waiting or spilled)


def _on(
    buffer_layout: BufferLayout, kind: ActionKind, what: str, unit: UnitShape, wanted: Sequence[str]
) -> list[OffloadAction]:
    """Return an action on a unit's host slots of the `wanted` kinds, or nothing if it has none."""
    used = tuple(slot for slot in buffer_layout.slots_of(unit.name) if slot.split(" ")[0] in wanted)
    return [OffloadAction(ActionKey(kind, what, unit.name), used)] if used else []


def _from_disk(buffer_layout: BufferLayout, what: str, unit: UnitShape) -> list[OffloadAction]:
    slots = tuple(slot for pair in buffer_layout.pairs(what, unit.name) for slot in (pair.disk, pair.host))
    return [OffloadAction(ActionKey(ActionKind.LOAD, what, unit.name), slots)] if slots else []


def _to_disk(buffer_layout: BufferLayout, what: str, unit: UnitShape) -> list[OffloadAction]:
    slots = tuple(slot for pair in buffer_layout.going(what, unit.name) for slot in (pair.host, pair.disk))
    return [OffloadAction(ActionKey(ActionKind.SPILL, what, unit.name), slots)] if slots else []


def _visit(buffer_layout: BufferLayout, what: str, unit: UnitShape) -> list[OffloadAction]:
    """Return the actions by which code outside the step reads or writes states, between steps."""
    slots = tuple(pair.host for pair in buffer_layout.pairs(what, unit.name))
    return [
        OffloadAction(ActionKey(ActionKind.COMPUTE, f"visit {what}", unit.name), slots),
        *_to_disk(buffer_layout, what, unit),
    ]


def update_order(units: Sequence[Unit], overlap: str = "forward") -> list[Unit]:
    """Return the units in the order in which their updates start.

    This is the order in which the next forward gathers them: the root, last in `units`, is first. With
    overlap="delayed", whose new parameters forward does not use yet, it is the order in which backward needs the
    gradients' slots again: the root is last, and of the others the last is first.
    """
    return [*units[-2::-1], *units[-1:]] if overlap == "delayed" else [*units[-1:], *units[:-1]]
