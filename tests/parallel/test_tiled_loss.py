"""The loss in tiles is torch's cross-entropy, and the logits of all tokens and ids never exist."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import decoders
import pytest
import torch
import torch.nn.functional as F
from allocated_peak import allocated_peak_bytes
from pool import Pool
from tiled_models import VOCAB, assert_close, batch, grads_of, llama, reference_loss
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from dzero import make_mesh, parallelize, testing, tile_loss


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("n", "tied"), [(1, False), (3, True), (37, False)])
def test_the_loss_and_its_gradients_are_those_of_whole_logits(n: int, tied: bool, dtype: torch.dtype) -> None:
    """fp32: log-sum-exps of tiles are rounded before they meet, a few times 2^-24. In bf16 logits are rounded as
    untiled ones, and gradients of features are added tile by tile."""
    plain, tiled = llama(tied=tied).to(dtype), llama(tied=tied).to(dtype)
    tile_loss(tiled, n)
    torch.testing.assert_close(tiled(batch()[0]), plain(batch()[0]), rtol=1e-6, atol=1e-7)
    losses = [reference_loss(plain, *batch()), tiled(*batch())]
    assert losses[1].dtype == torch.float32
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-6, atol=0)
    for loss in losses:
        loss.backward()  # type: ignore[no-untyped-call]
    close = {"rtol": 1e-5, "atol": 1e-7} if dtype == torch.float32 else {"rtol": 3e-2, "atol": 2e-3}
    assert_close(grads_of(tiled), grads_of(plain), **close)


@pytest.mark.parametrize("by_tokens", [True, False])
@pytest.mark.parametrize("n", [1, 4, 128])
def test_the_error_of_bf16_gradients_does_not_grow_with_the_number_of_tiles(n: int, by_tokens: bool) -> None:
    """Against fp64. A sum in bf16 would be off by about 2^-9 for each tile, which add like random steps: 1.3e-2 of 128.

    The gradient of the head is as exact as that of whole logits. That of the features is a sum in fp32 of products that
    were rounded, and rounded itself, so that its error is sqrt(2) times as large at most, whatever the number of tiles.
    """
    torch.manual_seed(0)
    exact, whole = HeadAlone().double(), HeadAlone().bfloat16()
    exact.load_state_dict(whole.state_dict())
    tiled = copy.deepcopy(whole)
    tile_loss(tiled, n, by_tokens=by_tokens)
    features, targets = torch.randn(2048, 32).bfloat16(), torch.randint(256, (2048,))
    right = grads_of_head(exact, features.double(), targets)
    errors = [
        [float((grad.double() - want).norm() / want.norm()) for grad, want in zip(grads, right, strict=True)]
        for grads in (grads_of_head(head, features, targets) for head in (whole, tiled))
    ]
    (of_features, of_head), (of_features_in_tiles, of_head_in_tiles) = errors
    assert of_head_in_tiles == pytest.approx(of_head, rel=0.01)
    assert of_features_in_tiles < 1.42 * of_features


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


@pytest.mark.parametrize("tied", [False, True])
def test_targets_are_treated_as_torch_treats_them(tied: bool) -> None:
    tiled, plain = llama(loss_tiles=3, tied=tied), llama(tied=tied)
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
    tiled, plain = llama(loss_tiles=3), llama()
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
    ids = torch.randint(vocab, (1, tokens))
    model = decoders.with_values(vocab, hidden_size=8, layers=1, heads=1, kv_heads=1, ffn_size=8, tied=tied)
    whole = peak(lambda: reference_loss(model, ids, ids))
    model.zero_grad()
    tile_loss(model, n)
    in_tiles = peak(lambda: model(ids, ids))
    logits_bytes = 4 * tokens * vocab
    assert whole > 2 * logits_bytes
    assert in_tiles < whole / n + 0.2 * logits_bytes


class Logits(TorchDispatchMode):
    """The rows of each product whose result is as wide as the vocabulary."""

    def __init__(self, vocab: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.vocab, self.rows = vocab, list[int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func._overloadpacket.__name__ == "mm" and out.shape[-1] == self.vocab:
            self.rows.append(out.shape[0])
        return out


@pytest.mark.parametrize(("settings", "rows"), [({}, [1024] * 4), ({"loss_tiles": 1}, [4096])])
def test_large_logits_are_tiled_by_themselves_and_the_head_stays_one_unit(
    settings: dict[str, int], rows: list[int]
) -> None:
    """4,096 tokens by 2^15 ids take 512 MiB in fp32, of which a tile has 128 MiB at most."""
    vocab, tokens = 2**15, torch.zeros(2, 2048, dtype=torch.int64, device="meta")
    model = decoders.on_meta(vocab)
    names = [name for name, _ in model.named_parameters()]
    decoders.in_blocks(model, tokens=tokens.numel(), **settings)
    assert [name for name, _ in model.named_parameters()] == names
    with Logits(vocab) as seen:
        model(tokens, tokens) if not settings else model(tokens)
    assert seen.rows == rows
    assert not hasattr(decoders.in_blocks(llama(), tokens=24).head, "loss_targets")  # small logits stay whole


def steep(vocab: int, **sizes: Any) -> nn.Module:
    """A llama with a large head, so that its logits are far apart."""
    model = decoders.with_values(vocab, **sizes)
    with torch.no_grad():
        model.get_submodule("head").weight.mul_(20)
    return model


def cut(ranks: int, n: int, vocab: int = 96, **sizes: Any) -> Any:
    """A llama whose vocabulary the ranks share, with `n` tiles of its loss."""
    model = steep(vocab, **sizes)
    if n > 1:
        tile_loss(model, n, by_tokens=True)
    return parallelize(model, make_mesh("cpu", tp=ranks))


def of_split_vocabulary(rank: int, ranks: int, n: int, tied: bool) -> tuple[float, dict[str, Tensor]]:
    """Loss and whole gradients of the parameters that tp cuts; others are summed over its ranks by the optimizer."""
    of_ranks = cut(ranks, n, tied=tied)
    with of_ranks.loss():
        loss = of_ranks.model(*of_96())
        loss.backward()
    params = of_ranks.model.named_parameters()
    return float(testing.local(loss)), {name: param.grad.full_tensor() for name, param in params if "norm" not in name}


def of_96() -> tuple[Tensor, Tensor]:
    tokens, targets = torch.randint(96, (2, 2, 12), generator=torch.Generator().manual_seed(3))
    targets[0, :3] = -100
    return tokens, targets


@pytest.mark.parametrize(("ranks", "n", "tied"), [(2, 5, False), (4, 3, True)])
def test_over_a_split_vocabulary_loss_and_gradients_are_those_of_whole_logits(
    pool: Pool, ranks: int, n: int, tied: bool
) -> None:
    model = steep(96, tied=tied)
    want = reference_loss(model, *of_96())
    want.backward()  # type: ignore[no-untyped-call]
    params = dict(model.named_parameters())
    for loss, grads in pool.run(of_split_vocabulary, ranks, n, tied):
        assert loss == pytest.approx(float(want.detach()), rel=1e-6)
        for name, grad in grads.items():
            assert (grad - params[name].grad).norm() <= 2e-6 * params[name].grad.norm(), name


def peak(loss_of: Callable[[], Tensor]) -> int:
    """Bytes that forward and backward allocate."""
    return allocated_peak_bytes(lambda: loss_of().backward(), torch.device("cpu"))  # type: ignore[no-untyped-call]


def peaks(rank: int, ranks: int) -> list[int]:
    """Of a head whose vocabulary is large, whole and in tiles; targets that are no ids are refused."""
    found = []
    for n in (1, 8):
        of_ranks = cut(ranks, n, 4096, hidden_size=8, layers=1, heads=2, kv_heads=2, ffn_size=8)
        ids = torch.randint(4096, (1, 256))
        loss_of: Any = nn.Module.__call__ if n > 1 else reference_loss
        with of_ranks.loss():
            found.append(peak(partial(loss_of, of_ranks.model, ids, ids)))
    with pytest.raises(IndexError):
        of_ranks.model(ids, torch.full_like(ids, 4096))
    return found


def test_over_a_split_vocabulary_logits_exist_one_tile_at_a_time(pool: Pool) -> None:
    """A rank's logits of all tokens are [256, 2048] in fp32; whole, several of that size exist at once."""
    of_logits = 256 * 2048 * 4
    for whole, in_tiles in pool.run(peaks, 2):
        assert whole > 2 * of_logits
        assert in_tiles < 4 * of_logits / 8 + 0.2 * of_logits
