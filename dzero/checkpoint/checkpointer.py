"""What a training loop uses: save now and then, resume at the start."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from dzero.checkpoint.config import CheckpointConfig
from dzero.checkpoint.errors import CheckpointDamaged, CheckpointError
from dzero.checkpoint.format import MANIFEST, NAMES, StoredBox
from dzero.checkpoint.manifest_types import check_state
from dzero.checkpoint.rank_consensus import RankConsensus
from dzero.checkpoint.reader import Checkpoint
from dzero.checkpoint.saver import Saver, all_see
from dzero.checkpoint.selection import ResumeOrigin, candidates, step_of
from dzero.checkpoint.states import CheckpointStates, Put
from dzero.checkpoint.store import CheckpointStore, is_there
from dzero.optim.base import MasterOptimizer
from dzero.streams import this_device
from dzero.zero.shard import Sharded

AUTO, LOCAL = "auto", "local."
STRICT = "resume.strict=true stops here"


@dataclass(frozen=True)
class Resumed:
    """A checkpoint's contents besides the states.

    `local`: only where as many ranks saved it. `notes`, on rank 0: what was damaged and therefore passed over, for the
    user to read.
    """

    path: Path
    step: int
    extra: dict[str, Any]
    local: dict[str, torch.Tensor] | None
    notes: list[str]


class Checkpointer:
    """Of a sharded model and its optimizer. Collective, as `Saver`: every rank makes one and calls the same methods.

    checkpoints = Checkpoints(CheckpointConfig(folder="checkpoints"), sharded, optim)
    extra = checkpoints.resume("auto")                # None where there is nothing to resume from
    checkpoints.save(step, {"schedule": …})           # returns when training may go on
    checkpoints.finish()                              # the last one is whole, and verified
    """

    def __init__(self, config: CheckpointConfig, sharded: Sharded, optim: MasterOptimizer) -> None:
        self.config, self._optim, self._shares = config, optim, sharded.layout.shares > 1
        self._states = CheckpointStates(sharded, optim)
        self._device = this_device(torch.device(sharded.mesh.device_type))
        self._saver: Saver | None = None
        self._origin: ResumeOrigin | None = None
        self._begun = False
        with ExitStack() as self._undo:
            self._ranks = RankConsensus(config.folder)
            self._undo.callback(self._ranks.close)
            if config.every is not None:
                self._open().prepare(self._states.parts())
            self._undo = self._undo.pop_all()

    def _open(self) -> Saver:
        """Take the folder for this run's saves."""
        if self._saver is None:
            self._saver = self._undo.enter_context(Saver(self.config, self._ranks, self._device))
        return self._saver

    def begin(self) -> None:
        """Begin a run in the folder, one that goes on from what was resumed, if anything was. Collective.

        `resume` and the first save do it where it is still to do. Raises CheckpointError where the folder holds
        checkpoints of another run, before anything in it changes.
        """
        self._open().claim(self._origin)
        self._begun = True

    def __enter__(self) -> Checkpointer:
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

        if not self._begun:
            self.begin()
        parts = self._states.parts() | {name: _own(tensor) for name, tensor in own.items()}
        self._open().save(step, parts, write, {"optim": self._states.scalars(), "extra": extra})

    def finished(self) -> str | None:
        """The name of a checkpoint that became whole since the last call. Raises CheckpointError if it failed."""
        return None if self._saver is None else self._saver.finished()

    def resume(self, which: str, *, strict: bool = False) -> Resumed | None:
        """Become what a checkpoint holds: `auto` for the latest in the folder, None where there is none; or its folder.

        Where the latest is damaged or gone, the newest before it that is whole is taken, and `Resumed.notes` says so;
        `strict` raises instead. What is damaged stays where it is.

        Raises CheckpointError on all ranks alike; also for a save that was under way, which it waits for.
        """
        self.finish()
        shelf, auto, names = CheckpointStore(self.config.folder if which == AUTO else which), which == AUTO, list[str]()
        notes, tried = list[str](), list[str]()

        def offer() -> str:
            """Rank 0's choice."""
            if not names:
                is_one = not auto and is_there(shelf.path / MANIFEST)
                names.extend([""] if is_one else candidates(shelf, notes) or [""])
                if strict and notes:
                    raise CheckpointError("", "; ".join([*notes, STRICT]))
            if len(tried) < len(names):
                return names[len(tried)]
            what = "no checkpoint of this run is whole; move them away to start anew"
            raise CheckpointError(str(shelf.path), "; ".join([what, *notes]))

        while True:
            name = self._ranks.agree(offer if dist.get_rank() == 0 else str)[0]
            if auto and not name:
                return None
            found, wrong = self._take(shelf.path / name)
            if found is not None:
                break
            if strict or not name:
                raise CheckpointError("", f"{wrong}; {STRICT}" if name else wrong)
            tried.append(name)
            notes.append(f"PASSED OVER {shelf.path / name}: {wrong}")
        if tried:
            lost = step_of(tried[0]) - found.step
            notes.append(f"going on from {found.path} instead: {lost} steps before {tried[0]} are made again")
        self._origin, self._begun = ResumeOrigin.of(found.path), False
        if self._saver is not None:
            self.begin()
        return replace(found, notes=notes if dist.get_rank() == 0 else [])

    def _take(self, path: Path) -> tuple[Resumed | None, str]:
        """Become what the checkpoint at `path` holds; where it is damaged, what is wrong, and every state is undefined.

        Raises CheckpointError on all ranks for what is no damage.
        """
        self._optim.synchronize()
        found: list[Resumed] = []

        def take() -> str:
            """This rank's part; what is damaged."""
            try:
                with Checkpoint(path) as checkpoint:
                    manifest = checkpoint.manifest
                    check_state(str(path / MANIFEST), manifest.state)
                    self._states.take(checkpoint, manifest.state["optim"])
                    found.append(Resumed(path, manifest.step, manifest.state["extra"], self._local(checkpoint), []))
            except CheckpointDamaged as error:
                return f"rank {dist.get_rank()}: {error}"
            return ""

        all_see(self._ranks, path, lambda: is_there(path / MANIFEST))
        wrong = [row for row in self._ranks.agree(take) if row]
        if wrong:
            self._states.abandon()
            return None, wrong[0]
        if self._shares:  # not before all have taken theirs; what overlap=delayed holds back stays so
            self._optim.synchronize()
        return found[0], ""

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


def _own(tensor: torch.Tensor) -> StoredBox:
    shape = tuple(tensor.shape)
    return StoredBox(None, NAMES[tensor.dtype], shape, (0,) * len(shape), shape, 0, 0)
