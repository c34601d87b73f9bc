"""Tables that describe a checkpoint, or a folder of them, and report damage."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dzero.checkpoint.errors import CheckpointError
from dzero.checkpoint.format import DTYPES, MANIFEST, StoredBox, data_name
from dzero.checkpoint.reader import Checkpoint
from dzero.checkpoint.selection import held_out_loss
from dzero.checkpoint.store import CheckpointStore, is_there
from dzero.hardware import dtype_name, format_bytes, format_count
from dzero.utils.terminal import DAMAGED, OK, Table

UNKNOWN = "unknown"
UNREAD = "not verified"
OWN = "of a rank"
"""Kind of entries that ranks do not share: random generators, and scales of 8-bit moments."""
TIERS = ("param", "grad", "master", "moments")
PRECISIONS = ("param", "master", "moments")
Progress = Callable[[int], None]


Inspected = tuple[list[Table], list[str]]
"""Tables to print, and one line for each damaged file or checkpoint."""


def inspect(path: Path, *, verify: bool, progress: Progress = lambda count: None) -> Inspected:
    """Describe a checkpoint, or all checkpoints in a folder; raise `CheckpointError` if there is none that opens.

    With `verify`, everything is read and compared with its checksums, and `progress` is called with the bytes of each
    block. Otherwise only the sizes of files are compared.
    """
    if not is_there(path / MANIFEST):
        return _shelf(CheckpointStore(path), verify=verify, progress=progress)
    with Checkpoint(path, check_files=False) as checkpoint:
        wrong = _wrong(checkpoint, verify=verify, progress=progress)
        files = _files(checkpoint, wrong, sound=OK if verify else UNREAD)
        tables = [_summary(checkpoint), _contents(checkpoint), files, _settings(checkpoint)]
    return [table for table in tables if table.rows], [*filter(None, wrong)]


def bytes_of(path: Path) -> int:
    """Return the bytes that `inspect` reads to verify `path`, without checkpoints that cannot be opened."""
    paths = [path] if is_there(path / MANIFEST) else [path / name for name in CheckpointStore(path).names()]
    total = 0
    for each in paths:
        with suppress(CheckpointError), Checkpoint(each) as checkpoint:
            total += _bytes(checkpoint)
    return total


def _wrong(checkpoint: Checkpoint, *, verify: bool, progress: Progress) -> list[str]:
    """Return what is wrong with each rank's file; an empty string if no error is found."""
    found = []
    for rank in range(checkpoint.manifest.ranks):
        try:
            checkpoint.files.check_size(rank)
            for count in checkpoint.files.verify(rank) if verify else ():
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
        ("held-out loss", _held_out(checkpoint)),
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
    """Build the table with one row per kind of tensor and dtype."""
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
    """Build the table with one row per group of settings."""
    rows = []
    for group, values in _config(checkpoint).items():
        keys = values if isinstance(values, dict) else {"": values}
        settings = " ".join(f"{key}={value}".lstrip("=") for key, value in keys.items())
        rows.append((_shown(group), _shown(settings)))
    return Table("settings of the run that saved it", ("group", "settings"), tuple(rows), left=2)


def _shelf(shelf: CheckpointStore, *, verify: bool, progress: Progress) -> Inspected:
    """Describe a folder with one row per checkpoint."""
    rows, wrong, latest = list[tuple[str, ...]](), list[str](), None
    try:
        latest = shelf.latest()
    except CheckpointError as error:
        wrong.append(str(error))
    for name in shelf.names():
        told = ("", "", "", "", "", "")
        try:
            with Checkpoint(shelf.path / name, check_files=False) as checkpoint:
                manifest = checkpoint.manifest
                run, size = manifest.run[:8] or UNKNOWN, format_bytes(_bytes(checkpoint))
                told = str(manifest.step), str(manifest.ranks), size, _when(checkpoint), run, _held_out(checkpoint)
                found = [*filter(None, _wrong(checkpoint, verify=verify, progress=progress))]
        except CheckpointError as error:
            found = [str(error)]
        wrong += found
        rows.append((name, DAMAGED if found else OK if verify else UNREAD, "latest" if name == latest else "", *told))
    rows += [(name, "unfinished", *("",) * 7) for name in shelf.unfinished()]
    if not rows and not wrong:
        raise CheckpointError(str(shelf.path), "no checkpoint is in it: name one's folder, or the folder above")
    header = ("name", "state", "", "step", "ranks", "size", "saved", "run", "held-out loss")
    return [Table(f"checkpoints in {shelf.path}", header, tuple(rows), left=3)], wrong


def _bytes(checkpoint: Checkpoint) -> int:
    """Return the total bytes of the ranks' files."""
    return sum(index.file_bytes for index in checkpoint.indexes)


def _held_out(checkpoint: Checkpoint) -> str:
    loss = held_out_loss(checkpoint.manifest)
    return "not evaluated" if loss is None else f"{loss:.4f}"


def _when(checkpoint: Checkpoint) -> str:
    """Return the time of the save as recorded by the run, or else the date of the manifest."""
    if (said := _at(checkpoint.manifest.state, "extra", "saved")) != UNKNOWN:
        return said
    changed = (checkpoint.path / MANIFEST).stat().st_mtime
    return f"{datetime.fromtimestamp(changed, UTC).isoformat(timespec='seconds')} (date of its manifest)"


def _config(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the settings of the run that saved; empty if train.py did not save them."""
    extra = checkpoint.manifest.state.get("extra")
    config = extra.get("config") if isinstance(extra, dict) else None
    return config if isinstance(config, dict) else {}


def _at(tree: Any, *keys: str) -> str:
    """Return the value at `keys` of plain JSON as text, or `UNKNOWN`."""
    for key in keys:
        if not isinstance(tree, dict) or key not in tree:
            return UNKNOWN
        tree = tree[key]
    return _shown(tree)


def _shown(value: Any) -> str:
    """Escape unprintable characters, so that text from a file cannot control the terminal."""
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in str(value))
