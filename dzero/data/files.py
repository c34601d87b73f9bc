"""Files that a `data.path` refers to: one file, all known files below a folder, or the matches of a glob."""

from __future__ import annotations

import glob
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ARRAY = ".json"
TEXT_SUFFIXES = (".txt", ".jsonl", ".parquet", ARRAY)
TOKEN_SUFFIXES = (".bin", ".npy")
SUFFIXES = TEXT_SUFFIXES + TOKEN_SUFFIXES
OF_A_FOLDER = tuple(suffix for suffix in SUFFIXES if suffix != ARRAY)
"""Suffixes of files that are read from a folder. Its .json files may describe something, so they are read by name."""


@dataclass(frozen=True, kw_only=True)
class FoundFiles:
    """Files below `root`, sorted by relative path, and the number of `ignored` others in the folder, by suffix."""

    root: Path
    paths: tuple[Path, ...]
    ignored: Counter[str] = field(default_factory=Counter)

    def key(self, path: Path) -> str:
        """Return the path relative to the root, which does not depend on where the folder is."""
        return path.relative_to(self.root).as_posix()

    @property
    def suffixes(self) -> set[str]:
        """Set of suffixes of the files, e.g. {".txt"}."""
        return {path.suffix for path in self.paths}


def find(pattern: str, key: str = "data.path") -> FoundFiles:
    """Find the files that a source refers to; `key` is the setting that names it, for messages.

    A file that is named directly or matched by a glob must have a known suffix. Of a folder, files with a suffix of
    `OF_A_FOLDER` are used and all others are counted. Empty files, and texts mixed with token files, are errors.
    """
    path = Path(pattern).expanduser()
    if path.is_dir():
        found = _in_folder(path, key)
    elif path.exists():
        found = FoundFiles(root=path.parent, paths=(path,))
    else:
        found = _by_glob(pattern, path, key)
    _check(found, f"{key}={pattern}")
    return found


def find_sources(patterns: Sequence[str]) -> dict[str, FoundFiles]:
    """Find the files of each source of a mixture, by the source's short name: that of its last part, if it is unique.

    Raises:
        FileNotFoundError: A source has no files.
        ValueError: A file is in two sources, or a source cannot be read.
    """
    found, owner = dict[str, FoundFiles](), dict[str, str]()
    last = Counter(Path(pattern).name for pattern in patterns)
    last[""] = 0
    for pattern in patterns:
        files = find(pattern, "data.paths")
        for path in files.paths:
            before = owner.setdefault(os.path.realpath(path), pattern)
            if before != pattern or pattern in found:
                twice = f"data.paths: {path} is in {before} and again in {pattern}"
                raise ValueError(f"{twice}; name each file once, with a larger data.weights to read it more often")
        found[pattern] = files
    return {Path(each).name if last[Path(each).name] == 1 else each: files for each, files in found.items()}


def _in_folder(root: Path, key: str) -> FoundFiles:
    os.scandir(root).close()  # raises if the folder cannot be read; rglob would ignore that
    paths = _sorted(root, root.rglob("*"))
    known = tuple(path for path in paths if _kind(root, path) in OF_A_FOLDER)
    others = Counter(kind for path in paths if (kind := _kind(root, path)) not in OF_A_FOLDER)
    if not known:
        hint = "; a Hugging Face dataset folder is given as data.name" if others[".arrow"] else ""
        hint += f"; its .json files are read by {key}='{root}/*.json'" if others[ARRAY] else ""
        raise FileNotFoundError(f"{key}={root}: no file below it ends in one of {[*OF_A_FOLDER]}{hint}")
    return FoundFiles(root=root, paths=known, ignored=others)


def _by_glob(pattern: str, path: Path, key: str) -> FoundFiles:
    root = next(each for each in (path, *path.parents) if not glob.has_magic(str(each)))
    paths = _sorted(root, map(Path, glob.glob(str(path), recursive=True)))
    if not paths:
        what = "no file matches" if glob.has_magic(pattern) else "no such file or folder"
        raise FileNotFoundError(
            f"{key}={pattern}: {what} (looked from {Path.cwd()}); give a file, a folder or a quoted glob"
        )
    return FoundFiles(root=root, paths=tuple(paths))


def _kind(root: Path, path: Path) -> str:
    """Return the suffix, or `hidden` for paths with a leading dot (files of editors and version control)."""
    hidden = any(part.startswith(".") for part in path.relative_to(root).parts)
    return "hidden" if hidden else path.suffix or "without suffix"


def _sorted(root: Path, paths: Iterable[Path]) -> list[Path]:
    return sorted((path for path in paths if path.is_file()), key=lambda path: path.relative_to(root).as_posix())


def _check(found: FoundFiles, setting: str) -> None:
    for path in found.paths:
        if path.suffix not in SUFFIXES:
            raise ValueError(f"{setting}: {path} ends in {path.suffix!r}, not in one of {[*SUFFIXES]}")
        if not path.is_file():
            raise ValueError(f"{setting}: {path} is no regular file; pipes cannot be read twice")
        if path.stat().st_size == 0:
            raise ValueError(f"{setting}: {path} is empty (0 bytes); remove it or write it again")
    if found.suffixes & set(TEXT_SUFFIXES) and found.suffixes & set(TOKEN_SUFFIXES):
        raise ValueError(
            f"{setting} mixes texts {[*TEXT_SUFFIXES]} with token files {[*TOKEN_SUFFIXES]}; "
            "name one kind by a glob such as 'folder/*.bin'"
        )
