"""Readers of text documents: the running Python's standard library, files, or a Hugging Face dataset.

    source            document     key that is hashed for the held-out split
    standard library  a .py file   path below the library
    .txt              a file       path below data.path
    .jsonl .json      a row        text, so that copies of a text are on the same side
    .parquet          a row        text
    dataset           a row        text

Readers are lazy and yield documents in a fixed order. Data that cannot be read is an error that names file and row; it
is never skipped. Only empty documents are left out.
"""

from __future__ import annotations

import hashlib
import json
import os
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from dzero.data.files import ARRAY, FoundFiles
from dzero.data.json_array import is_array, read_elements
from dzero.errors import converting, import_optional

ROWS = 1024
NOT_LIBRARY = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test"})


class Document(NamedTuple):
    """A text in UTF-8 (of a .txt file, its bytes), its name for errors, and the key that is hashed for the split."""

    name: str
    key: bytes
    text: bytes


def is_held_out(key: bytes, share: float) -> bool:
    """Return whether a document is held out; this depends only on its key and `share`, on every machine."""
    digest = hashlib.blake2b(key, digest_size=8).digest()
    return int.from_bytes(digest, "big") < share * 2**64


def python_library() -> FoundFiles:
    """Find the .py files of the running Python's standard library, without tests and installed packages."""
    root = Path(sysconfig.get_path("stdlib"))
    paths: list[Path] = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in NOT_LIBRARY]
        paths += (Path(folder, name) for name in names if name.endswith(".py"))
    if not paths:
        raise FileNotFoundError(f"this Python keeps no .py files in {root}: set data.path to your own texts")
    return FoundFiles(root=root, paths=tuple(sorted(paths, key=lambda path: path.relative_to(root).as_posix())))


def read_files(found: FoundFiles, field: str) -> Iterator[Document]:
    """Yield the documents of text files; `field` is the key of .json and .jsonl rows, and the column of .parquet."""
    for path in found.paths:
        if path.suffix == ARRAY and is_array(path):
            yield from _rows(_read_array(path, field))
        elif path.suffix in (".jsonl", ARRAY):
            yield from _rows(_read_jsonl(path, field))
        elif path.suffix == ".parquet":
            yield from _rows(_read_parquet(path, field))
        else:
            yield Document(str(path), found.key(path).encode(), path.read_bytes())


def read_dataset(name: str, config: str | None, split: str | None, field: str) -> Iterator[Document]:
    """Yield the rows of a Hugging Face dataset: a name on the hub, a folder of data files, or of a saved dataset.

    Without `config`, the dataset must have only one; without `split`, it is `train`, or all of a dataset that was saved
    without splits.
    """
    dataset = _open_dataset(name, config, split)
    if field not in dataset.column_names:
        raise ValueError(f"data.field={field}: {name} has no such column; choose one of {dataset.column_names}")
    batches = dataset.select_columns([field]).iter(batch_size=ROWS)
    texts = (text for batch in batches for text in batch[field])
    return _rows((f"{name} row {row}", text) for row, text in enumerate(texts))


def _rows(rows: Iterable[tuple[str, object]]) -> Iterator[Document]:
    for name, text in rows:
        if not isinstance(text, str):
            raise ValueError(f"{name}: the field is a {type(text).__name__}, not text; choose another data.field")
        try:
            content = text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"{name}: not valid Unicode ({error}); repair or remove that row") from error
        if content:
            yield Document(name, content, content)


def _read_jsonl(path: Path, field: str) -> Iterator[tuple[str, object]]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            name = f"{path} line {number}"
            try:
                row = json.loads(line.decode())
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{name} is not JSON in UTF-8 ({error}); repair or remove it") from error
            yield name, _text_of(row, field, name)


def _read_array(path: Path, field: str) -> Iterator[tuple[str, object]]:
    for number, (row, _) in enumerate(read_elements(path)):
        name = f"{path} element {number}"
        yield name, _text_of(row, field, name)


def _text_of(row: Any, field: str, name: str) -> object:
    if not isinstance(row, dict) or field not in row:
        has = f"keys {sorted(row)}" if isinstance(row, dict) else f"a {type(row).__name__}, no object"
        raise ValueError(f"data.field={field}: {name} has no such key, it has {has}; choose one that all rows have")
    return row[field]


def _read_parquet(path: Path, field: str) -> Iterator[tuple[str, object]]:
    pyarrow = import_optional("pyarrow", "a .parquet file", "data")
    parquet = import_optional("pyarrow.parquet", "a .parquet file", "data")
    damage = (pyarrow.ArrowException, OSError, UnicodeDecodeError)
    with (
        converting(f"{path} is no readable .parquet file", *damage, repair="write it again"),
        parquet.ParquetFile(path) as file,
    ):
        if field not in file.schema_arrow.names:
            raise ValueError(f"data.field={field}: {path} has no such column; choose one of {file.schema_arrow.names}")
        row = 0
        for batch in file.iter_batches(batch_size=ROWS, columns=[field]):
            for text in batch.column(0).to_pylist():
                yield f"{path} row {row}", text
                row += 1


def _open_dataset(name: str, config: str | None, split: str | None) -> Any:
    datasets = import_optional("datasets", f"data.name={name}", "data")
    folder = Path(name).expanduser()
    if name.startswith(("/", ".", "~")) and not folder.is_dir():
        raise FileNotFoundError(f"data.name={name}: no such folder (looked from {Path.cwd()})")
    saved = any((folder / marker).is_file() for marker in ("state.json", "dataset_dict.json"))
    try:
        if not saved:
            source = str(folder) if folder.is_dir() else name
            return datasets.load_dataset(source, config, split=split or "train")
        opened = datasets.load_from_disk(str(folder))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"data.name={name} (config={config}, split={split or 'train'}) could not be opened: {error}; "
            "check the three settings, or give local files as data.path"
        ) from error
    return _one_split(opened, name, config, split)


def _one_split(saved: Any, name: str, config: str | None, split: str | None) -> Any:
    """Select a split of what `save_to_disk` wrote: a dataset, or a dict of datasets by split."""
    if config is not None:
        raise ValueError(f"data.config={config} has no effect on the saved dataset {name}; remove it")
    if not isinstance(saved, dict):
        if split is not None:
            raise ValueError(f"data.split={split} has no effect: {name} was saved without splits; remove it")
        return saved
    if (split or "train") not in saved:
        raise ValueError(f"data.split={split or 'train'}: {name} has no such split; choose one of {sorted(saved)}")
    return saved[split or "train"]
