"""Promises of the corpus when it cannot be read: errors that name the file, the value and the repair."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from dzero.data.config import SETTINGS, DataConfig
from dzero.data.corpus import load

TEXTS = ["one", "two", "three"]


def write_parquet(path: Path, texts: list[str | None]) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"text": texts, "id": list(range(len(texts)))}), path)


def write_tokenizer(path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    tokenizers.Tokenizer(tokenizers.models.BPE({"<stop>": 0, "é": 1}, [])).save(str(path))


BAD_FILES = {
    "absent.txt": (None, {}, "no such file or folder"),
    "*.none": (None, {}, "no file matches"),
    "empty.txt": (b"", {}, r"empty\.txt is empty"),
    "empty.bin": (b"", {}, r"empty\.bin is empty"),
    "page.html": (b"<p>", {}, r"page\.html ends in '\.html', not in one of"),
    "rows.json": (
        b'[{"text": "a"}, {"body": "b"}]',
        {},
        r"data\.field=text: .*rows\.json element 1 has no such key.*\['body'\]",
    ),
    "cut.json": (b'[{"text": "a"}, {"text"', {}, r"cut\.json element 1 is not JSON in UTF-8 .*one array of rows"),
    "blank.jsonl": (b"\n\n", {}, r"blank\.jsonl: there is no text"),
    "key.jsonl": (b'{"body": "a"}\n', {}, r"data\.field=text: .*key\.jsonl line 1 has no such key.*\['body'\]"),
    "list.jsonl": (b'{"text": "a"}\n["a"]\n', {}, r"list\.jsonl line 2 .* a list"),
    "number.jsonl": (b'{"text": 3}\n', {}, r"number\.jsonl line 1: the field is a int, not text"),
    "broken.jsonl": (b'{"text": "a"}\n{"te', {}, r"broken\.jsonl line 2 is not JSON"),
    "latin.jsonl": ('{"text": "é"}'.encode("latin-1"), {}, r"latin\.jsonl line 1 is not JSON in UTF-8"),
    "half.jsonl": (b'{"text": "\\ud800"}', {}, r"half\.jsonl line 1: not valid Unicode"),
    "no.parquet": (b"PAR1 but no more", {}, r"no\.parquet is no readable \.parquet file"),
    "odd.bin": (b"abc", {}, r"odd\.bin: 3 bytes are no whole number of uint16 ids"),
    "minus.bin": (b"\xff" * 8, {"token_dtype": "int32"}, r"minus\.bin: token id -1 is negative"),
    "high.bin": (b"\xff\xff", {"vocab_size": 100}, r"data\.vocab_size=100: .*high\.bin holds the id 65535"),
    "junk.npy": (b"no array", {}, r"junk\.npy is no \.npy file"),
    "field.txt": (b"a", {"field": "text"}, r"data\.field=text has no effect on .*\.txt"),
    "dtype.npy": (b"a", {"token_dtype": "uint8"}, r"data\.token_dtype=uint8 has no effect on .*\.npy"),
    "coded.bin": (b"ab", {"tokenizer": "t.json"}, r"data\.tokenizer=t\.json has no effect on .*\.bin"),
    "coded.txt": (b"ab", {"tokenizer": "t.json"}, r"data\.tokenizer=t\.json: no such file"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_bad_file_is_an_error_that_names_it(tmp_path, name):
    content, settings, message = BAD_FILES[name]
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        load(DataConfig(path=str(tmp_path / name), **settings))


def test_arrays_that_are_no_token_ids_are_errors(tmp_path):
    np.save(tmp_path / "grid.npy", np.zeros((2, 3), np.int32))
    np.save(tmp_path / "float.npy", np.zeros(3))
    np.save(tmp_path / "none.npy", np.zeros(0, np.int32))
    np.save(tmp_path / "pickled.npy", np.array([{}, 1], object), allow_pickle=True)
    for path in tmp_path.iterdir():
        with pytest.raises(ValueError, match=path.name):
            load(DataConfig(path=str(path)))


def test_parquet_columns_and_missing_values_are_named(tmp_path):
    write_parquet(tmp_path / "a.parquet", ["a", None, "b"])
    with pytest.raises(ValueError, match=r"data\.field=body: .*a\.parquet .*\['text', 'id'\]"):
        load(DataConfig(path=str(tmp_path / "a.parquet"), field="body"))
    with pytest.raises(ValueError, match=r"a\.parquet row 1: the field is a NoneType"):
        load(DataConfig(path=str(tmp_path / "a.parquet")))


def test_folders_without_or_with_mixed_kinds_are_errors(tmp_path):
    (tmp_path / "data.arrow").write_bytes(b"x")
    with pytest.raises(FileNotFoundError, match=r"no file below it .* data\.name"):
        load(DataConfig(path=str(tmp_path)))
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "a.bin").write_bytes(b"ab")
    with pytest.raises(ValueError, match="mixes texts"):
        load(DataConfig(path=str(tmp_path)))


def test_datasets_that_cannot_be_opened_are_named_without_a_download(tmp_path):
    datasets = pytest.importorskip("datasets")
    saved = datasets.Dataset.from_dict({"text": TEXTS})
    saved.save_to_disk(str(tmp_path / "plain"))
    datasets.DatasetDict({"train": saved, "test": saved}).save_to_disk(str(tmp_path / "splits"))
    (tmp_path / "hollow").mkdir()
    for name, settings, message in (
        ("absent", {}, "no such folder"),
        ("hollow", {}, r"data\.name=.*hollow .*could not be opened"),
        ("plain", {"split": "train"}, r"data\.split=train has no effect"),
        ("plain", {"config": "en"}, r"data\.config=en has no effect"),
        ("plain", {"field": "body"}, r"data\.field=body: .*\['text'\]"),
        ("splits", {"split": "dev"}, r"data\.split=dev: .*\['test', 'train'\]"),
    ):
        with pytest.raises((ValueError, FileNotFoundError), match=message):
            load(DataConfig(name=str(tmp_path / name), **settings))


def test_a_tokenizer_that_cannot_serve_is_an_error(tmp_path):
    (tmp_path / "latin.txt").write_bytes("é".encode("latin-1"))
    (tmp_path / "junk.json").write_text("{}")
    write_tokenizer(tmp_path / "stop.json")
    text, junk, stop = (str(tmp_path / name) for name in ("latin.txt", "junk.json", "stop.json"))
    assert len(load(DataConfig(path=text, held_out=0.0)).train) == 2
    for settings, message in (
        ({"tokenizer": junk}, r"junk\.json is no tokenizers JSON file"),
        ({"tokenizer": stop}, r"none of .* is in the vocabulary of .*stop\.json, .*: set data\.separator"),
        ({"tokenizer": stop, "separator": "<end>"}, r"data\.separator=<end> is not in the vocabulary"),
        ({"tokenizer": stop, "separator": "<stop>"}, r"latin\.txt is not UTF-8"),
    ):
        with pytest.raises(ValueError, match=message):
            load(DataConfig(path=text, **settings))


def test_settings_without_effect_or_out_of_range_are_errors():
    every = set().union(*SETTINGS.values())
    values = {key: 7 if key == "vocab_size" else "uint8" if key == "token_dtype" else "x" for key in every}
    for source, chooser in (("python", {}), ("files", {"path": "a"}), ("dataset", {"name": "a"})):
        for key in every - SETTINGS[source] - {"path", "name"}:
            with pytest.raises(ValueError, match=f"data.{key}={values[key]} has no effect on {source}"):
                DataConfig(**chooser, **{key: values[key]})
    for settings, message in (
        ({"path": "a", "name": "b"}, "only one can be read"),
        ({"held_out": 1.0}, "data.held_out=1.0"),
        ({"held_out": -0.1}, "data.held_out=-0.1"),
        ({"path": "a", "token_dtype": "uint9"}, "data.token_dtype='uint9': choose one of"),
        ({"path": "a", "vocab_size": 0}, "data.vocab_size=0"),
        ({"separator": "x"}, "has no effect with data.tokenizer=null"),
    ):
        with pytest.raises(ValueError, match=message):
            DataConfig(**settings)


def test_a_missing_extra_is_named(tmp_path, monkeypatch):
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'dzero\[data\]'"):
        load(DataConfig(path=str(tmp_path / "a.parquet")))
