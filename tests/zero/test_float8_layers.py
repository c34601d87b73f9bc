"""Products in 8 bits: the bits of plain torchao, at every stage and on every tier, and which layers make them."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import parity_cells
import pytest
import small_decoders
import torch
from parity_cells import Cell, in_plain_torchao
from pool import Pool
from torch import nn

from dzero import PrecisionConfig, shard
from dzero.comm.wire import Blocks
from dzero.models.build import build
from dzero.models.config import ModelConfig
from dzero.models.llama import Linear
from dzero.parallel.blocks import apply_blocks
from dzero.parallel.config import BlockConfig
from dzero.zero.float8_layers import ADAPTER, EXCLUDED, ODD_DIMS, OUTSIDE, OWN_FORWARD, convert_linear_layers
from dzero.zero.offload_config import OFFLOADS

LLAMA = ModelConfig(hidden_size=32, layers=2, heads=2, ffn_size=48)
COMPUTES = pytest.mark.parametrize("compute", ["fp8_tensorwise", "fp8_rowwise"])


@pytest.mark.product(keep=3)
@pytest.mark.parametrize(
    ("compute", "stage", "microbatches", "offload"),
    [
        ("fp8_tensorwise", 3, 1, "host_all"),
        ("fp8_rowwise", 0, 1, "none"),
        ("fp8_rowwise", 2, 2, "host"),
        *(("fp8_tensorwise", stage, 1, "none") for stage in (0, 1, 2, 3)),
        *(("fp8_rowwise", stage, 1, "none") for stage in (1, 2, 3)),
        ("fp8_rowwise", 3, 1, "infinity"),
        ("fp8_tensorwise", 1, 2, "none"),
    ],
)
def test_stages_and_tiers_have_the_bits_of_plain_torchao(
    pool: Pool, tmp_path: Any, monkeypatch: Any, compute: str, stage: int, microbatches: int, offload: str
) -> None:
    monkeypatch.chdir(tmp_path)
    cell = Cell(stage, "bf16", microbatches, "fp32", "even", 2, compute)
    result, (want,) = parity_cells.train_beside_oracles(pool, cell, OFFLOADS[offload])
    assert parity_cells.differences(result, want) == []
    in_16_bits = parity_cells.oracle(Cell(stage, "bf16", microbatches, "fp32", "even", 2))
    assert result["norms"] != in_16_bits.norms


def made(compute: str, checkpoint: str = "none") -> tuple[nn.Module, nn.Module]:
    """A small decoder in bf16 that was converted here, and one that plain torchao converted."""
    model = small_decoders.build("even").bfloat16()
    plain = in_plain_torchao(copy.deepcopy(model), compute)
    apply_blocks(model, BlockConfig(activation_checkpoint=checkpoint), "cpu")
    convert_linear_layers(model, PrecisionConfig(compute=compute), emulate=True)
    return model, plain


@COMPUTES
@pytest.mark.parametrize("checkpoint", ["selective", pytest.param("full", marks=pytest.mark.full)])
def test_recomputation_changes_no_bit(compute: str, checkpoint: str) -> None:
    (batch,) = small_decoders.batches("even", steps=1, ranks=1, microbatches=1)[0][0]
    losses, models = [], made(compute, checkpoint)
    for model in models:
        loss = small_decoders.loss_fn(model, batch)
        loss.backward()
        losses.append(loss.item())
    assert losses[0] == losses[1]
    ours, theirs = (dict(model.named_parameters()) for model in models)
    assert [*ours] == [*theirs]
    assert all(torch.equal(param.grad, theirs[name].grad) for name, param in ours.items())


@COMPUTES
def test_what_is_not_finite_shows(compute: str) -> None:
    layers = nn.Sequential(nn.Linear(16, 16))
    convert_linear_layers(layers, PrecisionConfig(compute=compute), emulate=True)
    x = torch.ones(16, 16)
    x[3, 5] = torch.inf
    assert not layers(x)[3].isfinite().any()


def operand(weight: torch.Tensor, dim: int) -> torch.Tensor:
    """Values that a product with `fp8_rowwise` sees: scales are powers of two that keep rows or columns below 448."""
    largest = weight.double().abs().amax(dim, keepdim=True)
    scale = torch.exp2(torch.ceil(torch.log2(largest / 448)))
    return (weight.double() / scale).float().to(torch.float8_e4m3fn).double() * scale


@pytest.mark.parametrize(("code", "least", "most"), [("fp8", 0.0, 1e-3), ("int8", 0.05, 1.0)])
def test_gathers_in_fp8_leave_the_operands_of_rowwise_products(code: str, least: float, most: float) -> None:
    """Both scales are powers of two, so a value is rounded again only where it is tiny beside its row."""
    weight = torch.randn(128, 1024, generator=torch.Generator().manual_seed(0)).mul(0.02).bfloat16()
    blocks = Blocks(((weight.numel(), False),), code)
    row, gathered = torch.empty(blocks.nbytes, dtype=torch.uint8), torch.empty_like(weight)
    blocks.encode(weight.flatten(), row)
    blocks.decode(row, gathered.view(-1))
    for dim in (0, 1):
        differ = (operand(weight, dim) != operand(gathered, dim)).float().mean().item()
        assert least <= differ <= most


def llama() -> nn.Module:
    return build(LLAMA, vocab_size=64)


def test_layers_keep_names_class_hooks_and_initializers() -> None:
    model, before = llama(), llama()
    query = model.get_submodule("layers.0.attention.query")
    seen: list[str] = []
    query.register_forward_pre_hook(lambda *_: seen.append("hook"))
    found = convert_linear_layers(model, PrecisionConfig(compute="fp8_rowwise"), emulate=True)
    assert found is not None
    assert [*model.state_dict()] == [*before.state_dict()]
    assert [name for name, _ in model.named_modules()] == [name for name, _ in before.named_modules()]
    assert model.get_submodule("layers.0.attention.query") is query
    assert isinstance(query, Linear)
    assert type(query).__name__ == "Linear"
    assert vars(query).keys() == vars(before.get_submodule("layers.0.attention.query")).keys()
    assert type(query) is type(model.get_submodule("layers.1.ffn.down")), "one class, and so one compilation"
    model.to_empty(device="cpu")
    assert isinstance(query, Linear)
    query.reset_parameters()
    assert 0.01 < query.weight.std() < 0.03
    model.get_submodule("layers.0.attention.query")(torch.ones(16, 32))
    assert seen == ["hook"]


def test_what_stays_is_told_with_its_reason() -> None:
    class Doubled(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    model = llama()
    block = model.get_submodule("layers.0")
    block.odd, block.own = nn.Linear(32, 8, device="meta"), Doubled(32, 32, device="meta")
    block.lora_A = nn.ModuleDict({"default": nn.Linear(32, 16, device="meta")})
    precision = PrecisionConfig(compute="fp8_tensorwise", fp8_exclude=["layers.1.*", "*.key"])
    found = convert_linear_layers(model, precision, emulate=True)
    assert found is not None
    others = "attention.query", "attention.value", "attention.out", "ffn.gate", "ffn.up", "ffn.down"
    assert found.converted == tuple(f"layers.0.{name}" for name in others)
    reasons = {"layers.0.odd": ODD_DIMS, "layers.0.own": OWN_FORWARD, "layers.0.lora_A.default": ADAPTER}
    reasons |= {"head": OUTSIDE, "layers.0.attention.key": EXCLUDED, "layers.1.ffn.up": EXCLUDED}
    assert reasons.items() <= found.kept.items()
    assert found.line().startswith("precision.compute=fp8_tensorwise: 6 linear layers multiply in 8 bits; others do")
    assert [row[1] for row in found.table().rows] == ["6", "8", "1", "1", "1", "1"]


@pytest.mark.parametrize(
    ("model", "precision", "told"),
    [
        (
            llama,
            PrecisionConfig(compute="fp8_rowwise", fp8_exclude=["layers.7.*"]),
            r"fp8_exclude=\[layers\.7\.\*\]: no",
        ),
        (llama, PrecisionConfig(compute="fp8_rowwise", fp8_exclude=["*"]), "named in precision.fp8_exclude"),
        (lambda: nn.Linear(32, 32), PrecisionConfig(compute="fp8_rowwise"), "outside of blocks"),
        (lambda: nn.Sequential(nn.LayerNorm(32)), PrecisionConfig(compute="fp8_rowwise"), "it has none"),
    ],
)
def test_nothing_to_convert_is_refused(model: Any, precision: PrecisionConfig, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        convert_linear_layers(model(), precision, emulate=True)


def test_a_string_is_no_list_of_names() -> None:
    with pytest.raises(ValueError, match=r"fp8_exclude='head': a list of names"):
        PrecisionConfig(compute="fp8_rowwise", fp8_exclude="head")  # type: ignore[arg-type]


def sharded_kinds(rank: int, ranks: int) -> tuple[list[str], list[str], str]:
    """What a library user sees of a small model: warnings, keys of its state dict, and its repr."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        sharded = shard(small_decoders.build("even"), 3, precision=PrecisionConfig(compute="fp8_rowwise"))
    told = [str(each.message) for each in seen if "fp8" in str(each.message)]
    return told, [*sharded.model.state_dict()], repr(sharded)


def test_emulation_is_said_once(pool: Pool) -> None:
    (told, keys, shown), (untold, _, _) = pool.run(sharded_kinds, 2)
    assert len(told) == 1
    assert "emulated in fp32" in told[0]
    assert untold == []
    assert keys == [*small_decoders.build("even").state_dict()]
    assert "in 8 bits (rowwise scales)" in shown
