"""The mixture of dzero against one written token by token, its balance and its counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import decoders
import pytest
import torch
import torch.distributed as dist
from moe_reference import TokenByToken

from dzero import describe, save_pretrained, shard


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
def test_loads_count_each_microbatch_once_and_no_evaluation(recompute: str) -> None:
    model: Any = decoders.in_blocks(model_of(), activation_checkpoint=recompute)
    tokens = torch.randint(64, (2, 9))
    for _ in range(3):
        model(tokens).square().sum().backward()
    with torch.no_grad():
        model(tokens)
    for layer in model.layers:
        assert layer.ffn.router.load.sum() == 3 * 18 * 2  # 2 experts of each token


@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
def test_the_balance_loss_is_that_of_the_last_forward(recompute: str) -> None:
    model: Any = decoders.in_blocks(model_of(balance="loss", balance_rate=0.5), activation_checkpoint=recompute)
    for _ in range(2):
        model.zero_grad()
        logits = model(torch.randint(64, (2, 9)))
        losses, loss = [layer.ffn.loss for layer in model.layers], model.balance_loss()
        assert loss is not None
        (logits.sum() + loss).backward()
        assert all(layer.ffn.loss is each for layer, each in zip(model.layers, losses, strict=True))
        assert float(loss.detach()) == pytest.approx(0.5 * len(losses), rel=0.05)  # nearly alike, afresh
    with torch.no_grad():
        model(torch.randint(64, (2, 9)))
    assert model.balance_loss() is None
    assert model_of(balance="none", balance_rate=None).balance_loss() is None


def test_a_mixture_is_not_published_as_a_llama(tmp_path: Path) -> None:
    model = model_of()
    assert describe(model) is None
    with pytest.raises(ValueError, match="only models of transformers, and llamas and Mixtrals"):
        save_pretrained(shard(model, stage=0), tmp_path / "out")
    dist.destroy_process_group()  # that of one rank, which shard makes
