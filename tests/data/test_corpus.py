"""Promises of a corpus: every source gives the right ids, a split depends on no company, and what is wrong is named."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any

import chat
import numpy as np
import pytest
import torch
from corpora import IGNORED, load

TEXTS = [f"Document {number} says: naïve café № {number * number}.\n" for number in range(200)]


def read(path: Path, **settings: Any) -> Any:
    """The corpus of a file, a folder or a glob."""
    return load(path=str(path), **settings)


def documents(corpus: Any) -> tuple[list[str], list[str]]:
    """The texts on either side, cut at the separators."""
    sides = (bytes(side[:]).decode() for side in (corpus.train, corpus.held_out))
    train, held_out = (side.split("\0")[:-1] for side in sides)
    return train, held_out


def write_jsonl(path: Path, texts: list[str], field: str = "text") -> None:
    path.write_text("".join(json.dumps({field: text, "id": row}) + "\n" for row, text in enumerate(texts)))


def write_parquet(path: Path, texts: list[str | None], field: str = "text") -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({field: texts, "id": list(range(len(texts)))}), path, row_group_size=64)


def write_tokenizer(path: Path, *, end: str = "<|endoftext|>") -> None:
    path.write_text(chat.tokenizer_json(bos=False).replace("</s>", end))


HELD_OUT = [0, 3, 4, 16, 25, 26, 27, 31, 34, 40, 47, 50, 52, 59, 78, 82, 83, 92, 97, 103, 107, 108, 109]
HELD_OUT += [132, 136, 138, 139, 145, 157, 170, 173, 175, 176, 179, 180, 184, 189, 192]
"""Numbers of the documents that are held out of TEXTS at a fifth; frozen, since a run that goes on must find them."""


@pytest.fixture
def expected() -> tuple[list[str], list[str]]:
    """TEXTS split by the hash of their content, with a fifth held out."""
    sides = [text for number, text in enumerate(TEXTS) if number not in HELD_OUT], [TEXTS[n] for n in HELD_OUT]
    assert 20 < len(sides[1]) < 60
    return sides


def test_the_default_is_the_python_library_split_by_file_and_the_same_every_time():
    first, second = load(), load()
    assert first.vocab_size == 256
    assert first.train.parts[0].dtype == np.uint8
    assert np.array_equal(first.train[:], second.train[:])
    assert np.array_equal(first.held_out[:], second.held_out[:])
    assert len(first.train) > 2**21
    assert 0.001 < len(first.held_out) / len(first.train) < 0.1
    source = Path(dataclasses.__file__).read_bytes() + b"\0"
    assert (source in bytes(first.train[:])) is not (source in bytes(first.held_out[:]))


def test_jsonl_parquet_and_datasets_give_the_same_documents_and_split(tmp_path, expected, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    write_jsonl(tmp_path / "texts.jsonl", TEXTS, "content")
    write_parquet(tmp_path / "texts.parquet", TEXTS, "content")
    (tmp_path / "folder").mkdir()
    write_parquet(tmp_path / "folder" / "train.parquet", TEXTS, "content")
    saved = datasets.Dataset.from_dict({"content": TEXTS})
    saved.save_to_disk(str(tmp_path / "saved"))
    datasets.DatasetDict({"all": saved}).save_to_disk(str(tmp_path / "splits"))
    for settings in (
        {"path": str(tmp_path / "texts.jsonl")},
        {"path": str(tmp_path / "texts.parquet")},
        {"name": str(tmp_path / "folder")},
        {"name": str(tmp_path / "saved")},
        {"name": str(tmp_path / "splits"), "split": "all"},
    ):
        corpus = load(field="content", held_out=0.2, **settings)
        assert documents(corpus) == expected, settings
        assert corpus.vocab_size == 256


def test_the_split_of_a_document_ignores_order_place_and_company_and_grows_with_the_share(tmp_path, expected):
    (tmp_path / "parts").mkdir()
    write_jsonl(tmp_path / "parts" / "b.jsonl", TEXTS[100::-1])
    write_jsonl(tmp_path / "parts" / "a.jsonl", [*TEXTS[101:], "another one"])
    train, held_out = documents(read(tmp_path / "parts", held_out=0.2))
    assert set(expected[0]) <= set(train)
    assert set(expected[1]) <= set(held_out)
    assert len(train) + len(held_out) == len(TEXTS) + 1
    _, more = documents(read(tmp_path / "parts", held_out=0.3))
    assert set(expected[1]) < set(more)


def test_text_files_are_split_by_path_below_the_folder(tmp_path):
    for place in ("one", "two"):
        (tmp_path / place / "sub").mkdir(parents=True)
        for number in range(50):
            (tmp_path / place / "sub" / f"{number:02}.txt").write_text(TEXTS[number])
    (tmp_path / "two" / "README.md").write_text("not read")
    (tmp_path / "two" / "sub" / ".99.txt").write_text("an editor's copy")
    one, two = (read(tmp_path / place, held_out=0.2) for place in ("one", "two"))
    by_glob = read(tmp_path / "one" / "**" / "*.txt", held_out=0.2)
    assert documents(one) == documents(two) == documents(by_glob)
    train, held_out = documents(one)
    assert sorted(train + held_out) == sorted(TEXTS[:50])
    assert "not read: 1 .md, 1 hidden" in two.summary


def test_one_text_gives_its_tail_as_held_out(tmp_path):
    content = "".join(TEXTS).encode()
    (tmp_path / "poem.txt").write_bytes(content)
    corpus = read(tmp_path / "poem.txt", held_out=0.1)
    assert bytes(corpus.train[:]) + bytes(corpus.held_out[:]) == content + b"\0"
    assert len(corpus.held_out) == round((len(content) + 1) * 0.1)
    assert len(read(tmp_path / "poem.txt", held_out=0.0).held_out) == 0


def test_a_tokenizer_file_encodes_whole_documents_and_ends_each(tmp_path, expected):
    tokenizers = pytest.importorskip("tokenizers")
    write_tokenizer(tmp_path / "tokenizer.json")
    write_jsonl(tmp_path / "texts.jsonl", TEXTS)
    corpus = read(tmp_path / "texts.jsonl", tokenizer=str(tmp_path / "tokenizer.json"), held_out=0.2)
    tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    end = tokenizer.token_to_id("<|endoftext|>")
    assert corpus.vocab_size == tokenizer.get_vocab_size()
    for side, texts in zip((corpus.train, corpus.held_out), expected, strict=True):
        ids = side[:]
        assert ids.dtype == np.uint16
        cuts = np.flatnonzero(ids == end)
        pieces = np.split(ids, cuts + 1)[:-1]
        assert [tokenizer.decode(piece.tolist()) for piece in pieces] == texts


def test_a_long_text_is_encoded_in_pieces_without_loss(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    stop = str(tmp_path / "tokenizer.json")
    write_tokenizer(Path(stop), end="<stop>")
    text = "".join(TEXTS) * 300
    assert len(text) > 2**20
    (tmp_path / "long.txt").write_text(text)
    corpus = read(tmp_path / "long.txt", tokenizer=stop, separator="<stop>", held_out=0.0)
    assert tokenizers.Tokenizer.from_file(stop).decode(corpus.train[:].tolist()) == text


def test_token_files_are_mapped_and_cut_at_the_tail(tmp_path):
    ids = np.random.default_rng(0).integers(0, 50_000, 10_000)
    ids.astype(np.uint16).tofile(tmp_path / "a.bin")
    ids.astype(np.uint32).tofile(tmp_path / "wide.bin")
    np.save(tmp_path / "a.npy", ids.astype(np.int32))
    for name, settings in (("a.bin", {}), ("wide.bin", {"token_dtype": "uint32"}), ("a.npy", {})):
        corpus = read(tmp_path / name, held_out=0.1, **settings)
        assert all(isinstance(part, np.memmap) for part in corpus.train.parts)
        assert np.array_equal(corpus.train[:], ids[:9000])
        assert np.array_equal(corpus.held_out[:], ids[9000:])
        assert corpus.vocab_size == ids.max() + 1
    assert read(tmp_path / "a.npy", vocab_size=50_304).vocab_size == 50_304


def test_several_token_files_are_split_by_file_and_read_as_one(tmp_path):
    for number in range(20):
        np.full(100, number, np.uint16).tofile(tmp_path / f"{number:02}.bin")
    corpus = read(tmp_path, held_out=0.2)
    held_out = sorted({int(each) for each in corpus.held_out[:]})
    assert held_out
    assert np.array_equal(corpus.held_out[:], np.repeat(held_out, 100))
    assert len(corpus.train) + len(corpus.held_out) == 2000
    assert corpus.vocab_size == 20


# What cannot be read

BAD_FILES = {
    "absent.txt": (None, {}, "no such file or folder"),
    "*.none": (None, {}, "no file matches"),
    "empty.txt": (b"", {}, r"empty\.txt is empty"),
    "empty.bin": (b"", {}, r"empty\.bin is empty"),
    "page.html": (b"<p>", {}, r"page\.html ends in '\.html', not in one of"),
    "rows.json": (b'[{"text": "a"}, {"body": "b"}]', {}, r"rows\.json element 1 has no such key.*\['body'\]"),
    "cut.json": (b'[{"text": "a"}, {"text"', {}, r"cut\.json element 1 is not JSON in UTF-8 .*one array of rows"),
    "blank.jsonl": (b"\n\n", {}, r"blank\.jsonl: there is no text"),
    "key.jsonl": (b'{"body": "a"}\n', {}, r"data\.field=text: .*key\.jsonl line 1 has no such key.*\['body'\]"),
    "list.jsonl": (b'{"text": "a"}\n["a"]\n', {}, r"list\.jsonl line 2 .* a list"),
    "number.jsonl": (b'{"text": 3}\n', {}, r"number\.jsonl line 1: the field is a int, not text"),
    "broken.jsonl": (b'{"text": "a"}\n{"te', {}, r"broken\.jsonl line 2 is not JSON"),
    "half.jsonl": (b'{"text": "\\ud800"}', {}, r"half\.jsonl line 1: not valid Unicode"),
    "minus.bin": (b"\xff" * 8, {"token_dtype": "int32"}, r"minus\.bin: token id -1 is negative"),
    "high.bin": (b"\xff\xff", {"vocab_size": 100}, r"data\.vocab_size=100: .*high\.bin holds the id 65535"),
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
        read(tmp_path / name, **settings)


def test_arrays_that_are_no_token_ids_are_errors(tmp_path):
    np.save(tmp_path / "grid.npy", np.zeros((2, 3), np.int32))
    np.save(tmp_path / "float.npy", np.zeros(3))
    np.save(tmp_path / "none.npy", np.zeros(0, np.int32))
    np.save(tmp_path / "pickled.npy", np.array([{}, 1], object), allow_pickle=True)
    for path in tmp_path.iterdir():
        with pytest.raises(ValueError, match=path.name):
            read(path)


def test_parquet_columns_and_missing_values_are_named(tmp_path):
    write_parquet(tmp_path / "a.parquet", ["a", None, "b"])
    with pytest.raises(ValueError, match=r"data\.field=body: .*a\.parquet .*\['text', 'id'\]"):
        read(tmp_path / "a.parquet", field="body")
    with pytest.raises(ValueError, match=r"a\.parquet row 1: the field is a NoneType"):
        read(tmp_path / "a.parquet")


def test_folders_without_or_with_mixed_kinds_are_errors(tmp_path):
    (tmp_path / "data.arrow").write_bytes(b"x")
    with pytest.raises(FileNotFoundError, match=r"no file below it .* data\.name"):
        read(tmp_path)
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "a.bin").write_bytes(b"ab")
    with pytest.raises(ValueError, match="mixes texts"):
        read(tmp_path)


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
            load(name=str(tmp_path / name), **settings)


def test_a_tokenizer_that_cannot_serve_is_an_error(tmp_path):
    (tmp_path / "a.txt").write_text("a")
    write_tokenizer(tmp_path / "stop.json", end="<stop>")
    stop = {"tokenizer": str(tmp_path / "stop.json")}
    with pytest.raises(ValueError, match=r"none of .* is in the vocabulary of .*stop\.json, .*: set data\.separator"):
        read(tmp_path / "a.txt", **stop)
    with pytest.raises(ValueError, match=r"data\.separator=<end> is not in the vocabulary"):
        read(tmp_path / "a.txt", **stop, separator="<end>")


IDLE = {
    "python": ({}, {"field", "token_dtype", "vocab_size", "split", "config"}),
    "files": ({"path": "a"}, {"split", "config"}),
    "dataset": ({"name": "a"}, {"token_dtype", "vocab_size"}),
}
"""Sources, and settings that have no effect on them."""


def test_settings_without_effect_or_out_of_range_are_errors():
    for source, (chooser, idle) in IDLE.items():
        for key in idle:
            value = {"vocab_size": 7, "token_dtype": "uint8"}.get(key, "x")
            with pytest.raises(ValueError, match=f"data.{key}={value} has no effect on {source}"):
                load(**chooser, **{key: value})
    for settings, message in (
        ({"path": "a", "name": "b"}, "only one can be read"),
        ({"held_out": 1.0}, "data.held_out=1.0"),
        ({"held_out": -0.1}, "data.held_out=-0.1"),
        ({"path": "a", "token_dtype": "uint9"}, "data.token_dtype='uint9': choose one of"),
        ({"path": "a", "vocab_size": 0}, "data.vocab_size=0"),
        ({"separator": "x"}, "has no effect with data.tokenizer=null"),
    ):
        with pytest.raises(ValueError, match=message):
            load(**settings)


def test_a_missing_extra_is_named(tmp_path, monkeypatch):
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'dzero\[data\]'"):
        read(tmp_path / "a.parquet")


# Several sources


def rows(count: int, words: int, name: str) -> list[dict[str, Any]]:
    return [chat.turns(f"ask {name} {i}", " ".join([name] * words)) for i in range(count)]


def chats(folder: Path) -> tuple[Path, list[Path]]:
    """A model, and two files of short and long conversations."""
    paths = [folder / "short.jsonl", folder / "long.jsonl"]
    for path, found in zip(paths, (rows(30, 2, "short"), rows(12, 9, "longer")), strict=True):
        path.write_text("".join(f"{json.dumps(row)}\n" for row in found))
    return chat.write_model(folder / "model", chat.CHATML), paths


@pytest.mark.parametrize("pack", [True, False])
def test_chats_of_two_sources_are_those_of_each_source_alone(tmp_path: Path, pack: bool) -> None:
    model, paths = chats(tmp_path)
    given = {"kind": "chat", "tokenizer": str(model), "cache": str(tmp_path / "cache"), "pack": pack, "held_out": 0.2}
    corpus = load(64, **given, paths=[*map(str, paths)], weights=[1, 3])
    assert [*corpus.sources] == ["short.jsonl", "long.jsonl"]
    mixture = corpus.train_sequences(64, 1)
    alone = [load(64, **given, path=str(path)).train_sequences(64, 1) for path in paths]
    sizes = [len(each) for each in alone]
    assert len(mixture) == sum(sizes)
    indices = np.array([sizes[0], 0, sizes[0] + 1, 1])
    batch, parts = mixture.read(indices), [alone[1].read(np.array([0, 1])), alone[0].read(np.array([0, 1]))]
    assert mixture.counted(indices) == int((batch.targets != IGNORED).sum())
    for row, part in zip((0, 2, 1, 3), [(0, 0), (0, 1), (1, 0), (1, 1)], strict=True):
        of_source = parts[part[0]]
        length = of_source.tokens.shape[1]
        assert torch.equal(batch.tokens[row, :length], of_source.tokens[part[1]])
        assert torch.equal(batch.targets[row, :length], of_source.targets[part[1]])
        assert (batch.targets[row, length:] == IGNORED).all()
        assert (batch.positions is not None) is pack
        if batch.positions is not None and of_source.positions is not None:
            assert torch.equal(batch.positions[row], of_source.positions[part[1]])
    held_out = corpus.held_out_sources(64, 1)
    assert {name: weight for name, (_, weight) in held_out.items()} == {"short.jsonl": 0.25, "long.jsonl": 0.75}
    prompts = corpus.prompts(3, 8)
    assert len(prompts) == 3
    assert "short" in corpus.shown(prompts[0], prompts[0])
    assert "longer" in corpus.shown(prompts[1], prompts[1])


def test_one_source_is_read_as_without_a_mixture(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some words of a text " * 50)
    alone, one = read(tmp_path / "a.txt"), load(paths=[str(tmp_path / "a.txt")], weights=[0.3])
    assert type(one) is type(alone)
    assert one.summary == alone.summary
    assert one.train_sequences(8, 1).identity() == alone.train_sequences(8, 1).identity()


def test_texts_and_token_files_go_together(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some words of a text " * 50)
    np.arange(400, dtype=np.uint16).tofile(tmp_path / "b.bin")
    corpus = load(paths=[str(tmp_path / "a.txt"), str(tmp_path / "b.bin")], token_dtype="uint16")
    assert corpus.vocab_size == 400
    sizes = {name: len(each.train_sequences(8, 1)) for name, each in corpus.sources.items()}
    assert sizes == {"a.txt": 128, "b.bin": 48}
    assert len(corpus.train_sequences(8, 1)) == sum(sizes.values())


PROBLEMS = {
    "paths=[]": (r"data.paths=\[\]: name at least one source", {"paths": []}),
    "empty": (r"each a text and none empty", {"paths": ["a.txt", ""]}),
    "a list": (r"each a text and none empty", {"paths": ["a.txt", ["b.txt"]]}),
    "count": (r"data.weights=\[1\]: give one for each of the 2 sources", {"weights": [1]}),
    "nan": (r"nan is no weight", {"weights": [1, float("nan")]}),
    "infinite": (r"inf is no weight", {"weights": [float("inf"), 1]}),
    "zeros": (r"data.weights=\[0,0\]: at least one must be above 0", {"weights": [0, 0]}),
    "path too": (r"data.paths=\[.*\] with data.path=x: only one can be read", {"path": "x"}),
    "name too": (r"data.paths=\[.*\] with data.name=x: only one can be read", {"name": "x"}),
    "no paths": (r"data.weights=\[1\] has no effect with data.paths=null", {"paths": None, "weights": [1]}),
    "unknown": (r"nowhere.txt: no such file or folder", {"paths": ["a.txt", "nowhere.txt"]}),
    "twice": (r"a.txt is in .*a.txt and again in .*a.txt; name each file once", {"paths": ["a.txt", "a.txt"]}),
    "in a folder": (r"a.txt is in .*a.txt and again in .*; name each file once", {"paths": ["a.txt", "."]}),
    "by a link": (r"link.txt is in .*a.txt and again in .*link.txt", {"paths": ["a.txt", "link.txt"]}),
    "idle": (r"data.token_dtype=uint8 has no effect on the \['.txt'\] of data.paths", {"token_dtype": "uint8"}),
    "pipe": (r"no such file or folder|no regular file", {"paths": ["a.txt", "fifo.txt"]}),
}


@pytest.mark.parametrize("problem", PROBLEMS)
def test_a_mixture_that_cannot_be_is_refused_in_one_line(tmp_path: Path, problem: str) -> None:
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text(f"words of {name} " * 50)
    if problem == "by a link":
        (tmp_path / "link.txt").symlink_to("a.txt")
    if problem == "pipe":
        os.mkfifo(tmp_path / "fifo.txt")
    message, changes = PROBLEMS[problem]
    given: dict[str, Any] = {"paths": ["a.txt", "b.txt"], **changes}
    if given["paths"]:
        given["paths"] = [str(tmp_path / each) if each and isinstance(each, str) else each for each in given["paths"]]
    with pytest.raises((ValueError, FileNotFoundError), match=message) as error:
        load(**given)
    assert "\n" not in str(error.value)
