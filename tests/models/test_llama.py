"""The llama decoder against a reference written from the formulas, in fp64, head by head."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from dzero.models.build import build, count, flops_per_token, materialiser
from dzero.models.config import LlamaShape, ModelConfig
from dzero.models.llama import Llama

CONF = Path(__file__).parents[2] / "conf" / "model"
TINY: dict[str, Any] = {"hidden_size": 24, "layers": 2, "heads": 6, "kv_heads": 2, "ffn_size": 40}


def make(seed: int = 0, **changes: int | float | bool) -> Llama:
    config = ModelConfig(**{**TINY, **changes})
    model = build(config, vocab_size=31)
    assert isinstance(model, Llama)
    materialiser(config, model, seed=seed, device="cpu")(model)
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(4.0).add_(0.1 * torch.randn(param.shape, generator=torch.Generator().manual_seed(param.numel())))
    return model


def reference(model: Llama, tokens: Tensor) -> Tensor:
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


@pytest.mark.parametrize("kv_heads", [1, 2, 6])
@pytest.mark.parametrize("tied", [False, True])
def test_logits_equal_the_formulas(kv_heads: int, tied: bool) -> None:
    model = make(kv_heads=kv_heads, tied=tied, rope_theta=100.0)
    tokens = torch.randint(31, (2, 13), generator=torch.Generator().manual_seed(1))
    expected = torch.stack([reference(model, row) for row in tokens])
    torch.testing.assert_close(model.double()(tokens).detach(), expected, rtol=1e-5, atol=1e-6)  # angles are fp32


def test_logits_do_not_see_later_tokens() -> None:
    model = make()
    tokens = torch.randint(31, (1, 12), generator=torch.Generator().manual_seed(1))
    later = tokens.clone()
    later[:, 7:] = (later[:, 7:] + 1) % 31
    before, after = model(tokens), model(later)
    assert torch.allclose(before[:, :7], after[:, :7], atol=1e-6)
    assert not torch.allclose(before[:, 7:], after[:, 7:], atol=1e-3)


def test_logits_come_in_the_parameters_dtype() -> None:
    logits = make().bfloat16()(torch.zeros(2, 3, dtype=torch.long))
    assert logits.dtype == torch.bfloat16
    assert logits.shape == (2, 3, 31)


def test_a_sequence_over_the_limit_is_refused() -> None:
    model = make(max_tokens=8)
    model(torch.zeros(1, 8, dtype=torch.long))
    with pytest.raises(ValueError, match=r"9 tokens: model.max_tokens=8"):
        model(torch.zeros(1, 9, dtype=torch.long))


def test_the_first_loss_is_that_of_guessing() -> None:
    config = ModelConfig(**load("tiny"))
    model = build(config, vocab_size=256)
    materialiser(config, model, seed=0, device="cpu")(model)
    tokens = torch.randint(256, (2, 65), generator=torch.Generator().manual_seed(1))
    loss = torch.nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    assert loss.item() == pytest.approx(math.log(256), abs=0.1)


def load(name: str) -> dict[str, Any]:
    settings: dict[str, Any] = yaml.safe_load((CONF / f"{name}.yaml").read_text())
    return settings


def llama_elems(vocab: int, hidden: int, layers: int, kv_width: int, ffn: int, heads: int = 2) -> int:
    block = 2 * hidden * hidden + 2 * hidden * kv_width + 3 * hidden * ffn + 2 * hidden
    return heads * vocab * hidden + layers * block + hidden


@pytest.mark.parametrize(
    ("name", "elems"),
    [
        ("tiny", llama_elems(256, 192, 4, 64, 512, heads=1)),
        ("bench_21m", llama_elems(8192, 384, 8, 384, 1088)),
        ("bench_118m", llama_elems(21504, 768, 12, 768, 2048)),
        ("gpt2_124m", llama_elems(50257, 768, 12, 768, 2048, heads=1)),
        ("llama_1b", 1_235_814_400),
        ("llama_8b", 8_030_261_248),
        ("llama_70b", 70_553_706_496),
        ("llama_1t", 1_007_583_257_600),
    ],
)
def test_each_size_has_the_parameters_its_file_says(name: str, elems: int) -> None:
    model = build(ModelConfig(**load(name)), vocab_size=256)
    assert all(param.is_meta for param in model.parameters())
    assert count(model) == elems
    assert f"{elems:,} parameters" in (CONF / f"{name}.yaml").read_text()


def test_every_size_is_counted() -> None:
    files = {file.stem for file in CONF.glob("*.yaml")}
    llamas = {"tiny", "bench_21m", "bench_118m", "gpt2_124m", "llama_1b", "llama_8b", "llama_70b", "llama_1t"}
    assert files == {*llamas, "tiny_moe", "bench_moe", "mixtral_8x7b", "hf"}
    with pytest.raises(ValueError, match=r"model.name_or_path is unset"):
        ModelConfig(**load("hf"))


@pytest.mark.parametrize("tied", [False, True])
def test_flops_count_matmuls_and_attention(tied: bool) -> None:
    matmul = 2 * (24 * 24 * 2 + 2 * 24 * 8 + 3 * 24 * 40) + 31 * 24
    assert flops_per_token(make(tied=tied), 10) == 6 * matmul + 12 * 2 * 24 * 10
    assert flops_per_token(torch.nn.Linear(2, 2), 10) is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "gpt"}, r"model.kind='gpt': choose one of \['llama', 'moe', 'hf'\]"),
        ({"heads": 7}, r"model.heads=7 with model.hidden_size=24: .* allowed heads: \[1, 2, 3, 4, 6, 12\]"),
        ({"heads": 8}, r"model.heads=8 with model.hidden_size=24"),
        ({"hidden_size": 25, "heads": 5}, r"model.hidden_size=25: must be even"),
        ({"kv_heads": 4}, r"model.kv_heads=4 does not divide model.heads=6; allowed: \[1, 2, 3, 6\]"),
        ({"layers": 0}, r"model.layers=0: must be a whole number ≥ 1"),
        ({"norm_eps": 0.0}, r"model.norm_eps=0.0: must be a number in \(0, 1\]"),
        ({"layers": None}, r"model.layers is unset: .*\['hidden_size', 'layers', 'heads', 'ffn_size'\]"),
        ({"name_or_path": "gpt2"}, r"model.name_or_path=gpt2 has no effect with model.kind=llama"),
        ({"weights": True}, r"model.weights=true: model.kind=llama has no folder of its own; name one"),
        ({"kind": "hf"}, r"model.hidden_size=24 has no effect with model.kind=hf"),
    ],
)
def test_config_errors_name_key_value_and_repair(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelConfig(**{**TINY, **changes})


def test_false_and_zero_of_the_other_kind_are_settings_too() -> None:
    with pytest.raises(ValueError, match=r"model.tied=False has no effect"):
        ModelConfig(kind="hf", name_or_path="gpt2", tied=False)
    with pytest.raises(ValueError, match=r"model.layers=0 has no effect"):
        ModelConfig(kind="hf", name_or_path="gpt2", layers=0)


@pytest.mark.parametrize(
    ("make_shape", "message"),
    [
        (
            lambda: ModelConfig(**TINY, vocab_size=100).shape(256),
            "model.vocab_size=100: the tokenizer or the data has ids",
        ),
        (lambda: ModelConfig(**TINY).shape(None), "set model.vocab_size"),
    ],
)
def test_a_vocabulary_that_does_not_fit_is_refused(make_shape: Callable[[], LlamaShape], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_shape()
    assert ModelConfig(**TINY, vocab_size=300).shape(256).vocab_size == 300
    assert ModelConfig(**TINY).shape(256).vocab_size == 256
