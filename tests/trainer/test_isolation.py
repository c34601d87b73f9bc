"""Packed conversations stay apart: models that mix them are refused before the first step, others are not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from pool import Pool
from small_runs import CONF
from test_finetune import CHATS, model
from test_token_loss import Silent

from dzero.overrides import composed
from dzero.trainer.trainer import Trainer

transformers = pytest.importorskip("transformers")

published = model

SIZES = {
    "bloom": {"hidden_size": 64, "n_layer": 2, "n_head": 4},
    "opt": {
        "hidden_size": 64,
        "word_embed_proj_dim": 64,
        "ffn_dim": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    },
    "mamba": {"hidden_size": 64, "num_hidden_layers": 2, "state_size": 8},
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4},
    "mixtral": {
        "hidden_size": 64,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_local_experts": 4,
    },
}


def words(folder: Path, tokenizer: Path, *settings: str) -> list[str]:
    return [
        "--config-name=finetune",
        f"model.name_or_path={folder}",
        f"data.tokenizer={tokenizer}",
        f"data.path={CHATS}",
        f"data.cache={folder / 'cache'}",
        "train.sequence_tokens=64",
        "train.epochs=1",
        "export.at_end=false",
        "monitor.tensorboard=false",
        *settings,
    ]


def begun(rank: int, ranks: int, settings: list[str], folder: Path) -> tuple[str, int]:
    """What refuses the run, or nothing, and the number of calls that the ledger still counts."""
    try:
        trainer = Trainer(composed(settings, CONF), folder, torch.device("cpu"))
    except ValueError as error:
        return str(error), 0
    return "", len(trainer.sharded.ledger.take())


def held_out(rank: int, ranks: int, settings: list[str], folder: Path) -> float | None:
    """Loss of the held-out conversations before the first step."""
    found = Trainer(composed(settings, CONF), folder, torch.device("cpu"))._evaluate(1, Silent())
    return None if found is None else found.loss


def written(kind: str, folder: Path) -> Path:
    """Configuration and random weights of a small model."""
    config = transformers.AutoConfig.for_model(kind, vocab_size=512, **SIZES[kind])
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", ["bloom", "opt", "mamba"])
def test_a_model_that_mixes_packed_conversations_is_refused(
    pool: Pool,
    published: Path,
    tmp_path: Path,
    kind: str,
) -> None:
    folder = written(kind, tmp_path / kind)
    for message, _ in pool.run(begun, 2, words(folder, published, "zero.stage=3"), tmp_path):
        assert message.startswith("data.pack=true: ")
        assert message.endswith("; set data.pack=false")
        assert "\n" not in message
    for message, _ in pool.run(begun, 2, words(folder, published, "zero.stage=3", "data.pack=false"), tmp_path):
        assert message == ""


@pytest.mark.parametrize("settings", ["zero.stage=0", "zero.stage=3 offload=host block.loss_tiles=3", "mesh.cp=2"])
@pytest.mark.parametrize("kind", ["gpt2", "mixtral"])
def test_a_model_that_keeps_them_apart_is_taken_and_nothing_is_left_of_the_check(
    pool: Pool,
    published: Path,
    tmp_path: Path,
    kind: str,
    settings: str,
) -> None:
    folder = written(kind, tmp_path / kind)
    found = pool.run(begun, 2, words(folder, published, *settings.split()), tmp_path)
    assert found == [("", 0)] * 2


def test_a_pipeline_evaluates_packed_conversations_apart(pool: Pool, published: Path, tmp_path: Path) -> None:
    settings = [
        *(word for word in words(tmp_path, published) if not word.startswith("model.")),
        "model=tiny",
        "model.weights=false",
        "model.tied=false",
        "precision=fp32",
        "data.held_out=0.5",
    ]
    (whole,) = pool.run(held_out, 1, settings, tmp_path)
    for found in pool.run(held_out, 2, [*settings, "mesh.pp=2", "train.accumulate=2"], tmp_path):
        assert found == pytest.approx(whole, rel=1e-6)
