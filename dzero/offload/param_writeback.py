"""New working copies on their way to where forward finds them, and who has to wait for them.

    parameters live    a new working copy
    on the device      is fetched
    in host memory     is made in place, or copied there once nobody needs the old one
    on disk            is spilled

FSDP2 must not read a unit's shards before: the unit itself knows what to wait for (`Unit.pending`), whatever becomes of
the optimizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch

from dzero.offload.buffer_layout import BufferLayout
from dzero.offload.disk_staging import DiskStaging
from dzero.offload.executor import ScheduleExecutor, copy_all
from dzero.offload.param_prefetch import ParamPrefetch
from dzero.offload.schedule import ActionKey, ActionKind
from dzero.zero.shard import Sharded


class PendingWriteback(NamedTuple):
    """A parameter's new working copy `made` on the host, and its shard `local` where FSDP2 sees it; both flat."""

    name: str
    made: torch.Tensor
    local: torch.Tensor


class ParamWriteback:
    """Sends a unit's working copies; with overlap=delayed a step later."""

    def __init__(
        self, sharded: Sharded, buffer_layout: BufferLayout, executor: ScheduleExecutor, staging: DiskStaging
    ) -> None:
        self._buffer_layout, self._executor, self._staging = buffer_layout, executor, staging
        self._units = {unit.shape.name: unit for unit in sharded.units}
        self._delays = False
        self._held_back: list[tuple[str, Sequence[PendingWriteback]]] = []
        self.incoming: ParamPrefetch | None = None

    def await_update(self, unit: str) -> None:
        """A unit's update follows, which changes its parameters in place, or what they are made from."""
        if not self._buffer_layout.waiting:
            self._outdate(unit)
            self._units[unit].pending = partial(self._executor.wait, ActionKey(ActionKind.COMPUTE, "update", unit))

    def send(self, unit: str, work: Sequence[PendingWriteback]) -> None:
        """Working copies that the update makes, as soon as it has."""
        if self._delays:
            self.hold_back(unit, work)
        else:
            self._send(unit, work)

    def hold_back(self, unit: str, work: Sequence[PendingWriteback]) -> None:
        """Until the next step's updates, or `release`."""
        self._held_back.append((unit, [*work]))

    def held_back(self, unit: str) -> bool:
        """Whether something of a unit is."""
        return any(name == unit for name, _ in self._held_back)

    def begin(self, updates: int) -> None:
        """The updates of a step follow, after `updates` earlier ones: what was held back is due."""
        self.release()
        offload = self._buffer_layout.layout.offload
        self._delays = offload.mode == "delayed" and updates >= offload.delay_warmup_steps

    def release(self) -> None:
        """Send what was held back."""
        held_back, self._held_back = self._held_back, []
        for unit, work in held_back:
            self._send(unit, work)

    def _send(self, unit: str, work: Sequence[PendingWriteback]) -> None:
        buffer_layout, executor, keys = self._buffer_layout, self._executor, list[ActionKey]()
        spilled = any(buffer_layout.on_disk("param", each.name) for each in work)
        copies = [(self._home(each), each.made) for each in work if buffer_layout.published(each.name)]
        fetched = [(each.local, each.made) for each in work if not buffer_layout.on_host("param", each.name)]
        if buffer_layout.waiting and (spilled or copies):
            self._outdate(unit)
        if spilled:  # a load waits for it, by the disk slot
            self._spill(unit, work)
        if copies:
            keys.append(ActionKey(ActionKind.COMPUTE, "publish", unit))
            executor.compute(keys[-1], partial(copy_all, copies))
        if fetched:
            keys.append(ActionKey(ActionKind.FETCH, "work", unit))
            executor.move(keys[-1], fetched)
        if keys:
            self._units[unit].pending = partial(executor.wait, *keys)

    def _spill(self, unit: str, work: Sequence[PendingWriteback]) -> None:
        """As made; where not all of a unit's parameters were updated, together with the others from disk."""
        if self._buffer_layout.makes_all(unit, {each.name for each in work}):
            self._staging.spill("work", unit)
            return
        self._staging.load("param", unit)
        made = [(self._home(each), each.made) for each in work if self._buffer_layout.on_disk("param", each.name)]
        self._executor.compute(ActionKey(ActionKind.COMPUTE, "merge", unit), partial(copy_all, made))
        self._staging.spill("param", unit)

    def _home(self, work: PendingWriteback) -> torch.Tensor:
        return self._executor.view(self._buffer_layout.at[work.name, "param"], work.made.numel())

    def _outdate(self, unit: str) -> None:
        """Its parameters off the device are about to change."""
        if self.incoming is not None:
            self.incoming.outdate(unit)
        self._units[unit].await_update()
