"""The decoders of dzero: a llama against a reference written from the formulas, in fp64, head by head, and a mixture
against one written token by token; their sizes, and what the mixture counts."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import decoders
import pytest
import torch
import torch.distributed as dist
import yaml
from moe_reference import TokenByToken
from torch import Tensor, nn

from dzero import describe, save_pretrained, shard

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
        ({**TINY, "hidden_size": 25, "heads": 5}, r"model.hidden_size=25: must be even"),
        ({**TINY, "kv_heads": 4}, r"model.kv_heads=4 does not divide model.heads=6; allowed: \[1, 2, 3, 6\]"),
        ({"layers": 0}, r"model.layers=0: must be a whole number ≥ 1"),
        ({"norm_eps": 0.0}, r"model.norm_eps=0.0: must be a number in \(0, 1\]"),
        ({"layers": None}, r"model.layers is unset: .*\['hidden_size', 'layers', 'heads', 'ffn_size'\]"),
        ({"vocab_size": 63}, "model.vocab_size=63: the tokenizer or the data has ids"),
        ({**GPT2, "hidden_size": 24}, r"model.hidden_size=24 has no effect with model.kind=hf"),
        ({**GPT2, "tied": False}, r"model.tied=False has no effect"),  # false and zero are settings too
        ({**MOE, "top_k": 5}, "model.top_k=5 of model.experts=4: .* take model.top_k ≤ 4"),
        ({**MOE, "top_k": None}, "model.top_k is unset"),
        ({**MOE, "scores": "relu"}, "model.scores='relu': choose one of"),
        ({**MOE, "balance": "none", "balance_rate": 0.1}, "balance_rate=0.1 has no effect"),
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


# The mixture


def model_of(**settings: Any) -> Any:
    return decoders.with_values(64, **{**decoders.EXPERTS, "balance_rate": 0.01, **settings})


def mixture_of(**settings: Any) -> Any:
    """The mixture of the first layer, and its sizes; scores and experts differ."""
    model = model_of(**settings)
    mixture = model.layers[0].ffn
    torch.manual_seed(1)
    with torch.no_grad():
        for param in mixture.parameters():
            param.normal_(std=0.4)
    return mixture, model.shape


@pytest.mark.parametrize(
    ("scores", "experts", "top_k", "shared"),
    [("sigmoid", 4, 2, 1), ("softmax", 6, 3, 0), ("sigmoid", 5, 1, 2), ("softmax", 5, 1, 0), ("softmax", 3, 3, 0)],
)
def test_a_token_gets_the_weighted_sum_of_its_experts(scores: str, experts: int, top_k: int, shared: int) -> None:
    """Also where an expert is chosen by none: its gradient is zero, and not missing."""
    sizes = {"experts": experts, "top_k": top_k, "shared_experts": shared, "scores": scores, "balance": "loss"}
    mixture, shape = mixture_of(**sizes)
    given = torch.randn(2, 2, 32)
    found, wanted = [], []
    for module, kept in ((mixture, found), (TokenByToken(mixture, shape), wanted)):
        x = given.clone().requires_grad_()
        mixture.zero_grad()
        out = module(x)
        assert module.loss is not None
        (out.square().sum() + 10 * module.loss).backward()
        assert x.grad is not None
        kept += [out.detach(), module.loss.detach().float(), x.grad]
        kept += [param.grad.clone() for param in mixture.parameters() if param.grad is not None]
    assert len(found) == len(wanted) == 3 + len([*mixture.parameters()])
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-5 * float(theirs.abs().max()))


@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
def test_loads_and_the_balance_loss_count_each_microbatch_once_and_no_evaluation(recompute: str) -> None:
    """The loss is that of the last forward."""
    model: Any = decoders.in_blocks(model_of(balance="loss", balance_rate=0.5), activation_checkpoint=recompute)
    by_bias: Any = decoders.in_blocks(model_of(), activation_checkpoint=recompute)
    tokens = torch.randint(64, (2, 9))
    for _ in range(3):
        logits = model(tokens)
        losses, loss = [layer.ffn.loss for layer in model.layers], model.balance_loss()
        assert loss is not None
        (logits.sum() + by_bias(tokens).sum() + loss).backward()
        assert all(layer.ffn.loss is each for layer, each in zip(model.layers, losses, strict=True))
        assert float(loss.detach()) == pytest.approx(0.5 * len(losses), rel=0.05)  # nearly alike, afresh
    with torch.no_grad():
        model(tokens)
        by_bias(tokens)
    assert model.balance_loss() is None
    for layer in by_bias.layers:
        assert layer.ffn.router.load.sum() == 3 * 18 * 2  # 2 experts of each token
    assert model_of(balance="none", balance_rate=None).balance_loss() is None


def test_a_mixture_is_not_published_as_a_llama(tmp_path: Path) -> None:
    model = model_of()
    assert describe(model) is None
    with pytest.raises(ValueError, match="only models of transformers, and llamas and Mixtrals"):
        save_pretrained(shard(model, stage=0), tmp_path / "out")
    dist.destroy_process_group()  # that of one rank, which shard makes
