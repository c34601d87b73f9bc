"""Promises of mixtures: exact proportions, every sequence once an epoch of its source, over any ranks and resumes."""

from __future__ import annotations

import json
import os
from fractions import Fraction
from pathlib import Path
from typing import Any

import chat
import numpy as np
import pytest
import torch

from dzero.data.batch import IGNORED
from dzero.data.config import DataConfig
from dzero.data.corpus import load, vocab_size_of
from dzero.data.mixed_sequences import MixedSequences, shares_of, split, stream_over
from dzero.data.mixture import MixedCorpus
from dzero.data.sequences import TextSequences
from dzero.data.stream import SequenceStream

T = 4
SIZES = {"a": 23, "b": 7, "c": 40}
WEIGHTS = [0.5, 0.2, 0.3]
ORIGIN = {name: 1000 * number for number, name in enumerate(SIZES)}


def mixed(weights: list[float] | None = None, sizes: dict[str, int] = SIZES) -> MixedSequences:
    """Token i of source j is 1000 j + i, so that the first token of a sequence tells its source and number."""
    sources = {
        name: TextSequences(ORIGIN[name] + np.arange(size * T + 1, dtype=np.int32), T) for name, size in sizes.items()
    }
    return MixedSequences(sources, weights)


def stream(rank: int = 0, ranks: int = 1, *, microbatch: int = 2, seed: int = 5, **changes: Any) -> SequenceStream:
    sequences = mixed(**{"weights": WEIGHTS, **changes})
    return stream_over(sequences, microbatch_sequences=microbatch, rank=rank, ranks=ranks, seed=seed)


def step(streams: list[SequenceStream]) -> list[tuple[str, int]]:
    """Source and number of the sequences that a step of all ranks takes, in rank order."""
    firsts = [int(row[0]) for each in streams for row in each.next().tokens]
    return [([*SIZES][first // 1000], first % 1000 // T) for first in firsts]


@pytest.mark.parametrize(
    "weights", [[0.5, 0.2, 0.3], [1.0, 1.0, 1.0], [1e-9, 1.0, 3.0], [0.0, 2.0, 1.0], [1.0, 0.0, 0.0], [1.0] * 12]
)
def test_every_stretch_of_samples_has_the_exact_shares(weights: list[float]) -> None:
    shares = shares_of(weights)
    before = split(np.arange(5001), shares)
    assert np.array_equal(before.sum(0), np.arange(5001))
    assert set(np.unique(np.diff(before, axis=1))) <= {0, 1}
    for counts, share in zip(before, shares, strict=True):
        exact = np.arange(5001) * (share / sum(shares))
        assert np.abs(counts - exact).max() <= 2.0
        assert share or not counts.any()
    far = 10**15
    assert split(np.array([far]), shares).sum() == far
    assert abs(int(split(np.array([far]), shares)[0, 0]) - Fraction(shares[0], sum(shares)) * far) <= 2


def test_weights_are_taken_as_written_and_by_their_proportions() -> None:
    assert shares_of([0.7, 0.3]) == shares_of([70, 30]) == [7, 3]
    assert shares_of([0.1, 0.2, 0.7]) == [1, 2, 7]
    assert shares_of([23, 7, 40]) == mixed().shares


def test_every_sequence_of_a_source_once_in_each_of_its_epochs_in_a_new_order() -> None:
    one = stream(microbatch=10)
    seen = [each for _ in range(60) for each in step([one])]
    assert {name: sum(each == name for each, _ in seen) for name in SIZES} == {"a": 300, "b": 120, "c": 180}
    for name, size in SIZES.items():
        numbers = [number for each, number in seen if each == name]
        epochs = [numbers[at : at + size] for at in range(0, len(numbers) - size + 1, size)]
        assert all(sorted(epoch) == list(range(size)) for epoch in epochs)
        assert epochs[0] != epochs[1]


def test_every_step_has_the_proportions_and_the_order_does_not_depend_on_ranks() -> None:
    alone = stream(microbatch=1)
    wanted = [each for _ in range(240) for each in step([alone])]
    for ranks, microbatch in ((2, 5), (4, 10), (3, 10)):
        streams = [stream(rank, ranks, microbatch=microbatch) for rank in range(ranks)]
        steps = [step(streams) for _ in range(240 // (ranks * microbatch))]
        assert [each for found in steps for each in found] == wanted[: len(steps) * ranks * microbatch]
        for found in steps:
            for name, weight in zip(SIZES, WEIGHTS, strict=True):
                assert abs(sum(each == name for each, _ in found) - weight * len(found)) <= 2
    assert wanted != [each for _ in range(240) for each in step([stream(microbatch=1, seed=6)])]


@pytest.mark.parametrize(("before", "after"), [(1, 1), (1, 4), (4, 2), (3, 1)])
def test_a_resume_continues_at_the_sample_on_any_ranks(before: int, after: int) -> None:
    alone = stream(microbatch=1)
    wanted = [each for _ in range(2 * before * 7 + 60) for each in step([alone])]
    streams = [stream(rank, before) for rank in range(before)]
    seen = [each for _ in range(7) for each in step(streams)]
    state = json.loads(json.dumps(streams[0].state_dict()))
    resumed = [stream(rank, after) for rank in range(after)]
    for each in resumed:
        each.load_state_dict(state)
    while len(seen) < len(wanted):
        seen += step(resumed)
    assert seen[: len(wanted)] == wanted


def test_a_state_of_other_weights_or_sources_is_refused() -> None:
    state = stream().state_dict()
    for changes, message in (
        ({"weights": [0.5, 0.3, 0.2]}, "data.weights changed"),
        ({"sizes": {"a": 23, "b": 7}, "weights": [1.0, 1.0]}, "sources was 3 and is 2"),
        ({"sizes": {**SIZES, "b": 8}}, "windows was"),
    ):
        with pytest.raises(ValueError, match=message):
            stream(**changes).load_state_dict(state)
    single = stream_over(TextSequences(np.arange(99), T), microbatch_sequences=1, rank=0, ranks=1, seed=5)
    assert type(single) is SequenceStream
    with pytest.raises(ValueError, match="saved over other data"):
        single.load_state_dict(state)
    with pytest.raises(ValueError, match=r"lacks .*'sources'.*another number of sources"):
        stream().load_state_dict(single.state_dict())


def test_what_is_taken_of_each_source_is_counted_before_a_step() -> None:
    ranks = [stream(rank, 2, microbatch=5) for rank in range(2)]
    total = dict.fromkeys(SIZES, 0)
    for _ in range(6):
        assert ranks[0].use(2) == ranks[1].use(2)
        use, taken = ranks[0].use(2), [*step(ranks), *step(ranks)]
        for name, size in SIZES.items():
            total[name] += sum(each == name for each, _ in taken)
            assert use[name].tokens == T * sum(each == name for each, _ in taken)
            assert use[name].epochs == total[name] / size


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
    corpus = load(DataConfig(**given, paths=[*map(str, paths)], weights=[1, 3]), None, 64)
    assert isinstance(corpus, MixedCorpus)
    assert [*corpus.sources] == ["short.jsonl", "long.jsonl"]
    mixture = corpus.train_sequences(64, 1)
    alone = [load(DataConfig(**given, path=str(path)), None, 64).train_sequences(64, 1) for path in paths]
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
    alone = load(DataConfig(path=str(tmp_path / "a.txt")))
    one = load(DataConfig(paths=[str(tmp_path / "a.txt")], weights=[0.3]))
    assert type(one) is type(alone)
    assert one.summary == alone.summary
    assert one.train_sequences(8, 1).identity() == alone.train_sequences(8, 1).identity()


def test_texts_and_token_files_go_together(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some words of a text " * 50)
    np.arange(400, dtype=np.uint16).tofile(tmp_path / "b.bin")
    config = DataConfig(paths=[str(tmp_path / "a.txt"), str(tmp_path / "b.bin")], token_dtype="uint16")
    corpus = load(config)
    assert corpus.vocab_size == vocab_size_of(config) == 400
    assert isinstance(corpus, MixedCorpus)
    assert corpus.train_sequences(8, 1).shares == shares_of(
        [len(each.train_sequences(8, 1)) for each in corpus.sources.values()]
    )


PROBLEMS = {
    "paths=[]": (r"data.paths=\[\]: name at least one source", {"paths": []}),
    "empty": (r"each a text and none empty", {"paths": ["a.txt", ""]}),
    "a list": (r"each a text and none empty", {"paths": ["a.txt", ["b.txt"]]}),
    "count": (r"data.weights=\[1\]: give one for each of the 2 sources", {"weights": [1]}),
    "negative": (
        r"data.weights=\[1,-0.5\]: -0.5 is no weight, which must be a number in \[0, 1e\+09\]",
        {"weights": [1, -0.5]},
    ),
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
        load(DataConfig(**given))
    assert "\n" not in str(error.value)
