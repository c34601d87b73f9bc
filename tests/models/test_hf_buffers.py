"""Buffers that transformers' models compute and do not save: filled by parts, they are those of the constructor."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from dzero.models.hf import HFDecoder
from dzero.models.meta_init import MetaInitializer

transformers = pytest.importorskip("transformers")
TYPES = sorted(transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
FIRST = ["falcon_h1", "gpt2", "llama"]
IDS = {"vocab_size": 256, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
DEPTH = {"num_hidden_layers": 2, "n_layer": 2, "encoder_layers": 1, "decoder_layers": 2}
WIDTH = {
    "hidden_size": 64,
    "n_embd": 64,
    "d_model": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "num_attention_heads": 4,
    "n_head": 4,
    "max_position_embeddings": 128,
    "n_positions": 128,
    "n_routed_experts": 4,
    "num_local_experts": 4,
}
KEY_VALUES = {"num_key_value_heads": 2, "num_experts": 4}
SIZES = ({**IDS, **DEPTH, **WIDTH, **KEY_VALUES}, {**IDS, **DEPTH, **WIDTH}, {**IDS, **DEPTH}, IDS, {})
MOST_PARAMETERS = 4e8
WITHOUT_OWN = {"apertus", "apertus1p5_text", "openai-gpt"}
"""Types with parameters that only their constructor draws; they are refused unless weights are given."""


def small(kind: str) -> Any:
    """A small configuration, or None if these sizes make no model of this type or a large one."""
    for sizes in SIZES:
        try:
            known = transformers.AutoConfig.for_model(kind)
            config = transformers.AutoConfig.for_model(kind, **{k: v for k, v in sizes.items() if hasattr(known, k)})
            model = on_meta(config)
        except Exception:  # many kinds, for many reasons
            continue
        if sum(param.numel() for param in model.parameters()) <= MOST_PARAMETERS:
            return config
    return None


def on_meta(config: Any) -> HFDecoder:
    with torch.device("meta"):
        return HFDecoder(transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32))


def not_saved(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: buffer for name, buffer in model.named_buffers() if name not in model.state_dict()}


def agrees(kind: str) -> bool:
    """Compare with the model that transformers builds; return whether the type was built."""
    if (config := small(kind)) is None:
        return False
    want = not_saved(transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32))
    model = on_meta(config)
    fill = MetaInitializer(model, seed=0, device="cpu")
    if kind in WITHOUT_OWN:
        with pytest.raises(ValueError, match=r"no initialiser for .*published weights"):
            fill(model)
        return False
    for blocks in (module for module in [*model.modules()] if isinstance(module, nn.ModuleList)):
        for block in blocks:
            fill(block)
    fill(model)
    found = not_saved(model.model)
    assert found.keys() == want.keys(), kind
    for name, buffer in want.items():
        torch.testing.assert_close(found[name], buffer, rtol=0, atol=0, equal_nan=True, msg=f"{kind} {name}")
    return True


def test_buffers_of_some_types_are_those_that_the_constructor_computes() -> None:
    assert [kind for kind in FIRST if agrees(kind)] == FIRST


def test_the_buffers_of_a_second_build_leave_random_numbers_and_the_model_as_they_are() -> None:
    model = on_meta(small("falcon_h1"))
    before = torch.get_rng_state()
    computed = model.computed_buffers()
    assert torch.equal(before, torch.get_rng_state())
    assert computed["model.model.layers.0.mamba.mup_vector"].isfinite().all()
    assert all(param.is_meta for param in model.parameters())
    assert not nn.Linear(1, 1).weight.is_meta


@pytest.mark.full
def test_buffers_of_all_types_are_those_that_the_constructor_computes() -> None:
    assert sum(agrees(kind) for kind in TYPES) >= 150
