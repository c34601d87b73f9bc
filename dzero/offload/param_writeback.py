"""Write-back of new working copies to where forward reads them, and the waits of their readers.

    parameters on   a new working copy
    device          is fetched
    host            is made in place, or copied there once nothing needs the old one
    disk            is spilled

FSDP2 must not read a unit's shards before they have their new values. The unit itself stores this wait
(`Unit.pending`), so that it outlasts the optimizer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch

from dzero.offload.buffer_layout import BufferLayout
from dzero.offload.disk_staging import DiskStaging
from dzero.offload.executor import ScheduleExecutor
from dzero.offload.lane import copy_all
from dzero.offload.param_prefetch import ParamPrefetch
from dzero.offload.schedule import ActionKey, ActionKind
from dzero.offload.undo import Undo
from dzero.zero.sharded import Sharded


class PendingWriteback(NamedTuple):
    """New working copy `made` of a parameter on the host, and its shard `local` as FSDP2 sees it; both flat."""

    name: str
    made: torch.Tensor
    local: torch.Tensor


class ParamWriteback:
    """Writes back the working copies of units; with overlap=delayed one step later."""

    def __init__(
        self,
        sharded: Sharded,
        buffer_layout: BufferLayout,
        executor: ScheduleExecutor,
        staging: DiskStaging,
        undo: Undo,
    ) -> None:
        self._buffer_layout, self._executor, self._staging, self._undo = buffer_layout, executor, staging, undo
        self._units = {unit.shape.name: unit for unit in sharded.units}
        self._delays = False
        self._held_back: list[tuple[str, Sequence[PendingWriteback]]] = []
        self.incoming: ParamPrefetch | None = None

    def await_update(self, unit: str) -> None:
        """Make readers of a unit wait for its next update, which changes parameters or their masters in place."""
        if not self._buffer_layout.waiting:
            self._outdate(unit)
            self._units[unit].pending = partial(self._executor.wait, ActionKey(ActionKind.COMPUTE, "update", unit))

    def send(self, unit: str, work: Sequence[PendingWriteback]) -> None:
        """Send working copies once the update has made them, or hold them back with overlap=delayed."""
        if self._delays:
            self.hold_back(unit, work)
        else:
            self._send(unit, work)

    def hold_back(self, unit: str, work: Sequence[PendingWriteback]) -> None:
        """Hold back working copies until the next step's updates, or until `release`."""
        self._held_back.append((unit, [*work]))

    def held_back(self, unit: str) -> bool:
        """Return whether working copies of a unit are held back."""
        return any(name == unit for name, _ in self._held_back)

    def begin(self, updates: int) -> None:
        """Begin a step's updates, after `updates` earlier ones: send what was held back."""
        self.release()
        offload = self._buffer_layout.layout.offload
        self._delays = offload.mode == "delayed" and updates >= offload.delay_warmup_steps

    def release(self) -> None:
        """Send what was held back: by turns the last unit, which forward needs first, and the first to be updated."""
        held_back, self._held_back = deque(self._held_back), []
        while held_back:
            self._send(*held_back.pop())
            if held_back:
                self._send(*held_back.popleft())

    def _send(self, unit: str, work: Sequence[PendingWriteback]) -> None:
        buffer_layout, executor, keys = self._buffer_layout, self._executor, list[ActionKey]()
        spilled = any(buffer_layout.on_disk("param", each.name) for each in work)
        copies = [(self._home(each), each.made) for each in work if buffer_layout.published(each.name)]
        fetched = [(each.local, each.made) for each in work if not buffer_layout.on_host("param", each.name)]
        if buffer_layout.waiting and (spilled or copies):
            self._outdate(unit)
        if spilled:  # a later load waits for it, as both use the disk slot
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
        """Spill new working copies; if the update made only a part of a unit's, merge them with the rest first."""
        if self._buffer_layout.makes_all(unit, {each.name for each in work}):
            self._staging.spill("work", unit, exchanged=self._undo.is_exchanged(unit))
            return
        self._staging.load("param", unit)
        made = [(self._home(each), each.made) for each in work if self._buffer_layout.on_disk("param", each.name)]
        self._executor.compute(ActionKey(ActionKind.COMPUTE, "merge", unit), partial(copy_all, made))
        self._staging.spill("param", unit)

    def _home(self, work: PendingWriteback) -> torch.Tensor:
        return self._executor.view(self._buffer_layout.at[work.name, "param"], work.made.numel())

    def _outdate(self, unit: str) -> None:
        """Wait for earlier updates of a unit, and drop copies of its parameters, which are about to change."""
        if self.incoming is not None:
            self.incoming.outdate(unit)
        self._units[unit].await_update()
