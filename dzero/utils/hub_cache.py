"""Files in folders of published models, and the local cache of Hugging Face.

    CACHE/models--org--name/
        blobs/<hash>                                         contents of files
        refs/main                                            name of the snapshot that is current
        snapshots/<revision>/config.json -> ../../blobs/<hash>

Note: links. A folder may come from anyone, so a link in it could name any file of this machine. One kind of link is
followed: from `snapshots/<revision>` to a file of the `blobs` beside `snapshots`. Its name is read, not resolved. Each
part is then opened relative to the folder opened before it, and none of them may be a link. What is checked is
therefore what is read, whoever changes the folder meanwhile. All other links are refused.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
BLOB = re.compile(r"\.\./\.\./blobs/([\w.-]+)", re.ASCII)
"""Target of a link in a snapshot."""
REPOSITORY = re.compile(r"\w[\w.-]*/\w[\w.-]*", re.ASCII)
REVISION = re.compile(r"\w[\w.-]*", re.ASCII)
MOST_TEXT_BYTES = 256 << 20
"""Limit of a file that `read_bytes` reads."""


@contextmanager
def opened(file: Path) -> Iterator[int]:
    """Open a regular file for reading and return its descriptor; of links, only those of the cache are followed.

    Raise OSError for another link, and for a folder, a pipe or a device.
    """
    fd = _open(file)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(f"{file}: a folder, a pipe or a device, not a file of a model")
        yield fd
    finally:
        os.close(fd)


def read_bytes(file: Path) -> bytes:
    """Return the contents of a file, opened as by `opened`; raise ValueError above `MOST_TEXT_BYTES`."""
    with opened(file) as fd, os.fdopen(os.dup(fd), "rb") as data:
        if (size := os.fstat(fd).st_size) > MOST_TEXT_BYTES:
            raise ValueError(f"{file}: {size} bytes, more than such a file has")
        return data.read()


@contextmanager
def private_copies(folder: Path, names: Iterable[str]) -> Iterator[Path]:
    """Copy files of a folder, read by `read_bytes`, to a private one for a library that opens files by their names.

    Yields:
        The private folder, which is removed in the end.
    """
    with TemporaryDirectory(prefix="dzero-files-") as private:
        for name in names:
            copy = Path(private, name)
            copy.parent.mkdir(exist_ok=True)
            copy.write_bytes(read_bytes(folder / name))
        yield Path(private)


def local_folder(name: str) -> str:
    """Return the folder that a setting names: for `org/name` in the local cache its current snapshot, else `name`.

    A folder of that name goes first. Nothing is downloaded. Raise ValueError if the cache holds a damaged `refs/main`.
    """
    if not is_repository(name):
        return name
    repository = cache_folder() / f"models--{name.replace('/', '--')}"
    try:
        revision = read_bytes(repository / "refs" / "main").decode(errors="replace").strip()
    except FileNotFoundError:
        return name
    if not REVISION.fullmatch(revision):
        raise ValueError(f"{repository / 'refs' / 'main'}: {revision[:80]!r} is no name of a snapshot")
    snapshot = repository / "snapshots" / revision
    if snapshot.is_symlink():
        raise ValueError(f"{snapshot}: a symbolic link is not followed: run `hf download {name}` again")
    return str(snapshot) if snapshot.is_dir() else name


def is_repository(name: str) -> bool:
    """Return whether `name` has the form `org/name` and is no folder here."""
    return REPOSITORY.fullmatch(name) is not None and not Path(name).is_dir()


def cache_folder() -> Path:
    """Return the folder in which Hugging Face's tools keep downloads, from the environment variables that they read."""
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    hub = os.environ.get("HF_HUB_CACHE") or os.path.join(
        os.environ.get("HF_HOME") or os.path.join(home, "huggingface"), "hub"
    )
    return Path(os.path.expandvars(os.path.expanduser(hub)))


def _open(file: Path) -> int:
    """Open a file that is no link, or the blob that it links to."""
    folder = os.open(file.parent, FOLDER)
    try:
        return os.open(file.name, FILE, dir_fd=folder)
    except OSError as error:
        if error.errno == errno.ELOOP:
            return _open_blob(file, folder)
        raise OSError(error.errno, error.strerror, str(file)) from None
    finally:
        os.close(folder)


def _open_blob(file: Path, snapshot: int) -> int:
    """Open the blob that the link `file` names; `snapshot` is the descriptor of its folder."""
    target = os.readlink(file.name, dir_fd=snapshot)
    blob = BLOB.fullmatch(target)
    repository = os.open("../..", FOLDER, dir_fd=snapshot)
    folders = [repository]
    try:
        if blob is None or not _is_in_snapshots(snapshot, repository):
            raise _refused(file, target)
        folders.append(os.open("blobs", FOLDER | os.O_NOFOLLOW, dir_fd=repository))
        return os.open(blob[1], FILE, dir_fd=folders[-1])
    except FileNotFoundError:
        raise FileNotFoundError(f"{file}: {target} is not in the cache: download it again with `hf download`") from None
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR):  # blobs, or the blob itself, is a link
            raise _refused(file, target) from None
        raise
    finally:
        for folder in folders:
            os.close(folder)


def _is_in_snapshots(folder: int, repository: int) -> bool:
    """Return whether the parent of `folder` is the folder `snapshots` of `repository`, not a link to it."""
    try:
        named = os.stat("snapshots", dir_fd=repository, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return os.path.samestat(named, os.stat("..", dir_fd=folder))


def _refused(file: Path, target: str) -> OSError:
    return OSError(
        f"{file}: a symbolic link to {target}, which is no file of the blobs of its own repository in the cache of "
        "Hugging Face, is not followed: name a folder that holds the files themselves (`cp -rL`, or "
        "`hf download --local-dir`)"
    )
