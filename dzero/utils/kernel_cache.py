"""Where compiled kernels are kept between processes, so that only the first run on a machine compiles them.

    $XDG_CACHE_HOME/dzero/kernels/<digest>/     mode 0700; ~/.cache where XDG_CACHE_HOME is unset

The digest is that of this package's sources and of the versions of numba and Python: numba itself looks at the file of
a kernel only, not at what the kernel calls. numba keys the rest by the processor and its features, and writes files
beside their place and renames them, so several processes may share the folder.

A cached kernel is code, and numba reads it with pickle. So the folder must be a directory of this user's own that
nobody else may write to, no part of it a link that others could turn; else kernels are compiled in every process.
NUMBA_CACHE_DIR, where it is set, is the user's own choice.
"""

from __future__ import annotations

import os
import shutil
import stat
import sys
from contextlib import suppress
from pathlib import Path

import numba
import xxhash

PACKAGE = Path(__file__).parent
KEPT = 8
"""Folders of other digests that stay: other checkouts, say."""


def enable() -> bool:
    """Have numba cache the kernels that are compiled from now on; return whether it does."""
    if "NUMBA_CACHE_DIR" in os.environ:
        return True
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    try:
        folder = _private_folder(home / "dzero" / "kernels" / _digest())
    except (OSError, RuntimeError):  # no home, a full or read-only disk, or a folder of somebody else's
        return False
    numba.config.CACHE_DIR = str(folder)
    return True


def _digest() -> str:
    """Return what identifies this version of the kernels."""
    found = xxhash.xxh3_128(f"{numba.__version__} {sys.version}".encode())
    for path in sorted(PACKAGE.rglob("*.py")):
        found.update(path.read_bytes())
    return found.hexdigest()


def _private_folder(folder: Path) -> Path:
    """Make the folder and the one above it for this user alone, and forget the oldest beside it.

    Raises:
        OSError: It cannot be made, or others could write to it.
    """
    folder.parent.parent.mkdir(parents=True, exist_ok=True)
    folder = folder.parent.parent.resolve() / folder.parent.name / folder.name
    for above in folder.parent.parents:
        found = above.stat()
        shared = found.st_mode & 0o022 and not found.st_mode & stat.S_ISVTX
        if found.st_uid not in (0, os.getuid()) or shared:
            raise PermissionError(f"{above}: others could put another directory in the place of one in it")
    for each in (folder.parent, folder):
        with suppress(FileExistsError):
            each.mkdir(mode=0o700)
        found = each.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
            raise PermissionError(f"{each} is not a directory of this user's alone")
    others = [each for each in folder.parent.iterdir() if each != folder]
    for old in sorted(others, key=lambda each: each.stat().st_mtime)[:-KEPT]:
        shutil.rmtree(old, ignore_errors=True)
    return folder
