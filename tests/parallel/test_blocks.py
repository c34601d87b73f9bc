"""Activation checkpointing and compilation per block: the same gradients and names, and the recomputation promised."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import decoders
import pytest
import torch
import torch.nn.functional as F
from operator_calls import Calls
from torch import Tensor, nn
from training_loops import unequal

LAYERS = 3
MODES = ["none", "selective", "full"]
Grads = dict[str, Tensor]


def llama(**block: Any) -> Any:
    return decoders.in_blocks(decoders.with_values(17, layers=LAYERS, kv_heads=2), **block)


def tokens() -> Tensor:
    return torch.randint(17, (2, 12), generator=torch.Generator().manual_seed(3))


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return F.cross_entropy(model(batch[:, :-1]).float().flatten(0, 1), batch[:, 1:].flatten())


def gradients(model: nn.Module) -> Grads:
    torch.manual_seed(7)  # for dropout
    loss_of(model, tokens()).backward()
    return {name: param.grad for name, param in model.named_parameters() if param.grad is not None}


def assert_same(left: Grads, right: Grads) -> None:
    assert left
    assert unequal(left, right) == []


def of_transformers(kind: str) -> nn.Module:
    model = decoders.of_transformers(kind)
    decoders.filling(model)(model)
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "fp32": llama,
    "bf16": lambda: llama().bfloat16(),
    "bloom": lambda: of_transformers("bloom"),
    "dropout": lambda: of_transformers("gpt2").train(),
}


@pytest.mark.parametrize("mode", ["selective", "full"])
@pytest.mark.parametrize("model", MODELS)
def test_checkpointing_keeps_the_gradients_to_the_bit(mode: str, model: str) -> None:
    """Also where dropout has to draw the same masks again."""
    changed = decoders.in_blocks(MODELS[model](), activation_checkpoint=mode)
    assert_same(gradients(MODELS[model]()), gradients(changed))


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
        loss = loss_of(llama(activation_checkpoint=mode), tokens())
        with Calls() as count:
            loss.backward()
        return count.calls

    more = backward_calls(mode) - backward_calls("none")
    assert more["mm"] + more["addmm"] == LAYERS * matmuls
    assert more["_scaled_dot_product_flash_attention_for_cpu"] == LAYERS * attentions
    assert more["rsqrt"] + more["_fused_rms_norm"] == LAYERS * norms


@pytest.mark.parametrize("mode", MODES)
def test_names_classes_and_attributes_stay_and_other_models_of_the_class_too(mode: str) -> None:
    plain, changed = llama(), llama(activation_checkpoint=mode)
    assert [*plain.state_dict()] == [*changed.state_dict()]
    for block, before in zip(changed.layers, plain.layers, strict=True):
        assert isinstance(block, type(before))
        assert (type(block) is type(before)) == (mode == "none")
        assert type(block).__name__ == type(before).__name__ == "Block"
        assert vars(block).keys() == vars(before).keys()
    assert_same(gradients(plain), gradients(copy.deepcopy(changed)))


def test_blocks_inside_elements_that_are_not_called_are_recomputed() -> None:
    """Blocks are the outermost elements that have a forward, and parameters."""
    model = nn.ModuleList([nn.ModuleList(nn.Sequential(nn.Linear(2, 2), nn.Tanh()) for _ in range(2)), nn.ReLU()])
    decoders.in_blocks(model, activation_checkpoint="full")
    out = torch.ones(1, 2, requires_grad=True)
    for block in model[0]:
        out = block(out)
    with Calls() as count:
        out.sum().backward()
    assert count.calls["addmm"] == 2


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
    with counted_compilations() as frames:
        assert_same(gradients(llama()), gradients(llama(activation_checkpoint=mode, compile=True)))
    assert frames["graphs"] == 1


def test_compilation_is_off_on_cpu_and_on_on_cuda_unless_set() -> None:
    for device, setting, expected in [("cpu", None, 0), ("cuda", None, 1), ("cpu", True, 1), ("cuda", False, 0)]:
        with counted_compilations() as frames:
            llama(compile=setting, device=device)(tokens())
        assert frames["graphs"] == expected


def test_settings_that_do_not_exist_or_have_no_effect_are_errors() -> None:
    with pytest.raises(ValueError, match=r"activation_checkpoint='all': choose one of \['none', 'selective', 'full'\]"):
        llama(activation_checkpoint="all")
    for settings in ({"activation_checkpoint": "full"}, {"compile": True}):
        with pytest.raises(ValueError, match="Linear has no blocks"):
            decoders.in_blocks(nn.Linear(2, 2), **settings)
    decoders.in_blocks(nn.Linear(2, 2), device="cuda")
