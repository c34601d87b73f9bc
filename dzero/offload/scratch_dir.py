"""A private, locked directory under a scratch path, and one file of reserved blocks.

    <path>/dzero-<rank>-<pid>-<random>/     mode 0700
        lock                                locked (flock) while the run lives; holds the bytes it reserved
        data                                loses its name as soon as it is open

Lock. Held, the run lives; free, it is dead, and whoever starts next on this path removes what it left. Process numbers
decide nothing: they are used again, and mean nothing from one container to the next. A directory exists for a moment
before its lock is held, so somebody who tidies up may take it away: its owner sees that it lost and takes another name.

Data. Without a name it cannot be opened by accident, deleted, or taken for a checkpoint, and the kernel gives its
blocks back when the last process that has it open ends, however it ends. What SIGKILL leaves is a directory with a lock
of a few bytes. `df` counts the blocks and `du` does not; the locks say who holds how much.

The lock and the file belong to forked children too: while one of them lives, so does the run.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import weakref
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import NamedTuple

from dzero.hardware import format_bytes
from dzero.utils.scratch_paths import FOLDER, DiskError, open_path, reported_as_disk_error

NAME = re.compile(r"dzero-\d+-\d+-[0-9a-f]{16}")
LOCK = os.O_RDWR | os.O_NOFOLLOW
NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
FULL = (errno.ENOSPC, errno.EDQUOT)
ATTEMPTS = 100


class ScratchOwner(NamedTuple):
    """A living run on a path: the name of its directory, and the bytes that it reserved."""

    name: str
    held_bytes: int


class ScratchDir:
    """`needed_bytes` of `path`, reserved in the open file `fd` until `close`, or until nobody refers to this.

    name: of the directory; by default one that is new. Raises DiskError: no such path, a symbolic link, read-only, a
    directory of that name is there (EEXIST), too little space (ENOSPC). Nothing is left behind then.
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
        """Reserve more, up to `needed_bytes` in all. Raises DiskError where there is too little; all is as before then.

        What is in the file stays.
        """
        had, self.needed_bytes = self.needed_bytes, needed_bytes
        try:
            self._reserve(had)
        except DiskError:
            self.needed_bytes = had
            raise
        os.pwrite(self._lock, str(needed_bytes).encode(), 0)

    def _claim(self, given: str | None, undo: ExitStack) -> tuple[str, int, int]:
        """Make a directory and lock it; `undo` gets what removes it. Returns its name, itself and its lock, opened."""
        for _ in range(ATTEMPTS):
            name = given or f"dzero-{self.rank}-{os.getpid()}-{secrets.token_hex(8)}"
            try:
                os.mkdir(name, 0o700, dir_fd=self._parent)
            except FileExistsError as error:
                what = f"the run directory {name} is there already: two runs cannot share one; let the name be chosen"
                raise DiskError(errno.EEXIST, self.path, what) from error
            with ExitStack() as lost, suppress(FileNotFoundError, BlockingIOError):  # swept away before it was locked
                lost.callback(_remove, os.rmdir, name, self._parent)
                folder = os.open(name, FOLDER, dir_fd=self._parent)
                lost.callback(os.close, folder)
                if os.fstat(folder).st_uid != os.geteuid():
                    raise DiskError(errno.EPERM, self.path, f"{name} was exchanged for a directory of another user")
                lock = os.open("lock", NEW, 0o600, dir_fd=folder)
                lost.callback(_remove, os.unlink, "lock", folder)
                lost.callback(os.close, lock)
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if not os.fstat(lock).st_nlink:
                    continue
                os.write(lock, str(self.needed_bytes).encode())
                undo.push(lost.pop_all())
                return name, folder, lock
        raise DiskError(errno.EAGAIN, self.path, f"others removed {ATTEMPTS} directories before they were locked")

    def _make_file(self, folder: int, undo: ExitStack) -> int:
        """An open file. Its name goes at once, its blocks with `undo`."""
        with reported_as_disk_error(self.path, "making the scratch file"):
            fd = os.open("data", NEW, 0o600, dir_fd=folder)
            undo.callback(os.close, fd)
            undo.callback(os.ftruncate, fd, 0)  # closing is not enough: a forked child may have it open
            os.unlink("data", dir_fd=folder)
        return fd

    def _reserve(self, had: int) -> None:
        """Real blocks behind the first `had` bytes, up to `needed_bytes`; those alone if that fails."""
        more = self.needed_bytes - had
        if more > _available(self._parent) >= 0:
            raise self._full(errno.ENOSPC, more)  # before the last free block is taken from everybody for a moment
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
    """The living runs on `path`. Removes what dead ones left there."""
    parent = open_path(os.path.abspath(path))
    try:
        return _sweep(parent)
    finally:
        os.close(parent)


def _available(parent: int) -> int:
    """Bytes that users may take; -1 where the file system does not tell."""
    room = os.fstatvfs(parent)
    return room.f_bavail * room.f_frsize if room.f_blocks else -1


def _sweep(parent: int) -> list[ScratchOwner]:
    """The living runs, after removing what dead ones of this user left. What is not ours, or not known, stays."""
    found = [_look(parent, name) for name in sorted(filter(NAME.fullmatch, os.listdir(parent)))]
    return [holder for holder in found if holder]


def _look(parent: int, name: str) -> ScratchOwner | None:
    with ExitStack() as opened, suppress(OSError, ValueError):  # another user's, not empty, or gone meanwhile
        folder = os.open(name, FOLDER, dir_fd=parent)
        opened.callback(os.close, folder)
        if os.fstat(folder).st_uid != os.geteuid():
            return None
        try:
            lock = os.open("lock", LOCK, dir_fd=folder)
            opened.callback(os.close, lock)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for left in ("data", "lock"):
                _remove(os.unlink, left, folder)
        except BlockingIOError:
            return ScratchOwner(name, int(os.pread(lock, 32, 0) or b"0"))
        except FileNotFoundError:
            pass  # no lock yet, or no more: a directory that is empty may go, and its owner will see
        os.rmdir(name, dir_fd=parent)
    return None


def _remove(remove: Callable[..., None], name: str, folder: int) -> None:
    with suppress(FileNotFoundError):
        remove(name, dir_fd=folder)


def _in_process(owner: int, undo: ExitStack) -> None:
    """A forked child that ends must not take its parent's directory away."""
    if os.getpid() == owner:
        undo.close()
