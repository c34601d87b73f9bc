"""Cache of tokenized samples: what one process has tokenized, all others and all later runs map.

    <folder>/<key>/            samples, as `data/samples.py` describes; there only once they are whole
    <folder>/<key>.lock        held (flock) by the process that builds them
    <folder>/<key>.*.part/     private to the process that builds them; removed when its lock is free

The key is a hash of the files (path below the root, size, time of change, sampled content), of the encoder's
fingerprint, and of the format. The default folder is $XDG_CACHE_HOME/dzero/samples, or ~/.cache/dzero/samples. A
cache belongs to one user. It may be removed at any time: processes that have mapped it keep it.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from dzero.data.files import FoundFiles
from dzero.data.sample_builder import Encoder, Report, write_samples
from dzero.data.samples import Samples, SamplesMeta, SamplesWriter, read_meta
from dzero.utils.file_lock import take
from dzero.utils.scratch_paths import reported_as_disk_error

FORMAT = 1
"""Version of the files: raise it when older ones can no longer be read."""
ON_BAD_ROW = ("stop", "skip")
BLOCK_BYTES = 64 * 2**10
MOST_BLOCKS = 64
QUIET_S = 2.0


def build_or_open(
    found: FoundFiles,
    encoder: Encoder,
    *,
    folder: Path | None,
    on_bad_row: str,
    max_tokens: int | None,
    report: Report,
) -> Samples:
    """Return the samples of files, tokenized now or by an earlier call with the same files and encoder.

    Any number of processes may call this at once: the first tokenizes, the others wait for it. A process that is
    killed leaves nothing that a later call takes for whole.

    Args:
        found: .jsonl, .json and .parquet files.
        encoder: Encoder of conversations; its process is closed when the samples are built.
        folder: Folder of the cache; None for the default.
        on_bad_row: `stop` to raise at a row that cannot be used, `skip` to leave it out and count it.
        max_tokens: Length to which longer samples are cut, at least 2; None for no limit.
        report: Called with one line at a time: progress, and what is waited for.

    Returns:
        The samples, mapped into memory.

    Raises:
        ValueError: A row cannot be used and `on_bad_row` is `stop`, no sample is left, or the files changed meanwhile.
        OSError: The cache cannot be written: no space, no permission, or a folder of another user.
    """
    if on_bad_row not in ON_BAD_ROW:
        raise ValueError(f"data.on_bad_row={on_bad_row!r}: choose one of {[*ON_BAD_ROW]}")
    if max_tokens is not None and max_tokens < 2:
        raise ValueError(f"max_tokens={max_tokens}: must be at least 2, because the first token is never a target")
    home = _make_default() if folder is None else _make(folder.expanduser())
    key = _key(found, encoder)
    meta = _read(home / key)
    if meta is None:
        with closing(encoder), _locked(home / f"{key}.lock", report) as is_alone:
            meta = _read(home / key) or _build(home, key, found, encoder, on_bad_row, report, is_alone=is_alone)
    if meta.bad_rows and on_bad_row == "stop":
        raise ValueError(f"{meta.first_bad}; repair that row, or set data.on_bad_row=skip ({meta.bad_rows} bad rows)")
    return Samples(home / key, meta, max_tokens)


def _build(
    home: Path, key: str, found: FoundFiles, encoder: Encoder, on_bad_row: str, report: Report, *, is_alone: bool
) -> SamplesMeta:
    """Tokenize into a private folder and give it its name when it is whole. `is_alone`: the lock of `key` is held."""
    _remove_left(home, key, is_alone=is_alone)
    with _disk_errors(home):
        part = Path(tempfile.mkdtemp(prefix=f"{key}.", suffix=".part", dir=home))
    try:
        writer = SamplesWriter(part, encoder.dtype, encoder.vocab_size)
        try:
            meta = write_samples(found, encoder, writer, on_bad_row, report)
        finally:
            writer.close()
        if _key(found, encoder) != key:
            raise ValueError(f"the files below {found.root} changed while they were tokenized; start again")
        with _disk_errors(home):
            try:
                part.rename(home / key)
            except OSError:  # another process was faster, without a lock
                if is_alone or (made := _read(home / key)) is None:
                    raise
                shutil.rmtree(part, ignore_errors=True)
                return made
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    return meta


def _remove_left(home: Path, key: str, *, is_alone: bool) -> None:
    """Remove a damaged folder of this key, and what killed processes left half-written, of this key and others."""
    if (home / key).exists():
        with _disk_errors(home / key):
            shutil.rmtree(home / key)
    for part in home.glob("*.part"):
        owner = part.name.partition(".")[0]
        if (owner == key and is_alone) or (owner != key and _is_free(home / f"{owner}.lock")):
            shutil.rmtree(part, ignore_errors=True)


def _read(place: Path) -> SamplesMeta | None:
    """Return the description of whole samples, None if there are none; raise PermissionError if others made them."""
    if not os.path.lexists(place):
        return None
    found = place.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid not in (0, os.getuid()) or found.st_mode & 0o022:
        raise PermissionError(f"{place} is not a folder of this user's alone; remove it, or name another cache folder")
    return read_meta(place)


@contextmanager
def _locked(path: Path, report: Report) -> Iterator[bool]:
    """Hold a lock file; wait for another process that holds it, and say so after `QUIET_S` seconds.

    Yield whether it is held: not on a file system without locks.
    """
    with _disk_errors(path):
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        until_s = time.monotonic() + QUIET_S
        while (held := take(lock)) is False and time.monotonic() < until_s:
            time.sleep(QUIET_S / 100)
        if held is False:
            report(f"waiting for another process that tokenizes the same data (it holds {path})")
            held = take(lock, wait=True)
        if held is None:
            report(f"the file system of {path.parent} has no locks: another process may tokenize the same data as well")
        yield held is True
    finally:
        os.close(lock)


def _is_free(path: Path) -> bool:
    try:
        lock = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    except OSError:  # of another user, in a shared folder
        return False
    try:
        return take(lock) is True
    finally:
        os.close(lock)


def _key(found: FoundFiles, encoder: Encoder) -> str:
    """Return the name of the samples: a hash of the files, the encoder and the format."""
    files = [[found.key(path), *_content(path)] for path in found.paths]
    return hashlib.sha256(json.dumps([FORMAT, files, encoder.fingerprint]).encode()).hexdigest()[:32]


def _content(path: Path) -> list[Any]:
    """Return size, time of change, and a hash of evenly spread blocks; of a small file these are all of it."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        found = os.fstat(file.fileno())
        last = max(found.st_size - BLOCK_BYTES, 0)
        for start in sorted({int(at) for at in np.linspace(0, last, min(MOST_BLOCKS, last // BLOCK_BYTES + 2))}):
            file.seek(start)
            digest.update(file.read(BLOCK_BYTES))
    return [found.st_size, found.st_mtime_ns, digest.hexdigest()]


def _make_default() -> Path:
    """Create the default folder, for this user only; raise PermissionError if it is another's or open to others."""
    above = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dzero"
    for folder in (above, above / "samples"):
        _make(folder)
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
            raise PermissionError(f"{folder} is not a folder of this user's alone; remove it, or set another cache")
    return above / "samples"


def _make(folder: Path) -> Path:
    with _disk_errors(folder):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def _disk_errors(path: Path) -> Any:
    return reported_as_disk_error(str(path), "making the cache of tokenized samples (name another folder for it)")
