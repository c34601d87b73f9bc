"""What a training loop uses: save now and then, resume at the start."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from dzero.checkpoint.agreement import Agreement
from dzero.checkpoint.config import CheckpointConfig
from dzero.checkpoint.contents import Checkpoint
from dzero.checkpoint.errors import CheckpointError
from dzero.checkpoint.folder import Shelf
from dzero.checkpoint.format import MANIFEST, NAMES, Part
from dzero.checkpoint.saver import Saver
from dzero.checkpoint.states import Put, States
from dzero.optim.master import MasterOptimizer
from dzero.zero.shard import Sharded

AUTO, LOCAL = "auto", "local."


@dataclass(frozen=True)
class Resumed:
    """What came out of a checkpoint besides the states: `local` only where as many ranks saved it. `notes`: for the
    log."""

    path: Path
    step: int
    extra: dict[str, Any]
    local: dict[str, torch.Tensor] | None
    notes: list[str]


class Checkpoints:
    """Of a sharded model and its optimizer. Collective, as `Saver`: every rank makes one and calls the same methods.

    checkpoints = Checkpoints(CheckpointConfig(folder="checkpoints"), sharded, optim)
    extra = checkpoints.resume("auto")                # None where there is nothing to resume from
    checkpoints.save(step, {"schedule": …})           # returns when training may go on
    checkpoints.finish()                              # the last one is whole, and verified
    """

    def __init__(self, config: CheckpointConfig, sharded: Sharded, optim: MasterOptimizer) -> None:
        self.config, self._optim, self._shares = config, optim, sharded.layout.shares > 1
        self._states = States(sharded, optim)
        self._saver: Saver | None = None
        with ExitStack() as self._undo:
            self._ranks = Agreement(config.folder)
            self._undo.callback(self._ranks.close)
            if config.every is not None:
                self._open().prepare(self._states.parts())
            self._undo = self._undo.pop_all()

    def _open(self) -> Saver:
        """Take the folder for this run's saves."""
        if self._saver is None:
            self._saver = self._undo.enter_context(Saver(self.config, self._ranks))
        return self._saver

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._undo.close()

    def save(self, step: int, extra: dict[str, Any], local: Mapping[str, torch.Tensor] | None = None) -> None:
        """Save everything as it is now. `extra`: plain JSON, rank 0's counts; `local`: small tensors of this rank.

        Raises CheckpointError for the save before this one.
        """
        self._optim.await_updates()
        own = {f"{LOCAL}{name}": tensor for name, tensor in (local or {}).items()}

        def write(put: Put) -> None:
            self._states.write(put)
            for name, tensor in own.items():
                put(name, tensor)

        parts = self._states.parts() | {name: _own(tensor) for name, tensor in own.items()}
        self._open().save(step, parts, write, {"optim": self._states.scalars(), "extra": extra})

    def finished(self) -> str | None:
        """The name of a checkpoint that became whole since the last call. Raises CheckpointError if it failed."""
        return None if self._saver is None else self._saver.finished()

    def resume(self, which: str) -> Resumed | None:
        """Become what a checkpoint holds: `auto` for the latest in the folder, None where there is none; or its folder.

        Raises CheckpointError on all ranks alike; also for a save that was under way, which it waits for.
        """
        self.finish()
        path, notes = self._find(which)
        if path is None:
            return None
        found: list[Resumed] = []

        def take() -> str:
            """This rank's part."""
            with Checkpoint(path) as checkpoint:
                manifest = checkpoint.manifest
                self._optim.synchronize()
                self._states.take(checkpoint, manifest.state["optim"])
                found.append(Resumed(path, manifest.step, manifest.state["extra"], self._local(checkpoint), notes))
            return ""

        self._ranks.agree(take)
        if self._shares:  # not before all have taken theirs; what overlap=delayed holds back stays so
            self._optim.synchronize()
        return found[0]

    def _find(self, which: str) -> tuple[Path | None, list[str]]:
        """Which checkpoint, the same on every rank, and what the log should say of it."""
        auto, notes = which == AUTO, list[str]()
        shelf = Shelf(self.config.folder if auto else which)

        def find() -> str:
            """Rank 0's choice."""
            if auto:
                return chosen(shelf, notes)
            return "" if os.path.lexists(shelf.path / MANIFEST) else shelf.latest() or ""

        name = self._ranks.agree(find if dist.get_rank() == 0 else str)[0]
        return None if auto and not name else shelf.path / name, notes

    def _local(self, checkpoint: Checkpoint) -> dict[str, torch.Tensor] | None:
        """What this rank saved of its own; None where another number of ranks did."""
        rank = dist.get_rank()
        if checkpoint.manifest.ranks != dist.get_world_size():
            return None
        entries = [entry for entry in checkpoint.indexes[rank].parts if entry.startswith(LOCAL)]
        return {k.removeprefix(LOCAL): v for k, v in checkpoint.read_entries(rank, entries).items()}

    def finish(self) -> str | None:
        """Wait for a save that is under way; the checkpoint's name. Raises CheckpointError."""
        return None if self._saver is None else self._saver.finish()


def _own(tensor: torch.Tensor) -> Part:
    shape = tuple(tensor.shape)
    return Part(None, NAMES[tensor.dtype], shape, (0,) * len(shape), shape, 0, 0)


def chosen(shelf: Shelf, notes: list[str]) -> str:
    """The latest, or the newest that opens where the pointer is lost; nothing where nothing was saved.

    Raises CheckpointError where something was saved and nothing opens: to start anew is for the user to choose.
    """
    try:
        if name := shelf.latest():
            return name
    except CheckpointError as error:
        notes.append(f"{error}; the newest checkpoint that opens is taken instead")
    for name in reversed(shelf.names()):
        try:
            with Checkpoint(shelf.path / name):
                return name
        except CheckpointError as error:
            notes.append(f"passed over: {error}")
    if notes:
        raise CheckpointError(str(shelf.path), f"no checkpoint opens; move it away to start anew. {'; '.join(notes)}")
    return ""
