"""model.kind=moe with the weights of Mixtral computes what transformers computes, and refuses other mixtures."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from small_mixtures import VOCAB, mixture, tokens

from dzero.models.build import build, materialiser, weights_of
from dzero.models.config import ModelConfig
from dzero.models.moe import MoE
from dzero.models.weights import check_config

CONF = Path(__file__).parents[2] / "conf" / "model"

CONFIG = ModelConfig(
    kind="moe",
    hidden_size=32,
    layers=2,
    heads=4,
    kv_heads=2,
    ffn_size=48,
    experts=5,
    top_k=2,
    balance="loss",
    rope_theta=1e6,
)


def imported(folder: Path, config: ModelConfig = CONFIG) -> MoE:
    config = replace(config, weights=str(folder))
    model = build(config, VOCAB)
    assert isinstance(model, MoE)
    materialiser(config, model, seed=0, device="cpu")(model)
    return model.eval()


@pytest.mark.parametrize("tied", [False, True])
def test_mixtral_gives_the_logits_of_transformers(tmp_path: Path, tied: bool) -> None:
    theirs = mixture("mixtral", tie_word_embeddings=tied)
    (theirs.model if tied else theirs).save_pretrained(tmp_path, max_shard_size="20KB")  # a tied head is not needed
    ours = imported(tmp_path, replace(CONFIG, tied=tied))
    for layer, published in zip(ours.layers, theirs.model.layers, strict=True):
        gate, up = published.mlp.experts.gate_up_proj.chunk(2, 1)
        assert torch.equal(layer.ffn.experts.gate, gate.flatten(0, 1))
        assert torch.equal(layer.ffn.experts.up, up.flatten(0, 1))
        assert torch.equal(layer.ffn.experts.down, published.mlp.experts.down_proj.flatten(0, 1))
        assert torch.equal(layer.ffn.router.weight, published.mlp.gate.weight)
    # The same fp32 values; the chosen experts' outputs and products are summed in another order.
    torch.testing.assert_close(ours(tokens()), theirs(tokens()).logits, rtol=1e-5, atol=1e-6)


def test_the_published_mixtral_8x7b_is_that_of_the_configuration(tmp_path: Path) -> None:
    """Its settings as published in the days of transformers 4, without those that do not change what it computes."""
    published = {"model_type": "mixtral", "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336}
    published |= {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "num_local_experts": 8}
    published |= {"num_experts_per_tok": 2, "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "sliding_window": None}
    published |= {"hidden_act": "silu", "tie_word_embeddings": False, "torch_dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(published))
    settings = yaml.safe_load((CONF / "mixtral_8x7b.yaml").read_text())
    shape = ModelConfig(**settings, weights=str(tmp_path)).shape(None)
    check_config(tmp_path, shape)
    with pytest.raises(ValueError, match=r"set model.experts=8"):
        check_config(tmp_path, replace(shape, experts=4))


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"num_experts_per_tok": 3, "num_local_experts": 6}, "set model.experts=6 model.top_k=3"),
        ({"num_key_value_heads": "absent"}, "set model.kv_heads=8"),
        ({"sliding_window": 4096}, r"{'sliding_window': 4096}, where model.kind=moe has .*: take model=hf"),
        ({"model_type": "qwen3_moe"}, "model_type 'qwen3_moe' is no mixtral: take model=hf model.name_or_path="),
        ({"model_type": "llama"}, "model_type 'llama' is no mixtral"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "positions are scaled .* those of model.kind=moe are not"),
    ],
)
def test_another_configuration_is_refused(tmp_path: Path, changes: dict[str, Any], what: str) -> None:
    mixture("mixtral").save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: value for key, value in config.items() if value != "absent"}))
    with pytest.raises(ValueError, match=what):
        imported(tmp_path)


def test_settings_with_which_it_is_no_mixtral_are_named(tmp_path: Path) -> None:
    mixture("mixtral").save_pretrained(tmp_path)
    for changes, told in (
        ({"balance": None}, "model.balance=loss"),
        ({"scores": "sigmoid"}, "model.scores=softmax"),
        ({"shared_experts": 1, "top_k": 1}, "model.top_k=2 model.shared_experts=0"),
    ):
        with pytest.raises(ValueError, match=f"of mixtures only Mixtral is read, .*; set {told}$"):
            imported(tmp_path, replace(CONFIG, **changes))
    llama = replace(CONFIG, kind="llama", experts=None, top_k=None, balance=None, weights=str(tmp_path))
    with pytest.raises(ValueError, match="is no llama: take model=hf"):
        weights_of(llama, build(llama, VOCAB))


def test_a_folder_in_which_transformers_left_the_experts_fused_is_refused(tmp_path: Path) -> None:
    mixture("mixtral").save_pretrained(tmp_path, save_original_format=False)
    with pytest.raises(ValueError, match=r"32 tensors .* not in its .*layers.1.block_sparse_moe.experts.4.w2.weight"):
        imported(tmp_path)  # 2 layers, each with a router and 5 experts of 3 matrices
