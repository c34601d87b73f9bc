"""The loss in tiles is torch's cross-entropy, and the logits of all tokens and ids never exist."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from allocated_peak import allocated_peak_bytes
from tiled_models import VOCAB, assert_close, batch, grads_of, llama, reference_loss
from torch import Tensor, nn

from dzero import tile_loss
from dzero.models.config import LlamaShape
from dzero.models.llama import Llama
from dzero.parallel.blocks import apply_blocks
from dzero.parallel.config import BlockConfig
from dzero.parallel.tiling import loss as tiling_loss


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("n", [1, 3, 37])
def test_the_loss_and_its_gradients_are_those_of_whole_logits(n: int, tied: bool) -> None:
    """fp32: log-sum-exps of tiles are rounded before they meet, a few times 2^-24."""
    plain, tiled = llama(tied=tied), llama(tied=tied)
    tile_loss(tiled, n)
    tokens, targets = batch()
    torch.testing.assert_close(tiled(tokens), plain(tokens), rtol=1e-6, atol=1e-7)
    losses = [reference_loss(plain, tokens, targets), tiled(tokens, targets)]
    assert losses[1].dtype == torch.float32
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-6, atol=0)
    for loss in losses:
        loss.backward()
    assert_close(grads_of(tiled), grads_of(plain), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("tied", [False, True])
def test_bf16_logits_are_rounded_as_untiled_ones(tied: bool) -> None:
    """The losses differ in fp32 only; gradients of features are added in bf16, tile by tile."""
    plain, tiled = llama(tied=tied).bfloat16(), llama(BlockConfig(loss_tiles=4), tied=tied).bfloat16()
    losses = [reference_loss(plain, *batch()), tiled(*batch())]
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-6, atol=0)
    for loss in losses:
        loss.backward()
    assert_close(grads_of(tiled), grads_of(plain), rtol=3e-2, atol=2e-3)


TILED: dict[str, dict[str, bool]] = {"tokens": {"by_tokens": True}, "vocabulary": {}}


@pytest.mark.parametrize("along", TILED)
@pytest.mark.parametrize("n", [1, 4, 32, 128])
def test_the_error_of_bf16_gradients_does_not_grow_with_the_number_of_tiles(n: int, along: str) -> None:
    """Against fp64. A sum in bf16 would be off by about 2^-9 for each tile, which add like random steps: 1.3e-2 of 128.

    The gradient of the head is as exact as that of whole logits. That of the features is a sum in fp32 of products that
    were rounded, and rounded itself, so that its error is sqrt(2) times as large at most, whatever the number of tiles.
    """
    torch.manual_seed(0)
    exact, whole = HeadAlone().double(), HeadAlone().bfloat16()
    exact.load_state_dict(whole.state_dict())
    tiled = copy.deepcopy(whole)
    tile_loss(tiled, n, **TILED[along])
    features, targets = torch.randn(2048, 32).bfloat16(), torch.randint(256, (2048,))
    errors = []
    of_features, of_head = grads_of_head(exact, features.double(), targets)
    for head in (whole, tiled):
        grads = grads_of_head(head, features, targets)
        errors += [error_of(grads[0], of_features), error_of(grads[1], of_head)]
    assert errors[3] == pytest.approx(errors[1], rel=0.01)
    assert errors[2] < 1.42 * errors[0]


def grads_of_head(model: nn.Module, features: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of the features and of the whole weight, of the sum of the losses."""
    features = features.clone().requires_grad_()
    if hasattr(model.head, "loss_targets"):
        loss = model(features, targets) * len(targets)
    else:
        logits = model(features)
        loss = F.cross_entropy(logits if logits.dtype == torch.float64 else logits.float(), targets, reduction="sum")
    loss.backward()
    assert features.grad is not None
    return features.grad, torch.cat([param.grad for param in model.parameters() if param.grad is not None])


class HeadAlone(nn.Module):
    """A head, of which the inputs are those of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(32, 256, bias=False)

    def forward(self, features: Tensor) -> Tensor:
        if not features.is_floating_point():  # two tokens, by which tile_loss tries what the model returns
            features = features.unsqueeze(-1).expand(*features.shape, 32).to(self.head.weight.dtype)
        out: Tensor = self.head(features)
        return out


def error_of(grad: Tensor, exact: Tensor) -> float:
    return float((grad.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("tied", [False, True])
def test_targets_are_treated_as_torch_treats_them(tied: bool) -> None:
    tiled, plain = llama(BlockConfig(loss_tiles=3), tied=tied), llama(tied=tied)
    tokens, targets = batch()
    ignored = torch.full_like(targets, -100)
    assert tiled(tokens, ignored).isnan()
    assert reference_loss(plain, tokens, ignored).isnan()
    for wrong in (VOCAB, -1):
        with pytest.raises(IndexError):
            tiled(tokens, targets.clone().fill_(wrong))
        with pytest.raises(IndexError):
            reference_loss(plain, tokens, targets.clone().fill_(wrong))


def test_extreme_logits_stay_finite() -> None:
    tiled, plain = llama(BlockConfig(loss_tiles=3)), llama()
    for model in (tiled, plain):
        states = model.state_dict()
        model.load_state_dict({**states, "head.weight": states["head.weight"] * 1e5})
    loss = tiled(*batch())
    torch.testing.assert_close(loss, reference_loss(plain, *batch()))
    loss.backward()
    assert all(param.grad is None or param.grad.isfinite().all() for param in tiled.parameters())


@pytest.mark.parametrize("tied", [False, True])
def test_logits_exist_one_tile_at_a_time(tied: bool) -> None:
    """Whole: logits, their exponentials and their gradients are there at once, each [tokens, vocabulary] in fp32."""
    tokens, vocab, n = 256, 4096, 8
    shape = LlamaShape(vocab_size=vocab, hidden_size=8, layers=1, heads=1, kv_heads=1, ffn_size=8, tied=tied)
    ids = torch.randint(vocab, (1, tokens))
    peaks = []
    for tiles in (1, n):
        model = Llama(shape)
        if tiles > 1:
            tile_loss(model, tiles)
        loss_of = reference_loss if tiles == 1 else nn.Module.__call__

        def run(model: nn.Module = model, loss_of: object = loss_of) -> None:
            loss_of(model, ids, ids).backward()  # type: ignore[operator]

        peaks.append(allocated_peak_bytes(run, torch.device("cpu")))
    logits_bytes = 4 * tokens * vocab
    assert peaks[0] > 2 * logits_bytes
    assert peaks[1] < peaks[0] / n + 0.2 * logits_bytes


def test_large_logits_are_tiled_by_themselves_and_the_head_stays_one_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, targets = batch()
    plain, small, large = llama(), llama(), llama()
    apply_blocks(small, BlockConfig(), "cpu", tokens.numel())
    assert not hasattr(small.head, "loss_targets")
    monkeypatch.setattr(tiling_loss, "LOGITS_BYTES", 7 * VOCAB * 4)
    apply_blocks(large, BlockConfig(), "cpu", tokens.numel())
    assert [name for name, _ in large.named_parameters()] == [name for name, _ in plain.named_parameters()]
    rows: list[int] = []
    monkeypatch.setattr(F, "linear", counted(rows, F.linear))
    losses = [reference_loss(plain, tokens, targets), large(tokens, targets)]
    assert rows == [24, 6, 6, 6, 6]
    for each in losses:
        each.backward()
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-6, atol=0)
    assert_close(grads_of(large), grads_of(plain), rtol=1e-5, atol=1e-7)
    whole = llama()
    apply_blocks(whole, BlockConfig(loss_tiles=1), "cpu", tokens.numel())
    assert not hasattr(whole.head, "loss_targets")


def counted(rows: list[int], run: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Run as `run` does, and note the rows of logits; recomputations in backward come after the test has looked."""

    def linear(*args: Any, **kwargs: Any) -> Tensor:
        out = run(*args, **kwargs)
        if out.shape[-1] == VOCAB:
            rows.append(out.numel() // VOCAB)
        return out

    return linear
