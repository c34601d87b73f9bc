"""Modules in tiles compute what they computed whole, under the names they had.

Tolerances: the same products are added in another order. In fp32 that is a few times 2^-24 of the largest partial sum;
in bf16 each tile's output is rounded to 2^-9 before the sum, and each tile's gradient of the input.
"""

from __future__ import annotations

import copy
from contextlib import nullcontext
from itertools import product
from typing import Any

import decoders
import pytest
import torch
import torch.nn.functional as F
from allocated_peak import allocated_peak_bytes
from on_ranks import on_ranks
from operator_calls import Calls
from tiled_models import LAYERS, SIZES, assert_close, batch, grads_of, llama, reference_loss
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from dzero import shard, tile, tile_loss

FP32 = {"rtol": 1e-5, "atol": 1e-6}
BF16 = {"rtol": 2e-2, "atol": 1e-2}


class Gated(nn.Module):
    """An MLP with biases, named as transformers does."""

    def __init__(self, hidden: int = 23) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(8, hidden), nn.Linear(8, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, 8)
        self.act_fn = nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return out


class Scaled(nn.Embedding):
    """An embedding that does more than look up."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 2


def swiglu(width: int = 8, hidden: int = 23) -> nn.Module:
    """The MLP of a llama of dzero."""
    model = decoders.with_values(3, hidden_size=width, layers=1, heads=1, kv_heads=1, ffn_size=hidden)
    return model.get_submodule("layers.0.ffn")


def modules() -> dict[str, nn.Module]:
    torch.manual_seed(0)
    linear, no_bias = nn.Linear(8, 23), nn.Linear(8, 23, bias=False)
    return {"linear": linear, "no bias": no_bias, "gated": Gated(), "swiglu": swiglu()}


def tiles_of(module: nn.Module) -> list[nn.Module]:
    return [*module.tiles.children()] if hasattr(module, "tiles") else []


def grad_of(tensor: Tensor) -> Tensor:
    assert tensor.grad is not None
    return tensor.grad


@pytest.mark.parametrize(("n", "recompute"), [(1, False), (2, True), (7, False), (7, True)])
@pytest.mark.parametrize("kind", [*modules()])
def test_tiles_compute_what_the_whole_does(kind: str, n: int, recompute: bool) -> None:
    whole, tiled = modules()[kind], tile(modules()[kind], n, recompute=recompute)
    assert len(tiles_of(tiled)) == (n if n > 1 else 0)
    seen = []
    for module in (whole, tiled):
        x = torch.randn(5, 3, 8, generator=torch.Generator().manual_seed(1), requires_grad=True)
        y = module(x)
        y.square().sum().backward()
        seen.append({"y": y.detach(), "x": x.grad, **grads_of(module)})
    assert_close(seen[1], seen[0], **FP32)


@pytest.mark.parametrize(("n", "padding"), [(1, 0), (2, None), (7, 11), (23, 22)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_embedding_in_tiles_has_the_bits_of_the_whole_one(n: int, padding: int | None, dtype: torch.dtype) -> None:
    """Every row is in one tile, and its gradient is the sum over the same tokens in the same order."""
    torch.manual_seed(0)
    whole = nn.Embedding(23, 8, padding_idx=padding, dtype=dtype)
    tiled = tile(copy.deepcopy(whole), n, recompute=True)
    ids, weights = torch.randint(23, (4, 50)), torch.randn(4, 50, 8, dtype=dtype)
    assert torch.equal(tiled(ids), whole(ids))
    for module in (tiled, whole):
        (module(ids) * weights).sum().backward()
    assert_close(grads_of(tiled), grads_of(whole), rtol=0, atol=0)
    for module, wrong in product((tiled, whole), (-1, 23)):
        with pytest.raises(IndexError):
            module(torch.tensor([[0, wrong]]))


@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, FP32), (torch.bfloat16, BF16)])
@pytest.mark.parametrize(("n", "mode"), [(2, "none"), (7, "full")])
def test_a_model_in_tiles_has_its_gradients(n: int, mode: str, dtype: torch.dtype, close: dict[str, float]) -> None:
    plain, tiled = llama().to(dtype), llama(tiles=n, activation_checkpoint=mode).to(dtype)
    losses = [reference_loss(model, *batch()) for model in (plain, tiled)]
    torch.testing.assert_close(losses[1], losses[0], **close)
    for loss in losses:
        loss.backward()  # type: ignore[no-untyped-call]
    assert_close(grads_of(tiled), grads_of(plain), **close)


def test_partial_sums_of_16_bits_are_added_in_fp32() -> None:
    """1 + 2^-8 + 2^-8 is 1 + 2^-7: bf16 would round the first sum to 1, and then the second."""
    mlp = Gated(3).bfloat16()
    with torch.no_grad():
        for param in mlp.parameters():
            param.zero_()
        mlp.gate_proj.bias.fill_(10)  # gelu(10) = 10
        mlp.up_proj.weight[:, 0] = 1
        mlp.down_proj.weight[0] = torch.tensor([1, 2.0**-8, 2.0**-8]) / 10
    x = F.one_hot(torch.tensor([0]), 8).bfloat16()
    parts = [each(x)[0, 0].float() for each in tiles_of(tile(mlp, 3))]
    assert mlp(x)[0, 0].item() == sum(parts).bfloat16().item() > 1  # type: ignore[union-attr]


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("kind", ["linear", "mlp"])
def test_the_error_of_a_bf16_input_gradient_does_not_grow_with_the_tiles(kind: str, recompute: bool) -> None:
    """Against fp64: a sum in bf16 of 128 tiles would be off five times as much as the whole module's product."""
    torch.manual_seed(0)
    whole = (nn.Linear(32, 512) if kind == "linear" else swiglu(32, 512)).bfloat16()
    x, weight = torch.randn(64, 32).bfloat16(), torch.randn(512 if kind == "linear" else 32).bfloat16()

    def of_input(module: nn.Module, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        (module(x) * weight.to(x.dtype)).sum().backward()
        return grad_of(x).double()

    exact = of_input(copy.deepcopy(whole).double(), x.double())
    grads = [of_input(tile(copy.deepcopy(whole), n, recompute=recompute), x) for n in (1, 8, 128)]
    errors = [float((grad - exact).norm() / exact.norm()) for grad in grads]
    assert max(errors) < 2 * errors[0], errors


def test_a_checkpointed_block_computes_each_of_its_tiles_once_more_at_each_backward() -> None:
    model = llama(tiles=3, activation_checkpoint="full")
    loss = reference_loss(model, *batch())
    for times in (1, 2):
        with Calls() as counted:
            loss.backward(retain_graph=True)  # type: ignore[no-untyped-call]
        assert counted.calls["silu"] == counted.calls["silu_backward"] == LAYERS * 3
        if times == 1:
            once = [grad_of(param).clone() for param in model.parameters()]
    assert all(torch.equal(grad_of(param), 2 * grad) for param, grad in zip(model.parameters(), once, strict=True))


def test_recomputed_tiles_keep_their_hidden_features_one_tile_at_a_time() -> None:
    """Whole, five tensors [tokens, hidden] in fp32 are there at once; of tiles, an eighth, and the in- and outputs."""
    tokens, hidden = 512, 1024
    features = 4 * tokens * hidden
    peaks = {}
    for n in (1, 8):
        x, mlp = torch.randn(tokens, 8, requires_grad=True), tile(Gated(hidden), n, recompute=True)
        peaks[n] = allocated_peak_bytes(lambda: mlp(x).sum().backward(), torch.device("cpu"))  # noqa: B023
    assert peaks[1] > 4 * features
    assert peaks[8] < peaks[1] / 8 + 0.15 * features


def test_what_does_not_fit_is_refused_by_its_untiled_name() -> None:
    model = llama(tiles=2)
    kept = model.state_dict()
    states = {**kept, "layers.0.ffn.up.weight": torch.zeros(22, 16)}
    with pytest.raises(RuntimeError, match=r"size mismatch for layers.0.ffn.up.weight: \(22, 16\) .* \(23, 16\)"):
        model.load_state_dict(states)
    del states["layers.0.ffn.up.weight"]
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "layers.0.ffn.up.weight"\. $'):
        model.load_state_dict(states)
    assert model.load_state_dict(states, strict=False) == (["layers.0.ffn.up.weight"], [])
    assert_close(model.state_dict(), kept, rtol=0, atol=0)


def test_mlps_of_transformers_are_tiled() -> None:
    plain = decoders.of_transformers("llama", on="cpu", num_hidden_layers=1)
    tiled = decoders.in_blocks(copy.deepcopy(plain), tiles=3)
    ids = torch.arange(9).view(1, 9)
    torch.testing.assert_close(tiled(ids), plain(ids), **FP32)
    assert_close(tiled.state_dict(), plain.state_dict(), rtol=0, atol=0)
    with pytest.raises(ValueError, match="have no MLP"):
        decoders.in_blocks(tiled, tiles=2)
    decoders.in_blocks(tiled, loss_tiles=2)
    torch.testing.assert_close(tiled(ids, ids), reference_loss(plain, ids, ids))


@pytest.mark.parametrize("kind", ["mixtral", "granitemoe", "mamba"])
def test_whether_a_model_passes_on_the_logits_of_its_head_is_found_without_its_values(kind: str) -> None:
    model = decoders.of_transformers(kind, num_local_experts=2, num_hidden_layers=1)
    refused = pytest.raises(ValueError, match=r"loss_tiles=2: GraniteMoeForCausalLM changes the logits of its head")
    with refused if kind == "granitemoe" else nullcontext():
        tile_loss(model, 2)


class Stubborn(nn.Module):
    """Model on meta whose forward raises, or asks for a value."""

    def __init__(self, problem: str) -> None:
        super().__init__()
        self.problem = problem
        with torch.device("meta"):
            self.embedding, self.head = nn.Embedding(5, 4), nn.Linear(4, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.embedding(tokens))
        if self.problem == "value":
            return logits if float(logits.sum()) > 0 else -logits
        if self.problem == "in fp32" and logits.dtype == torch.bfloat16:
            return 2 * logits
        raise KeyError(self.problem)


def test_a_models_own_error_is_raised_and_not_taken_for_one_that_cannot_be_tiled() -> None:
    with pytest.raises(KeyError, match="gone"):
        tile_loss(Stubborn("gone"), 1)
    for problem in ("value", "in fp32"):  # what fake tensors lack, and an error in one of two dtypes
        with pytest.raises(ValueError, match=r"Stubborn changes the logits .* or cannot be tried"):
            tile_loss(Stubborn(problem), 1)


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (lambda: tile(nn.Linear(2, 3), 0), r"tiles=0: must be a whole number ≥ 1"),
        (lambda: tile(nn.Linear(2, 3), 4), r"tiles=4: Linear has 3 output features; take at most as many"),
        (lambda: tile(Gated(), 24), r"tiles=24: Gated has 23 hidden features"),
        (lambda: tile(nn.LayerNorm(3), 2), r"LayerNorm with the parameters \['weight', 'bias'\] cannot be tiled"),
        (lambda: tile(weight_norm(nn.Linear(2, 3)), 2), r"cannot be tiled: an nn.Linear and .* MLP .*'gate_proj'"),
        (lambda: tile(nn.Embedding(3, 2), 4), r"tiles=4: Embedding has 3 rows; take at most as many"),
        (lambda: tile(nn.Embedding(3, 2, max_norm=1.0), 2), r"Embedding cannot be tiled: max_norm changes rows"),
        (lambda: tile(nn.Embedding(3, 2, sparse=True), 2), r"Embedding cannot be tiled: sparse gradients"),
        (lambda: tile(nn.Embedding(3, 2, scale_grad_by_freq=True), 2), r"cannot be tiled: scale_grad_by_freq counts"),
        (lambda: tile(Scaled(3, 2), 2), r"Scaled has a forward of its own"),
        (lambda: tile(tile(nn.Linear(2, 3), 2), 2), r"Linear is in 2 tiles already"),
        (lambda: llama(embedding_tiles=0), r"block.embedding_tiles=0: must be a whole number ≥ 1"),
        (lambda: llama(tiles=0), r"block.tiles=0: must be a whole number ≥ 1"),
        (lambda: llama(loss_tiles=-1), r"block.loss_tiles=-1"),
        (lambda: llama(tiles=2, compile=True), r"block.compile=true with block.tiles=2"),
        (lambda: llama(tiles=2, activation_checkpoint="selective"), r"selective with block.tiles=2.*take .*full"),
        (lambda: decoders.in_blocks(nn.Sequential(nn.Linear(2, 2)), tiles=2), r"block.tiles=2: .* no MLP"),
        (lambda: decoders.in_blocks(Gated(), embedding_tiles=2), r"embedding_tiles=2: Gated has no nn.Embedding"),
        (lambda: llama(tiles=24), r"tiles=24: SwiGLU has 23"),
        (lambda: llama(embedding_tiles=38), r"tiles=38: Embedding has 37"),
        (lambda: llama(loss_tiles=38), r"tiles=38: Linear has 37"),
    ],
)
def test_what_cannot_be_tiled_is_told(action: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        action()


@on_ranks(1)
def test_a_tied_parameter_that_was_tiled_is_refused_before_it_trains_apart(rank: int, ranks: int) -> None:
    """A tied parameter of which one place, or each, was tiled."""
    both = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    both[1].weight = both[0].weight
    for module in both:
        tile(module, 2)
    head = decoders.with_values(**SIZES, tied=True)
    tile(head.get_submodule("head"), 2)
    for model, name in ((both, "1"), (head, "head")):
        with pytest.raises(ValueError, match=f"{name} was tiled, but the model uses its parameter elsewhere"):
            shard(model, stage=3)
