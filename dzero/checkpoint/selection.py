"""Selection of the checkpoints in a folder that a run may resume from, may remove, and must not touch.

All decisions follow the lineage in the manifests (checkpoint/lineage.py). A checkpoint whose manifest cannot be read
belongs to no run: it is reported, and never removed.

The best checkpoint of a lineage is the one with the lowest held-out loss in its manifest; of equal ones, the first. No
file names it, so there is nothing that could contradict the checkpoints that are there.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path

from msgspec.structs import replace

from dzero.checkpoint.errors import CheckpointError
from dzero.checkpoint.format import Manifest
from dzero.checkpoint.lineage import Lineage
from dzero.checkpoint.store import STEP, CheckpointStore, manifest_at

EXTRA, HELD_OUT = "extra", "held_out_loss"
"""Keys of a manifest's `state` under which a training loop stores the held-out loss of its model, in nats."""


def members(shelf: CheckpointStore) -> tuple[dict[str, Manifest], dict[str, CheckpointError]]:
    """Return the manifests in a folder by name, and the errors of those that do not open.

    Of the large `state`, only the held-out loss in `extra` is kept.
    """
    found, unreadable = dict[str, Manifest](), dict[str, CheckpointError]()
    for name in shelf.names():
        try:
            manifest = manifest_at(shelf.path / name)
            loss = held_out_loss(manifest)
            found[name] = replace(manifest, state={} if loss is None else {EXTRA: {HELD_OUT: loss}})
        except CheckpointError as error:
            unreadable[name] = error
    return found, unreadable


def candidates(shelf: CheckpointStore, notes: list[str]) -> list[str]:
    """Return the names of the checkpoints to resume from, the best first, and add messages for the log to `notes`.

    The best is the checkpoint that the pointer names, or a newer one that continues it but that the pointer was not yet
    moved to. Its ancestors follow, the newest first. Without a pointer, the checkpoint that was saved last takes its
    place. Checkpoints of which none can be opened are an error: only the user may decide to start from scratch.
    """
    pointer, (found, unreadable) = None, members(shelf)
    try:
        pointer = shelf.pointer()
    except CheckpointError as error:
        notes.append(f"{error}; the checkpoint that was saved last is taken instead")
    if pointer is None:
        notes += [f"passed over: {error}" for error in unreadable.values()]
        if not found and notes:
            raise CheckpointError(
                str(shelf.path), f"no checkpoint opens; move it away to start anew. {'; '.join(notes)}"
            )
        if not found:
            return []
        name = _by_age(found)[-1]
        lineage = found[name].origin
    else:
        newer = [error for name, error in unreadable.items() if step_of(name) > step_of(pointer.name)]
        notes += [f"passed over: {error}" for error in newer]
        name, lineage = pointer.name, pointer.origin
        if not lineage.run and name in found:
            lineage = found[name].origin
    step = found[name].step if name in found else step_of(name)
    others = {each: found[each] for each in reversed(_by_age(found)) if each != name}
    if not lineage.run:  # saved before runs had ids, so only the time of the save orders them
        return [name, *(each for each, manifest in others.items() if not manifest.run)]
    here = len(lineage.ancestors), step
    after = [each for each, manifest in others.items() if _descends(manifest, lineage.run, step)]
    before = [each for place, _, each in _along(lineage, others) if place <= here]
    return [*after, name, *reversed(before)]


def keep(shelf: CheckpointStore, count: int, lineage: Lineage, *, keep_best: bool = False) -> list[str]:
    """Remove the oldest checkpoints of a lineage except `count`, never the latest; return the names of those removed.

    With `keep_best`, the best of the lineage stays too. Checkpoints of other runs and branches, and unreadable ones,
    are neither removed nor counted.
    """
    found = members(shelf)[0]
    own, stays = _along(lineage, found), {shelf.latest(), _best(lineage, found) if keep_best else None}
    going = [name for _, _, name in own[: max(0, len(own) - count)] if name not in stays]
    for name in going:
        shelf.remove(name)
    return going


def best(shelf: CheckpointStore, lineage: Lineage) -> str | None:
    """Return the checkpoint of the lowest held-out loss in a lineage; None if no checkpoint of it has a loss."""
    return _best(lineage, members(shelf)[0])


def held_out_loss(manifest: Manifest) -> float | None:
    """Return the held-out loss of a checkpoint in nats; None if the manifest has no finite one."""
    extra = manifest.state.get(EXTRA)
    loss = extra.get(HELD_OUT) if isinstance(extra, dict) else None
    if isinstance(loss, bool) or not isinstance(loss, int | float) or not math.isfinite(loss):
        return None
    return float(loss)


def refuse_foreign(shelf: CheckpointStore, lineage: Lineage, source: Path | None) -> None:
    """Raise `CheckpointError` if a run of `lineage` would save beside checkpoints of another run.

    A run that resumed from a checkpoint `source` in this folder may save there, because it chose among them.
    """
    if source is not None and os.path.realpath(source.parent) == os.path.realpath(shelf.path):
        return
    found, unreadable = members(shelf)
    foreign = {name: each for name, each in found.items() if lineage.position(each.run, each.step) is None}
    if not foreign and not unreadable:
        return
    newest = _by_age(foreign)[-1] if foreign else max(unreadable)
    runs = {each.run[:8] or "without an id" for each in foreign.values()}
    whose = f" (run {', '.join(sorted(runs))})" if runs else ""
    raise CheckpointError(
        str(shelf.path),
        f"it holds {len(foreign) + len(unreadable)} checkpoints of another run{whose}, the newest {newest}; none was "
        "touched: resume=auto goes on from them, checkpoint.folder=NEW saves in a folder of this run's own",
    )


def step_of(name: str) -> int:
    """Return the step in a checkpoint's name."""
    return _numbers(name)[0]


def _numbers(name: str) -> tuple[int, int]:
    """Return the step, and the attempt at it, in a checkpoint's name."""
    match = STEP.fullmatch(name)
    assert match is not None
    return int(match[1]), int(match[2] or 0)


def _by_age(found: Mapping[str, Manifest]) -> list[str]:
    """Return the names of checkpoints, the one that was saved last at the end."""
    return sorted(found, key=lambda name: (found[name].saved_ns, found[name].step, _numbers(name)[1]))


def _along(lineage: Lineage, found: Mapping[str, Manifest]) -> list[tuple[tuple[int, int], int, str]]:
    """Return position, time of the save and name of the checkpoints in a lineage, in its order."""
    own = [(lineage.position(each.run, each.step), each.saved_ns, name) for name, each in found.items()]
    return sorted((place, saved_ns, name) for place, saved_ns, name in own if place is not None)


def _best(lineage: Lineage, found: Mapping[str, Manifest]) -> str | None:
    losses = {name: held_out_loss(found[name]) for _, _, name in _along(lineage, found)}
    known = {name: loss for name, loss in losses.items() if loss is not None}
    return min(known, key=lambda name: known[name]) if known else None


def _descends(manifest: Manifest, run: str, step: int) -> bool:
    """Return whether the checkpoint continues from `run` at `step`, directly or not."""
    if manifest.run == run:
        return manifest.step > step
    return any(each == run and last >= step for each, last in manifest.lineage)
