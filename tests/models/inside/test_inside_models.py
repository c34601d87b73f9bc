"""Values of a model on meta: the same bits whatever the order and the parts, ties kept, nothing left unwritten; buffers
that a constructor computes; and the operations of a token that are counted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import decoders
import pytest
import torch
from pool import Pool
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dzero import shard
from dzero.models.build import flops_per_token
from dzero.models.hf import HFDecoder
from dzero.models.meta_init import MetaInitializer

LLAMA = {"hidden_size": 16, "layers": 3, "heads": 2, "ffn_size": 24, "tied": True}
MIXTURE = {**LLAMA, "kind": "moe", "experts": 4, "top_k": 2}


def filled(parts: Callable[[Any], list[nn.Module]], seed: int = 0, device: str = "cpu", **settings: Any) -> Any:
    model = decoders.on_meta(11, **{**LLAMA, **settings})
    fill = MetaInitializer(model, seed=seed, device=device)
    for part in parts(model):
        fill(part)
    return model


def whole(model: nn.Module) -> list[nn.Module]:
    return [model]


def same(a: nn.Module, b: nn.Module) -> bool:
    left, right = a.state_dict(), b.state_dict()
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize("settings", [LLAMA, MIXTURE], ids=["llama", "mixture"])
def test_values_depend_on_neither_order_nor_parts(settings: dict[str, Any]) -> None:
    alone = filled(whole, **settings)
    assert same(alone, filled(lambda m: [*m.layers, m], **settings))
    for ends_first in (["head", "norm"], ["embedding"]):  # which are tied
        again = filled(lambda m, ends=ends_first: [*map(m.get_submodule, ends), *reversed(m.layers), m], **settings)
        assert same(alone, again)
        assert again.head.weight is again.embedding.weight
    assert same(alone, filled(lambda m: [*reversed([*m.modules()])], **settings))


def test_values_depend_on_the_seed_and_the_module_and_not_on_the_callers_generator() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    one = filled(whole)
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(2)
    assert same(one, filled(whole))
    assert not torch.equal(one.embedding.weight, filled(whole, seed=1).embedding.weight)
    assert not torch.equal(one.get_parameter("layers.0.ffn.up.weight"), one.get_parameter("layers.1.ffn.up.weight"))


def test_only_the_part_is_allocated_and_what_is_not_on_meta_or_frozen_is_left_so() -> None:
    model = decoders.on_meta(11, **LLAMA)
    fill = MetaInitializer(model, seed=0, device="cpu")
    model.get_parameter("norm.weight").requires_grad_(False)
    block = model.get_submodule("layers.1")
    fill(block)
    real = {name for name, param in model.named_parameters() if not param.is_meta}
    assert real == {f"layers.1.{name}" for name, _ in block.named_parameters()}
    kept = dict(block.named_parameters())
    with torch.no_grad():
        for param in kept.values():
            param.fill_(7.0)
    fill(model)
    assert all(param is kept[name] and bool((param == 7.0).all()) for name, param in block.named_parameters())
    assert not any(param.is_meta for param in model.parameters())
    assert [name for name, param in model.named_parameters() if not param.requires_grad] == ["norm.weight"]


def test_values_have_the_stated_deviations() -> None:
    model = filled(whole, hidden_size=128, layers=8, ffn_size=256, vocab_size=256, tied=False)
    for name, param in model.named_parameters():
        assert param.dtype == torch.float32
        expected = 0.005 if name.endswith(("out.weight", "down.weight")) else 0.02  # 0.02 / sqrt(2 * 8)
        if param.ndim == 1:
            assert bool((param == 1.0).all())
        else:
            assert param.std().item() == pytest.approx(expected, rel=0.03)


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


def sharded_values(rank: int, ranks: int, settings: list[dict[str, Any]]) -> list[dict[str, Tensor]]:
    found = []
    for each in settings:
        model = decoders.on_meta(11, **each)
        shard(model, stage=3, precision="fp32", init=decoders.filling(model))
        found.append({n: p.full_tensor() if isinstance(p, DTensor) else p.data for n, p in model.named_parameters()})
    return found


def test_sharded_values_are_those_of_the_whole_model(pool: Pool) -> None:
    settings: list[dict[str, Any]] = [LLAMA, {"kind": "hf", "name_or_path": "bloom"}]
    wholes = [decoders.with_values(11, **each) for each in settings]
    for of_rank in pool.run(sharded_values, 2, settings):
        for model, values in zip(wholes, of_rank, strict=True):
            assert all(torch.equal(param, values[name]) for name, param in model.named_parameters())


class Scaled(nn.Module):
    def __init__(self, *, buffer: Tensor | None = None) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.gain = nn.Parameter(torch.ones(2)) if buffer is None else None
        self.register_buffer("table", buffer)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool, None])
def test_a_buffer_or_a_parameter_that_nobody_writes_is_an_error(dtype: torch.dtype | None) -> None:
    with torch.device("meta"):
        model = nn.Sequential(Scaled(buffer=None if dtype is None else torch.ones(3, dtype=dtype)))
    name = "gain" if dtype is None else "table"
    with pytest.raises(ValueError, match=rf"no initialiser for \['0.{name}'\].*reset_parameters"):
        MetaInitializer(model, seed=0, device="cpu")(model)


@pytest.mark.gpu
def test_values_on_a_gpu_depend_on_the_seed_alone() -> None:
    before = torch.cuda.get_rng_state()
    first, second = filled(whole, device="cuda"), filled(lambda m: [*reversed(m.layers), m], device="cuda")
    assert torch.equal(before, torch.cuda.get_rng_state())
    assert same(first, second)


# ---- buffers that models of transformers compute and do not save

IDS = {"vocab_size": 256, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
DEPTH = {"num_hidden_layers": 2, "n_layer": 2, "encoder_layers": 1, "decoder_layers": 2}
WIDTH = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "intermediate_size"), 64),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_routed_experts", "num_local_experts"), 4),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 128),
    "moe_intermediate_size": 32,
}
KEY_VALUES = {"num_key_value_heads": 2, "num_experts": 4}
SIZES = ({**IDS, **DEPTH, **WIDTH, **KEY_VALUES}, {**IDS, **DEPTH, **WIDTH}, {**IDS, **DEPTH}, IDS, {})
MOST_PARAMETERS = 4e8
WITHOUT_OWN = {"apertus", "apertus1p5_text", "openai-gpt"}
"""Types with parameters that only their constructor draws; they are refused unless weights are given."""


def small(kind: str) -> Any:
    """A small configuration, or None if these sizes make no model of this type or a large one."""
    transformers = pytest.importorskip("transformers")
    for sizes in SIZES:
        try:
            known = transformers.AutoConfig.for_model(kind)
            config = transformers.AutoConfig.for_model(kind, **{k: v for k, v in sizes.items() if hasattr(known, k)})
            model = of_config(config, "meta")
        except Exception:  # many kinds, for many reasons
            continue
        if sum(param.numel() for param in model.parameters()) <= MOST_PARAMETERS:
            return config
    return None


def of_config(config: Any, device: str) -> HFDecoder:
    transformers = pytest.importorskip("transformers")
    with torch.device(device):
        return HFDecoder(transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32))


def not_saved(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: buffer for name, buffer in model.named_buffers() if name not in model.state_dict()}


def agrees(kind: str) -> bool:
    """Compare with the model that transformers builds; return whether the type was built."""
    if (config := small(kind)) is None:
        return False
    want, model = not_saved(of_config(config, "cpu")), of_config(config, "meta")
    fill = MetaInitializer(model, seed=0, device="cpu")
    if kind in WITHOUT_OWN:
        with pytest.raises(ValueError, match=r"no initialiser for .*published weights"):
            fill(model)
        return False
    for blocks in (module for module in [*model.modules()] if isinstance(module, nn.ModuleList)):
        for block in blocks:
            fill(block)
    fill(model)
    found = not_saved(model)
    assert found.keys() == want.keys(), kind
    for name, buffer in want.items():
        torch.testing.assert_close(found[name], buffer, rtol=0, atol=0, equal_nan=True, msg=f"{kind} {name}")
    return True


def test_buffers_of_some_types_are_those_that_the_constructor_computes() -> None:
    first = ["falcon_h1", "gpt2", "llama"]
    assert [kind for kind in first if agrees(kind)] == first


def test_the_buffers_of_a_second_build_leave_random_numbers_and_the_model_as_they_are() -> None:
    model = of_config(small("falcon_h1"), "meta")
    before = torch.get_rng_state()
    computed = model.computed_buffers()
    assert torch.equal(before, torch.get_rng_state())
    assert computed["model.model.layers.0.mamba.mup_vector"].isfinite().all()
    assert all(param.is_meta for param in model.parameters())
    assert not nn.Linear(1, 1).weight.is_meta


SOME = "tests/models/inside/test_inside_models.py::test_buffers_of_some_types_are_those_that_the_constructor_computes"


@pytest.mark.full(SOME)
def test_buffers_of_all_types_are_those_that_the_constructor_computes() -> None:
    modeling = pytest.importorskip("transformers").models.auto.modeling_auto
    assert sum(agrees(kind) for kind in sorted(modeling.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)) >= 150


# ---- operations


@pytest.mark.parametrize("tied", [False, True])
def test_flops_count_matmuls_and_attention(tied: bool) -> None:
    """Of a token in sequences of 10, of 2 layers of width 32 with 4 heads of 8 dims; of experts, those that it uses."""
    attention, router, expert = 2 * 32 * 32, 8 * 32, 3 * 32 * 24
    matmul = 2 * (2 * attention + 3 * 32 * 48) + 64 * 32
    assert flops_per_token(decoders.on_meta(tied=tied), 10) == 6 * matmul + 12 * 2 * 32 * 10
    used = 2 * (2 * attention + 3 * expert + router) + 64 * 32  # two chosen, one shared; the head
    mixture = decoders.on_meta(tied=tied, **{**decoders.EXPERTS, "experts": 8})
    assert flops_per_token(mixture, 10) == 6 * used + 12 * 2 * 32 * 10
    assert flops_per_token(nn.Linear(2, 2), 10) is None
    grouped = 2 * (attention + 2 * 32 * 16 + 3 * 32 * 48) + 64 * 32
    assert flops_per_token(decoders.of_transformers("llama"), 10) == 6 * grouped + 12 * 2 * 32 * 10
