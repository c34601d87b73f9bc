"""Causal LMs of transformers, from folders made here: built offline, filled, loaded; what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import decoders
import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers")
safetensors_torch = pytest.importorskip("safetensors.torch")

KINDS = ["llama", "gpt2", "qwen2"]


def hf_config(kind: str, **changes: Any) -> Any:
    sizes = decoders.GPT2 if kind == "gpt2" else decoders.TRANSFORMERS
    return transformers.AutoConfig.for_model(kind, **{**sizes, "vocab_size": 61, **changes})


@pytest.fixture(params=KINDS)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    hf_config(request.param).save_pretrained(tmp_path)
    return tmp_path


def tokens() -> Tensor:
    return torch.randint(61, (2, 10), generator=torch.Generator().manual_seed(3))


def settings_of(where: Path | str, *, weights: bool = False) -> dict[str, Any]:
    return {"kind": "hf", "name_or_path": str(where), "weights": weights}


def build(where: Path | str, vocab_size: int | None = None) -> nn.Module:
    return decoders.on_meta(vocab_size, **settings_of(where))


def made(where: Path | str, *, weights: bool = False, by_parts: bool = False) -> Any:
    """Filled, from random values or those of the folder; by parts: block by block from the last, and then the rest."""
    settings = settings_of(where, weights=weights)
    model = decoders.on_meta(61, **settings)
    fill = decoders.filling(model, **settings)
    if by_parts:
        blocks = next(m for m in model.modules() if isinstance(m, nn.ModuleList))
        for block in reversed(blocks):
            fill(block)
    fill(model)
    return model.eval()


def saved(folder: Path, kind: str, **options: Any) -> Any:
    """A model of transformers with its own random values, written into `folder`."""
    torch.manual_seed(5)
    model = transformers.AutoModelForCausalLM.from_config(hf_config(kind)).eval()
    model.save_pretrained(folder, **options)
    return model


def test_a_folder_is_built_on_meta_and_filled_in_any_parts_as_transformers_spreads_values(folder: Path) -> None:
    assert all(p.is_meta and p.dtype == torch.float32 for p in build(folder).parameters())
    whole, parts = made(folder), made(folder, by_parts=True)
    for name, value in whole.state_dict().items():
        assert torch.equal(value, parts.state_dict()[name]), name
    logits = whole(tokens())
    assert logits.shape == (2, 10, 61)
    assert torch.equal(logits, parts(tokens()))
    theirs = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(folder))
    for name, param in theirs.named_parameters():
        assert parts.model.get_parameter(name).std().item() == pytest.approx(param.std().item(), rel=0.2), name
    for name, buffer in theirs.named_buffers():
        assert torch.equal(parts.model.get_buffer(name), buffer), name
    shared = theirs.lm_head.weight is theirs.get_input_embeddings().weight
    assert (parts.model.lm_head.weight is parts.model.get_input_embeddings().weight) == shared


@pytest.mark.parametrize(("kind", "shard_bytes"), [("llama", "10GB"), ("gpt2", "20KB"), ("qwen2", "20KB")])
def test_local_weights_are_loaded_of_16_bits_too(tmp_path: Path, kind: str, shard_bytes: str) -> None:
    theirs = saved(tmp_path, kind, max_shard_size=shard_bytes)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard_bytes == "20KB")
    exact = made(tmp_path, weights=True, by_parts=True)
    assert all(torch.equal(exact.model.get_parameter(name), param) for name, param in theirs.named_parameters())
    torch.testing.assert_close(exact(tokens()), theirs(tokens()).logits)
    theirs.bfloat16().save_pretrained(tmp_path, max_shard_size=shard_bytes)
    ours = made(tmp_path, weights=True).model
    for name, param in theirs.named_parameters():
        assert torch.equal(ours.get_parameter(name), param.float())


def test_weights_without_the_models_prefix_are_loaded(tmp_path: Path) -> None:
    theirs = saved(tmp_path, "gpt2")
    theirs.transformer.save_pretrained(tmp_path)
    hf_config("gpt2").save_pretrained(tmp_path)
    ours = made(tmp_path, weights=True).model
    assert all(torch.equal(ours.get_parameter(name), param) for name, param in theirs.named_parameters())


def test_weights_that_are_missing_of_another_shape_or_without_a_place_are_named(tmp_path: Path) -> None:
    saved(tmp_path, "llama")
    file = tmp_path / "model.safetensors"
    state = safetensors_torch.load_file(file)
    safetensors_torch.save_file({**state, "extra": torch.zeros(1)}, file)
    with pytest.warns(UserWarning, match=r"no place for \['extra'\]"):
        made(tmp_path, weights=True)
    safetensors_torch.save_file({**state, "model.norm.weight": torch.zeros(5)}, file)
    with pytest.raises(ValueError, match=r"model.norm.weight has shape \[5\], the model needs \[32\]"):
        made(tmp_path, weights=True)
    del state["model.layers.1.mlp.up_proj.weight"]
    safetensors_torch.save_file(state, file)
    with pytest.raises(ValueError, match=r"1 tensors .*'model.layers.1.mlp.up_proj.weight'"):
        made(tmp_path, weights=True)


def test_absent_and_broken_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"has no config.json"):
        build(tmp_path)
    hf_config("llama").save_pretrained(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"model.safetensors: no such file"):
        made(tmp_path, weights=True)
    (tmp_path / "model.safetensors").write_bytes(b"\x10" * 20)
    with pytest.raises(ValueError, match=r"not a whole safetensors file"):
        made(tmp_path, weights=True)


def test_names_that_are_no_causal_lm_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"neither a local folder .* Allowed types: .*gpt2"):
        build("some-model")
    with pytest.raises(FileNotFoundError, match=r"no such folder, .*run `hf download someone/some-model`"):
        build("someone/some-model")
    transformers.ViTConfig().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"ViTConfig is no causal LM"):
        build(tmp_path)
    assert sum(param.numel() for param in build("gpt2").parameters()) == 124_439_808, "a type has its default sizes"
    with pytest.raises(ValueError, match=r"gpt2: its vocab_size=50257: the tokenizer or the data has ids up to 99999"):
        build("gpt2", 100_000)


def test_an_encoder_is_refused_and_its_causal_kind_is_taken(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48}
    transformers.BertConfig(**sizes).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"bert attends to later tokens, .*set is_decoder to true"):
        build(tmp_path)
    transformers.BertConfig(**sizes, is_decoder=True).save_pretrained(tmp_path)
    assert [*build(tmp_path).parameters()]


@pytest.mark.parametrize(
    ("kind", "says"), [("Marian", "has an encoder"), ("Whisper", "has an encoder"), ("T5", "no causal")]
)
def test_a_model_with_an_encoder_is_not_made_as_its_decoder_alone(kind: str, says: str, tmp_path: Path) -> None:
    getattr(transformers, f"{kind}Config")().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=rf"{says}.*; train it by DzeroTrainer or a loop of your own"):
        build(tmp_path)


def test_code_of_the_folder_is_not_run(tmp_path: Path) -> None:
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    settings = {"model_type": "evil", "auto_map": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match=r"code from the folder is never run"):
        build(tmp_path)
    assert not (tmp_path / "ran").exists()
