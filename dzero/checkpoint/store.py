"""Folders of checkpoints: what becomes durable in which order, and what counts as there.

    runs/checkpoints/
        .lock                      held by the run that saves here; says by which word its ranks know the folder
        latest.json                the newest checkpoint that was verified, and its lineage
        step_00000200/             a checkpoint: only renamed to this name when all of it is on disk
        step_00000400.partial/     being written, or left by a run that died: never read, removed by the next one

    order       what is on disk when it has ended
    1 data      every rank's tensors and index, each synchronised       (rank by rank)
    2 metadata  the manifest, synchronised
    3 folder    the entries of the partial folder; when it opens, its new name, and the entries of the folder above
    4 latest    the pointer, by a rename; what is too old goes after that

Symbolic links are followed nowhere below the folder that the user named: every file is opened relative to a handle of
the folder that holds it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import stat
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType

import msgspec

from dzero.checkpoint.errors import CheckpointDamaged, CheckpointError
from dzero.checkpoint.format import MANIFEST, MOST_MANIFEST_BYTES, Manifest, seal, unseal
from dzero.checkpoint.lineage import Lineage, Segment

STEP = re.compile(r"step_([0-9]{8,18})(?:_([0-9]{1,9}))?")
PARTIAL, GOING = ".partial", ".going"
LATEST, LOCK = "latest.json", ".lock"
LEFT = re.compile(rf"({STEP.pattern}|{re.escape(LATEST)})({re.escape(PARTIAL)}|{re.escape(GOING)})")
MOST_LATEST_BYTES, MOST_LOCK_BYTES = MOST_MANIFEST_BYTES, 4096
REPAIRS = {
    errno.ENOSPC: "free space, or point checkpoint.folder to another disk",
    errno.EDQUOT: "free space within your quota, or point checkpoint.folder to another disk",
    errno.EACCES: "this user may not; change the permissions, or checkpoint.folder",
    errno.EROFS: "choose a checkpoint.folder that can be written",
    errno.EFBIG: "raise the limit on the size of files (ulimit -f)",
    errno.EEXIST: "another file is in the way; remove it",
    errno.ELOOP: "symbolic links are not followed in checkpoints; name the folder itself",
    errno.ENOTDIR: "name a folder",
    errno.ENOENT: "it is missing; take another checkpoint",
}
DAMAGE = (errno.ENOENT, errno.EIO, errno.ESTALE, errno.EISDIR, errno.ENOTDIR)
"""Errors of the system that say that bytes are gone; the others say that they may not be read."""


class Latest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The contents of `latest.json`: a checkpoint, and the lineage of its run in case its manifest is damaged."""

    name: str
    run: str = ""
    lineage: tuple[Segment, ...] = ()

    @property
    def origin(self) -> Lineage:
        """Return the lineage of the run that saved the checkpoint."""
        return Lineage(self.run, self.lineage)


class Directory:
    """A handle of a directory: files in it by name, none of them through a link. Raises CheckpointError."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        with reported_as_checkpoint_error(self.path):
            if self.path.is_symlink():
                named = f"a symbolic link is not followed: name the folder itself, {os.path.realpath(self.path)}"
                raise CheckpointDamaged(str(self.path), named)
            self.fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)

    def __enter__(self) -> Directory:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        os.close(self.fd)

    def open(self, name: str, flags: int) -> int:
        """A descriptor of a regular file."""
        with reported_as_checkpoint_error(self.path / name):
            fd = os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o666, dir_fd=self.fd)
            try:
                _regular(os.fstat(fd))
            except OSError:
                os.close(fd)
                raise
        return fd

    def size(self, name: str) -> int:
        """Bytes of a regular file."""
        with reported_as_checkpoint_error(self.path / name):
            return _regular(os.stat(name, dir_fd=self.fd, follow_symlinks=False)).st_size

    def read(self, name: str, most_bytes: int) -> bytes:
        """A small file. Raises CheckpointError for one beyond `most_bytes`."""
        fd = self.open(name, os.O_RDONLY)
        with reported_as_checkpoint_error(self.path / name), os.fdopen(fd, "rb") as file:
            if os.fstat(fd).st_size > most_bytes:
                size = os.fstat(fd).st_size
                raise CheckpointDamaged(
                    str(self.path / name), f"{size} bytes, more than the {most_bytes} that it may have"
                )
            return file.read()

    def write(self, name: str, data: bytes) -> None:
        """A small file, on disk when this returns; whoever reads `name` sees all of it or what was there before."""
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
        """Its entries are on disk when this returns."""
        with reported_as_checkpoint_error(self.path):
            os.fsync(self.fd)


class CheckpointStore:
    """The folder that holds a run's checkpoints."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)

    def names(self) -> list[str]:
        """Of the checkpoints that are whole, the oldest first."""
        entries = [entry for entry in self._entries() if entry.is_dir(follow_symlinks=False)]
        found = [match for entry in entries if (match := STEP.fullmatch(entry.name))]
        return [match[0] for match in sorted(found, key=lambda match: (int(match[1]), int(match[2] or 0)))]

    def unfinished(self) -> list[str]:
        """Of those that are being written or removed, or that a run which died left so."""
        names = sorted(entry.name for entry in self._entries() if entry.name.endswith((PARTIAL, GOING)))
        return [name for name in names if STEP.fullmatch(name.removesuffix(PARTIAL).removesuffix(GOING))]

    def latest(self) -> str | None:
        """The newest checkpoint that was verified. Raises CheckpointError where the pointer is damaged."""
        return None if (pointer := self.pointer()) is None else pointer.name

    def pointer(self) -> Latest | None:
        """Return what `latest.json` says, None without one. Raises CheckpointError where it is damaged."""
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
        """A new, empty partial folder for `step`; the name that it will have, which sorts behind all that are there."""
        taken = [STEP.fullmatch(entry.name.removesuffix(PARTIAL).removesuffix(GOING)) for entry in self._entries()]
        attempts = [int(match[2] or 1) for match in taken if match and int(match[1]) == step]
        name = f"step_{step:08d}" + (f"_{max(attempts) + 1}" if attempts else "")
        with reported_as_checkpoint_error(self.path / (name + PARTIAL)):
            os.mkdir(self.path / (name + PARTIAL))
        return name

    def partial(self, name: str) -> Path:
        """Where a checkpoint is while it is written."""
        return self.path / (name + PARTIAL)

    def discard(self, name: str) -> None:
        """It will not be finished."""
        with suppress(OSError):
            shutil.rmtree(self.partial(name))

    def publish(self, name: str) -> None:
        """Everything in the partial folder is on disk: give it its name."""
        with (
            reported_as_checkpoint_error(self.path / name),
            Directory(self.partial(name)) as partial,
            Directory(self.path) as folder,
        ):
            partial.sync()
            os.rename(name + PARTIAL, name, src_dir_fd=folder.fd, dst_dir_fd=folder.fd)
            folder.sync()

    def point(self, name: str, lineage: Lineage) -> None:
        """`name`, saved by the run of `lineage`, was verified: it is the latest."""
        with Directory(self.path) as folder:
            folder.write(LATEST, seal(Latest(name, *lineage))[0])

    def remove(self, name: str) -> None:
        """Rename it first, so that nobody finds half of it."""
        with reported_as_checkpoint_error(self.path / name), Directory(self.path) as folder:
            os.rename(name, name + GOING, src_dir_fd=folder.fd, dst_dir_fd=folder.fd)
            folder.sync()
            shutil.rmtree(name + GOING, dir_fd=folder.fd)

    def clean(self) -> list[str]:
        """Remove what runs that died left half-written or half-removed; call it under `locked`."""
        left = [entry for entry in self._entries() if LEFT.fullmatch(entry.name)]
        for entry in left:
            with reported_as_checkpoint_error(entry.path):
                (shutil.rmtree if entry.is_dir(follow_symlinks=False) else os.unlink)(entry.path)
        return [entry.name for entry in left]

    @contextmanager
    def locked(self) -> Iterator[str]:
        """Alone in saving here; a word that is in the folder now and that no other folder has (`word`).

        Raises CheckpointError where another run saves here.
        """
        _make(self.path)
        with Directory(self.path) as folder:
            fd = folder.open(LOCK, os.O_RDWR | os.O_CREAT)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                os.close(fd)
                raise CheckpointError(
                    str(self.path), "another run saves its checkpoints here: give this one a folder of its own"
                ) from error
            try:
                word = uuid.uuid4().hex
                with reported_as_checkpoint_error(self.path / LOCK):
                    os.ftruncate(fd, 0)
                    os.pwrite(fd, word.encode(), 0)
                    os.fsync(fd)
                yield word
            finally:
                os.close(fd)

    def word(self) -> str:
        """Return what `locked` last wrote here; nothing where this machine sees no such folder."""
        if not is_there(self.path / LOCK):
            return ""
        with Directory(self.path) as folder:
            return folder.read(LOCK, MOST_LOCK_BYTES).decode(errors="replace")

    def _entries(self) -> list[os.DirEntry[str]]:
        with reported_as_checkpoint_error(self.path), suppress(FileNotFoundError), os.scandir(self.path) as entries:
            return [*entries]
        return []


def _regular(found: os.stat_result) -> os.stat_result:
    """It, if it is of a regular file. Raises OSError."""
    if stat.S_ISLNK(found.st_mode):
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EISDIR, "it is no regular file")
    return found


def _make(path: Path) -> None:
    """A folder and those above it, their names on disk."""
    if not os.path.lexists(path):
        _make(path.parent)
        with reported_as_checkpoint_error(path), suppress(FileExistsError):
            path.mkdir()
        with Directory(path.parent.resolve()) as above:  # links above are the user's own
            above.sync()


def is_there(path: Path) -> bool:
    """Whether there is a file, a folder or a link. Raises CheckpointError where this user may not know."""
    with reported_as_checkpoint_error(path), suppress(FileNotFoundError, NotADirectoryError):
        os.lstat(path)
        return True
    return False


def read_manifest(folder: Directory) -> Manifest:
    """The manifest of the checkpoint in `folder`. Raises CheckpointError."""
    path = str(folder.path / MANIFEST)
    manifest = unseal(folder.read(MANIFEST, MOST_MANIFEST_BYTES), Manifest, path)
    try:
        manifest.check()
    except ValueError as error:
        raise CheckpointError(path, str(error)) from error
    return manifest


def checkpoint_at(path: Path | str) -> Path:
    """A checkpoint's folder: `path`, or the latest in it. Raises CheckpointError where there is none."""
    path = Path(path)
    if is_there(path / MANIFEST):
        return path
    if (name := CheckpointStore(path).latest()) is None:
        what = f"no checkpoint: neither {MANIFEST} nor {LATEST} is in it; name a checkpoint, or the folder above"
        raise CheckpointError(str(path), what)
    return path / name


@contextmanager
def reported_as_checkpoint_error(path: Path | str) -> Iterator[None]:
    """Errors of the system as CheckpointError, with the file and what to do."""
    try:
        yield
    except CheckpointError:
        raise
    except OSError as error:
        repair, kind = REPAIRS.get(error.errno or 0), CheckpointDamaged if error.errno in DAMAGE else CheckpointError
        raise kind(str(path), f"{error.strerror or error}{f': {repair}' if repair else ''}") from error
