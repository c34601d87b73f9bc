"""Weights as transformers publishes them become masters, and an export gives them back, bit for bit.

A run with a learning rate of 0 keeps its masters; its checkpoint is exported in fp32.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pool import Pool
from small_mixtures import mixture
from small_runs import settled, train, write_text
from test_export_hf import exported, tensors

import dzero

transformers = pytest.importorskip("transformers")
BYTES = 256
SIZES: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
OWN = "model.vocab_size=256 model.norm_eps=1e-6 model.weights={source}"
HF = (
    "model=hf model.name_or_path={source} model.weights=true model.hidden_size=null model.layers=null "
    "model.heads=null model.kv_heads=null model.ffn_size=null"
)
MOE = (
    "model=tiny_moe model.hidden_size=32 model.layers=2 model.heads=4 model.kv_heads=2 model.ffn_size=48 "
    "model.experts=4 model.top_k=2 model.shared_experts=0 model.scores=softmax model.balance=none model.tied=false "
    "model.vocab_size=256 model.norm_eps=1e-5 model.rope_theta=1e6 model.weights={source}"
)
OVER_ALL = "zero.stage=2 mesh.replicate=2 zero.optimizer_shard_axes=[replicate,shard]"
ON_DISK = "zero.stage=3 offload=infinity offload.disk.paths=[{scratch}] offload.disk.block_bytes=8192"
WAYS: dict[str, tuple[str, str, int]] = {
    "llama, stage 3": ("llama", f"{OWN} zero.stage=3", 3),
    "llama, stage 1, fp32": ("llama", f"{OWN} zero.stage=1 precision=fp32", 2),
    "llama, tiles": ("llama", f"{OWN} zero.stage=3 block.tiles=3", 2),
    "llama, remainders, hybrid": ("llama", f"{OWN} zero.stage=3 precision=bf16_remainder mesh.replicate=2", 4),
    "llama, states over all": ("llama", f"{OWN} {OVER_ALL}", 4),
    "llama, disk": ("llama", f"{OWN} {ON_DISK}", 2),
    "gpt2": ("gpt2", f"{HF} zero.stage=3", 2),
    "qwen2": ("qwen2", f"{HF} zero.stage=1", 2),
    "mixtral as our mixture, ep": ("mixtral", f"{MOE} zero.stage=3 mesh.ep=2", 2),
    "mixtral": ("mixtral", f"{HF} zero.stage=3", 2),
    "qwen3_moe": ("qwen3_moe", f"{HF} zero.stage=1", 2),
    "qwen2_moe": ("qwen2_moe", f"{HF} zero.stage=3", 1),
    "olmoe": ("olmoe", f"{HF} zero.stage=3", 2),
    "deepseek_v3": ("deepseek_v3", f"{HF} zero.stage=3", 2),
}
"""What is published, the settings of the run that starts from it, and its ranks."""
DEFAULT = ("llama, stage 3", "gpt2", "mixtral as our mixture, ep", "deepseek_v3")


def theirs(kind: str) -> Any:
    """A model of transformers with its own random values, for bytes as tokens."""
    if kind not in ("llama", "gpt2", "qwen2"):
        return mixture(kind, vocab_size=BYTES, **({"num_local_experts": 4} if kind == "mixtral" else {}))
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4} if kind == "gpt2" else SIZES | {"num_key_value_heads": 1}
    more = {"tie_word_embeddings": True, "rms_norm_eps": 1e-6} if kind == "llama" else {}
    torch.manual_seed(5)
    config = transformers.AutoConfig.for_model(kind, vocab_size=BYTES, **sizes, **more)
    return transformers.AutoModelForCausalLM.from_config(config)


def marked(way: str) -> Any:
    asks = "tests/checkpoint/test_import_hf.py::test_masters_are_the_published_values_and_are_exported_as_them"
    return pytest.param(way, marks=[] if way in DEFAULT else pytest.mark.full(asks))


@pytest.mark.parametrize("way", [marked(way) for way in WAYS])
def test_masters_are_the_published_values_and_are_exported_as_them(pool: Pool, tmp_path: Path, way: str) -> None:
    """By names, dtypes and bits; and transformers loads what is exported."""
    kind, line, ranks = WAYS[way]
    model = theirs(kind)
    model.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    text = write_text(tmp_path / "words.txt", words=300)
    words = line.replace("{source}", str(tmp_path / "theirs")).replace("{scratch}", str(tmp_path)).split()
    saves = ["checkpoint.every=1", f"checkpoint.folder={tmp_path / 'ck'}", "data.held_out=0", "train.steps=1"]
    run = settled(text, *words, *saves, "optim.lr=0", "schedule.kind=constant", f"launch.workers={ranks}")
    pool.run(train, ranks, run, tmp_path, timeout_s=300.0)
    found, want = exported(tmp_path / "ck", tmp_path / "out", "fp32"), tensors(tmp_path / "theirs")
    assert found.keys() == want.keys()
    assert all(torch.equal(found[name], value) and found[name].dtype == value.dtype for name, value in want.items())
    again, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(report.values()), report
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in model.state_dict().items())


def test_a_model_tells_how_it_is_published_by_layer() -> None:
    layers = "model.layers.#"
    expert = f"{layers}.block_sparse_moe.experts.*"
    split = {"operation": "split", "dim": 0}
    fused, down = f"{layers}.mlp.experts.gate_up_proj", f"{layers}.mlp.experts.down_proj"
    found = dzero.describe(mixture("mixtral"))
    assert found is not None
    assert found["layout"] == [
        {"sources": [f"{layers}.mlp.gate.weight"], "targets": [f"{layers}.block_sparse_moe.gate.weight"]},
        {
            "sources": [fused],
            "targets": [f"{expert}.w1.weight", f"{expert}.w3.weight"],
            "steps": [{"operation": "chunk", "dim": 1}, split],
        },
        {"sources": [down], "targets": [f"{expert}.w2.weight"], "steps": [split]},
    ]
    assert "layout" not in (dzero.describe(theirs("llama")) or {"layout": None})
