"""Staging of states on disk: the LOAD and SPILL actions of a schedule.

A turn slot on the host holds the bytes of one unit at a time. `DiskStaging` records which one, in the order in which
actions are started, and does not load what a slot still holds. A speculative update spills a unit's new states to spare
slots on disk. They become the unit's states when the update is committed. Until then no old state is overwritten.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from dzero.offload.buffer_layout import BufferLayout, BufferSlice, SlotPair, spare_of
from dzero.offload.disk import DiskStore
from dzero.offload.executor import ScheduleExecutor
from dzero.offload.schedule import ActionKey, ActionKind


class DiskStaging:
    """Moves units between `store` and the host slots of `executor`; must be used by one thread."""

    def __init__(self, buffer_layout: BufferLayout, executor: ScheduleExecutor, store: DiskStore | None) -> None:
        self._buffer_layout, self._executor, self.store = buffer_layout, executor, store
        self._held: dict[str, str] = {}
        self._swapped: set[str] = set()
        self._early: dict[str, set[str]] = {}

    def load(self, what: str, unit: str) -> None:
        """Start loading the slots of `BufferLayout.pairs`, except those that still hold the unit."""
        pairs = self._buffer_layout.pairs(what, unit)
        missing = [(pair, self._piece(pair)) for pair in pairs if self._held.get(pair.host) != pair.disk]
        if missing:
            self._start(ActionKind.LOAD, what, unit, missing)
        self.hold(what, unit)

    def spill(self, what: str, unit: str, *, early: bool = False, exchanged: bool = False) -> None:
        """Start writing a unit's host slots to disk.

        Args:
            what: As in `BufferLayout.pairs`.
            unit: Name of the unit.
            early: Whether to write to the spare slots, until `keep` or `drop`.
            exchanged: Whether the contents of slots that an update overwrites are in the unit's undo slot.
        """
        pairs = self._buffer_layout.going(what, unit)
        if not pairs:
            return
        if early:
            self._early[unit] = {pair.disk for pair in pairs}
        moves = [(pair, self._piece(pair, other=early)) for pair in pairs]
        self._start(ActionKind.SPILL, what, unit, moves, exchanged=exchanged)
        for pair in pairs:
            self._forget({slot for slot, disk in self._held.items() if disk == pair.disk and slot != pair.host})

    def keep(self, unit: str) -> None:
        """Make the states that were spilled early those of the unit."""
        self._swapped ^= self._early.pop(unit, set())

    def drop(self, unit: str) -> None:
        """Discard the states that were spilled early."""
        early = self._early.pop(unit, set())
        self._forget({slot for slot, disk in self._held.items() if disk in early})

    def hold(self, what: str, unit: str) -> None:
        """Record that the unit's host slots hold its values, or will when all started actions have ended."""
        self._held.update({pair.host: pair.disk for pair in self._buffer_layout.pairs(what, unit)})

    def visit(self, what: str, unit: str, work: Callable[[], Any], *, fresh: bool = False, changes: bool = True) -> Any:
        """Run `work` on a unit's host slots in the host's lane, and return its result.

        Args:
            what: As in `BufferLayout.pairs`.
            unit: Name of the unit.
            work: Function that reads or writes the slots.
            fresh: Whether `work` writes all of the slots, so that they need not be loaded.
            changes: Whether to write the slots back to disk afterwards.

        Raises:
            RuntimeError: States are requested between backward and step, when a speculative update has changed them.
        """
        if what == "states" and unit in self._early:
            raise RuntimeError(
                f"the states of {unit} were updated ahead of the step's decision (offload.overlap=backward): call "
                "optim.synchronize() before you read or write them between backward and step"
            )
        self.hold(what, unit) if fresh else self.load(what, unit)
        found: list[Any] = []  # not the future's result, which the executor would keep alive with the action
        visited = self._executor.compute(
            ActionKey(ActionKind.COMPUTE, f"visit {what}", unit), partial(_append, found, work)
        )
        if changes:
            self.spill(what, unit)
        visited.result()
        return found[0]

    def _piece(self, pair: SlotPair, *, other: bool = False) -> str:
        return spare_of(pair.disk) if (pair.disk in self._swapped) != other else pair.disk

    def _forget(self, slots: set[str]) -> None:
        self._held = {slot: disk for slot, disk in self._held.items() if slot not in slots}

    def _start(
        self,
        kind: ActionKind,
        what: str,
        unit: str,
        moves: Sequence[tuple[SlotPair, str]],
        *,
        exchanged: bool = False,
    ) -> None:
        assert self.store is not None, "nothing is on disk"
        sizes = self.store.sizes
        undo = self._buffer_layout.undo_places[unit] if exchanged else {}
        buffers = {
            piece: self._executor.view(undo.get(pair.host, BufferSlice(pair.host, 0, torch.uint8, sizes[piece])))
            for pair, piece in moves
        }
        transfer = self.store.read if kind is ActionKind.LOAD else self.store.write
        self._executor.compute(
            ActionKey(kind, what, unit), partial(_all, transfer, buffers), sum(sizes[piece] for piece in buffers)
        )


@dataclass
class DiskStorage:
    """`TensorStorage` of one tensor in a unit's host slots, where `view` is the flat tensor."""

    staging: DiskStaging
    what: str
    unit: str
    view: torch.Tensor

    def get(self) -> torch.Tensor:
        """Return a copy of the elements, after all started actions on them."""
        copy: torch.Tensor = self.staging.visit(self.what, self.unit, self.view.clone, changes=False)
        return copy

    def put(self, flat: torch.Tensor) -> None:
        """Write the elements of `flat`, and the rest of the slot with them, to disk."""
        self.staging.visit(self.what, self.unit, partial(self.view.copy_, flat))


def _append(found: list[Any], work: Callable[[], Any]) -> None:
    with torch.no_grad():
        found.append(work())


def _all(transfer: Callable[[str, torch.Tensor], Future[None]], buffers: dict[str, torch.Tensor]) -> None:
    for done in [transfer(piece, buffer) for piece, buffer in buffers.items()]:
        done.result()
