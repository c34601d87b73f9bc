"""A tiny published model with a tokenizer, some conversations, and the words that fine-tune it."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import torch
import transformers

EXAMPLE = Path(__file__).parents[2] / "examples" / "finetune"
CHATS = EXAMPLE / "chats.jsonl"
TOKENS = 64
WIDTH, FFN, HEADS, KV_HEADS, LAYERS = 64, 128, 4, 2, 4
OF_LLAMA = {
    "hidden_size": WIDTH,
    "ffn_size": FFN,
    "layers": LAYERS,
    "heads": HEADS,
    "kv_heads": KV_HEADS,
    "norm_eps": 1e-6,
    "vocab_size": 512,
    "max_tokens": 2048,
}
"""The same sizes as settings of dzero's own llama."""
FIXED = [
    *("precision=fp32", "optim.max_norm=null", "schedule.kind=constant", "schedule.warmup_fraction=0"),
    *("data.held_out=0", "data.shuffle=false", "train.epochs=null"),
]
"""Settings of runs whose numbers an oracle has: 16 sequences are all conversations once, or twice if packed."""


def make(folder: Path) -> Path:
    """Write a small llama beside `chats.jsonl`, the first 16 conversations of the example."""
    spec = importlib.util.spec_from_file_location("make_model", EXAMPLE / "make_model.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.make(folder / "model")
    config = transformers.LlamaConfig.from_pretrained(folder / "model")
    sizes = {"hidden_size": WIDTH, "intermediate_size": FFN, "num_hidden_layers": LAYERS, "head_dim": WIDTH // HEADS}
    config.update(sizes)
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(folder / "model")
    (folder / "chats.jsonl").write_text("".join(CHATS.read_text().splitlines(keepends=True)[:16]))
    return folder / "model"


def chats_of(model: Path) -> Path:
    return model.parent / "chats.jsonl"


def words(model: Path, folder: Path, *settings: str) -> list[str]:
    """Fine-tune a published model on the conversations beside it."""
    return [
        "--config-name=finetune",
        f"model.name_or_path={model}",
        f"data.path={chats_of(model)}",
        f"data.cache={folder / 'cache'}",
        f"train.sequence_tokens={TOKENS}",
        "monitor.tensorboard=false",
        *settings,
    ]


def words_of_llama(model: Path, folder: Path, *settings: str) -> list[str]:
    """The same with dzero's own llama, which begins with the published weights."""
    own = ["model=tiny", "model.tied=false", f"model.weights={model}", f"data.tokenizer={model}"]
    own += [f"model.{key}={value}" for key, value in OF_LLAMA.items()]
    return [word for word in words(model, folder, *own, *settings) if not word.startswith("model.name_or_path")]


def encoded(model: Path) -> list[dict[str, Any]]:
    """Every conversation as transformers encodes it, with its labels."""
    tokenizer, found = transformers.AutoTokenizer.from_pretrained(model), []
    for line in chats_of(model).read_text().splitlines():
        given = tokenizer.apply_chat_template(
            json.loads(line)["messages"], tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        ids, counts = torch.tensor(given["input_ids"]), torch.tensor(given["assistant_masks"]).bool()
        found.append({"input_ids": ids, "labels": torch.where(counts, ids, -100)})
    return found


def padded(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """A batch of conversations, padded to the longest."""
    columns = {key: [row[key] for row in rows] for key in ("input_ids", "labels")}
    columns["attention_mask"] = [torch.ones_like(each) for each in columns["input_ids"]]
    return {
        key: torch.nn.utils.rnn.pad_sequence(each, batch_first=True, padding_value=-100 if key == "labels" else 0)
        for key, each in columns.items()
    }
