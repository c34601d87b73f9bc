"""Folders in the layout that is published become the parameters that transformers makes of them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from small_mixtures import MIXTURES, VOCAB, mixture, tokens
from torch import Tensor

from dzero.models.build import build, materialiser
from dzero.models.config import ModelConfig
from dzero.models.hf import HFDecoder
from dzero.models.safetensors_reader import stored_tensors

transformers = pytest.importorskip("transformers")
core = pytest.importorskip("transformers.core_model_loading")
mapping = pytest.importorskip("transformers.conversion_mapping")
safetensors_torch = pytest.importorskip("safetensors.torch")


def loaded(folder: Path) -> HFDecoder:
    config = ModelConfig(kind="hf", name_or_path=str(folder), weights=True)
    model = build(config, VOCAB)
    assert isinstance(model, HFDecoder)
    materialiser(config, model, seed=0, device="cpu")(model)
    return model.eval()


@pytest.mark.parametrize("layout", ["published", "of the model"])
@pytest.mark.parametrize("kind", MIXTURES)
def test_a_mixture_is_what_transformers_loads(tmp_path: Path, kind: str, layout: str) -> None:
    theirs = mixture(kind)
    theirs.save_pretrained(tmp_path, save_original_format=layout == "published", max_shard_size="20KB")
    fused = any("gate_up_proj" in name for name in stored_tensors(tmp_path))
    assert fused == (layout == "of the model")
    ours = loaded(tmp_path)
    for name, value in theirs.state_dict().items():
        assert torch.equal(ours.model.state_dict()[name], value), name
    assert torch.equal(ours(tokens()), theirs(tokens()).logits)


def rewritten(folder: Path, change: Any) -> None:
    """Let `change` edit the tensors of a folder of mixtral, by name."""
    mixture("mixtral").save_pretrained(folder)
    tensors: dict[str, Tensor] = safetensors_torch.load_file(folder / "model.safetensors")
    change(tensors)
    safetensors_torch.save_file(tensors, folder / "model.safetensors")


EXPERT = "model.layers.1.block_sparse_moe.experts"


def last_absent(tensors: dict[str, Tensor]) -> None:
    for part in ("w1", "w2", "w3"):
        del tensors[f"{EXPERT}.4.{part}.weight"]


def renumbered(tensors: dict[str, Tensor]) -> None:
    tensors[f"{EXPERT}.6.w2.weight"] = tensors.pop(f"{EXPERT}.4.w2.weight")


def one_up_absent(tensors: dict[str, Tensor]) -> None:
    del tensors[f"{EXPERT}.4.w3.weight"]


def other_shape(tensors: dict[str, Tensor]) -> None:
    tensors[f"{EXPERT}.3.w1.weight"] = torch.zeros(47, 32)


def all_absent(tensors: dict[str, Tensor]) -> None:
    for name in [name for name in tensors if EXPERT in name]:
        del tensors[name]


def fused_too(tensors: dict[str, Tensor]) -> None:
    tensors["model.layers.1.mlp.experts.down_proj"] = torch.zeros(5, 32, 48)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (last_absent, r"layers.1.*gate|w1.*with 7 more has shape \[4, 96, 32\], the model needs \[5, 96, 32\]"),
        (renumbered, r"experts.0.w2.weight to .*experts.6.w2.weight, 5 tensors, are not numbered from 0 on"),
        (one_up_absent, r"has shape \[4, 48, 32\], .* \[5, 48, 32\]: one parameter of the model is made of both"),
        (other_shape, r"experts.3.w1.weight has shape \[47, 32\], .*experts.0.w1.weight \[48, 32\]"),
        (all_absent, r"2 tensors of the model are not in .*layers.1.mlp.experts.gate_up_proj"),
        (fused_too, r"stored as model.layers.1.mlp.experts.down_proj too"),
    ],
)
def test_experts_that_do_not_make_the_parameter_are_refused(tmp_path: Path, change: Any, what: str) -> None:
    rewritten(tmp_path, change)
    with pytest.raises(ValueError, match=what):
        loaded(tmp_path)


@pytest.fixture
def converted_by(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let transformers convert the head of mixtral by given operations."""

    known = mapping.get_model_conversion_mapping

    def convert(operations: list[Any]) -> None:
        def more(model: Any, *args: Any, **options: Any) -> list[Any]:
            return [
                *known(model, *args, **options),
                core.WeightConverter("stored_head", "lm_head", operations=operations),
            ]

        monkeypatch.setattr(mapping, "get_model_conversion_mapping", more)

    return convert


def test_an_operation_that_is_unknown_is_named(tmp_path: Path, converted_by: Any) -> None:
    rewritten(tmp_path, lambda tensors: tensors.update({"stored_head.weight": tensors.pop("lm_head.weight")}))
    converted_by([type("Interleave", (), {})()])
    with pytest.raises(
        ValueError, match=r"stored_head.weight: transformers converts it by Interleave, which dzero does"
    ):
        loaded(tmp_path)
    (conditional := core.Transpose(0, 1)).check_dims = True
    converted_by([conditional])
    with pytest.raises(ValueError, match=r"by Transpose, which .* save_original_format=False"):
        loaded(tmp_path)


def test_a_transposed_tensor_is_read(tmp_path: Path, converted_by: Any) -> None:
    def transposed(tensors: dict[str, Tensor]) -> None:
        tensors["stored_head.weight"] = tensors.pop("lm_head.weight").T.contiguous()

    rewritten(tmp_path, transposed)
    converted_by([core.Transpose(0, 1)])
    assert torch.equal(loaded(tmp_path)(tokens()), mixture("mixtral")(tokens()).logits)


def test_what_the_model_has_no_place_for_is_told(tmp_path: Path) -> None:
    rewritten(tmp_path, lambda tensors: tensors.update({"model.layers.2.extra.weight": torch.zeros(3)}))
    with pytest.warns(UserWarning, match=re.escape("no place for ['model.layers.2.extra.weight']")):
        loaded(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "mixtral"
