"""The updates of a step, each where its master is stored; states stored elsewhere are moved there and back.

    master on     gradients and moments on the other side     working copy
    device        are fetched; moments are evicted again      updated in place
    host, disk    are evicted; moments are fetched again      sent to where forward reads it

Updates on the host run in the offload's lanes, in the order of `update_order`. On the device the states of the next
unit are fetched while this one is updated. Without offload everything is updated at once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import torch

from dzero.offload.buffer_layout import BufferLayout
from dzero.offload.build_schedule import update_order
from dzero.offload.lane import Move
from dzero.offload.manager import OffloadManager
from dzero.offload.param_writeback import PendingWriteback
from dzero.zero.sharded import Sharded

States = TypeVar("States", bound="UpdatedParam")
Run = Callable[[Sequence[Any]], None]


class UpdatedParam(Protocol):
    """Interface to a parameter with its states.

    Attributes:
        work: Tensor for the working copy if the update runs on the host, otherwise None.
    """

    name: str
    work: torch.Tensor | None

    def made(self, *, exchanged: bool) -> torch.Tensor | None:
        """Return the working copy that an update on the host made; of states in the unit's undo slot if `exchanged`."""

    @property
    def local(self) -> torch.Tensor:
        """The parameter's local shard, flat."""

    @property
    def moments(self) -> tuple[str, ...]:
        """Keys of the moments that are moved if they are stored apart from the master."""

    def flat(self, key: str) -> torch.Tensor:
        """Return this rank's part of a state, flat."""


@dataclass
class PendingUpdate(Generic[States]):
    """A parameter that is to be updated from its gradient.

    Attributes:
        stored: The parameter with its states.
        grad: Gradient [local shard, flat].
        moved: Moments by key that were moved to where the update runs.
        exchanged: Whether the update finds the states in the unit's undo slot.
    """

    stored: States
    grad: torch.Tensor
    moved: dict[str, torch.Tensor] = field(default_factory=dict)
    exchanged: bool = False


class OffloadedStep(Generic[States]):
    """Runs the updates of a step, unit by unit."""

    def __init__(self, sharded: Sharded, offload: OffloadManager) -> None:
        self._offload, self._buffer_layout = offload, offload.buffer_layout
        self._units = update_order([unit.shape for unit in sharded.units], sharded.layout.offload.mode)
        self._away = frozenset[str]().union(*updated_apart(self._buffer_layout))

    def start(
        self, pending: dict[str, PendingUpdate[States]], run: Run, updates: int, done: Collection[str] = ()
    ) -> None:
        """Start the updates of a step; those on the host may continue after this returns.

        Args:
            pending: Updates by parameter name.
            run: Updates parameters whose states are all where it runs, in a lane of the host or in this thread.
            updates: Number of earlier updates, including those of the run that a loaded state comes from.
            done: Names of parameters, in whole units, that were updated early; only their working copies are sent.
        """
        self._offload.begin_updates(updates)
        at_home = [each for name, each in pending.items() if name not in self._away]
        away = pending.keys() & self._away
        by_unit = {
            unit.name: [pending[each.name] for each in unit.params if each.name in away]
            for unit in (self._units if away else ())
        }
        for unit, of_unit in by_unit.items():
            if on_host := [each for each in of_unit if self._buffer_layout.updated_on_host(each.stored.name)]:
                if any(each.stored.name not in done for each in on_host):
                    self._start_on_host(unit, on_host, run)
                self._send_work(unit, on_host)
                self._put_moments_back(unit, on_host)
        if at_home:
            run(at_home)
        on_device = {
            unit: here
            for unit, of_unit in by_unit.items()
            if (here := [each for each in of_unit if not self._buffer_layout.updated_on_host(each.stored.name)])
        }
        self._update_on_device(on_device, run)
        self._offload.end_step()

    def _start_on_host(self, unit: str, pending: list[PendingUpdate[States]], run: Run) -> None:
        offload = self._offload
        grads: list[Move] = []
        moments: list[Move] = []
        exchanged = offload.undo.is_exchanged(unit)
        for each in pending:
            name, elems, each.exchanged = each.stored.name, each.grad.numel(), exchanged
            if not self._buffer_layout.on_host("grad", name):
                grads.append((offload.view(name, "grad", elems), each.grad))
                each.grad = grads[-1][0]
            if not self._buffer_layout.on_host("moments", name):
                each.moved = {key: offload.view(name, key, elems) for key in each.stored.moments}
                moments += [(staged, each.stored.flat(key)) for key, staged in each.moved.items()]
        if grads:
            offload.evict("grad", unit, grads)
        if moments:
            offload.evict("moments", unit, moments)
        offload.update(unit, partial(run, pending))

    def _send_work(self, unit: str, pending: list[PendingUpdate[States]]) -> None:
        exchanged = self._offload.undo.is_exchanged(unit)
        self._offload.send(unit, work_of([each.stored for each in pending], exchanged=exchanged))

    def _put_moments_back(self, unit: str, pending: list[PendingUpdate[States]]) -> None:
        moments = [(each.stored.flat(key), staged) for each in pending for key, staged in each.moved.items()]
        if moments:
            self._offload.fetch("moments", unit, moments)

    def _update_on_device(self, by_unit: dict[str, list[PendingUpdate[States]]], run: Run) -> None:
        """Update parameters whose gradients or moments are fetched for it, one unit ahead."""
        units = list(by_unit)
        for index, unit in enumerate(units):
            for coming in units[0 if index == 0 else index + 1 : index + 2]:
                self._fetch_for_update(coming, by_unit[coming])
            self._offload.wait_for_fetched(unit)
            run(by_unit[unit])
            back = [(each.stored.flat(key), moved) for each in by_unit[unit] for key, moved in each.moved.items()]
            if back:
                self._offload.put_back(unit, back)

    def _fetch_for_update(self, unit: str, pending: list[PendingUpdate[States]]) -> None:
        grads: list[Move] = []
        moments: list[Move] = []
        for each in pending:
            if self._buffer_layout.on_host("grad", each.stored.name):
                grads.append((torch.empty_like(each.grad, device=each.stored.local.device), each.grad))
                each.grad = grads[-1][0]
            if self._buffer_layout.on_host("moments", each.stored.name):
                device = each.stored.local.device
                each.moved = {
                    key: torch.empty_like(each.stored.flat(key), device=device) for key in each.stored.moments
                }
                moments += [(moved, each.stored.flat(key)) for key, moved in each.moved.items()]
        if grads:
            self._offload.fetch_for_update("grad", unit, grads)
        if moments:
            self._offload.fetch_for_update("moments", unit, moments)


def updated_apart(buffer_layout: BufferLayout) -> list[set[str]]:
    """Return the parameters of each unit that are updated apart from other units, since a state is off the device."""
    return [
        {
            param.name
            for param in unit.params
            if any(buffer_layout.on_host(kind, param.name) for kind in ("grad", "master", "moments"))
        }
        for unit in buffer_layout.units
    ]


def device_of(stored: UpdatedParam) -> torch.device:
    """Return the device on which a parameter is updated."""
    return (stored.local if stored.work is None else stored.work).device


def work_of(stored: Sequence[UpdatedParam], *, exchanged: bool = False) -> list[PendingWriteback]:
    """Return the working copies that the updates write on the host; `exchanged` is that of `UpdatedParam.made`."""
    made = [(each, each.made(exchanged=exchanged)) for each in stored]
    return [PendingWriteback(each.name, work, each.local) for each, work in made if work is not None]
