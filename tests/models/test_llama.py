"""The decoders of dzero: a llama against a reference written from the formulas, in fp64, head by head; their sizes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import decoders
import pytest
import torch
import yaml
from torch import Tensor, nn

CONF = Path(__file__).parents[2] / "conf" / "model"
TINY: dict[str, Any] = {"hidden_size": 24, "layers": 2, "heads": 6, "kv_heads": 2, "ffn_size": 40}


def make(**changes: int | float | bool) -> Any:
    model = decoders.with_values(31, **{**TINY, **changes})
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(4.0).add_(0.1 * torch.randn(param.shape, generator=torch.Generator().manual_seed(param.numel())))
    return model


def reference(model: Any, tokens: Tensor) -> Tensor:
    """tokens [time] -> logits fp64 [time, vocab]: dims i and i + half of a head are one complex number."""
    shape, weight = model.shape, {name: p.detach().double() for name, p in model.state_dict().items()}
    half = shape.head_dim // 2

    def norm(x: Tensor, name: str) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + shape.norm_eps).sqrt() * weight[name]

    def turned(x: Tensor) -> Tensor:
        rows = []
        for position, row in enumerate(x):
            pairs = torch.complex(row[:half], row[half:])
            angles = [position * shape.rope_theta ** (-2 * i / shape.head_dim) for i in range(half)]
            pairs = pairs * torch.tensor([complex(math.cos(a), math.sin(a)) for a in angles], dtype=torch.complex128)
            rows.append(torch.cat([pairs.real, pairs.imag]))
        return torch.stack(rows)

    def attention(x: Tensor, name: str) -> Tensor:
        query, key, value = (x @ weight[f"{name}.{part}.weight"].T for part in ("query", "key", "value"))
        heads = []
        for head in range(shape.heads):
            shared = head // (shape.heads // shape.kv_heads)
            q = turned(query[:, head * shape.head_dim : (head + 1) * shape.head_dim])
            k = turned(key[:, shared * shape.head_dim : (shared + 1) * shape.head_dim])
            v = value[:, shared * shape.head_dim : (shared + 1) * shape.head_dim]
            rows = []
            for t in range(len(x)):
                scores = (k[: t + 1] @ q[t]) / math.sqrt(shape.head_dim)
                rows.append(scores.softmax(0) @ v[: t + 1])
            heads.append(torch.stack(rows))
        return torch.cat(heads, dim=1) @ weight[f"{name}.out.weight"].T

    def ffn(x: Tensor, name: str) -> Tensor:
        gate, up = x @ weight[f"{name}.gate.weight"].T, x @ weight[f"{name}.up.weight"].T
        return (gate / (1 + torch.exp(-gate)) * up) @ weight[f"{name}.down.weight"].T

    x = weight["embedding.weight"][tokens]
    for i in range(shape.layers):
        x = x + attention(norm(x, f"layers.{i}.attention_norm.weight"), f"layers.{i}.attention")
        x = x + ffn(norm(x, f"layers.{i}.ffn_norm.weight"), f"layers.{i}.ffn")
    return norm(x, "norm.weight") @ weight["head.weight"].T


@pytest.mark.parametrize(("kv_heads", "tied"), [(1, False), (2, True), (6, False)])
def test_logits_equal_the_formulas(kv_heads: int, tied: bool) -> None:
    """Later tokens are not seen: the reference has none of them."""
    model = make(kv_heads=kv_heads, tied=tied, rope_theta=100.0)
    tokens = torch.randint(31, (2, 13), generator=torch.Generator().manual_seed(1))
    expected = torch.stack([reference(model, row) for row in tokens])
    torch.testing.assert_close(model.double()(tokens).detach(), expected, rtol=1e-5, atol=1e-6)  # angles are fp32


def test_logits_come_in_the_parameters_dtype_and_a_sequence_over_the_limit_is_refused() -> None:
    model = make(max_tokens=8).bfloat16()
    logits = model(torch.zeros(2, 8, dtype=torch.long))
    assert logits.dtype == torch.bfloat16
    assert logits.shape == (2, 8, 31)
    with pytest.raises(ValueError, match=r"9 tokens: model.max_tokens=8"):
        model(torch.zeros(1, 9, dtype=torch.long))


def load(name: str) -> dict[str, Any]:
    settings: dict[str, Any] = yaml.safe_load((CONF / f"{name}.yaml").read_text())
    return settings


def test_the_first_loss_is_that_of_guessing() -> None:
    model = decoders.with_values(256, **load("tiny"))
    tokens = torch.randint(256, (2, 65), generator=torch.Generator().manual_seed(1))
    loss = nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    assert loss.item() == pytest.approx(math.log(256), abs=0.1)


def llama_elems(vocab: int, hidden: int, layers: int, kv_width: int, ffn: int, heads: int = 2) -> int:
    block = 2 * hidden * hidden + 2 * hidden * kv_width + 3 * hidden * ffn + 2 * hidden
    return heads * vocab * hidden + layers * block + hidden


DENSE = {
    "tiny": llama_elems(256, 192, 4, 64, 512, heads=1),
    "bench_21m": llama_elems(8192, 384, 8, 384, 1088),
    "bench_118m": llama_elems(21504, 768, 12, 768, 2048),
    "gpt2_124m": llama_elems(50257, 768, 12, 768, 2048, heads=1),
    "llama_1b": 1_235_814_400,
    "llama_8b": 8_030_261_248,
    "llama_70b": 70_553_706_496,
    "llama_1t": 1_007_583_257_600,
}
MIXED = {
    "tiny_moe": (3_768_000, 1_556_160),
    "bench_moe": (31_095_168, 16_054_656),
    "mixtral_8x7b": (46_702_792_704, 12_879_925_248),
}
"""All parameters, and those that a token uses."""


def elems(model: nn.Module, part: str = "") -> int:
    return sum(param.numel() for name, param in model.named_parameters() if part in name)


@pytest.mark.parametrize("name", [*DENSE, *MIXED])
def test_each_size_has_the_parameters_its_file_says(name: str) -> None:
    settings = load(name)
    model = decoders.on_meta(256, **settings)
    assert all(param.is_meta for param in model.parameters())
    total, active = MIXED.get(name, (DENSE.get(name), None))
    assert elems(model) == total
    assert f"{total:,}" in (CONF / f"{name}.yaml").read_text()
    if active is not None:
        experts = elems(model, ".experts.")
        assert elems(model) - experts + experts * settings["top_k"] // settings["experts"] == active


def test_every_size_is_counted() -> None:
    assert {file.stem for file in CONF.glob("*.yaml")} == {*DENSE, *MIXED, "hf"}
    with pytest.raises(ValueError, match=r"model.name_or_path is unset"):
        decoders.on_meta(**load("hf"))


MOE: dict[str, Any] = {"kind": "moe", "experts": 4, "top_k": 2}
GPT2: dict[str, Any] = {"kind": "hf", "name_or_path": "gpt2"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({**TINY, "kind": "gpt"}, r"model.kind='gpt': choose one of \['llama', 'moe', 'hf'\]"),
        ({**TINY, "heads": 7}, r"model.heads=7 with model.hidden_size=24: .* allowed heads: \[1, 2, 3, 4, 6, 12\]"),
        ({**TINY, "heads": 8}, r"model.heads=8 with model.hidden_size=24"),
        ({**TINY, "hidden_size": 25, "heads": 5}, r"model.hidden_size=25: must be even"),
        ({**TINY, "kv_heads": 4}, r"model.kv_heads=4 does not divide model.heads=6; allowed: \[1, 2, 3, 6\]"),
        ({"layers": 0}, r"model.layers=0: must be a whole number ≥ 1"),
        ({"norm_eps": 0.0}, r"model.norm_eps=0.0: must be a number in \(0, 1\]"),
        ({"layers": None}, r"model.layers is unset: .*\['hidden_size', 'layers', 'heads', 'ffn_size'\]"),
        ({"name_or_path": "gpt2"}, r"model.name_or_path=gpt2 has no effect with model.kind=llama"),
        ({"weights": True}, r"model.weights=true: model.kind=llama has no folder of its own; name one"),
        ({"vocab_size": 63}, "model.vocab_size=63: the tokenizer or the data has ids"),
        ({**GPT2, "hidden_size": 24}, r"model.hidden_size=24 has no effect with model.kind=hf"),
        ({**GPT2, "tied": False}, r"model.tied=False has no effect"),  # false and zero are settings too
        ({**GPT2, "layers": 0}, r"model.layers=0 has no effect"),
        ({**MOE, "top_k": 5}, "model.top_k=5 of model.experts=4: .* take model.top_k ≤ 4"),
        ({**MOE, "top_k": None}, "model.top_k is unset"),
        ({**MOE, "experts": 0}, "model.experts=0: must be a whole number ≥ 1"),
        ({**MOE, "scores": "relu"}, "model.scores='relu': choose one of"),
        ({**MOE, "balance": "none", "balance_rate": 0.1}, "balance_rate=0.1 has no effect"),
        ({**MOE, "balance_rate": -1.0}, "model.balance_rate=-1.0: must be a number in "),
        ({**MOE, "weights": True}, "model.weights=true: model.kind=moe has no folder of its own"),
        ({"experts": 4}, "model.experts=4 has no effect with model.kind=llama"),
    ],
)
def test_config_errors_name_key_value_and_repair(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        decoders.on_meta(64, **settings)


def test_the_vocabulary_is_that_of_the_data_or_a_larger_one() -> None:
    with pytest.raises(ValueError, match=r"set model\.vocab_size"):
        decoders.on_meta(None)
    assert decoders.on_meta(64).get_parameter("head.weight").shape[0] == 64
    assert decoders.on_meta(64, vocab_size=300).get_parameter("head.weight").shape[0] == 300
