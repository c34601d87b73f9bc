"""Weights as Hugging Face publishes them: what is read, and what is refused before anything is."""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dzero.models.build import build, materialiser
from dzero.models.config import ModelConfig
from dzero.models.llama import Llama
from dzero.models.published import llama_config, published_name
from dzero.models.safetensors_reader import stored_tensors
from dzero.models.weights import local_weights

safetensors_torch = pytest.importorskip("safetensors.torch")

CONFIG = ModelConfig(hidden_size=32, layers=2, heads=4, kv_heads=2, ffn_size=48, rope_theta=5e5)


def tokens() -> Tensor:
    return torch.randint(61, (2, 10), generator=torch.Generator().manual_seed(3))


def published(folder: Path, seed: int = 5, **changes: Any) -> Llama:
    """A llama of ours with random values, written by safetensors' own library under its published names."""
    model = build(CONFIG, 61)
    assert isinstance(model, Llama)
    materialiser(CONFIG, model, seed=seed, device="cpu")(model)
    state = {published_name("llama", name): value for name, value in model.state_dict().items()}
    safetensors_torch.save_file(state, folder / "model.safetensors")
    config = {key: value for key, value in (llama_config(model.shape) | changes).items() if value != "absent"}
    (folder / "config.json").write_text(json.dumps(config))
    return model


def imported(folder: Path, config: ModelConfig = CONFIG) -> Llama:
    config = replace(config, weights=str(folder))
    model = build(config, 61)
    assert isinstance(model, Llama)
    materialiser(config, model, seed=0, device="cpu")(model)
    return model


def test_a_llama_starts_from_published_weights(tmp_path: Path) -> None:
    theirs = published(tmp_path)
    assert torch.equal(imported(tmp_path)(tokens()), theirs(tokens()))


def test_what_transformers_writes_makes_the_same_logits(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    published(tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    (again := tmp_path / "again").mkdir()
    model.save_pretrained(again, max_shard_size="20KB")
    assert (again / "model.safetensors.index.json").exists()
    # The same fp32 values; rotary tables and sums of products in another order.
    torch.testing.assert_close(imported(again)(tokens()), model(tokens()).logits, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"num_attention_heads": 8}, r"another model than this; set model.heads=8"),
        ({"rms_norm_eps": "absent"}, r"set model.norm_eps=1e-06"),
        ({"rope_parameters": "absent", "rope_theta": "absent"}, r"set model.rope_theta=10000.0"),
        ({"tie_word_embeddings": True, "vocab_size": 7}, r"set model.vocab_size=7 model.tied=true"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5}}, r"positions are scaled .* take model=hf"),
        ({"rope_parameters": "absent", "rope_scaling": {"type": "linear"}}, r"positions are scaled"),
        ({"hidden_act": "gelu"}, r"'hidden_act': 'gelu'.*, where model.kind=llama has .*: take model=hf"),
        ({"attention_bias": True}, r"{'attention_bias': True}, where"),
        ({"model_type": "mistral"}, r"model_type 'mistral' is no llama: take model=hf model.name_or_path="),
    ],
)
def test_the_configuration_of_another_model_is_refused(tmp_path: Path, changes: dict[str, Any], what: str) -> None:
    published(tmp_path, **changes)
    with pytest.raises(ValueError, match=what):
        imported(tmp_path)


def test_older_spellings_of_the_configuration_are_read(tmp_path: Path) -> None:
    published(tmp_path, rope_parameters="absent", head_dim="absent", rope_theta=500000)
    imported(tmp_path)


def test_any_box_is_read_and_not_a_byte_more(tmp_path: Path) -> None:
    drawn = {"a": torch.randn(7, 5, 3), "b": torch.randn(4).bfloat16(), "c": torch.tensor(3.0), "d": torch.ones(0, 3)}
    safetensors_torch.save_file(drawn, tmp_path / "model.safetensors")
    stored = stored_tensors(tmp_path)
    for name, want in drawn.items():
        assert torch.equal(stored[name](), want)
    for offset, size in [
        ((0, 0, 0), (7, 5, 3)),
        ((2, 0, 0), (3, 5, 3)),
        ((1, 2, 0), (4, 2, 3)),
        ((0, 1, 1), (7, 3, 2)),
    ]:
        cut = tuple(slice(o, o + n) for o, n in zip(offset, size, strict=True))
        before = read_bytes()
        found = stored["a"].read(offset, size)
        assert torch.equal(found, drawn["a"][cut])
        assert 0 <= read_bytes() - before - found.nbytes <= 200  # the reading of the counter itself
    assert stored["a"].read((7, 0, 0), (0, 5, 3)).shape == (0, 5, 3)


def read_bytes() -> int:
    """By this process so far."""
    return int(Path("/proc/self/io").read_text().split()[1])


def file_of(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(shape: list[int], start: int, end: int, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x10" * 20,
        file_of({}, length=1 << 62),
        file_of({}, length=0),
        file_of(b"[" * 100_000),
        file_of({"a": 3}),
        file_of({"a": entry([2], 0, 8)}, bytes(7)),  # cut short
        file_of({"a": entry([2], 0, 8)}, bytes(9)),
        file_of({"a": entry([3], 0, 8)}, bytes(8)),  # another size
        file_of({"a": entry([2], 0, 8), "b": entry([2], 4, 12)}, bytes(12)),  # overlapping
        file_of({"a": entry([2], 0, 8), "b": entry([2], 12, 20)}, bytes(20)),  # with a hole
        file_of({"a": entry([2], 8, 0)}, bytes(8)),
        file_of({"a": entry([-1, -2], 0, 8)}, bytes(8)),
        file_of({"a": entry([1 << 62, 1 << 62], 0, 8)}, bytes(8)),
        file_of({"a": entry([2], -8, 0)}, bytes(8)),
    ],
)
def test_a_file_that_contradicts_itself_is_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(ValueError, match=r"model.safetensors: "):
        stored_tensors(tmp_path)


def test_a_snapshot_in_the_cache_of_hugging_face_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository = tmp_path / "models--org--name"
    for folder in ("refs", "blobs", "snapshots/1"):
        (repository / folder).mkdir(parents=True)
    (repository / "refs" / "main").write_text("1")
    theirs = published(repository / "blobs")
    for name in ("config.json", "model.safetensors"):
        (repository / "blobs" / name).rename(repository / "blobs" / f"hash-{name}")
        (repository / "snapshots" / "1" / name).symlink_to(f"../../blobs/hash-{name}")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    want = theirs(tokens())
    assert torch.equal(imported(repository / "snapshots" / "1")(tokens()), want)
    assert torch.equal(imported(Path("org/name"))(tokens()), want)
    model = build(ModelConfig(kind="hf", name_or_path="org/name"), 61)
    assert [*local_weights("org/name", model)] == [*model.state_dict()]


def test_nothing_outside_the_folder_and_no_link_is_read(tmp_path: Path) -> None:
    (folder := tmp_path / "model").mkdir()
    published(tmp_path)
    (folder / "model.safetensors").symlink_to(tmp_path / "model.safetensors")
    with pytest.raises(OSError, match=r"a symbolic link to .*, is not followed"):
        stored_tensors(folder)
    for name in ("../model.safetensors", str(tmp_path / "model.safetensors"), "", ".."):
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
        with pytest.raises(FileNotFoundError, match="no such file"):
            stored_tensors(folder)
    (folder / "model.safetensors.index.json").write_text("[" * 100_000)
    with pytest.raises(ValueError, match=r"index.json: not a whole file of its kind"):
        stored_tensors(folder)


def test_a_file_that_shrinks_and_a_dtype_that_is_unknown_are_told_when_they_are_read(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(file_of({"a": entry([4], 0, 4, "F8_E4M3"), "b": entry([2], 4, 12)}, bytes(12)))
    stored = stored_tensors(tmp_path)
    with pytest.raises(ValueError, match=r"a is F8_E4M3; known are F32"):
        stored["a"]()
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(ValueError, match=r"within b: it was cut short"):
        stored["b"]()


def test_other_models_have_no_layout(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"weights of Linear"):
        local_weights(str(tmp_path), torch.nn.Linear(2, 2))
