"""Samples: they are tokenized once, what is opened is whole, and every token that counts is a target once.

They look inside, because of an encoder that needs no other package, and of kills, full disks and crowds at a moment.
"""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import chat
import numpy as np
import pytest
from corpora import IGNORED
from numpy.typing import NDArray

from dzero.data import rows, sample_builder
from dzero.data.chat_template import ChatEncoder, EncodedSample
from dzero.data.conversations import Conversation, conversation_of
from dzero.data.documents import is_held_out
from dzero.data.files import find
from dzero.data.packing import SampleSequences, best_fit
from dzero.data.rows import read_rows
from dzero.data.sample_cache import build_or_open
from dzero.data.samples import Samples
from dzero.data.tokenize_samples import tokenize

TEXTS = [(f"Question {n} " * (n % 7 + 1), f"answer {n}") for n in range(300)]


class ByteEncoder:
    """An encoder of prompts and completions that needs no other package: UTF-8 bytes; completions count."""

    fingerprint, vocab_size, dtype = "bytes", 256, np.dtype(np.uint16)

    def __init__(self, before: Callable[[int], object] = lambda number: None) -> None:
        """`before`: called before each batch with its number, from 1 on."""
        self.batches: list[int] = []
        self._before = before

    def encode_batch(
        self, conversations: Sequence[Conversation], *, stop: bool = False
    ) -> list[EncodedSample | ValueError]:
        self.batches.append(len(conversations))
        self._before(len(self.batches))
        return [self._encode(*conversation.text) for conversation in conversations if conversation.text is not None]

    def _encode(self, prompt: str, completion: str) -> EncodedSample | ValueError:
        if "bad" in prompt:
            return ValueError("it cannot be encoded")
        ids = np.frombuffer((prompt + completion).encode(), np.uint8).astype(np.int32)
        return EncodedSample(ids, np.arange(len(ids)) >= len(prompt.encode()))

    def close(self) -> None:
        self.batches.append(0)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file of all `TEXTS`."""
    return write(tmp_path / "chat.jsonl")


def write(path: Path, texts: Sequence[tuple[str, str]] = TEXTS) -> Path:
    path.write_text("".join(json.dumps({"prompt": p, "completion": c}) + "\n" for p, c in texts))
    return path


def build(path: Path, encoder: Any = None, **settings: Any) -> tuple[Samples, list[str]]:
    said: list[str] = []
    settings = {"folder": path.parent / "cache", "on_bad_row": "stop", "max_tokens": None, **settings}
    return build_or_open(find(str(path)), encoder or ByteEncoder(), report=said.append, **settings), said


def folders(path: Path) -> list[Path]:
    return [each for each in (path.parent / "cache").iterdir() if each.is_dir()]


def texts_of(samples: Samples) -> list[tuple[str, str]]:
    sides = [(samples.ids(i), samples.counts(i)) for i in range(len(samples))]
    return [(bytes(ids[~counts].tolist()).decode(), bytes(ids[counts].tolist()).decode()) for ids, counts in sides]


def test_samples_are_what_was_encoded_and_are_encoded_once(path: Path) -> None:
    encoder = ByteEncoder()
    samples, _ = build(path, encoder)
    again, _ = build(path, encoder)
    assert encoder.batches == [300, 0]
    assert texts_of(samples) == texts_of(again) == TEXTS
    assert (samples.lengths.dtype, samples.counted.dtype, samples.vocab_size) == (np.int64, np.int64, 256)
    assert samples.lengths.tolist() == [len(p + c) for p, c in TEXTS]
    assert samples.counted.tolist() == [len(c) for _, c in TEXTS]
    assert samples.ids(-1).dtype == np.uint16
    assert not samples.ids(0).flags.writeable
    tokens = sum(len(p + c) for p, c in TEXTS)
    assert samples.summary == f"300 samples, {tokens:,} tokens, {sum(len(c) for _, c in TEXTS):,} of them counted"
    with pytest.raises(IndexError):
        samples.ids(300)


def test_samples_are_cut_when_they_are_read_and_their_side_of_the_split_stays(tmp_path: Path) -> None:
    texts = [("abc", "de"), ("a" * 20, "bc"), ("a" * 18, "bcd"), ("", "xyz"), ("x", ""), ("y" * 30, "z")]
    path, encoder = write(tmp_path / "chat.jsonl", texts), ByteEncoder()
    whole, _ = build(path, encoder)
    cut, _ = build(path, encoder, max_tokens=20)
    assert encoder.batches == [6, 0]
    assert whole.counted.tolist() == [2, 2, 3, 2, 1]  # the first token is never a target
    assert texts_of(cut) == [("abc", "de"), ("a" * 18, "bc"), ("", "xyz")]
    assert cut.counted.tolist() == [2, 2, 2]
    assert "; 3 samples cut to 20 tokens, which loses 14 tokens; 3 samples left out because no token" in cut.summary
    assert cut.is_held_out(0.5).tolist() == whole.is_held_out(0.5)[[0, 2, 3]].tolist()
    with pytest.raises(ValueError, match="no sample is left"):
        build(write(tmp_path / "other.jsonl", [("x", "")]))
    with pytest.raises(ValueError, match="must be at least 2"):
        build(path, encoder, max_tokens=1)


def test_the_held_out_split_is_by_a_hash_of_the_ids_alone(path: Path, tmp_path: Path) -> None:
    samples, backwards = build(path)[0], build(write(tmp_path / "b.jsonl", TEXTS[::-1]))[0]
    for fraction in (0.0, 0.02, 0.3, 0.999):
        held_out = samples.is_held_out(fraction)
        keys = [samples.ids(i).astype("<i4").tobytes() for i in range(len(samples))]
        assert held_out.tolist() == [is_held_out(key, fraction) for key in keys]
        assert held_out.tolist() == backwards.is_held_out(fraction).tolist()[::-1]
    assert 60 < samples.is_held_out(0.3).sum() < 120


def test_a_bad_row_stops_or_is_left_out_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "chat.jsonl"
    lines = ['{"prompt": "a", "completion": "b"}', "{", '{"prompt": "bad", "completion": "b"}', '{"text": "a"}']
    path.write_text("\n".join(lines))
    with pytest.raises(ValueError, match=r"^chat.jsonl line 2: the line is not JSON .* data.on_bad_row=skip"):
        build(path)
    assert folders(path) == []
    samples, _ = build(path, on_bad_row="skip")
    assert len(samples) == 1
    assert "; 3 rows left out, the first: chat.jsonl line 2: the line is not JSON" in samples.summary
    with pytest.raises(ValueError, match=r"^chat.jsonl line 2: .* \(3 bad rows\)$"):
        build(path)
    with pytest.raises(ValueError, match="choose one of"):
        build(path, on_bad_row="ignore")


def rewritten(path: Path) -> None:
    """Other contents of the same size and time."""
    before = path.stat()
    path.write_bytes(path.read_bytes().replace(b"answer 150", b"ANSWER 150"))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_another_file_encoder_or_format_is_tokenized_anew(path: Path) -> None:
    build(path)
    rewritten(path)
    for number, change in enumerate(("content", "time", "encoder")):
        encoder = ByteEncoder()
        if change == "time":
            os.utime(path, ns=(0, 0))
        if change == "encoder":
            encoder.fingerprint = "other"
        samples, _ = build(path, encoder)
        assert encoder.batches == [300, 0], change
        assert texts_of(samples)[150][1] == "ANSWER 150"
        assert len(folders(path)) == number + 2


def test_files_that_change_while_they_are_tokenized_are_refused(path: Path) -> None:
    with pytest.raises(ValueError, match="changed while they were tokenized"):
        build(path, ByteEncoder(before=lambda _: os.utime(path, ns=(0, 0))))
    assert folders(path) == []


DAMAGE: dict[str, Callable[[Path], object]] = {
    "shorter": lambda folder: os.truncate(folder / "ids.bin", 100),
    "missing": lambda folder: (folder / "counts.bin").unlink(),
    "no meta": lambda folder: (folder / "meta.json").unlink(),
    "other meta": lambda folder: (folder / "meta.json").write_text("[]"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_folder_is_built_anew(path: Path, damage: str) -> None:
    build(path)
    (folder,) = folders(path)
    DAMAGE[damage](folder)
    assert texts_of(build(path)[0]) == TEXTS


CHILD = """
import sys, time
sys.path[:0] = {path!r}
from test_inside_samples import *
file = Path({file!r})
def waits(line):
    print(line, flush=True)
    Path(str(file) + "." + str(os.getpid())).touch()
def before(number):
    while len([*file.parent.glob(file.name + ".*")]) < {others}:
        time.sleep(0.01)
    if number == {dies_at}:
        os.kill(os.getpid(), signal.SIGKILL)
sample_builder.BATCH_ROWS = 30
encoder = ByteEncoder(before)
samples = build_or_open(
    find(str(file)), encoder, folder=file.parent / "cache", on_bad_row="stop", max_tokens=None, report=waits
)
print(len([each for each in encoder.batches if each]), texts_of(samples) == TEXTS, flush=True)
"""


def start(file: Path, *, others: int = 0, dies_at: int = 0) -> subprocess.Popen[str]:
    """A process that tokenizes once `others` wait for it, and is killed in one of its ten batches."""
    paths = [str(Path(__file__).parent), *sys.path]
    code = CHILD.format(path=paths, file=str(file), others=others, dies_at=dies_at)
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)


def test_of_processes_that_start_at_once_one_tokenizes_and_the_others_wait(path: Path) -> None:
    processes = [start(path, others=2) for _ in range(3)]
    said = sorted(process.communicate(timeout=120)[0].splitlines() for process in processes)
    assert said[0] == ["10 True"]
    for waited in said[1:]:
        assert waited[0].startswith("waiting for another process that tokenizes the same data")
        assert waited[1:] == ["0 True"]
    assert len(folders(path)) == 1


def test_a_killed_process_leaves_nothing_that_is_taken_for_whole(path: Path, tmp_path: Path) -> None:
    process = start(path, dies_at=5)
    process.communicate(timeout=120)
    assert process.returncode == -signal.SIGKILL
    (left,) = folders(path)
    assert left.suffix == ".part"
    other, _ = build(write(tmp_path / "other.jsonl", TEXTS[:3]))
    assert len(other) == 3
    assert not left.exists()
    assert texts_of(build(path)[0]) == TEXTS


def test_memory_does_not_grow_with_the_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample_builder, "BATCH_CHARACTERS", 20_000)
    peaks = []
    for count in (300, 3000):
        path, encoder = write(tmp_path / f"{count}.jsonl", [("p" * 900, "c" * 100)] * count), ByteEncoder()
        tracemalloc.start()
        build(path, encoder)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert max(encoder.batches) == 20
    assert peaks[1] < peaks[0] + 60 * 2700  # arrays with a few numbers for each sample; their text is 1000 bytes each


def test_progress_has_the_time_that_is_left(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample_builder, "BATCH_ROWS", 100)
    assert build(path)[1] == []
    monkeypatch.setattr(sample_builder, "REPORT_SECONDS", 0.0)
    os.utime(path, ns=(0, 0))
    said = build(path)[1]
    assert len(said) == 3
    assert said[-1] == "tokenizing: 100% read, 300 samples, about 0:00 min left"


def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    """By a limit of the system on the size of files, which fails a write as a full disk does."""
    path = write(tmp_path / "chat.jsonl", [("p" * 9000, "c" * 9000)] * 20)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, limits[1]))
    try:
        with pytest.raises(OSError, match=r"writing tokenized samples .*: File too large") as error:
            build(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert error.value.errno == errno.EFBIG
    assert "\n" not in str(error.value)
    assert folders(path) == []


def test_the_default_folder_is_private_to_the_user(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    build(path, folder=None)
    home = tmp_path / "xdg" / "dzero" / "samples"
    assert home.stat().st_mode & 0o777 == 0o700
    home.chmod(0o777)
    with pytest.raises(PermissionError, match="of this user's alone"):
        build(path, folder=None)
    home.rename(tmp_path / "elsewhere")
    home.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PermissionError, match="of this user's alone"):
        build(path, folder=None)


def test_links_in_a_shared_cache_are_not_followed(path: Path, tmp_path: Path) -> None:
    build(path)
    (folder,) = folders(path)
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PermissionError, match="of this user's alone"):
        build(path)
    folder.unlink()
    lock = folder.with_suffix(".lock")
    lock.unlink()
    lock.symlink_to(tmp_path / "victim")
    with pytest.raises(OSError, match="symbolic links"):
        build(path)
    assert not (tmp_path / "victim").exists()


def test_conversations_of_a_chat_model_are_tokenized_and_shown(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    path, said = tmp_path / "chat.jsonl", []
    rows = [chat.turns("Hi", "Hello"), chat.turns("a", "🎉 b", "c", "日本")]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    encoder = ChatEncoder(chat.write_model(tmp_path / "model", chat.NO_TAGS), "assistant")
    samples = tokenize(
        find(str(path)), encoder, folder=tmp_path / "c", on_bad_row="stop", max_tokens=None, report=said.append
    )
    said = [line for line in said if not line.startswith("tokenizing")]  # how far it is, on a slow machine
    assert said[0] == samples.summary
    assert said[2].endswith("<|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\n⟦Hello<|im_end|>⟧\\n")
    for index, row in enumerate(rows):
        expected = encoder.encode(conversation_of(row))
        assert samples.ids(index).tolist() == expected.ids.tolist()
        assert samples.counts(index).tolist() == expected.counts.tolist()
    encoder.close()


def test_a_line_that_is_too_long_is_a_bad_row_and_not_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "MOST_LINE_BYTES", 4096)
    (tmp_path / "chat.jsonl").write_text(f'{{"n": 1}}\n{{"a": "{"x" * 5000}"}}\n{{"n": 2}}')
    first, bad, last = read_rows(find(str(tmp_path / "chat.jsonl")))
    assert (first.value, bad.value, last.value) == ({"n": 1}, {}, {"n": 2})
    assert "longer than 4096 bytes" in bad.problem


# Sequences of samples


class Drawn:
    """Samples of 2 to 12 tokens; id 100 i + j is token j of sample i, so that a target tells where it is from."""

    def __init__(self, samples: int = 40) -> None:
        drawn = np.random.default_rng(0)
        self.lengths = drawn.integers(2, 13, samples)
        self._counts = [drawn.random(length) < 0.5 for length in self.lengths]
        self.counted = np.array([counts[1:].sum() for counts in self._counts])
        self.hashes = np.arange(samples, dtype=np.uint64)

    def ids(self, index: int) -> NDArray[np.int32]:
        return np.arange(self.lengths[index], dtype=np.int32) + 100 * index

    def counts(self, index: int) -> NDArray[np.bool_]:
        return self._counts[index]

    def targets(self) -> list[int]:
        """Ids that must be targets."""
        return [
            int(token)
            for index in range(len(self.lengths))
            for token, counts in list(zip(self.ids(index), self.counts(index), strict=True))[1:]
            if counts
        ]


def sequences(samples: Drawn, length: int = 30, *, pack: bool = True, multiple: int = 0) -> SampleSequences:
    chosen = np.arange(len(samples.lengths))
    return SampleSequences(samples, chosen, length, pack=pack, multiple=multiple, name="drawn")


@pytest.mark.parametrize("pack", [True, False])
@pytest.mark.parametrize("length", [11, 30])
def test_every_token_that_counts_is_a_target_once_after_its_own_predecessor(pack: bool, length: int) -> None:
    samples = Drawn()
    made = sequences(samples, length, pack=pack, multiple=4)
    batches = [made.read(np.array([index])) for index in range(len(made))]
    pairs = [pair for each in batches for pair in zip(each.tokens[0].tolist(), each.targets[0].tolist(), strict=True)]
    found = {target: token for token, target in pairs if target != IGNORED}
    assert sorted(target for _, target in pairs if target != IGNORED) == samples.targets()
    assert all(target == token + 1 for target, token in found.items())
    counted = [int((each.targets != IGNORED).sum()) for each in batches]
    assert [made.counted(np.array([i])) for i in range(len(made))] == counted
    assert made.counted(np.arange(len(made))) == len(found)


def test_positions_restart_in_each_sample_and_in_the_rest() -> None:
    made = sequences(Drawn())
    batch = made.read(np.arange(len(made)))
    assert batch.positions is not None
    assert batch.tokens.shape == batch.positions.shape == (len(made), 30)
    rests = set()
    for tokens, positions in zip(batch.tokens.tolist(), batch.positions.tolist(), strict=True):
        end = max(place for place, token in enumerate(tokens) if token) + 1
        assert positions == [*(token % 100 for token in tokens[:end]), *range(30 - end)]
        rests.add(30 - end)
    assert max(rests) > 1


def test_padded_sequences_are_as_long_as_their_longest_sample_up_to_a_multiple() -> None:
    batch = sequences(Drawn(), pack=False, multiple=4).read(np.array([0, 1, 2]))
    assert batch.positions is None
    assert batch.tokens.shape[1] % 4 == 0
    assert 0 <= batch.tokens.shape[1] - (batch.tokens % 100).amax().item() - 1 < 4
    assert sequences(Drawn(), pack=False).read(np.array([0])).tokens.shape[1] == 30


def test_other_contents_or_another_mask_of_any_sample_are_other_sequences() -> None:
    for change in ("hashes", "counted"):
        samples = Drawn(4000)
        before = sequences(samples).identity()
        getattr(samples, change)[3777] += 1
        assert sequences(samples).identity() != before


def test_groups_fit_and_are_few() -> None:
    sizes = np.random.default_rng(1).integers(1, 65, 5000)
    groups = best_fit(sizes, 64)
    assert sorted(index for group in groups for index in group) == list(range(5000))
    assert max(sizes[group].sum() for group in groups) <= 64
    assert len(groups) <= 1.01 * sizes.sum() / 64
    assert groups == best_fit(sizes, 64)
