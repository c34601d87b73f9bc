"""Activation checkpointing and compilation per block: the same gradients and names, and the recomputation promised."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pool import Pool
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from dzero import PrecisionConfig, ZeroConfig, shard
from dzero.models.build import build, materialiser
from dzero.models.config import ModelConfig
from dzero.models.llama import Block
from dzero.parallel.blocks import apply_blocks, find_blocks
from dzero.parallel.config import BlockConfig

LAYERS = 3
MODES = ["none", "selective", "full"]
Grads = dict[str, Tensor]


class Count(TorchDispatchMode):
    """Calls of each aten operator."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func._overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


class Dropping(nn.Module):
    """Blocks of other libraries: keyword arguments, dropout, biases."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor, *, scale: float) -> tuple[Tensor, float]:
        return x + F.dropout(F.gelu(self.layer(x)), 0.5) * scale, scale


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Dropping() for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x, _ = block(x, scale=0.5)
        return x


def llama() -> nn.Module:
    config = ModelConfig(hidden_size=32, layers=LAYERS, heads=4, kv_heads=2, ffn_size=48)
    model = build(config, vocab_size=17)
    materialiser(config, model, seed=0, device="cpu")(model)
    return model


def tokens() -> Tensor:
    return torch.randint(17, (2, 12), generator=torch.Generator().manual_seed(3))


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return F.cross_entropy(model(batch[:, :-1]).float().flatten(0, 1), batch[:, 1:].flatten())


def gradients(model: nn.Module) -> Grads:
    loss_of(model, tokens()).backward()
    return {name: param.grad for name, param in model.named_parameters() if param.grad is not None}


def assert_same(left: Grads, right: Grads) -> None:
    assert left.keys() == right.keys()
    assert left
    for name, grad in left.items():
        assert torch.equal(grad, right[name]), name


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_checkpointing_keeps_the_gradients_to_the_bit(mode: str, dtype: torch.dtype) -> None:
    plain, changed = llama().to(dtype), llama().to(dtype)
    apply_blocks(changed, BlockConfig(activation_checkpoint=mode), "cpu")
    assert_same(gradients(plain), gradients(changed))


@pytest.mark.parametrize("mode", MODES)
def test_dropout_is_recomputed_with_the_same_mask(mode: str) -> None:
    plain = Stack()
    changed = copy.deepcopy(plain)
    apply_blocks(changed, BlockConfig(activation_checkpoint=mode), "cpu")
    grads = []
    for model in (plain, changed):
        torch.manual_seed(7)
        model(torch.randn(4, 8)).square().sum().backward()
        grads.append({name: param.grad for name, param in model.named_parameters() if param.grad is not None})
    assert_same(*grads)


@pytest.mark.parametrize(
    ("mode", "matmuls", "attentions", "norms"),
    [
        ("none", 0, 0, 0),
        ("selective", 0, 0, 2),
        # The last operator of a block saves nothing that backward needs, so its 7th matmul is not recomputed.
        ("full", 6, 1, 2),
    ],
)
def test_each_mode_recomputes_what_it_says(mode: str, matmuls: int, attentions: int, norms: int) -> None:
    def backward_calls(mode: str) -> Counter[str]:
        model = llama()
        apply_blocks(model, BlockConfig(activation_checkpoint=mode), "cpu")
        loss = loss_of(model, tokens())
        with Count() as count:
            loss.backward()
        return count.calls

    more = backward_calls(mode) - backward_calls("none")
    assert more["mm"] + more["addmm"] == LAYERS * matmuls
    assert more["_scaled_dot_product_flash_attention_for_cpu"] == LAYERS * attentions
    assert more["rsqrt"] + more["_fused_rms_norm"] == LAYERS * norms


@pytest.mark.parametrize("mode", MODES)
def test_names_classes_and_attributes_stay(mode: str) -> None:
    plain, changed = llama(), llama()
    apply_blocks(changed, BlockConfig(activation_checkpoint=mode), "cpu")
    assert [*plain.state_dict()] == [*changed.state_dict()]
    for (name, block), (_, before) in zip(find_blocks(changed), find_blocks(plain), strict=True):
        assert isinstance(block, Block), name
        assert type(block).__name__ == "Block"
        assert vars(block).keys() == vars(before).keys()
    assert_same(gradients(plain), gradients(copy.deepcopy(changed)))


def test_other_models_with_the_same_class_of_block_stay() -> None:
    plain, changed = llama(), llama()
    apply_blocks(changed, BlockConfig(activation_checkpoint="full"), "cpu")
    assert all(type(block) is Block for _, block in find_blocks(plain))


def test_blocks_are_the_outermost_elements_with_parameters() -> None:
    inner = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    model = nn.ModuleDict({"a": nn.ModuleList([inner, nn.ReLU()]), "b": nn.Linear(2, 2)})
    assert find_blocks(model) == [("a.0", inner)]
    assert [name for name, _ in find_blocks(inner)] == ["0"]


def test_blocks_inside_elements_that_are_not_called_are_recomputed() -> None:
    model = nn.ModuleList([nn.ModuleList(nn.Sequential(nn.Linear(2, 2), nn.Tanh()) for _ in range(2))])
    apply_blocks(model, BlockConfig(activation_checkpoint="full"), "cpu")
    out = torch.ones(1, 2, requires_grad=True)
    for _, block in find_blocks(model):
        out = block(out)
    with Count() as count:
        out.sum().backward()
    assert count.calls["addmm"] == 2


def test_blocks_of_transformers_are_checkpointed_to_the_bit() -> None:
    pytest.importorskip("transformers")
    config = ModelConfig(kind="hf", name_or_path="bloom")
    grads = []
    for mode in MODES:
        model = build(config)
        materialiser(config, model, seed=0, device="cpu")(model)
        apply_blocks(model, BlockConfig(activation_checkpoint=mode), "cpu")
        grads.append(gradients(model))
    assert_same(grads[0], grads[1])
    assert_same(grads[0], grads[2])


def sharded_gradients(rank: int, ranks: int, mode: str) -> Grads:
    model = llama()
    apply_blocks(model, BlockConfig(activation_checkpoint=mode), "cpu")
    shard(model, ZeroConfig(stage=3), precision=PrecisionConfig())
    loss_of(model, (tokens() + rank) % 17).backward()
    return {n: p.grad.full_tensor() for n, p in model.named_parameters() if p.grad is not None}  # type: ignore[attr-defined]


def test_sharded_blocks_are_checkpointed_to_the_bit(pool: Pool) -> None:
    plain = pool.run(sharded_gradients, 2, "none")
    for mode in ("selective", "full"):
        assert_same(plain[0], pool.run(sharded_gradients, 2, mode)[0])


@contextmanager
def counted_compilations() -> Iterator[Counter[str]]:
    """Frames that the compiler looked at, without a backend's seconds: the graphs run as they were captured."""
    frames: Counter[str] = Counter()

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        frames["graphs"] += 1
        return graph

    original = torch.compile
    torch._dynamo.reset()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", lambda forward: original(forward, backend=backend))
        yield frames
    torch._dynamo.reset()


@pytest.mark.parametrize("mode", MODES)
def test_equal_blocks_share_one_compilation(mode: str) -> None:
    plain, changed = llama(), llama()
    with counted_compilations() as frames:
        apply_blocks(changed, BlockConfig(activation_checkpoint=mode, compile=True), "cpu")
        assert_same(gradients(plain), gradients(changed))
    assert frames["graphs"] == 1


def test_compilation_is_off_on_cpu_and_on_on_cuda_unless_set() -> None:
    for device, setting, expected in [("cpu", None, 0), ("cuda", None, 1), ("cpu", True, 1), ("cuda", False, 0)]:
        with counted_compilations() as frames:
            model = llama()
            apply_blocks(model, BlockConfig(compile=setting), device)
            model(tokens())
        assert frames["graphs"] == expected


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_compiled_blocks_have_close_gradients(mode: str) -> None:
    plain, changed = gradients(llama()), llama()
    apply_blocks(changed, BlockConfig(activation_checkpoint=mode, compile=True), "cpu")
    for name, grad in gradients(changed).items():
        torch.testing.assert_close(grad, plain[name], rtol=1e-4, atol=1e-6)  # fused kernels round elsewhere


def test_settings_that_do_not_exist_or_have_no_effect_are_errors() -> None:
    with pytest.raises(ValueError, match=r"activation_checkpoint='all': choose one of \['none', 'selective', 'full'\]"):
        BlockConfig(activation_checkpoint="all")
    for config in (BlockConfig(activation_checkpoint="full"), BlockConfig(compile=True)):
        with pytest.raises(ValueError, match="Linear has no blocks"):
            apply_blocks(nn.Linear(2, 2), config, "cpu")
    apply_blocks(nn.Linear(2, 2), BlockConfig(), "cuda")
