"""Plans of fine-tuning, from a config.json alone: what fits on one card, in bytes that are added up by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dzero.estimate.forecast import Forecast
from dzero.overrides import composed
from dzero.plan.plan_run import forecast_run

pytest.importorskip("transformers")
pytest.importorskip("peft")

ROOT = Path(__file__).parents[2]
GIB = 1 << 30
VOCAB = 128_256
SIZES = {"8 B": (4096, 14336, 32, 32), "70 B": (8192, 28672, 80, 64)}
"""Width, width of the feed-forward layers, layers and heads of Llama 3; 8 heads of keys and values."""


def plan(folder: Path, size: str, *settings: str) -> Forecast:
    hidden, ffn, layers, heads = SIZES[size]
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "vocab_size": VOCAB,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(config))
    words = ["--config-name=finetune", f"model.name_or_path={folder}", "mesh.dp=1", "zero.stage=3", *settings]
    found = composed([*words, "block.activation_checkpoint=full"], ROOT / "conf")
    assert found.hardware is not None
    return forecast_run(found, found.hardware)


def frozen_bytes(size: str) -> int:
    """Matrices of blocks in 34 bytes per 64 elements; norms, embedding and head in 2 bytes per element."""
    hidden, ffn, layers, heads = SIZES[size]
    kv = 8 * hidden // heads
    matrices = layers * (2 * hidden * hidden + 2 * hidden * kv + 3 * hidden * ffn)
    return matrices * 34 // 64 + 2 * ((2 * layers + 1) * hidden + 2 * VOCAB * hidden)


LARGE = ["adapter=qlora", "adapter.target_modules=all-linear", "adapter.r=16", "train.sequence_tokens=4096"]


@pytest.mark.full
def test_70_billion_parameters_in_4_bits_are_tuned_on_one_card_of_80_gb(tmp_path: Path) -> None:
    found = plan(tmp_path, "70 B", *LARGE, "hardware=h100_80g")
    assert found.fits
    assert found.tiers["device"].kinds["frozen"] == frozen_bytes("70 B")
    assert found.tiers["device"].total_bytes < 55 * GIB


@pytest.mark.full
def test_70_billion_parameters_in_4_bits_are_tuned_on_one_card_of_24_gb_from_the_host(tmp_path: Path) -> None:
    found = plan(tmp_path, "70 B", *LARGE, "hardware=rtx4090", "offload.frozen=host")
    assert found.fits
    assert frozen_bytes("70 B") <= found.tiers["host"].total_bytes < 40 * GIB


def test_all_of_8_billion_parameters_are_tuned_on_one_card_of_24_gb(tmp_path: Path) -> None:
    found = plan(
        tmp_path,
        "8 B",
        "hardware=rtx4090",
        "precision=bf16_remainder",
        "precision.moments=int8",
        "offload=host_all",
        "optim.max_norm=1.0",
        "train.sequence_tokens=2048",
    )
    assert found.fits
    assert found.tiers["host"].total_bytes < 61 * GIB
