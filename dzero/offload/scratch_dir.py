"""Private, locked directory under a scratch path, with one file of reserved blocks.

    <path>/dzero-<rank>-<pid>-<random>/     mode 0700
        lock                                locked (flock) while the run is alive; holds the number of reserved bytes
        data                                unlinked as soon as it is open

Lock. While it is held, the run is alive. If it is free, the run is dead, and the next run on this path removes what was
left; on a file system without locks, nothing. Process ids are not used, because they are reused and differ between
containers. A directory exists for a moment before its lock is held, so the clean-up of another run may remove it. Its
owner detects this, and takes another name.

Data. A file without a name cannot be opened by accident, deleted, or taken for a checkpoint. The kernel frees its
blocks when the last process that has it open ends, however it ends. SIGKILL leaves only a directory with a lock file of
a few bytes. `df` counts the blocks and `du` does not; the lock files say how much each run holds.

Forked children share the lock and the file: while one of them is alive, so is the run.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import weakref
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import NamedTuple

from dzero.hardware import format_bytes
from dzero.utils.file_lock import take
from dzero.utils.scratch_paths import FOLDER, DiskError, open_path, reported_as_disk_error

NAME = re.compile(r"dzero-\d+-\d+-[0-9a-f]{16}")
LOCK = os.O_RDWR | os.O_NOFOLLOW
NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
FULL = (errno.ENOSPC, errno.EDQUOT)
ATTEMPTS = 100


class ScratchOwner(NamedTuple):
    """Live run on a path: the name of its directory, and the number of bytes that it reserved."""

    name: str
    held_bytes: int


class ScratchDir:
    """Scratch space of `needed_bytes`, reserved in the open file `fd`.

    The space is held until `close`, or until nothing references this object.

    Args:
        path: The scratch path.
        needed_bytes: Size to reserve.
        rank: This rank, for the name of the directory and for messages.
        name: Name of the directory; by default a new one.

    Raises:
        DiskError: The path does not exist, is a symbolic link or read-only; the directory exists (EEXIST); there is too
            little space (ENOSPC). Nothing is left behind.
    """

    def __init__(self, path: str, needed_bytes: int, *, rank: int = 0, name: str | None = None) -> None:
        self.path = os.path.abspath(path)
        self.needed_bytes, self.rank = needed_bytes, rank
        with ExitStack() as undo:
            self._parent = open_path(self.path)
            undo.callback(os.close, self._parent)
            _sweep(self._parent)
            with reported_as_disk_error(self.path, "making a private directory for scratch data"):
                self.name, folder, self._lock = self._claim(name, undo)
            self.fd = self._make_file(folder, undo)
            self._reserve(0)
            self.close = weakref.finalize(self, _in_process, os.getpid(), undo.pop_all())

    def __enter__(self) -> ScratchDir:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def grow(self, needed_bytes: int) -> None:
        """Reserve `needed_bytes` in all and keep the contents; after a DiskError the reservation is unchanged."""
        had, self.needed_bytes = self.needed_bytes, needed_bytes
        try:
            self._reserve(had)
        except DiskError:
            self.needed_bytes = had
            raise
        os.pwrite(self._lock, str(needed_bytes).encode(), 0)

    def _claim(self, given: str | None, undo: ExitStack) -> tuple[str, int, int]:
        """Make and lock a directory, and return its name and the descriptors of it and its lock; `undo` removes it."""
        for _ in range(ATTEMPTS):
            name = given or f"dzero-{self.rank}-{os.getpid()}-{secrets.token_hex(8)}"
            try:
                os.mkdir(name, 0o700, dir_fd=self._parent)
            except FileExistsError as error:
                what = f"the run directory {name} is there already: two runs cannot share one; let the name be chosen"
                raise DiskError(errno.EEXIST, self.path, what) from error
            with ExitStack() as lost, suppress(FileNotFoundError):  # removed before it was locked
                lost.callback(_remove, os.rmdir, name, self._parent)
                folder = os.open(name, FOLDER, dir_fd=self._parent)
                lost.callback(os.close, folder)
                if os.fstat(folder).st_uid != os.geteuid():
                    raise DiskError(errno.EPERM, self.path, f"{name} was exchanged for a directory of another user")
                lock = os.open("lock", NEW, 0o600, dir_fd=folder)
                lost.callback(_remove, os.unlink, "lock", folder)
                lost.callback(os.close, lock)
                if take(lock) is False or not os.fstat(lock).st_nlink:
                    continue
                os.write(lock, str(self.needed_bytes).encode())
                undo.push(lost.pop_all())
                return name, folder, lock
        raise DiskError(errno.EAGAIN, self.path, f"others removed {ATTEMPTS} directories before they were locked")

    def _make_file(self, folder: int, undo: ExitStack) -> int:
        """Return the descriptor of an unlinked file, whose blocks are freed by `undo`."""
        with reported_as_disk_error(self.path, "making the scratch file"):
            fd = os.open("data", NEW, 0o600, dir_fd=folder)
            undo.callback(os.close, fd)
            undo.callback(os.ftruncate, fd, 0)  # closing is not enough: a forked child may have it open
            os.unlink("data", dir_fd=folder)
        return fd

    def _reserve(self, had: int) -> None:
        """Allocate blocks from byte `had` up to `needed_bytes`; on failure, truncate the file to `had` bytes."""
        more = self.needed_bytes - had
        if more > _available(self._parent) >= 0:
            raise self._full(errno.ENOSPC, more)  # before the last free blocks are taken, if only for a moment
        try:
            if more:
                os.posix_fallocate(self.fd, had, more)
        except OSError as error:
            os.ftruncate(self.fd, had)
            if error.errno in FULL:
                raise self._full(error.errno, more) from error
            what = f"reserving {format_bytes(more)} of scratch space: {error.strerror}"
            raise DiskError(error.errno or 0, self.path, what, count=more) from error

    def _full(self, code: int, more: int) -> DiskError:
        others = [holder for holder in _sweep(self._parent) if holder.name != self.name]
        held = format_bytes(sum(holder.held_bytes for holder in others))
        available = _available(self._parent)
        left = f"{format_bytes(available)} are" if available >= 0 else "an unknown amount is"
        listed = ", ".join(f"{holder.name} {format_bytes(holder.held_bytes)}" for holder in others)
        wanted = f"{format_bytes(more)} more" if more < self.needed_bytes else format_bytes(more)
        what = (
            f"rank {self.rank} needs {wanted} of scratch space; "
            f"{left} available, and {len(others)} other runs hold {held}{listed and f' ({listed})'}: free "
            "space, or name more or larger paths"
        )
        return DiskError(code, self.path, what, count=more)


def holders(path: str) -> list[ScratchOwner]:
    """Return the live runs on `path`, after removing what dead runs left."""
    parent = open_path(os.path.abspath(path))
    try:
        return _sweep(parent)
    finally:
        os.close(parent)


def _available(parent: int) -> int:
    """Return the number of bytes available to users, or -1 if the file system does not report it."""
    room = os.fstatvfs(parent)
    return room.f_bavail * room.f_frsize if room.f_blocks else -1


def _sweep(parent: int) -> list[ScratchOwner]:
    """Return the live runs, after removing what dead runs of this user left; other entries stay."""
    found = [_look(parent, name) for name in sorted(filter(NAME.fullmatch, os.listdir(parent)))]
    return [holder for holder in found if holder]


def _look(parent: int, name: str) -> ScratchOwner | None:
    with ExitStack() as opened, suppress(OSError, ValueError):  # another user's, not empty, or gone by now
        folder = os.open(name, FOLDER, dir_fd=parent)
        opened.callback(os.close, folder)
        if os.fstat(folder).st_uid != os.geteuid():
            return None
        try:
            lock = os.open("lock", LOCK, dir_fd=folder)
            opened.callback(os.close, lock)
            if not take(lock):  # alive, or on a file system without locks perhaps alive
                return ScratchOwner(name, int(os.pread(lock, 32, 0) or b"0"))
            for left in ("data", "lock"):
                _remove(os.unlink, left, folder)
        except FileNotFoundError:
            pass  # no lock yet, or not any more: an empty directory may be removed, and its owner detects it
        os.rmdir(name, dir_fd=parent)
    return None


def _remove(remove: Callable[..., None], name: str, folder: int) -> None:
    with suppress(FileNotFoundError):
        remove(name, dir_fd=folder)


def _in_process(owner: int, undo: ExitStack) -> None:
    """Clean up in the owner process only: a forked child must not remove its parent's directory when it ends."""
    if os.getpid() == owner:
        undo.close()
