"""What is in a checkpoint, or in a folder of them, as tables; and whether it is what was written."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dzero.checkpoint.errors import CheckpointError
from dzero.checkpoint.format import DTYPES, MANIFEST, StoredBox, data_name
from dzero.checkpoint.reader import Checkpoint
from dzero.checkpoint.store import CheckpointStore, is_there
from dzero.hardware import dtype_name, format_bytes, format_count
from dzero.utils.terminal import DAMAGED, OK, Table

UNKNOWN = "unknown"
UNREAD = "not verified"
OWN = "of a rank"
"""What ranks do not share: random generators, scales of 8-bit moments."""
TIERS = ("param", "grad", "master", "moments")
PRECISIONS = ("param", "master", "moments")
Progress = Callable[[int], None]


@dataclass(frozen=True)
class Inspected:
    """`tables` for people; `wrong`: what is damaged, a line each, nothing where all is well."""

    tables: list[Table]
    wrong: list[str]


def inspect(path: Path, *, verify: bool, progress: Progress = lambda count: None) -> Inspected:
    """A checkpoint, or all in a folder. verify: read everything; else only sizes are compared. progress: of bytes read.

    Raises CheckpointError for a checkpoint that cannot be opened, and for a folder without one.
    """
    if not is_there(path / MANIFEST):
        return _shelf(CheckpointStore(path), verify=verify, progress=progress)
    with Checkpoint(path, check_files=False) as checkpoint:
        wrong = _wrong(checkpoint, verify=verify, progress=progress)
        files = _files(checkpoint, wrong, sound=OK if verify else UNREAD)
        tables = [_summary(checkpoint), _contents(checkpoint), files, _settings(checkpoint)]
    return Inspected([table for table in tables if table.rows], [*filter(None, wrong)])


def bytes_of(path: Path) -> int:
    """What `inspect` reads to verify a checkpoint, or all in a folder; none of one that does not open."""
    paths = [path] if is_there(path / MANIFEST) else [path / name for name in CheckpointStore(path).names()]
    total = 0
    for each in paths:
        with suppress(CheckpointError), Checkpoint(each) as checkpoint:
            total += _bytes(checkpoint)
    return total


def _wrong(checkpoint: Checkpoint, *, verify: bool, progress: Progress) -> list[str]:
    """What is wrong with each rank's file; empty where nothing is known to be."""
    found = []
    for rank in range(checkpoint.manifest.ranks):
        try:
            checkpoint.check_size(rank)
            for count in checkpoint.verify_file(rank) if verify else ():
                progress(count)
            found.append("")
        except CheckpointError as error:
            found.append(str(error))
    return found


def _summary(checkpoint: Checkpoint) -> Table:
    state, config = checkpoint.manifest.state, _config(checkpoint)
    owners = {name.partition(".")[2]: name for name in checkpoint.names if name.startswith(("master.", "param."))}
    elems = sum(math.prod(checkpoint.part(name).shape) for name in owners.values())
    rows = (
        ("step", str(checkpoint.manifest.step)),
        ("saved", _when(checkpoint)),
        ("run", checkpoint.manifest.run[:8] or UNKNOWN),
        ("ranks", str(checkpoint.manifest.ranks)),
        ("model", _at(state, "extra", "model", "kind")),
        ("parameters", f"{format_count(elems)} in {len(owners)} tensors"),
        ("size", format_bytes(_bytes(checkpoint))),
        ("optimizer", _at(state, "optim", "rule")),
        ("stage", _at(config, "zero", "stage")),
        ("tiers", ", ".join(f"{kind} {_at(config, 'offload', kind)}" for kind in TIERS)),
        ("precision", ", ".join(f"{kind} {_at(config, 'precision', kind)}" for kind in PRECISIONS)),
    )
    return Table(f"checkpoint {checkpoint.path}", ("what", "value"), rows, left=2)


def _contents(checkpoint: Checkpoint) -> Table:
    """A row per kind of tensor and dtype."""
    parts: dict[tuple[str, str], list[StoredBox]] = {}
    for index in checkpoint.indexes:
        for part in index.parts.values():
            kind = OWN if part.of is None else part.of.partition(".")[0]
            parts.setdefault((_shown(kind), dtype_name(DTYPES[part.dtype])), []).append(part)
    rows = []
    for (kind, dtype), found in sorted(parts.items()):
        tensors = len({part.of for part in found}) if kind != OWN else len(found)
        elems, count = sum(part.box.elems for part in found), sum(part.end - part.start for part in found)
        rows.append((kind, dtype, str(tensors), format_count(elems), format_bytes(count)))
    return Table("contents", ("kind", "dtype", "tensors", "elements", "bytes"), tuple(rows), left=2)


def _files(checkpoint: Checkpoint, wrong: list[str], *, sound: str) -> Table:
    rows = [
        (data_name(index.rank), DAMAGED if why else sound, str(len(index.parts)), format_bytes(index.file_bytes))
        for index, why in zip(checkpoint.indexes, wrong, strict=True)
    ]
    return Table("files", ("file", "state", "parts", "size"), tuple(rows), left=2)


def _settings(checkpoint: Checkpoint) -> Table:
    """A row per group."""
    rows = []
    for group, values in _config(checkpoint).items():
        keys = values if isinstance(values, dict) else {"": values}
        rows.append((_shown(group), " ".join(f"{key}={value}".lstrip("=") for key, value in keys.items())))
    shown = tuple((group, _shown(values)) for group, values in rows)
    return Table("settings of the run that saved it", ("group", "settings"), shown, left=2)


def _shelf(shelf: CheckpointStore, *, verify: bool, progress: Progress) -> Inspected:
    """A row per checkpoint."""
    rows, wrong, latest = list[tuple[str, ...]](), list[str](), None
    try:
        latest = shelf.latest()
    except CheckpointError as error:
        wrong.append(str(error))
    for name in shelf.names():
        told = ("", "", "", "", "")
        try:
            with Checkpoint(shelf.path / name, check_files=False) as checkpoint:
                manifest = checkpoint.manifest
                run, size = manifest.run[:8] or UNKNOWN, format_bytes(_bytes(checkpoint))
                told = str(manifest.step), str(manifest.ranks), size, _when(checkpoint), run
                found = [*filter(None, _wrong(checkpoint, verify=verify, progress=progress))]
        except CheckpointError as error:
            found = [str(error)]
        wrong += found
        rows.append((name, DAMAGED if found else OK if verify else UNREAD, "latest" if name == latest else "", *told))
    rows += [(name, "unfinished", "", "", "", "", "", "") for name in shelf.unfinished()]
    if not rows and not wrong:
        raise CheckpointError(str(shelf.path), "no checkpoint is in it: name one's folder, or the folder above")
    header = ("name", "state", "", "step", "ranks", "size", "saved", "run")
    return Inspected([Table(f"checkpoints in {shelf.path}", header, tuple(rows), left=3)], wrong)


def _bytes(checkpoint: Checkpoint) -> int:
    """Of the ranks' files."""
    return sum(index.file_bytes for index in checkpoint.indexes)


def _when(checkpoint: Checkpoint) -> str:
    """As the run said, else the file's date."""
    if (said := _at(checkpoint.manifest.state, "extra", "saved")) != UNKNOWN:
        return said
    changed = (checkpoint.path / MANIFEST).stat().st_mtime
    return f"{datetime.fromtimestamp(changed, UTC).isoformat(timespec='seconds')} (date of its manifest)"


def _config(checkpoint: Checkpoint) -> dict[str, Any]:
    """Of the run that saved it; empty where it was none of train.py's."""
    extra = checkpoint.manifest.state.get("extra")
    config = extra.get("config") if isinstance(extra, dict) else None
    return config if isinstance(config, dict) else {}


def _at(tree: Any, *keys: str) -> str:
    """What is there in plain JSON, for people."""
    for key in keys:
        if not isinstance(tree, dict) or key not in tree:
            return UNKNOWN
        tree = tree[key]
    return _shown(tree)


def _shown(value: Any) -> str:
    """A terminal obeys no character that a file brought."""
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in str(value))
