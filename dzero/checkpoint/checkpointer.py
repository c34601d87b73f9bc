"""Checkpointing for a training loop: periodic saves, and resuming at the start."""

from __future__ import annotations

import json
import threading
import weakref
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dzero.checkpoint.config import CheckpointConfig
from dzero.checkpoint.errors import CheckpointDamaged, CheckpointError
from dzero.checkpoint.format import MANIFEST, StoredBox
from dzero.checkpoint.lineage import Lineage
from dzero.checkpoint.manifest_types import check_state
from dzero.checkpoint.rank_consensus import RankConsensus
from dzero.checkpoint.reader import Checkpoint
from dzero.checkpoint.saver import Saver, all_see
from dzero.checkpoint.selection import best, candidates, step_of
from dzero.checkpoint.states import CheckpointStates, Put
from dzero.checkpoint.store import CheckpointStore, is_there, manifest_at
from dzero.optim.base import MasterOptimizer
from dzero.streams import this_device
from dzero.zero.sharded import Sharded, check_sharded

AUTO, LOCAL = "auto", "local."
STRICT = "resume.strict=true stops here"


@dataclass(frozen=True)
class Resumed:
    """Contents of a checkpoint other than the states of model and optimizer.

    Attributes:
        extra: JSON values that were given to `Checkpointer.save`.
        local: Tensors that this rank gave to `Checkpointer.save`; None if another number of ranks saved them.
        notes: On rank 0, messages for the user: damaged checkpoints that were passed over, settings that were
            overridden, and buffers that differed between the ranks of another mesh.
    """

    path: Path
    step: int
    extra: dict[str, Any]
    local: dict[str, torch.Tensor] | None
    notes: list[str]


class Checkpointer:
    """Saves and restores the states of a sharded model and its optimizer.

    Collective: every rank constructs one and calls the same methods.

    Args:
        config: Settings of the checkpoints.
        sharded: Sharded model.
        optim: Its optimizer.
        left_out: Names of frozen parameters that checkpoints do not hold, because the run that resumes loads them from
            where this one did.

    Example:
        with Checkpointer(CheckpointConfig(folder="checkpoints"), sharded, optim) as checkpoints:
            resumed = checkpoints.resume("auto")          # None if there is no checkpoint
            checkpoints.save(step, {"schedule": …})       # returns when training may continue
            checkpoints.finish()                          # the last checkpoint is complete and verified
    """

    def __init__(
        self, config: CheckpointConfig, sharded: Sharded, optim: MasterOptimizer, *, left_out: Collection[str] = ()
    ) -> None:
        if not isinstance(config, CheckpointConfig):
            raise TypeError(f"Checkpointer of {config!r}: give dzero.CheckpointConfig(folder=...), sharded, optim")
        check_sharded(sharded, "Checkpointer", "Checkpointer(config, sharded, optim)")
        if not isinstance(optim, MasterOptimizer):
            raise TypeError(
                f"Checkpointer with {type(optim).__name__}: give the optimizer of dzero that updates sharded"
            )
        self.config, self._optim, self._replica_shards = config, optim, sharded.layout.replica_shards > 1
        self._sharded = sharded
        self._states = CheckpointStates(sharded, optim, left_out)
        self._device = this_device(torch.device(sharded.mesh.device_type))
        self._saver: Saver | None = None
        self._lineage, self._begun = Lineage().resumed(0), False
        self._source: Path | None = None
        with ExitStack() as self._undo:
            self._ranks = RankConsensus(config.folder)
            self._undo.callback(self._ranks.close)
            if config.every is not None:
                self._open().prepare(self._states.parts(self._ranks.agree))
            self._undo = self._undo.pop_all()
        self._finalizer = weakref.finalize(self, self._undo.close)
        _open.add(self)

    def _open(self) -> Saver:
        """Create this run's `Saver`, which locks the folder, if it does not exist yet."""
        if self._saver is None:
            self._saver = self._undo.enter_context(Saver(self.config, self._ranks, self._device))
        return self._saver

    def begin(self) -> None:
        """Begin a run in the folder that continues from the resumed checkpoint, if any. Collective.

        `resume` and the first `save` call this where it has not happened yet.

        Raises:
            CheckpointError: If the folder holds checkpoints of another run. Nothing in the folder has changed then.
        """
        self._open().claim(self._lineage, self._source)
        self._begun = True

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, raised: type[BaseException] | None, *_: object) -> None:
        if raised is None:
            self.close()
        self._finalizer()

    def close(self) -> None:
        """Finish a save in progress, raising its error, and unlock the folder; leaving the context does so too."""
        try:
            self.finish()
        finally:
            self._finalizer()

    def save(self, step: int, extra: dict[str, Any], local: Mapping[str, torch.Tensor] | None = None) -> None:
        """Save all states as they are now. Collective.

        Residuals of `precision.feedback` are not saved but dropped, here as in a run that resumes.

        Args:
            step: Step that the states belong to.
            extra: Plain JSON values; those of rank 0 are saved.
            local: Small tensors of this rank.

        Raises:
            CheckpointError: If the save before this one failed, or this one cannot begin.
        """
        self._optim.await_updates()
        self._sharded.drop_residuals()
        own = {f"{LOCAL}{name}": tensor for name, tensor in (local or {}).items()}

        def parts() -> dict[str, StoredBox]:
            of_rank = {name: StoredBox.unplaced(None, each.dtype, tuple(each.shape)) for name, each in own.items()}
            return self._states.parts(self._ranks.agree) | of_rank

        def write(put: Put) -> None:
            self._states.write(put)
            for name, tensor in own.items():
                put(name, tensor)

        if not self._begun:
            self.begin()
        self._open().save(step, parts, write, {"optim": self._states.scalars(), "extra": extra})

    def finished(self) -> str | None:
        """Return the name of a newly completed checkpoint, or None; raise `CheckpointError` if the save failed."""
        return None if self._saver is None else self._saver.finished()

    def best(self) -> Path | None:
        """Return the checkpoint of the lowest held-out loss of this run and those that it continues. Collective.

        The loss is `extra["held_out_loss"]`, which was given to `save`. A save in progress is waited for. None is
        returned if no checkpoint of this run has a loss.
        """
        self.finish()
        shelf = CheckpointStore(self.config.folder)
        found = self._ranks.agree(lambda: best(shelf, self._lineage) or "" if dist.get_rank() == 0 else "")[0]
        return shelf.path / found if found else None

    def resume(self, which: str, *, strict: bool = False, override: Collection[str] = ()) -> Resumed | None:
        """Load the states of a checkpoint, after any save in progress has ended. Collective.

        Parameter groups get the settings that they were saved with, such as `lr`, `betas`, `weight_decay`, and those
        that schedules and callbacks keep there.

        If the latest checkpoint is damaged or missing, the newest intact one before it is loaded and `Resumed.notes`
        reports it. Damaged checkpoints stay in place.

        Args:
            which: Folder of a checkpoint, folder of checkpoints, or `auto` for the latest in the configured folder.
            strict: Raise instead of loading an older checkpoint than the latest.
            override: Settings of the parameter groups that stay as the optimizer has them, such as `["lr"]`, to
                change them in this run. `initial_lr`, from which schedules compute, stays with `lr`.

        Returns:
            None if `which` is `auto` and there is no checkpoint.

        Raises:
            CheckpointError: On all ranks alike, if no checkpoint can be loaded or the save in progress failed.
        """
        self.finish()
        shelf, auto = CheckpointStore(self.config.folder if which == AUTO else which), which == AUTO

        def offer() -> str:
            """Return the candidates, the best first, and messages about them, on rank 0."""
            notes: list[str] = []
            is_one = not auto and is_there(shelf.path / MANIFEST)
            names = [""] if is_one else candidates(shelf, notes) or [""]
            if strict and notes:
                raise CheckpointError("", "; ".join([*notes, STRICT]))
            return json.dumps([names, notes])

        names, notes = json.loads(self._ranks.agree(offer if dist.get_rank() == 0 else str)[0])
        if auto and names == [""]:
            return None
        for name in names:
            found, wrong = self._take(shelf.path / name, override)
            if found is not None:
                break
            if strict or not name:
                raise CheckpointError("", f"{wrong}; {STRICT}" if name else wrong)
            notes.append(f"PASSED OVER {shelf.path / name}: {wrong}")
        else:
            what = "no checkpoint of this run is whole; move them away to start anew"
            raise CheckpointError(str(shelf.path), "; ".join([what, *notes]))
        if name != names[0]:
            lost = step_of(names[0]) - found.step
            notes.append(f"going on from {found.path} instead: {lost} steps before {names[0]} are made again")
        resumed = manifest_at(found.path)
        self._lineage, self._source, self._begun = resumed.origin.resumed(resumed.step), found.path, False
        if self._saver is not None:
            self.begin()
        return replace(found, notes=[*notes, *found.notes] if dist.get_rank() == 0 else [])

    def _take(self, path: Path, override: Collection[str]) -> tuple[Resumed | None, str]:
        """Load the checkpoint at `path`; if it is damaged, return what is wrong and leave every state undefined.

        An error that is not damage is raised on all ranks.
        """
        self._optim.synchronize()
        self._sharded.drop_residuals()
        found: list[Resumed] = []

        def take() -> str:
            """Load this rank's states; return what is damaged."""
            try:
                with Checkpoint(path) as checkpoint:
                    manifest = checkpoint.manifest
                    check_state(str(path / MANIFEST), manifest.state)
                    notes = self._states.take(checkpoint, manifest.state["optim"], override)
                    notes += [f"resume: {key} of the parameter groups is this run's" for key in override]
                    found.append(Resumed(path, manifest.step, manifest.state["extra"], self._local(checkpoint), notes))
            except CheckpointDamaged as error:
                return f"rank {dist.get_rank()}: {error}"
            return ""

        all_see(self._ranks, path, lambda: is_there(path / MANIFEST))
        wrong = [row for row in self._ranks.agree(take) if row]
        if wrong:
            self._states.abandon()
            return None, wrong[0]
        if (
            self._replica_shards
        ):  # only after every rank has loaded; values that overlap=delayed holds back stay held back
            self._optim.synchronize()
        return found[0], ""

    def _local(self, checkpoint: Checkpoint) -> dict[str, torch.Tensor] | None:
        """Return the tensors that this rank saved for itself; None if another number of ranks saved."""
        rank = dist.get_rank()
        if checkpoint.manifest.ranks != dist.get_world_size():
            return None
        entries = [entry for entry in checkpoint.indexes[rank].parts if entry.startswith(LOCAL)]
        return {k.removeprefix(LOCAL): v for k, v in checkpoint.read_entries(rank, entries).items()}

    def finish(self) -> str | None:
        """Wait for a save in progress; return the checkpoint's name or None; raise `CheckpointError` if it failed."""
        return None if self._saver is None else self._saver.finish()


_open: weakref.WeakSet[Checkpointer] = weakref.WeakSet()


def _close_all() -> None:
    for each in [*_open]:
        each._finalizer()


# At the end of the program, for those that nobody closes: before pools of threads take no more work, which a save in
# progress needs. `atexit` would come after that.
threading._register_atexit(_close_all)  # type: ignore[attr-defined]
