"""Products in 8 bits: the bits of plain torchao, at every stage and on every tier, and which layers make them."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import decoders
import parity_cells
import pytest
import reference
import small_decoders
import torch
from fake_ranks import fake_ranks
from on_ranks import on_ranks
from parity_cells import Cell, in_plain_torchao
from pool import Pool
from torch import nn
from torch.utils.checkpoint import checkpoint

from dzero import ModelInit, OffloadConfig, PrecisionConfig, Sharded, shard

HOST = OffloadConfig(grad="host", master="host", moments="host")
ALL_AWAY = OffloadConfig(param="host", grad="host", master="host", moments="host")


@pytest.mark.product(keep=1)
@pytest.mark.parametrize(
    ("compute", "stage", "microbatches", "offload"),
    [
        ("fp8_tensorwise", 3, 1, ALL_AWAY),
        ("fp8_rowwise", 2, 2, HOST),
        ("fp8_tensorwise", 1, 2, None),
        ("fp8_tensorwise", 2, 1, None),
        ("fp8_rowwise", 0, 1, None),
        ("fp8_rowwise", 3, 1, None),
    ],
    ids=str,
)
def test_stages_and_tiers_have_the_bits_of_plain_torchao(
    pool: Pool, compute: str, stage: int, microbatches: int, offload: OffloadConfig | None
) -> None:
    cell = Cell(stage, "bf16", microbatches, "fp32", "even", 2, compute)
    result, (want,) = parity_cells.train_beside_oracles(pool, cell, offload)
    assert parity_cells.differences(result, want) == []
    in_16_bits = parity_cells.oracle(Cell(stage, "bf16", microbatches, "fp32", "even", 2))
    assert result["norms"] != in_16_bits.norms


class Recomputed(nn.Module):
    """A block whose backward computes it again, after another block has used its memory."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = checkpoint(self.block, x, use_reentrant=False)
        return out


@pytest.mark.parametrize("compute", ["fp8_tensorwise", "fp8_rowwise"])
@on_ranks(1)
def test_recomputation_changes_no_bit(rank: int, ranks: int, compute: str) -> None:
    """Compare a model whose blocks are computed twice with one of plain torchao whose blocks are not."""
    model = small_decoders.build("even")
    model.layers = nn.ModuleList(Recomputed(block) for block in model.layers)
    sharded = shard(model, 0, precision=PrecisionConfig(compute=compute))
    plain = in_plain_torchao(small_decoders.build("even"), compute)
    for param in plain.parameters():
        param.data = reference.to_working(param.data, torch.bfloat16)
    (batch,) = small_decoders.batches("even", steps=1, ranks=1, microbatches=1)[0][0]
    losses = [small_decoders.loss_fn(each, batch) for each in (sharded.model, plain)]
    for loss in losses:
        loss.backward()  # type: ignore[no-untyped-call]
    assert losses[0].item() == losses[1].item()
    grads = {name.replace(".block.", "."): param.grad for name, param in sharded.model.named_parameters()}
    assert all(torch.equal(parity_cells.whole(grads[name]), param.grad) for name, param in plain.named_parameters())


def sharded_on_meta(model: nn.Module, **precision: Any) -> Sharded:
    with fake_ranks(2), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        meta = torch.device("meta")
        return shard(model, 3, precision=PrecisionConfig(**precision), init=ModelInit(device=meta))


def test_layers_keep_names_class_hooks_and_attributes() -> None:
    model, before = decoders.on_meta(), decoders.on_meta()
    query, plain = (each.get_submodule("layers.0.attention.query") for each in (model, before))
    seen: list[str] = []
    query.register_forward_pre_hook(lambda *_: seen.append("hook"))
    sharded_on_meta(model, compute="fp8_rowwise")
    assert [*model.state_dict()] == [*before.state_dict()]
    assert [name for name, _ in model.named_modules()] == [name for name, _ in before.named_modules()]
    assert model.get_submodule("layers.0.attention.query") is query
    assert isinstance(query, type(plain))
    assert type(query).__name__ == type(plain).__name__


def test_what_stays_is_told_with_its_reason() -> None:
    class Doubled(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    model = decoders.on_meta()
    block: Any = model.get_submodule("layers.0")
    block.odd, block.own = nn.Linear(32, 8, device="meta"), Doubled(32, 32, device="meta")
    block.lora_A = nn.ModuleDict({"default": nn.Linear(32, 16, device="meta")})
    found = sharded_on_meta(model, compute="fp8_tensorwise", fp8_exclude=["layers.1.*", "*.key"]).float8
    assert found is not None
    others = "attention.query", "attention.value", "attention.out", "ffn.gate", "ffn.up", "ffn.down"
    assert found.converted == tuple(f"layers.0.{name}" for name in others)
    excluded = dict.fromkeys(("layers.0.attention.key", "layers.1.ffn.up"), "named in precision.fp8_exclude")
    reasons = {
        "layers.0.odd": "dims that are no multiples of 16",
        "layers.0.own": "a forward of its own",
        "layers.0.lora_A.default": "matrix of an adapter",
        "head": "outside of blocks",
        **excluded,
    }
    assert reasons.items() <= found.kept.items()
    assert found.line().startswith("precision.compute=fp8_tensorwise: 6 linear layers multiply in 8 bits; others do")
    assert [row[1] for row in found.table().rows] == ["6", "8", "1", "1", "1", "1"]


@pytest.mark.parametrize(
    ("model", "exclude", "told"),
    [
        (decoders.on_meta(), ["layers.7.*"], r"fp8_exclude=\[layers\.7\.\*\]: no"),
        (decoders.on_meta(), ["*"], "named in precision.fp8_exclude"),
        (nn.ModuleDict({"only": nn.Linear(32, 32)}), [], "outside of blocks"),
        (nn.Sequential(nn.LayerNorm(32)), [], "it has none"),
        (nn.Sequential(nn.Linear(32, 32)), "head", "fp8_exclude='head': a list of names"),
    ],
)
def test_nothing_to_convert_is_refused(model: nn.Module, exclude: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        sharded_on_meta(copy.deepcopy(model), compute="fp8_rowwise", fp8_exclude=exclude)


def sharded_kinds(rank: int, ranks: int) -> tuple[list[str], str]:
    """What a library user sees of a small model: warnings, and its repr."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        sharded = shard(small_decoders.build("even"), 3, precision=PrecisionConfig(compute="fp8_rowwise"))
    return [str(each.message) for each in seen if "fp8" in str(each.message)], repr(sharded)


def test_emulation_is_said_once(pool: Pool) -> None:
    (told, shown), (untold, _) = pool.run(sharded_kinds, 2)
    assert len(told) == 1
    assert "emulated in fp32" in told[0]
    assert untold == []
    assert "in 8 bits (rowwise scales)" in shown
