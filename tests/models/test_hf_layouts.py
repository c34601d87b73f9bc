"""Names and shapes that transformers publishes, of every causal LM that its defaults can build."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from dzero.models.conversions import STEPS, convert_all
from dzero.models.hf_conversions import as_loaded, as_saved

transformers = pytest.importorskip("transformers")
core = pytest.importorskip("transformers.core_model_loading")
TYPES = sorted(transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
FIRST = ["deepseek_v3", "gpt2", "granitemoe", "jamba", "mixtral", "qwen3_moe"]


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
    if (model := on_meta(kind)) is None:
        return False
    own = shapes(model.state_dict())
    layout = as_saved(type(model), model.config)
    published = shapes(convert_all(layout, without_values(own)))
    assert published == shapes(core.revert_weight_conversion(model, model.state_dict())), kind
    assert shapes(as_loaded(model, without_values(published))) == own, kind
    assert shapes(as_loaded(model, without_values(own))) == own, kind  # as save_original_format=False writes it
    return bool(layout)


def test_some_layouts_are_those_of_transformers() -> None:
    assert [kind for kind in FIRST if agrees(kind)] == [kind for kind in FIRST if kind != "gpt2"]


@pytest.mark.full
def test_all_layouts_are_those_of_transformers() -> None:
    assert sum(agrees(kind) for kind in TYPES) >= 40
