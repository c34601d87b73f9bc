"""How stored tensors become those of a model, box by box: files, views of tensors, conversions, and layouts of
transformers."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dzero.models.conversions import STEPS, Conversion, Step, convert_all
from dzero.models.hf_conversions import as_loaded, as_saved
from dzero.models.safetensors_reader import stored_tensors
from dzero.models.tensor_views import Joined, Readable, Stacked, Transposed


class Counted:
    """A tensor in memory that counts the elements that are read."""

    stored, where = ("counted",), "counted"

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self.shape, self.elems = tensor, tuple(tensor.shape), 0

    def read(self, offset: Sequence[int], size: Sequence[int]) -> Tensor:
        box = tuple(slice(o, o + n) for o, n in zip(offset, size, strict=True))
        assert all(o >= 0 and o + n <= whole for o, n, whole in zip(offset, size, self.shape, strict=True))
        self.elems += self._tensor[box].numel()
        return self._tensor[box].clone()

    def __call__(self) -> Tensor:
        return self.read((0,) * len(self.shape), self.shape)


# ---- files


def file_of(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(shape: list[int], start: int, end: int, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


@pytest.mark.parametrize(
    "data",
    [
        b"",
        file_of({}, length=1 << 62),
        file_of(b"[" * 100_000),
        file_of({"a": 3}),
        file_of({"a": entry([2], 0, 8)}, bytes(7)),  # cut short
        file_of({"a": entry([2], 0, 8)}, bytes(9)),  # with bytes behind its end
        file_of({"a": entry([3], 0, 8)}, bytes(8)),  # another size
        file_of({"a": entry([2], 0, 8), "b": entry([2], 4, 12)}, bytes(12)),  # overlapping
        file_of({"a": entry([2], 0, 8), "b": entry([2], 12, 20)}, bytes(20)),  # with a hole
        file_of({"a": entry([2], 8, 0)}, bytes(8)),  # backwards
        file_of({"a": entry([2], -8, 0)}, bytes(8)),
        file_of({"a": entry([-1, -2], 0, 8)}, bytes(8)),
        file_of({"a": entry([1 << 62, 1 << 62], 0, 8)}, bytes(8)),
    ],
)
def test_a_file_that_contradicts_itself_is_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(ValueError, match=r"model.safetensors: "):
        stored_tensors(tmp_path)


def test_nothing_outside_the_folder_and_no_link_is_read(tmp_path: Path) -> None:
    (folder := tmp_path / "model").mkdir()
    (tmp_path / "model.safetensors").write_bytes(file_of({"a": entry([2], 0, 8)}, bytes(8)))
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


# ---- views


def leaves(count: int, last: int = 5) -> list[Counted]:
    return [Counted(torch.randn(3, 4, last)) for _ in range(count)]


def test_parts_that_do_not_fit_together_are_refused() -> None:
    two = (*leaves(1), *leaves(1, last=6))
    with pytest.raises(ValueError, match=r"counted has shape \[3, 4, 6\], counted \[3, 4, 5\]: one parameter"):
        Stacked(two, 0)
    with pytest.raises(ValueError, match="do not fit together"):
        Joined(two, 1)
    assert Joined(two, 2).shape == (3, 4, 11)
    for wrong in (-1, 4):
        with pytest.raises(ValueError, match="with 4 dims"):
            Stacked(tuple(leaves(2)), wrong)
    with pytest.raises(ValueError, match="dim 3 of a tensor with 3 dims"):
        Transposed((leaves(1)[0],), 0, 3)


# ---- conversions

FUSED = Conversion(("layers.#.qkv",), ("layers.#.q", "layers.#.k", "layers.#.v"), (Step("chunk", 0),))
APART = Conversion(FUSED.targets, FUSED.sources, (Step("concatenate", 0),))
UNEVEN = Conversion(FUSED.sources, FUSED.targets, (Step("chunk", 0, sizes=(4, 1, 2)),))
MERGED = Conversion(("layers.#.up",), ("layers.#.experts.*.up",), (Step("transpose", 1, 2), Step("split", 0)))


def tensors(**shapes: tuple[int, ...]) -> dict[str, Readable]:
    return {name.replace("_", "."): Counted(torch.randn(shape)) for name, shape in shapes.items()}


def test_ranges_become_tensors_of_their_own_in_every_layer_and_come_together_again() -> None:
    given = tensors(layers_0_qkv=(6, 2), norm=(3,), layers_1_qkv=(6, 2))
    apart = convert_all([FUSED], given)
    assert [*apart] == ["layers.0.q", "layers.0.k", "layers.0.v", "norm", "layers.1.q", "layers.1.k", "layers.1.v"]
    assert torch.equal(apart["layers.1.k"](), given["layers.1.qkv"]()[2:4])
    together = convert_all([APART], dict(reversed(apart.items())))  # in whatever order they are stored
    assert shapes(together) == shapes(given)
    assert all(torch.equal(together[name](), given[name]()) for name in given)
    given = tensors(layers_0_qkv=(7, 2))
    assert torch.equal(convert_all([UNEVEN], given)["layers.0.v"](), given["layers.0.qkv"]()[5:])
    given = tensors(layers_3_up=(2, 4, 5))
    split = convert_all([MERGED], given)  # steps apply in order
    assert [*split] == ["layers.3.experts.0.up", "layers.3.experts.1.up"]
    assert torch.equal(split["layers.3.experts.1.up"](), given["layers.3.up"]()[1].T)


def test_what_does_not_apply_is_refused() -> None:
    with pytest.raises(ValueError, match=r"layers.0.q is stored together with \['layers.0.v'\], which are not there"):
        convert_all([APART], tensors(layers_0_q=(2, 2), layers_0_k=(2, 2)))
    with pytest.raises(ValueError, match=r"\[7, 2\] does not consist of 3 equal ranges along dim 0"):
        convert_all([FUSED], tensors(layers_0_qkv=(7, 2)))
    with pytest.raises(ValueError, match=r"\[8, 2\] does not consist of ranges of \[4, 1, 2\] along dim 0"):
        convert_all([UNEVEN], tensors(layers_0_qkv=(8, 2)))
    with pytest.raises(ValueError, match=r"layers.0.qkv and another tensor both make layers.0.k"):
        convert_all([FUSED], tensors(layers_0_k=(2, 2), layers_0_qkv=(6, 2)))
    with pytest.raises(ValueError, match="70000 parts; at most 65536 are made"):
        convert_all([Conversion(("a",), ("a.*",), (Step("split", 0),))], tensors(a=(70000, 0)))


# ---- layouts of transformers, of every causal LM that its defaults can build


@dataclass(frozen=True)
class Shape:
    """A tensor without values."""

    where: str
    shape: tuple[int, ...]

    @property
    def stored(self) -> tuple[str, ...]:
        return (self.where,)

    def read(self, offset: Sequence[int], size: Sequence[int]) -> Tensor:
        raise NotImplementedError

    def __call__(self) -> Tensor:
        raise NotImplementedError


def shapes(tensors: Any) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def without_values(named: dict[str, tuple[int, ...]]) -> dict[str, Any]:
    return {name: Shape(name, shape) for name, shape in named.items()}


def on_meta(kind: str) -> Any:
    """The model, or None if its defaults make none or it uses an operation without a step."""
    transformers = pytest.importorskip("transformers")
    try:
        config = transformers.AutoConfig.for_model(kind)
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config)
    except Exception:  # many kinds, for many reasons
        return None
    known = all(step.operation in STEPS for each in as_saved(type(model), model.config) for step in each.steps)
    return model if known else None


def agrees(kind: str) -> bool:
    """Compare with transformers, and read back what is written; return whether layouts differ at all."""
    core = pytest.importorskip("transformers.core_model_loading")
    if (model := on_meta(kind)) is None:
        return False
    own = shapes(model.state_dict())
    layout = as_saved(type(model), model.config)
    published = shapes(convert_all(layout, without_values(own)))
    assert published == shapes(core.revert_weight_conversion(model, model.state_dict())), kind
    assert shapes(as_loaded(model, without_values(published))) == own, kind
    assert shapes(as_loaded(model, without_values(own))) == own, kind  # as save_original_format=False writes it
    return bool(layout)


FIRST = ["deepseek_v3", "gpt2", "granitemoe", "jamba", "mixtral", "qwen3_moe"]


def test_some_layouts_are_those_of_transformers() -> None:
    assert [kind for kind in FIRST if agrees(kind)] == [kind for kind in FIRST if kind != "gpt2"]


@pytest.mark.full("tests/models/inside/test_inside_layouts.py::test_some_layouts_are_those_of_transformers")
def test_all_layouts_are_those_of_transformers() -> None:
    modeling = pytest.importorskip("transformers").models.auto.modeling_auto
    assert sum(agrees(kind) for kind in sorted(modeling.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)) >= 40
