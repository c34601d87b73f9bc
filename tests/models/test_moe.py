"""The mixture against one written token by token, its balance, its counts, and what its settings refuse."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import yaml
from moe_reference import SHAPE, TokenByToken

from dzero import describe
from dzero.models.build import build, count, flops_per_token, materialiser
from dzero.models.config import ModelConfig, MoEShape
from dzero.models.moe import Mixture, MoE, Router, grouped_linear
from dzero.models.weights import local_weights
from dzero.parallel.blocks import apply_blocks
from dzero.parallel.config import BlockConfig

CONF = Path(__file__).parents[2] / "conf" / "model"
SMALL: dict[str, Any] = {"kind": "moe", "hidden_size": 16, "layers": 2, "heads": 2, "ffn_size": 8, "vocab_size": 32}


def mixture_of(shape: MoEShape) -> Mixture:
    torch.manual_seed(1)
    mixture = Mixture(shape)
    with torch.no_grad():
        for param in mixture.parameters():
            param.mul_(20.0)  # so that scores and experts differ
    return mixture


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
@pytest.mark.parametrize(("experts", "top_k", "shared"), [(4, 2, 1), (6, 3, 0), (5, 1, 2), (3, 3, 0)])
def test_a_token_gets_the_weighted_sum_of_its_experts(scores: str, experts: int, top_k: int, shared: int) -> None:
    shape = replace(SHAPE, experts=experts, top_k=top_k, shared_experts=shared, scores=scores, balance="loss")
    mixture = mixture_of(shape)
    given = torch.randn(2, 5, 32)
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


def test_a_bias_changes_who_is_chosen_and_nothing_else() -> None:
    router = mixture_of(SHAPE).router
    assert router.bias is not None
    tokens = torch.randn(50, 32)
    scores, _, chosen = router(tokens)
    router.bias[2] = 10.0
    again, weights, others = router(tokens)
    assert torch.equal(scores, again)
    assert (others == 2).any(1).all()
    assert not (chosen == 2).any(1).all()
    picked = scores.gather(1, others)
    torch.testing.assert_close(weights, picked / picked.sum(1, keepdim=True))


def test_the_bias_moves_by_the_sign_of_what_is_missing() -> None:
    router = Router(replace(SHAPE, balance_rate=0.5))
    assert router.bias is not None
    assert router.load is not None
    router.load += 7
    router.rebalance(torch.tensor([5, 1, 3, 3]))
    assert router.bias.tolist() == [-0.5, 0.5, 0.0, 0.0]
    router.rebalance(torch.tensor([1, 1, 1, 2]))
    assert router.bias.tolist() == [0.0, 1.0, 0.5, -0.5]
    assert router.load.tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
def test_loads_count_each_microbatch_once_and_no_evaluation(recompute: str) -> None:
    torch.manual_seed(0)
    model = MoE(SHAPE)
    apply_blocks(model, BlockConfig(activation_checkpoint=recompute), "cpu")
    tokens = torch.randint(64, (2, 9))
    for _ in range(3):
        model(tokens).square().sum().backward()
    with torch.no_grad():
        model(tokens)
    for layer in model.layers:
        assert layer.ffn.router.load.sum() == 3 * 18 * SHAPE.top_k  # type: ignore[union-attr, operator]


@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
def test_the_balance_loss_is_that_of_the_last_forward(recompute: str) -> None:
    torch.manual_seed(0)
    model = MoE(replace(SHAPE, balance="loss", balance_rate=0.5))
    apply_blocks(model, BlockConfig(activation_checkpoint=recompute), "cpu")
    for _ in range(2):
        model.zero_grad()
        logits = model(torch.randint(64, (2, 9)))
        losses, loss = [layer.ffn.loss for layer in model.layers], model.balance_loss()  # type: ignore[union-attr]
        assert loss is not None
        (logits.sum() + loss).backward()
        assert all(layer.ffn.loss is each for layer, each in zip(model.layers, losses, strict=True))  # type: ignore[union-attr]
        assert float(loss.detach()) == pytest.approx(0.5 * SHAPE.layers, rel=0.05)  # nearly alike, afresh
    with torch.no_grad():
        model(torch.randint(64, (2, 9)))
    assert model.balance_loss() is None
    plain = MoE(replace(SHAPE, balance="none", balance_rate=None))
    assert plain.balance_loss() is None


def test_experts_without_rows_have_gradients_of_zeros() -> None:
    stacked, counts = torch.randn(4 * 3, 5, requires_grad=True), torch.tensor([2, 0, 3, 0])
    rows = torch.randn(5, 5, requires_grad=True)
    out = grouped_linear(rows, stacked, counts)
    torch.testing.assert_close(out[:2], rows[:2] @ stacked[:3].T)
    torch.testing.assert_close(out[2:], rows[2:] @ stacked[6:9].T)
    out.sum().backward()
    assert stacked.grad is not None
    assert not stacked.grad[3:6].any()
    assert not stacked.grad[9:].any()
    assert stacked.grad[:3].any()
    empty = grouped_linear(rows[:0], stacked, torch.zeros(4, dtype=torch.int64))
    assert empty.shape == (0, 3)
    assert empty.requires_grad


def test_every_rank_draws_the_same_experts() -> None:
    config = ModelConfig(**SMALL, experts=4, top_k=2)
    whole, apart = build(config), build(config)
    materialiser(config, whole, seed=5, device="cpu")(whole)
    fill = materialiser(config, apart, seed=5, device="cpu")
    for module in reversed([*apart.modules()]):
        fill(module)
    for (name, a), b in zip(whole.state_dict().items(), apart.state_dict().values(), strict=True):
        assert torch.equal(a, b), name


def test_flops_count_the_experts_that_a_token_uses() -> None:
    config = ModelConfig(**SMALL, experts=8, top_k=2, shared_experts=1)
    attention, expert, router = 4 * 16 * 16, 3 * 16 * 8, 8 * 16
    used = 2 * (attention + 3 * expert + router) + 32 * 16  # two chosen, one shared; the head
    assert flops_per_token(build(config), 10) == 6 * used + 12 * 2 * 16 * 10


@pytest.mark.parametrize(
    ("name", "params", "active"),
    [
        ("tiny_moe", 3_768_000, 1_556_160),
        ("bench_moe", 31_095_168, 16_054_656),
        ("mixtral_8x7b", 46_702_792_704, 12_879_925_248),
    ],
)
def test_the_sizes_are_those_that_are_written(name: str, params: int, active: int) -> None:
    text = (CONF / f"{name}.yaml").read_text()
    config = ModelConfig(**yaml.safe_load(text))
    model = build(config, 256)
    assert count(model) == params
    assert f"{params:,}" in text
    experts = sum(param.numel() for key, param in model.named_parameters() if ".experts." in key)
    assert config.experts is not None
    assert config.top_k is not None
    assert count(model) - experts + experts * config.top_k // config.experts == active


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"experts": 4, "top_k": 5}, "model.top_k=5 of model.experts=4: .* take model.top_k ≤ 4"),
        ({"experts": 4}, "model.top_k is unset"),
        ({"experts": 0, "top_k": 1}, "model.experts=0: must be a whole number ≥ 1"),
        ({"experts": 4, "top_k": 2, "scores": "relu"}, "model.scores='relu': choose one of"),
        ({"experts": 4, "top_k": 2, "balance": "none", "balance_rate": 0.1}, "balance_rate=0.1 has no effect"),
        (
            {"experts": 4, "top_k": 2, "balance_rate": -1.0},
            "model.balance_rate=-1.0: must be a number in ",
        ),
        ({"experts": 4, "top_k": 2, "weights": True}, "model.weights=true: model.kind=moe has no folder of its own"),
        ({"kind": "llama", "experts": 4}, "model.experts=4 has no effect with model.kind=llama"),
    ],
)
def test_sizes_that_make_no_sense_are_refused(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        ModelConfig(**{**SMALL, **settings})


def test_a_mixture_is_not_published_as_a_llama(tmp_path: Path) -> None:
    shape = replace(SHAPE, scores="sigmoid", top_k=1, shared_experts=2)
    assert describe(MoE(shape)) is None
    change = "model.scores=softmax model.top_k=2 model.shared_experts=0 model.balance=loss"
    with pytest.raises(ValueError, match=f"only Mixtral is read, .* set {change}"):
        local_weights(str(tmp_path), MoE(shape))


def test_a_mixture_learns_which_expert_a_token_needs() -> None:
    """Two kinds of tokens with opposite targets: a loss that one expert alone cannot reach."""
    torch.manual_seed(0)
    shape = replace(SHAPE, hidden_size=8, heads=2, kv_heads=2, ffn_size=4, experts=2, top_k=1, shared_experts=0)
    mixture = mixture_of(shape)
    x = torch.randn(1, 256, 8)
    target = torch.where(x[..., :1] > 0, x.flip(-1), -x)
    optim = torch.optim.Adam(mixture.parameters(), lr=0.02)
    first = float(F.mse_loss(mixture(x), target).detach())
    for _ in range(150):
        optim.zero_grad()
        loss = F.mse_loss(mixture(x), target)
        loss.backward()
        optim.step()
    assert float(loss.detach()) < 0.5 * first
