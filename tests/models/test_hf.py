"""Causal LMs of transformers, from folders made here: built offline, filled, loaded, and equal to ours."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dzero.models.build import build, count, flops_per_token, materialiser
from dzero.models.config import ModelConfig
from dzero.models.hf import HFDecoder

transformers = pytest.importorskip("transformers")
safetensors_torch = pytest.importorskip("safetensors.torch")

SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 61,
    "max_position_embeddings": 64,
}
KINDS = ["llama", "gpt2", "qwen2"]


def hf_config(kind: str, **changes: Any) -> Any:
    if kind == "gpt2":
        return transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=61, n_positions=64, **changes)
    return transformers.AutoConfig.for_model(kind, **{**SIZES, **changes})


@pytest.fixture(params=KINDS)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    hf_config(request.param).save_pretrained(tmp_path)
    return tmp_path


def tokens() -> Tensor:
    return torch.randint(61, (2, 10), generator=torch.Generator().manual_seed(3))


def made(config: ModelConfig, *, by_parts: bool = False) -> HFDecoder:
    model = build(config, vocab_size=61)
    assert isinstance(model, HFDecoder)
    materialise = materialiser(config, model, seed=0, device="cpu")
    if by_parts:
        blocks = next(m for m in model.modules() if isinstance(m, nn.ModuleList))
        for block in reversed(blocks):
            materialise(block)
    materialise(model)
    return model.eval()


def saved(folder: Path, kind: str, **options: Any) -> Any:
    """A model of transformers with its own random values, written into `folder`."""
    torch.manual_seed(5)
    model = transformers.AutoModelForCausalLM.from_config(hf_config(kind)).eval()
    model.save_pretrained(folder, **options)
    return model


def test_a_folder_is_built_on_meta_and_filled_in_any_parts(folder: Path) -> None:
    config = ModelConfig(kind="hf", name_or_path=str(folder))
    assert all(p.is_meta and p.dtype == torch.float32 for p in build(config).parameters())
    whole, parts = made(config), made(config, by_parts=True)
    for name, value in whole.state_dict().items():
        assert torch.equal(value, parts.state_dict()[name]), name
    logits = whole(tokens())
    assert logits.shape == (2, 10, 61)
    assert torch.equal(logits, parts(tokens()))


def test_values_are_spread_as_transformers_spreads_them(folder: Path) -> None:
    config = ModelConfig(kind="hf", name_or_path=str(folder))
    ours = made(config, by_parts=True).model
    theirs = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(folder))
    for name, param in theirs.named_parameters():
        assert ours.get_parameter(name).std().item() == pytest.approx(param.std().item(), rel=0.2), name
    for name, buffer in theirs.named_buffers():
        assert torch.equal(ours.get_buffer(name), buffer), name


def test_shared_weights_stay_shared(tmp_path: Path) -> None:
    hf_config("gpt2").save_pretrained(tmp_path)
    model = made(ModelConfig(kind="hf", name_or_path=str(tmp_path)), by_parts=True).model
    assert model.lm_head.weight is model.transformer.wte.weight


def test_flops_follow_the_configuration(tmp_path: Path) -> None:
    hf_config("llama").save_pretrained(tmp_path)
    model = build(ModelConfig(kind="hf", name_or_path=str(tmp_path)))
    matmul = 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48) + 61 * 32
    assert flops_per_token(model, 10) == 6 * matmul + 12 * 2 * 32 * 10


def test_a_bare_model_type_has_its_default_sizes() -> None:
    assert count(build(ModelConfig(kind="hf", name_or_path="gpt2"))) == 124_439_808


def test_our_llama_gives_the_logits_of_transformers(tmp_path: Path) -> None:
    theirs = saved(tmp_path, "llama")
    config = ModelConfig(
        hidden_size=32, layers=2, heads=4, kv_heads=2, ffn_size=48, norm_eps=theirs.config.rms_norm_eps
    )
    ours = build(config, vocab_size=61)
    materialiser(config, ours, seed=0, device="cpu")(ours)
    state = theirs.state_dict()
    for old, new in {
        "model.embed_tokens": "embedding",
        "model.layers": "layers",
        "model.norm": "norm",
        "lm_head": "head",
        "input_layernorm": "attention_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn": "attention",
        "q_proj": "query",
        "k_proj": "key",
        "v_proj": "value",
        "o_proj": "out",
        "mlp": "ffn",
        "gate_proj": "gate",
        "up_proj": "up",
        "down_proj": "down",
    }.items():
        state = {name.replace(old, new): value for name, value in state.items()}
    ours.load_state_dict(state)
    torch.testing.assert_close(ours(tokens()), theirs(tokens()).logits, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shard_bytes", ["10GB", "20KB"])
def test_local_weights_are_loaded(tmp_path: Path, kind: str, shard_bytes: str) -> None:
    theirs = saved(tmp_path, kind, max_shard_size=shard_bytes)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard_bytes == "20KB")
    ours = made(ModelConfig(kind="hf", name_or_path=str(tmp_path), weights=True), by_parts=True)
    assert torch.equal(ours(tokens()), theirs(tokens()).logits)


def test_weights_without_the_models_prefix_are_loaded(tmp_path: Path) -> None:
    theirs = saved(tmp_path, "gpt2")
    theirs.transformer.save_pretrained(tmp_path)
    hf_config("gpt2").save_pretrained(tmp_path)
    ours = made(ModelConfig(kind="hf", name_or_path=str(tmp_path), weights=True))
    assert torch.equal(ours(tokens()), theirs(tokens()).logits)


def test_16_bit_weights_are_loaded_into_fp32(tmp_path: Path) -> None:
    theirs = saved(tmp_path, "llama").bfloat16()
    theirs.save_pretrained(tmp_path)
    ours = made(ModelConfig(kind="hf", name_or_path=str(tmp_path), weights=True)).model
    for name, param in theirs.named_parameters():
        assert torch.equal(ours.get_parameter(name), param.float())


def test_missing_weights_are_named(tmp_path: Path) -> None:
    saved(tmp_path, "llama")
    state = safetensors_torch.load_file(tmp_path / "model.safetensors")
    del state["model.layers.1.mlp.up_proj.weight"]
    safetensors_torch.save_file(state, tmp_path / "model.safetensors")
    config = ModelConfig(kind="hf", name_or_path=str(tmp_path), weights=True)
    with pytest.raises(ValueError, match=r"1 tensors .*'model.layers.1.mlp.up_proj.weight'"):
        materialiser(config, build(config), seed=0, device="cpu")


def test_weights_of_another_shape_or_without_a_place_are_named(tmp_path: Path) -> None:
    saved(tmp_path, "llama")
    config = ModelConfig(kind="hf", name_or_path=str(tmp_path), weights=True)
    state = safetensors_torch.load_file(tmp_path / "model.safetensors")
    safetensors_torch.save_file({**state, "extra": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.warns(UserWarning, match=r"no place for \['extra'\]"):
        materialiser(config, build(config), seed=0, device="cpu")
    state["model.norm.weight"] = torch.zeros(5)
    safetensors_torch.save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"model.norm.weight has shape \[5\], the model needs \[32\]"):
        materialiser(config, build(config), seed=0, device="cpu")


def test_absent_broken_and_outside_files_are_refused(tmp_path: Path) -> None:
    config = ModelConfig(kind="hf", name_or_path=str(tmp_path), weights=True)
    with pytest.raises(FileNotFoundError, match=r"has no config.json"):
        build(config)
    hf_config("llama").save_pretrained(tmp_path)
    model = build(config)
    with pytest.raises(FileNotFoundError, match=r"model.safetensors: no such file"):
        materialiser(config, model, seed=0, device="cpu")
    (tmp_path / "model.safetensors").write_bytes(b"\x10" * 20)
    with pytest.raises(ValueError, match=r"not a whole safetensors file"):
        materialiser(config, model, seed=0, device="cpu")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../model.safetensors"}}))
    with pytest.raises(FileNotFoundError, match=r"no such file"):
        materialiser(config, model, seed=0, device="cpu")


def test_names_that_are_no_causal_lm_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"neither a local folder .* Allowed types: .*gpt2"):
        build(ModelConfig(kind="hf", name_or_path="some-model"))
    with pytest.raises(FileNotFoundError, match=r"no such folder, .*run `hf download someone/some-model`"):
        build(ModelConfig(kind="hf", name_or_path="someone/some-model"))
    transformers.ViTConfig().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"ViTConfig is no causal LM"):
        build(ModelConfig(kind="hf", name_or_path=str(tmp_path)))
    with pytest.raises(ValueError, match=r"gpt2: its vocab_size=50257: the tokenizer or the data has ids up to 99999"):
        build(ModelConfig(kind="hf", name_or_path="gpt2"), vocab_size=100_000)


def test_an_encoder_is_refused_and_its_causal_kind_is_taken(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48}
    config = ModelConfig(kind="hf", name_or_path=str(tmp_path))
    transformers.BertConfig(**sizes).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"bert attends to later tokens, .*set is_decoder to true"):
        build(config)
    transformers.BertConfig(**sizes, is_decoder=True).save_pretrained(tmp_path)
    assert count(build(config)) > 0


@pytest.mark.parametrize(
    ("kind", "says"), [("Marian", "has an encoder"), ("Whisper", "has an encoder"), ("T5", "no causal")]
)
def test_a_model_with_an_encoder_is_not_made_as_its_decoder_alone(kind: str, says: str, tmp_path: Path) -> None:
    getattr(transformers, f"{kind}Config")().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=rf"{says}.*; train it by DzeroTrainer or a loop of your own"):
        build(ModelConfig(kind="hf", name_or_path=str(tmp_path)))


def test_code_of_the_folder_is_not_run(tmp_path: Path) -> None:
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    settings = {"model_type": "evil", "auto_map": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match=r"code from the folder is never run"):
        build(ModelConfig(kind="hf", name_or_path=str(tmp_path)))
    assert not (tmp_path / "ran").exists()
