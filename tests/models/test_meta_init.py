"""Values of a model on meta: the same bits whatever the order and the parts, ties kept, nothing left unwritten."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from pool import Pool
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dzero import PrecisionConfig, ZeroConfig, shard
from dzero.models.build import build, materialiser
from dzero.models.config import ModelConfig
from dzero.models.llama import Llama
from dzero.models.meta_init import MetaInitializer

CONFIG = ModelConfig(hidden_size=16, layers=3, heads=2, ffn_size=24, tied=True)


def on_meta() -> Llama:
    model = build(CONFIG, vocab_size=11)
    assert isinstance(model, Llama)
    return model


def filled(parts: Callable[[Llama], list[nn.Module]], seed: int = 0) -> Llama:
    model = on_meta()
    materialise = materialiser(CONFIG, model, seed=seed, device="cpu")
    for part in parts(model):
        materialise(part)
    return model


def same(a: nn.Module, b: nn.Module) -> bool:
    left, right = a.state_dict(), b.state_dict()
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def test_values_depend_on_neither_order_nor_parts() -> None:
    whole = filled(lambda m: [m])
    assert same(whole, filled(lambda m: [*m.layers, m]))
    assert same(whole, filled(lambda m: [m.head, m.norm, *reversed(m.layers), m]))
    assert same(whole, filled(lambda m: [m.get_submodule("layers.1.ffn.up"), m]))


def test_values_do_not_depend_on_the_callers_generator_and_leave_it_alone() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    model = filled(lambda m: [m])
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(2)
    assert same(model, filled(lambda m: [m]))


def test_seeds_and_modules_draw_different_values() -> None:
    one, two = filled(lambda m: [m], seed=0), filled(lambda m: [m], seed=1)
    assert not torch.equal(one.embedding.weight, two.embedding.weight)
    assert not torch.equal(one.get_parameter("layers.0.ffn.up.weight"), one.get_parameter("layers.1.ffn.up.weight"))


def test_ties_stay_ties_whichever_end_is_filled_first() -> None:
    for first in ("head", "embedding"):
        model = filled(lambda m, first=first: [m.get_submodule(first), m])
        assert model.head.weight is model.embedding.weight
        assert same(model, filled(lambda m: [m]))


def test_what_is_not_on_meta_is_left_alone() -> None:
    model = on_meta()
    materialise = materialiser(CONFIG, model, seed=0, device="cpu")
    materialise(model.layers[0])
    kept = dict(model.layers[0].named_parameters())
    with torch.no_grad():
        for param in kept.values():
            param.fill_(7.0)
    materialise(model)
    assert all(param is kept[name] and bool((param == 7.0).all()) for name, param in model.layers[0].named_parameters())
    assert not any(param.is_meta for param in model.parameters())


def test_only_the_part_is_allocated() -> None:
    model = filled(lambda m: [m.layers[1]])
    real = {name for name, param in model.named_parameters() if not param.is_meta}
    assert real == {f"layers.1.{name}" for name, _ in model.layers[1].named_parameters()}


def test_values_have_the_stated_deviations() -> None:
    config = ModelConfig(hidden_size=128, layers=8, heads=2, ffn_size=256)
    model = build(config, vocab_size=256)
    materialiser(config, model, seed=0, device="cpu")(model)
    for name, param in model.named_parameters():
        assert param.dtype == torch.float32
        expected = 0.005 if name.endswith(("out.weight", "down.weight")) else 0.02  # 0.02 / sqrt(2 * 8)
        if param.ndim == 1:
            assert bool((param == 1.0).all())
        else:
            assert param.std().item() == pytest.approx(expected, rel=0.03)


def test_frozen_parameters_stay_frozen() -> None:
    model = on_meta()
    model.norm.weight.requires_grad_(False)
    materialiser(CONFIG, model, seed=0, device="cpu")(model)
    assert [name for name, param in model.named_parameters() if not param.requires_grad] == ["norm.weight"]


def test_the_modules_of_torch_are_filled() -> None:
    def make() -> nn.Module:
        layer = nn.TransformerEncoderLayer(8, 2, 16)
        return nn.Sequential(nn.Embedding(5, 8), layer, nn.BatchNorm1d(8), nn.Linear(8, 3))

    def names(model: nn.Module) -> dict[str, torch.dtype]:
        return {name: tensor.dtype for name, tensor in model.state_dict().items()}

    with torch.device("meta"):
        model = make()
    MetaInitializer(model, seed=0, device="cpu")(model)
    assert names(model) == names(make())
    assert all(bool(t.isfinite().all()) for t in model.state_dict().values())
    assert bool((model.get_parameter("1.self_attn.out_proj.bias") == 0).all())  # which the parent sets


def sharded_values(rank: int, ranks: int, config: ModelConfig, stage: int) -> dict[str, Tensor]:
    model = build(config, vocab_size=11)
    materialise = materialiser(config, model, seed=0, device="cpu")
    shard(model, ZeroConfig(stage=stage), precision=PrecisionConfig(param="fp32"), init=materialise)
    return {n: p.full_tensor() if isinstance(p, DTensor) else p.data for n, p in model.named_parameters()}


@pytest.mark.parametrize("config", [CONFIG, ModelConfig(kind="hf", name_or_path="bloom")], ids=["llama", "bloom"])
def test_sharded_values_are_those_of_the_whole_model(pool: Pool, config: ModelConfig) -> None:
    whole = build(config, vocab_size=11)
    materialiser(config, whole, seed=0, device="cpu")(whole)
    for stage in (0, 3):
        for values in pool.run(sharded_values, 2, config, stage):
            assert all(torch.equal(param, values[name]) for name, param in whole.named_parameters())


class Scaled(nn.Module):
    def __init__(self, *, buffer: Tensor | None = None) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.gain = nn.Parameter(torch.ones(2)) if buffer is None else None
        self.register_buffer("table", buffer)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool])
def test_a_buffer_that_nobody_writes_is_an_error(dtype: torch.dtype) -> None:
    with torch.device("meta"):
        model = nn.Sequential(Scaled(buffer=torch.ones(3, dtype=dtype)))
    with pytest.raises(ValueError, match=r"no initialiser for \['0.table'\].*reset_parameters"):
        MetaInitializer(model, seed=0, device="cpu")(model)


def test_a_parameter_that_nobody_writes_is_an_error() -> None:
    with torch.device("meta"):
        model = nn.Sequential(Scaled())
    with pytest.raises(ValueError, match=r"no initialiser for \['0.gain'\]"):
        MetaInitializer(model, seed=0, device="cpu")(model)


@pytest.mark.gpu
def test_values_on_a_gpu_depend_on_the_seed_alone() -> None:
    states = []
    for parts in (lambda m: [m], lambda m: [*reversed(m.layers), m]):
        model = on_meta()
        materialise = materialiser(CONFIG, model, seed=0, device="cuda")
        before = torch.cuda.get_rng_state()
        for part in parts(model):
            materialise(part)
        assert torch.equal(before, torch.cuda.get_rng_state())
        states.append(model.state_dict())
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
