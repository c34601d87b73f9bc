"""Promises of the corpus: every source gives the right ids, and a split that does not depend on company."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from omegaconf import OmegaConf

from dzero.data.config import DataConfig
from dzero.data.corpus import Corpus, load
from dzero.data.documents import is_held_out

TEXTS = [f"Document {number} says: naïve café № {number * number}.\n" for number in range(200)]


def documents(corpus: Corpus) -> tuple[list[str], list[str]]:
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
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=[end], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding(length=64)
    tokenizer.save(str(path))


@pytest.fixture
def expected() -> tuple[list[str], list[str]]:
    """TEXTS split by the hash of their content, with a fifth held out."""
    held_out = [text for text in TEXTS if is_held_out(text.encode(), 0.2)]
    assert 20 < len(held_out) < 60
    return [text for text in TEXTS if text not in held_out], held_out


def test_the_config_is_a_typed_group_for_omegaconf():
    schema = OmegaConf.structured(DataConfig)
    merged = OmegaConf.merge(schema, {"path": "texts", "held_out": 0.1})
    assert OmegaConf.to_object(merged) == DataConfig(path="texts", held_out=0.1)


def test_the_default_is_the_python_library_split_by_file_and_the_same_every_time():
    first, second = load(DataConfig()), load(DataConfig())
    assert first.vocab_size == 256
    assert first.train.parts[0].dtype == np.uint8
    assert np.array_equal(first.train[:], second.train[:])
    assert np.array_equal(first.held_out[:], second.held_out[:])
    assert len(first.train) > 2**21
    assert 0.001 < len(first.held_out) / len(first.train) < 0.1
    source = Path(dataclasses.__file__).read_bytes() + b"\0"
    held_out = is_held_out(b"dataclasses.py", 0.02)
    assert (source in bytes(first.train[:])) is not held_out
    assert (source in bytes(first.held_out[:])) is held_out


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
        corpus = load(DataConfig(field="content", held_out=0.2, **settings))
        assert documents(corpus) == expected, settings
        assert corpus.vocab_size == 256


def test_the_split_of_a_document_ignores_order_place_and_company(tmp_path, expected):
    write_jsonl(tmp_path / "all.jsonl", TEXTS)
    (tmp_path / "parts").mkdir()
    write_jsonl(tmp_path / "parts" / "b.jsonl", TEXTS[100::-1])
    write_jsonl(tmp_path / "parts" / "a.jsonl", [*TEXTS[101:], "another one"])
    train, held_out = documents(load(DataConfig(path=str(tmp_path / "parts"), held_out=0.2)))
    assert set(expected[0]) <= set(train)
    assert set(expected[1]) <= set(held_out)
    assert len(train) + len(held_out) == len(TEXTS) + 1


def test_a_larger_held_out_share_only_moves_documents_over():
    moved = [is_held_out(text.encode(), 0.3) for text in TEXTS]
    assert all(moved[row] for row, text in enumerate(TEXTS) if is_held_out(text.encode(), 0.2))
    assert [is_held_out(key, 0.5) for key in (b"a", b"b", b"c", b"d")] == [True, False, True, False]  # frozen


def test_text_files_are_split_by_path_below_the_folder(tmp_path):
    for place in ("one", "two"):
        (tmp_path / place / "sub").mkdir(parents=True)
        for number in range(50):
            (tmp_path / place / "sub" / f"{number:02}.txt").write_text(TEXTS[number])
    (tmp_path / "two" / "README.md").write_text("not read")
    (tmp_path / "two" / "sub" / ".99.txt").write_text("an editor's copy")
    one, two = (load(DataConfig(path=str(tmp_path / place), held_out=0.2)) for place in ("one", "two"))
    by_glob = load(DataConfig(path=str(tmp_path / "one" / "**" / "*.txt"), held_out=0.2))
    assert documents(one) == documents(two) == documents(by_glob)
    train, held_out = documents(one)
    assert sorted(train + held_out) == sorted(TEXTS[:50])
    assert "not read: 1 .md, 1 hidden" in two.summary


def test_one_text_gives_its_tail_as_held_out(tmp_path):
    content = "".join(TEXTS).encode()
    (tmp_path / "poem.txt").write_bytes(content)
    corpus = load(DataConfig(path=str(tmp_path / "poem.txt"), held_out=0.1))
    assert bytes(corpus.train[:]) + bytes(corpus.held_out[:]) == content + b"\0"
    assert len(corpus.held_out) == round((len(content) + 1) * 0.1)
    assert len(load(DataConfig(path=str(tmp_path / "poem.txt"), held_out=0.0)).held_out) == 0


def test_a_tokenizer_file_encodes_whole_documents_and_ends_each(tmp_path, expected):
    tokenizers = pytest.importorskip("tokenizers")
    write_tokenizer(tmp_path / "tokenizer.json")
    write_jsonl(tmp_path / "texts.jsonl", TEXTS)
    corpus = load(
        DataConfig(path=str(tmp_path / "texts.jsonl"), tokenizer=str(tmp_path / "tokenizer.json"), held_out=0.2)
    )
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
    write_tokenizer(tmp_path / "tokenizer.json", end="<stop>")
    text = "".join(TEXTS) * 300
    assert len(text) > 2**20
    (tmp_path / "long.txt").write_text(text)
    corpus = load(
        DataConfig(
            path=str(tmp_path / "long.txt"),
            tokenizer=str(tmp_path / "tokenizer.json"),
            separator="<stop>",
            held_out=0.0,
        )
    )
    tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.decode(corpus.train[:].tolist()) == text


def test_token_files_are_mapped_and_cut_at_the_tail(tmp_path):
    ids = np.random.default_rng(0).integers(0, 50_000, 10_000)
    ids.astype(np.uint16).tofile(tmp_path / "a.bin")
    ids.astype(np.uint32).tofile(tmp_path / "wide.bin")
    np.save(tmp_path / "a.npy", ids.astype(np.int32))
    for name, settings in (("a.bin", {}), ("wide.bin", {"token_dtype": "uint32"}), ("a.npy", {})):
        corpus = load(DataConfig(path=str(tmp_path / name), held_out=0.1, **settings))
        assert all(isinstance(part, np.memmap) for part in corpus.train.parts)
        assert np.array_equal(corpus.train[:], ids[:9000])
        assert np.array_equal(corpus.held_out[:], ids[9000:])
        assert corpus.vocab_size == ids.max() + 1
    assert load(DataConfig(path=str(tmp_path / "a.npy"), vocab_size=50_304)).vocab_size == 50_304


def test_several_token_files_are_split_by_file_and_read_as_one(tmp_path):
    for number in range(20):
        np.full(100, number, np.uint16).tofile(tmp_path / f"{number:02}.bin")
    corpus = load(DataConfig(path=str(tmp_path), held_out=0.2))
    held_out = [number for number in range(20) if is_held_out(f"{number:02}.bin".encode(), 0.2)]
    assert held_out
    assert np.array_equal(corpus.held_out[:], np.repeat(held_out, 100))
    assert len(corpus.train) + len(corpus.held_out) == 2000
    assert corpus.vocab_size == 20
