"""Selection of the checkpoints in a folder that a run may resume from, may remove, and must not touch.

All decisions follow the lineage in the manifests (checkpoint/lineage.py). A checkpoint whose manifest cannot be read
belongs to no run: it is reported, and never removed.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from dzero.checkpoint.errors import CheckpointError
from dzero.checkpoint.lineage import Lineage
from dzero.checkpoint.store import STEP, CheckpointStore, Directory, read_manifest


class ListedCheckpoint(NamedTuple):
    """A checkpoint of a folder whose manifest could be read."""

    name: str
    step: int
    saved_ns: int
    lineage: Lineage


class ResumeOrigin(NamedTuple):
    """The checkpoint that a run resumed from."""

    path: Path
    step: int
    lineage: Lineage

    @classmethod
    def of(cls, path: Path) -> ResumeOrigin:
        """Read the origin from the manifest at `path`; raise `CheckpointError` if that fails."""
        with Directory(path) as folder:
            manifest = read_manifest(folder)
        return cls(path, manifest.step, manifest.origin)


def members(shelf: CheckpointStore) -> tuple[list[ListedCheckpoint], dict[str, CheckpointError]]:
    """Return the checkpoints of a folder, and by name the errors of manifests that cannot be read."""
    found, unreadable = list[ListedCheckpoint](), dict[str, CheckpointError]()
    for name in shelf.names():
        try:
            with Directory(shelf.path / name) as folder:
                manifest = read_manifest(folder)
        except CheckpointError as error:
            unreadable[name] = error
        else:
            found.append(ListedCheckpoint(name, manifest.step, manifest.saved_ns, manifest.origin))
    return found, unreadable


def candidates(shelf: CheckpointStore, notes: list[str]) -> list[str]:
    """Return the names of the checkpoints to resume from, the best first; empty if nothing was saved.

    The best is the checkpoint that the pointer names, or a newer one that continues it but that the pointer was not yet
    moved to. Its ancestors follow, the newest first. Without a pointer, the checkpoint that was saved last takes its
    place.

    Args:
        shelf: Folder of checkpoints.
        notes: List to which messages for the log are added.

    Raises:
        CheckpointError: If checkpoints exist but none can be opened, as only the user may decide to start from scratch.
    """
    pointer, (found, unreadable) = None, members(shelf)
    try:
        pointer = shelf.pointer()
    except CheckpointError as error:
        notes.append(f"{error}; the checkpoint that was saved last is taken instead")
    by_name = {member.name: member for member in found}
    if pointer is None:
        notes += [f"passed over: {error}" for error in unreadable.values()]
        if not found and notes:
            raise CheckpointError(
                str(shelf.path), f"no checkpoint opens; move it away to start anew. {'; '.join(notes)}"
            )
        if not found:
            return []
        best = max(found, key=_age)
        name, lineage = best.name, best.lineage
    else:
        newer = [error for name, error in unreadable.items() if step_of(name) > step_of(pointer.name)]
        notes += [f"passed over: {error}" for error in newer]
        name, lineage = pointer.name, pointer.origin
        if not lineage.run and name in by_name:
            lineage = by_name[name].lineage
    others = sorted((member for member in found if member.name != name), key=_age, reverse=True)
    if not lineage.run:  # saved before runs had ids, so only the time of the save orders them
        return [name, *(member.name for member in others if not member.lineage.run)]
    step = by_name[name].step if name in by_name else step_of(name)
    here, after = (len(lineage.ancestors), step), [each.name for each in others if _descends(each, lineage.run, step)]
    before = [(place, saved_ns, each) for place, saved_ns, each in _along(lineage, others) if place <= here]
    return [*after, name, *(each for _, _, each in reversed(before))]


def keep(shelf: CheckpointStore, count: int, lineage: Lineage) -> list[str]:
    """Remove the oldest checkpoints of a lineage except `count`, never the latest; return the names of those removed.

    Checkpoints of other runs and branches, and unreadable ones, are neither removed nor counted.
    """
    own, latest = _along(lineage, members(shelf)[0]), shelf.latest()
    going = [name for _, _, name in own[: max(0, len(own) - count)] if name != latest]
    for name in going:
        shelf.remove(name)
    return going


def refuse_foreign(shelf: CheckpointStore, lineage: Lineage, origin: ResumeOrigin | None) -> None:
    """Raise `CheckpointError` if a run of `lineage` would save beside checkpoints of another run.

    A run that resumed from a checkpoint in this folder may save there, because it chose among them.
    """
    if origin is not None and os.path.realpath(origin.path.parent) == os.path.realpath(shelf.path):
        return
    found, unreadable = members(shelf)
    foreign = [each for each in found if lineage.position(each.lineage.run, each.step) is None]
    if not foreign and not unreadable:
        return
    newest = max(foreign, key=_age).name if foreign else max(unreadable)
    runs = {each.lineage.run[:8] or "without an id" for each in foreign}
    whose = f" (run {', '.join(sorted(runs))})" if runs else ""
    raise CheckpointError(
        str(shelf.path),
        f"it holds {len(foreign) + len(unreadable)} checkpoints of another run{whose}, the newest {newest}; none was "
        "touched: resume=auto goes on from them, checkpoint.folder=NEW saves in a folder of this run's own",
    )


def step_of(name: str) -> int:
    """Return the step in a checkpoint's name."""
    match = STEP.fullmatch(name)
    assert match is not None
    return int(match[1])


def _age(member: ListedCheckpoint) -> tuple[int, int, int]:
    match = STEP.fullmatch(member.name)
    assert match is not None
    return member.saved_ns, member.step, int(match[2] or 0)


def _along(lineage: Lineage, found: list[ListedCheckpoint]) -> list[tuple[tuple[int, int], int, str]]:
    """Return position, time of the save and name of the checkpoints in a lineage, in its order."""
    own = [(lineage.position(each.lineage.run, each.step), each.saved_ns, each.name) for each in found]
    return sorted((place, saved_ns, name) for place, saved_ns, name in own if place is not None)


def _descends(member: ListedCheckpoint, run: str, step: int) -> bool:
    """Return whether the checkpoint continues from `run` at `step`, directly or not."""
    if member.lineage.run == run:
        return member.step > step
    return any(each == run and last >= step for each, last in member.lineage.ancestors)
