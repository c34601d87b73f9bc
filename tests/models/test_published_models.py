"""Weights as Hugging Face publishes them, of a llama, of Mixtral and of mixtures in the layout of transformers: what is
read, and what is refused before anything is."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import decoders
import pytest
import torch
import yaml
from small_mixtures import MIXTURES, VOCAB, mixture, tokens
from torch import Tensor
from training_loops import unequal

transformers = pytest.importorskip("transformers")
safetensors_torch = pytest.importorskip("safetensors.torch")

CONF = Path(__file__).parents[2] / "conf" / "model"
SIZES: dict[str, Any] = {"hidden_size": 32, "layers": 2, "heads": 4, "kv_heads": 2, "ffn_size": 48}
LLAMA: dict[str, Any] = {**SIZES, "rope_theta": 5e5}
MIXTRAL: dict[str, Any] = {**SIZES, "kind": "moe", "experts": 5, "top_k": 2, "balance": "loss", "rope_theta": 1e6}
FP32 = {"rtol": 1e-5, "atol": 1e-6}
"""The same values; rotary tables, outputs of experts and sums of products in another order."""


def llama(folder: Path, **options: Any) -> Any:
    """A llama of transformers with random values, written into `folder`."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    more = {"intermediate_size": 48, "vocab_size": VOCAB, "rope_theta": 5e5, "rms_norm_eps": 1e-5}
    torch.manual_seed(5)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **more)).eval()
    model.save_pretrained(folder, **options)
    return model


def changed(folder: Path, changes: dict[str, Any]) -> None:
    """Edit config.json; "absent" removes a key."""
    file = folder / "config.json"
    config = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: value for key, value in config.items() if value != "absent"}))


def imported(folder: Path | str, settings: dict[str, Any], **changes: Any) -> Any:
    return decoders.with_values(VOCAB, **{**settings, "weights": str(folder), **changes}).eval()


@pytest.mark.parametrize("shard_bytes", ["10GB", "20KB"])
def test_a_llama_starts_from_published_weights(tmp_path: Path, shard_bytes: str) -> None:
    theirs = llama(tmp_path, max_shard_size=shard_bytes)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard_bytes == "20KB")
    torch.testing.assert_close(imported(tmp_path, LLAMA)(tokens()), theirs(tokens()).logits, **FP32)
    changed(tmp_path, {"rope_parameters": "absent", "head_dim": "absent", "rope_theta": 500000})  # older spellings
    torch.testing.assert_close(imported(tmp_path, LLAMA)(tokens()), theirs(tokens()).logits, **FP32)


@pytest.mark.parametrize("tied", [False, True])
def test_mixtral_gives_the_logits_of_transformers(tmp_path: Path, tied: bool) -> None:
    theirs = mixture("mixtral", tie_word_embeddings=tied)
    (theirs.model if tied else theirs).save_pretrained(tmp_path, max_shard_size="20KB")  # a tied head is not needed
    ours = imported(tmp_path, MIXTRAL, tied=tied)
    for layer, published in zip(ours.layers, theirs.model.layers, strict=True):
        gate, up = published.mlp.experts.gate_up_proj.chunk(2, 1)
        assert torch.equal(layer.ffn.experts.gate, gate.flatten(0, 1))
        assert torch.equal(layer.ffn.experts.up, up.flatten(0, 1))
        assert torch.equal(layer.ffn.experts.down, published.mlp.experts.down_proj.flatten(0, 1))
        assert torch.equal(layer.ffn.router.weight, published.mlp.gate.weight)
    torch.testing.assert_close(ours(tokens()), theirs(tokens()).logits, **FP32)


@pytest.mark.parametrize(
    ("settings", "changes", "what"),
    [
        (LLAMA, {"num_attention_heads": 8}, r"another model than this; set model.heads=8"),
        (LLAMA, {"rms_norm_eps": "absent"}, r"set model.norm_eps=1e-06"),
        (LLAMA, {"rope_parameters": "absent", "rope_theta": "absent"}, r"set model.rope_theta=10000.0"),
        (LLAMA, {"tie_word_embeddings": True, "vocab_size": 7}, r"set model.vocab_size=7 model.tied=true"),
        (LLAMA, {"rope_parameters": {"rope_type": "llama3"}}, r"positions are scaled .* take model=hf"),
        (LLAMA, {"rope_parameters": "absent", "rope_scaling": {"type": "linear"}}, r"positions are scaled"),
        (LLAMA, {"hidden_act": "gelu"}, r"'hidden_act': 'gelu'.*, where model.kind=llama has .*: take model=hf"),
        (LLAMA, {"attention_bias": True}, r"{'attention_bias': True}, where"),
        (LLAMA, {"model_type": "mistral"}, r"model_type 'mistral' is no llama: take model=hf model.name_or_path="),
        (MIXTRAL, {"num_experts_per_tok": 3, "num_local_experts": 6}, "set model.experts=6 model.top_k=3"),
        (MIXTRAL, {"num_key_value_heads": "absent"}, "set model.kv_heads=8"),
        (MIXTRAL, {"sliding_window": 4096}, r"{'sliding_window': 4096}, where model.kind=moe has .*: take model=hf"),
        (MIXTRAL, {"model_type": "qwen3_moe"}, "'qwen3_moe' is no mixtral: take model=hf model.name_or_path="),
        (MIXTRAL, {"rope_parameters": {"rope_type": "yarn"}}, "positions are scaled .* those of model.kind=moe"),
    ],
)
def test_the_configuration_of_another_model_is_refused(
    tmp_path: Path, settings: dict[str, Any], changes: dict[str, Any], what: str
) -> None:
    theirs = llama(tmp_path) if settings is LLAMA else mixture("mixtral")
    theirs.save_pretrained(tmp_path)
    changed(tmp_path, changes)
    with pytest.raises(ValueError, match=what):
        imported(tmp_path, settings)


def test_settings_with_which_it_is_no_mixtral_are_named(tmp_path: Path) -> None:
    mixture("mixtral").save_pretrained(tmp_path)
    for changes, told in (
        ({"balance": None}, "model.balance=loss"),
        ({"scores": "sigmoid"}, "model.scores=softmax"),
        ({"shared_experts": 1, "top_k": 1}, "model.top_k=2 model.shared_experts=0"),
    ):
        with pytest.raises(ValueError, match=f"of mixtures only Mixtral is read, .*; set {told}$"):
            imported(tmp_path, MIXTRAL, **changes)
    with pytest.raises(ValueError, match="is no llama: take model=hf"):
        imported(tmp_path, LLAMA)


def test_the_published_mixtral_8x7b_is_that_of_the_configuration(tmp_path: Path) -> None:
    """Its settings as published in the days of transformers 4, without those that do not change what it computes."""
    published = {"model_type": "mixtral", "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336}
    published |= {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "num_local_experts": 8}
    published |= {"num_experts_per_tok": 2, "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "sliding_window": None}
    published |= {"hidden_act": "silu", "tie_word_embeddings": False, "torch_dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(published))
    settings = yaml.safe_load((CONF / "mixtral_8x7b.yaml").read_text()) | {"weights": str(tmp_path)}
    with pytest.raises(FileNotFoundError, match=r"model.safetensors: no such file"):  # all before it agrees
        decoders.filling(decoders.on_meta(None, **settings), **settings)
    settings |= {"experts": 4}
    with pytest.raises(ValueError, match=r"set model.experts=8"):
        decoders.filling(decoders.on_meta(None, **settings), **settings)


def test_a_folder_in_which_transformers_left_the_experts_fused_is_refused(tmp_path: Path) -> None:
    mixture("mixtral").save_pretrained(tmp_path, save_original_format=False)
    with pytest.raises(ValueError, match=r"32 tensors .* not in its .*layers.1.block_sparse_moe.experts.4.w2.weight"):
        imported(tmp_path, MIXTRAL)  # 2 layers, each with a router and 5 experts of 3 matrices


def test_a_snapshot_in_the_cache_of_hugging_face_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository = tmp_path / "models--org--name"
    for folder in ("refs", "blobs", "snapshots/1"):
        (repository / folder).mkdir(parents=True)
    (repository / "refs" / "main").write_text("1")
    theirs = llama(repository / "blobs")
    for name in ("config.json", "model.safetensors"):
        (repository / "blobs" / name).rename(repository / "blobs" / f"hash-{name}")
        (repository / "snapshots" / "1" / name).symlink_to(f"../../blobs/hash-{name}")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    want = theirs(tokens()).logits
    torch.testing.assert_close(imported(repository / "snapshots" / "1", LLAMA)(tokens()), want, **FP32)
    torch.testing.assert_close(imported("org/name", LLAMA)(tokens()), want, **FP32)
    assert torch.equal(hf("org/name")(tokens()), want)


def hf(folder: Path | str) -> Any:
    settings = {"kind": "hf", "name_or_path": str(folder), "weights": True}
    return decoders.with_values(VOCAB, **settings).eval()


@pytest.mark.parametrize("layout", ["published", "of the model"])
@pytest.mark.parametrize("kind", MIXTURES)
def test_a_mixture_is_what_transformers_loads(tmp_path: Path, kind: str, layout: str) -> None:
    theirs = mixture(kind)
    theirs.save_pretrained(tmp_path, save_original_format=layout == "published", max_shard_size="20KB")
    names = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    assert any("gate_up_proj" in name for name in names) == (layout == "of the model")
    ours = hf(tmp_path)
    for name, value in theirs.state_dict().items():
        assert torch.equal(ours.model.state_dict()[name], value), name
    torch.testing.assert_close(ours(tokens()), theirs(tokens()).logits)


Tensors = dict[str, Tensor]
EXPERT = "model.layers.1.block_sparse_moe.experts"


def rewritten(folder: Path, change: Callable[[Tensors], object]) -> None:
    """Let `change` edit the tensors of a folder of mixtral, by name."""
    mixture("mixtral").save_pretrained(folder)
    tensors: Tensors = safetensors_torch.load_file(folder / "model.safetensors")
    change(tensors)
    safetensors_torch.save_file(tensors, folder / "model.safetensors")


def last_absent(tensors: Tensors) -> None:
    for part in ("w1", "w2", "w3"):
        del tensors[f"{EXPERT}.4.{part}.weight"]


def renumbered(tensors: Tensors) -> None:
    tensors[f"{EXPERT}.6.w2.weight"] = tensors.pop(f"{EXPERT}.4.w2.weight")


def one_up_absent(tensors: Tensors) -> None:
    del tensors[f"{EXPERT}.4.w3.weight"]


def other_shape(tensors: Tensors) -> None:
    tensors[f"{EXPERT}.3.w1.weight"] = torch.zeros(47, 32)


def fused_too(tensors: Tensors) -> None:
    tensors["model.layers.1.mlp.experts.down_proj"] = torch.zeros(5, 32, 48)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (last_absent, r"layers.1.*gate|w1.*with 7 more has shape \[4, 96, 32\], the model needs \[5, 96, 32\]"),
        (renumbered, r"experts.0.w2.weight to .*experts.6.w2.weight, 5 tensors, are not numbered from 0 on"),
        (one_up_absent, r"has shape \[4, 48, 32\], .* \[5, 48, 32\]: one parameter of the model is made of both"),
        (other_shape, r"experts.3.w1.weight has shape \[47, 32\], .*experts.0.w1.weight \[48, 32\]"),
        (fused_too, r"stored as model.layers.1.mlp.experts.down_proj too"),
    ],
)
def test_experts_that_do_not_make_the_parameter_are_refused(tmp_path: Path, change: Any, what: str) -> None:
    rewritten(tmp_path, change)
    with pytest.raises(ValueError, match=what):
        hf(tmp_path)


@pytest.fixture
def converted_by(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let transformers convert the head of mixtral by given operations."""
    mapping = pytest.importorskip("transformers.conversion_mapping")
    core = pytest.importorskip("transformers.core_model_loading")
    known = mapping.get_model_conversion_mapping

    def convert(operations: list[Any]) -> None:
        def more(model: Any, *args: Any, **options: Any) -> list[Any]:
            own = core.WeightConverter("stored_head", "lm_head", operations=operations)
            return [*known(model, *args, **options), own]

        monkeypatch.setattr(mapping, "get_model_conversion_mapping", more)

    return convert


def test_a_transposed_tensor_is_read_and_an_unknown_operation_named(tmp_path: Path, converted_by: Any) -> None:
    core = pytest.importorskip("transformers.core_model_loading")

    def transposed(tensors: Tensors) -> None:
        tensors["stored_head.weight"] = tensors.pop("lm_head.weight").T.contiguous()

    rewritten(tmp_path, transposed)
    converted_by([core.Transpose(0, 1)])
    assert unequal(hf(tmp_path).model.state_dict(), mixture("mixtral").state_dict()) == []
    converted_by([type("Interleave", (), {})()])
    with pytest.raises(ValueError, match=r"stored_head.weight: transformers converts it by Interleave, which dzero"):
        hf(tmp_path)
    (conditional := core.Transpose(0, 1)).check_dims = True
    converted_by([conditional])
    with pytest.raises(ValueError, match=r"by Transpose, which .* save_original_format=False"):
        hf(tmp_path)
