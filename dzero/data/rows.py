"""Rows of .jsonl, .json and .parquet files, one at a time and in a fixed order.

    file       row                         named in errors
    .jsonl     a line that is not blank    chat.jsonl line 12    (the first line is 1)
    .json      an element of the array     chat.json element 7   (the first is 0), or as .jsonl
    .parquet   a row, without its nulls    x.parquet row 7       (the first row is 0)

A line or element that is no JSON object is still a row: its `problem` says what is wrong with it, and the caller
decides whether that ends the reading. A file that cannot be read at all is an error.

Arrow fills fields that a row of a column of structs lacks with null, so nulls of .parquet files are left out at every
depth. Nulls of a .jsonl or .json file were written by somebody and are kept.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from dzero.data.files import ARRAY, FoundFiles
from dzero.data.json_array import is_array, read_elements
from dzero.errors import converting, import_optional, in_short

ROW_SUFFIXES = (".jsonl", ".parquet", ARRAY)
BATCH_ROWS = 256
MOST_LINE_BYTES = 256 * 2**20


@dataclass(frozen=True)
class Row:
    """One row of a file: its keys and values, its place, and what is wrong with it if it has no keys and values.

    `read_bytes` says about how many bytes of all files have been read once this row has been.
    """

    value: dict[str, Any]
    where: str
    problem: str = ""
    read_bytes: int = field(default=0, compare=False)


def read_rows(found: FoundFiles) -> Iterator[Row]:
    """Yield the rows of .jsonl, .json and .parquet files, file by file, in bounded memory.

    Raises:
        ValueError: A file has another suffix, or is no readable .json or .parquet file.
        ModuleNotFoundError: A .parquet file needs pyarrow, which is not installed.
    """
    for path in found.paths:
        if path.suffix not in ROW_SUFFIXES:
            raise ValueError(f"{path}: chat and instruction data are rows of {[*ROW_SUFFIXES]} files; convert it")
    before_bytes = 0
    for path in found.paths:
        yield from _reader(path)(path, found.key(path), before_bytes)
        before_bytes += path.stat().st_size


def _reader(path: Path) -> Callable[[Path, str, int], Iterator[Row]]:
    if path.suffix == ".parquet":
        return _read_parquet
    return _read_array if path.suffix == ARRAY and is_array(path) else _read_jsonl


def _read_array(path: Path, name: str, before_bytes: int) -> Iterator[Row]:
    for number, (value, read_bytes) in enumerate(read_elements(path)):
        where, read_bytes = f"{name} element {number}", before_bytes + read_bytes
        if isinstance(value, dict):
            yield Row(value, where, read_bytes=read_bytes)
        else:
            yield Row({}, where, f"the element is a JSON {type(value).__name__}, not an object with keys", read_bytes)


def _read_jsonl(path: Path, name: str, before_bytes: int) -> Iterator[Row]:
    with path.open("rb") as file:
        for number, line in _lines(file):
            where, read_bytes = f"{name} line {number}", before_bytes + file.tell()
            if line is None:
                yield Row({}, where, f"the line is longer than {MOST_LINE_BYTES} bytes", read_bytes)
            elif line.strip():
                value, problem = _parsed(line)
                yield Row(value, where, problem, read_bytes)


def _lines(file: BinaryIO) -> Iterator[tuple[int, bytes | None]]:
    """Yield each line with its number; a line that is too long is read past, and None stands for it."""
    number = 0
    while line := file.readline(MOST_LINE_BYTES):
        number += 1
        whole = line.endswith(b"\n") or len(line) < MOST_LINE_BYTES
        rest = line
        while not whole and rest and not rest.endswith(b"\n"):
            rest = file.readline(MOST_LINE_BYTES)
        yield number, line if whole else None


def _parsed(line: bytes) -> tuple[dict[str, Any], str]:
    try:
        value = json.loads(line.decode().strip())
    except (ValueError, RecursionError) as error:
        return {}, f"the line is not JSON in UTF-8 ({in_short(error)})"
    if not isinstance(value, dict):
        return {}, f"the line is a JSON {type(value).__name__}, not an object with keys"
    return value, ""


def _read_parquet(path: Path, name: str, before_bytes: int) -> Iterator[Row]:
    pyarrow = import_optional("pyarrow", "a .parquet file", "data")
    parquet = import_optional("pyarrow.parquet", "a .parquet file", "data")
    size_bytes = path.stat().st_size
    damage = (pyarrow.ArrowException, OSError, UnicodeDecodeError)
    with (
        converting(f"{path} is no readable .parquet file", *damage, repair="write it again"),
        parquet.ParquetFile(path) as file,
    ):
        rows = max(file.metadata.num_rows, 1)
        number = 0
        for batch in file.iter_batches(batch_size=BATCH_ROWS):
            for value in batch.to_pylist():
                read_bytes = before_bytes + size_bytes * (number + 1) // rows
                yield Row(_without_nulls(value), f"{name} row {number}", read_bytes=read_bytes)
                number += 1


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value
