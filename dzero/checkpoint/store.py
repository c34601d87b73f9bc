"""Folders of checkpoints: the order in which files become durable, and which checkpoints exist.

    runs/checkpoints/
        .lock                      locked by the run that saves here; its word lets ranks recognize the folder
        latest.json                the newest checkpoint that was verified, and its lineage
        step_00000200/             a checkpoint: gets this name by a rename when all of it is on disk
        step_00000400.partial/     being written, or left by a run that died: never read, removed by the next run

    order       on disk when it has ended
    1 data      every rank's tensors and index, each with fsync         (rank by rank)
    2 metadata  the manifest, with fsync
    3 folder    the entries of the partial folder; if it can be opened, its new name, and the entries of the parent
    4 latest    the pointer, by a rename; old checkpoints are removed after that

Symbolic links below the folder that the user named are never followed: every file is opened relative to a handle of its
folder.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import shutil
import stat
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from dzero.checkpoint.errors import CheckpointDamaged, CheckpointError, reported_as_checkpoint_error
from dzero.checkpoint.format import MANIFEST, MOST_MANIFEST_BYTES, Manifest, seal, unseal
from dzero.checkpoint.lineage import Lineage, Segment
from dzero.utils.file_lock import take

logger = logging.getLogger(__name__)
STEP = re.compile(r"step_([0-9]{8,18})(?:_([0-9]{1,9}))?")
PARTIAL, GOING = ".partial", ".going"
LATEST, LOCK = "latest.json", ".lock"
LEFT = re.compile(rf"({STEP.pattern}|{re.escape(LATEST)})({re.escape(PARTIAL)}|{re.escape(GOING)})")
MOST_LATEST_BYTES, MOST_LOCK_BYTES = MOST_MANIFEST_BYTES, 4096


class Latest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Contents of `latest.json`: a checkpoint, and the lineage of its run in case its manifest is damaged."""

    name: str
    run: str = ""
    lineage: tuple[Segment, ...] = ()

    @property
    def origin(self) -> Lineage:
        """Lineage of the run that saved the checkpoint."""
        return Lineage(self.run, self.lineage)


class Directory:
    """Handle of a directory whose files are accessed by name, never through a link; raises `CheckpointError`."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        with reported_as_checkpoint_error(self.path):
            if self.path.is_symlink():
                named = f"a symbolic link is not followed: name the folder itself, {os.path.realpath(self.path)}"
                raise CheckpointDamaged(str(self.path), named)
            self.fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)

    def __enter__(self) -> Directory:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.fd)

    def open(self, name: str, flags: int) -> int:
        """Open a regular file and return its descriptor."""
        with reported_as_checkpoint_error(self.path / name):
            fd = os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o666, dir_fd=self.fd)
            try:
                _regular(os.fstat(fd))
            except OSError:
                os.close(fd)
                raise
        return fd

    def size(self, name: str) -> int:
        """Return the bytes of a regular file."""
        with reported_as_checkpoint_error(self.path / name):
            return _regular(os.stat(name, dir_fd=self.fd, follow_symlinks=False)).st_size

    def read(self, name: str, most_bytes: int) -> bytes:
        """Read a small file; raise `CheckpointError` if it has more than `most_bytes`."""
        fd = self.open(name, os.O_RDONLY)
        with reported_as_checkpoint_error(self.path / name), os.fdopen(fd, "rb") as file:
            if (size := os.fstat(fd).st_size) > most_bytes:
                what = f"{size} bytes, more than the {most_bytes} that it may have"
                raise CheckpointDamaged(str(self.path / name), what)
            return file.read()

    def write(self, name: str, data: bytes) -> None:
        """Write a small file durably and atomically: readers of `name` see the old or the new contents."""
        temporary = name + PARTIAL
        fd = self.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        with reported_as_checkpoint_error(self.path / name), os.fdopen(fd, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(fd)
        with reported_as_checkpoint_error(self.path / name):
            os.rename(temporary, name, src_dir_fd=self.fd, dst_dir_fd=self.fd)
        self.sync()

    def sync(self) -> None:
        """Flush the directory's entries to disk."""
        with reported_as_checkpoint_error(self.path):
            os.fsync(self.fd)


class CheckpointStore:
    """The folder that holds a run's checkpoints."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self._is_locked: bool | None = False

    def names(self) -> list[str]:
        """Return the names of the complete checkpoints, the oldest first."""
        entries = [entry for entry in self._entries() if entry.is_dir(follow_symlinks=False)]
        found = [match for entry in entries if (match := STEP.fullmatch(entry.name))]
        return [match[0] for match in sorted(found, key=lambda match: (int(match[1]), int(match[2] or 0)))]

    def unfinished(self) -> list[str]:
        """Return the names of checkpoints that are being written or removed, or were when a run died."""
        names = sorted(entry.name for entry in self._entries() if entry.name.endswith((PARTIAL, GOING)))
        return [name for name in names if STEP.fullmatch(name.removesuffix(PARTIAL).removesuffix(GOING))]

    def latest(self) -> str | None:
        """Return the newest verified checkpoint, or None; raise `CheckpointError` if the pointer is damaged."""
        return None if (pointer := self.pointer()) is None else pointer.name

    def pointer(self) -> Latest | None:
        """Return the contents of `latest.json`, or None without one; raise `CheckpointError` if it is damaged."""
        path = self.path / LATEST
        if not is_there(path):
            return None
        with Directory(self.path) as folder:
            pointer = unseal(folder.read(LATEST, MOST_LATEST_BYTES), Latest, str(path))
        if not STEP.fullmatch(pointer.name):
            raise CheckpointError(str(path), f"{pointer.name!r} is no name of a checkpoint")
        try:
            pointer.origin.check()
        except ValueError as error:
            raise CheckpointError(str(path), str(error)) from error
        return pointer

    def begin(self, step: int) -> str:
        """Create an empty partial folder for `step`; return its final name, which sorts after those of that step."""
        taken = [STEP.fullmatch(entry.name.removesuffix(PARTIAL).removesuffix(GOING)) for entry in self._entries()]
        attempts = [int(match[2] or 1) for match in taken if match and int(match[1]) == step]
        name = f"step_{step:08d}" + (f"_{max(attempts) + 1}" if attempts else "")
        with reported_as_checkpoint_error(self.path / (name + PARTIAL)):
            os.mkdir(self.path / (name + PARTIAL))
        return name

    def partial(self, name: str) -> Path:
        """Return the folder of a checkpoint while it is written."""
        return self.path / (name + PARTIAL)

    def discard(self, name: str) -> None:
        """Remove the partial folder of a checkpoint that will not be completed."""
        with suppress(OSError):
            shutil.rmtree(self.partial(name))

    def publish(self, name: str) -> None:
        """Rename a partial folder, whose files are all on disk, to its final name."""
        with (
            reported_as_checkpoint_error(self.path / name),
            Directory(self.partial(name)) as partial,
            Directory(self.path) as folder,
        ):
            partial.sync()
            os.rename(name + PARTIAL, name, src_dir_fd=folder.fd, dst_dir_fd=folder.fd)
            folder.sync()

    def point(self, name: str, lineage: Lineage) -> None:
        """Make the verified checkpoint `name`, saved by the run of `lineage`, the latest."""
        with Directory(self.path) as folder:
            folder.write(LATEST, seal(Latest(name, *lineage))[0])

    def remove(self, name: str) -> None:
        """Remove a checkpoint; it is renamed first, so that no reader finds half of it."""
        with reported_as_checkpoint_error(self.path / name), Directory(self.path) as folder:
            os.rename(name, name + GOING, src_dir_fd=folder.fd, dst_dir_fd=folder.fd)
            folder.sync()
            shutil.rmtree(name + GOING, dir_fd=folder.fd)

    def clean(self) -> list[str]:
        """Remove what dead runs left half-written or half-removed; call it under `locked`, which must have a lock."""
        if not self._is_locked:
            return []
        left = [entry for entry in self._entries() if LEFT.fullmatch(entry.name)]
        for entry in left:
            with reported_as_checkpoint_error(entry.path):
                (shutil.rmtree if entry.is_dir(follow_symlinks=False) else os.unlink)(entry.path)
        return [entry.name for entry in left]

    @contextmanager
    def locked(self) -> Iterator[str]:
        """Lock the folder for this run, and yield a new random word that is stored in the folder for `word`."""
        _make(self.path)
        with Directory(self.path) as folder:
            fd = folder.open(LOCK, os.O_RDWR | os.O_CREAT)
            try:
                with reported_as_checkpoint_error(self.path / LOCK):
                    self._is_locked = take(fd)
                if self._is_locked is False:
                    raise CheckpointError(
                        str(self.path), "another run saves its checkpoints here: give this one a folder of its own"
                    )
                if self._is_locked is None:
                    logger.warning(
                        f"{self.path}: this file system has no locks, so a second run that saves here would not be "
                        "noticed; what runs that died left half-written stays"
                    )
                word = uuid.uuid4().hex
                with reported_as_checkpoint_error(self.path / LOCK):
                    os.ftruncate(fd, 0)
                    os.pwrite(fd, word.encode(), 0)
                    os.fsync(fd)
                yield word
            finally:
                os.close(fd)

    def word(self) -> str:
        """Return the word that `locked` last stored here; empty if this machine does not see the folder."""
        if not is_there(self.path / LOCK):
            return ""
        with Directory(self.path) as folder:
            return folder.read(LOCK, MOST_LOCK_BYTES).decode(errors="replace")

    def _entries(self) -> list[os.DirEntry[str]]:
        with reported_as_checkpoint_error(self.path), suppress(FileNotFoundError), os.scandir(self.path) as entries:
            return [*entries]
        return []


def _regular(found: os.stat_result) -> os.stat_result:
    """Return `found` if it belongs to a regular file; raise OSError otherwise."""
    if stat.S_ISLNK(found.st_mode):
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EISDIR, "it is no regular file")
    return found


def _make(path: Path) -> None:
    """Create a folder and its parents, with their entries on disk."""
    if not os.path.lexists(path):
        _make(path.parent)
        with reported_as_checkpoint_error(path), suppress(FileExistsError):
            path.mkdir()
        with Directory(path.parent.resolve()) as above:  # links in the parent path are the user's choice
            above.sync()


def is_there(path: Path) -> bool:
    """Return whether a file, folder or link exists; raise `CheckpointError` if permissions do not allow to check."""
    with reported_as_checkpoint_error(path), suppress(FileNotFoundError, NotADirectoryError):
        os.lstat(path)
        return True
    return False


def read_manifest(folder: Directory) -> Manifest:
    """Read the manifest of the checkpoint in `folder`; raise `CheckpointError` if that fails."""
    path = str(folder.path / MANIFEST)
    manifest = unseal(folder.read(MANIFEST, MOST_MANIFEST_BYTES), Manifest, path)
    try:
        manifest.check()
    except ValueError as error:
        raise CheckpointError(path, str(error)) from error
    return manifest


def manifest_at(path: Path) -> Manifest:
    """Read the manifest of the checkpoint `path`; raise `CheckpointError` if that fails."""
    with Directory(path) as folder:
        return read_manifest(folder)


def checkpoint_at(path: Path | str) -> Path:
    """Return `path`, or the latest checkpoint in it; raise `CheckpointError` if there is none."""
    path = Path(path)
    if is_there(path / MANIFEST):
        return path
    if (name := CheckpointStore(path).latest()) is None:
        what = f"no checkpoint: neither {MANIFEST} nor {LATEST} is in it; name a checkpoint, or the folder above"
        raise CheckpointError(str(path), what)
    return path / name
