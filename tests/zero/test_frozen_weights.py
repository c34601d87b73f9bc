"""Frozen weights on every tier and in every format: the numbers of plain torch on decoded weights, in counted bytes.

What a format decodes to is asked in `tests/zero/inside/test_inside_formats.py`; here it is what a sharded model gives
out before its first step.
"""

from __future__ import annotations

import copy
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fake_ranks import fake_ranks
from live_tensors import live_bytes
from on_ranks import on_ranks
from parity_cells import whole
from pool import Pool
from torch import Tensor, nn

from dzero import (
    AdamW,
    CheckpointConfig,
    Checkpointer,
    DiskConfig,
    ModelInit,
    OffloadConfig,
    PrecisionConfig,
    Sharded,
    shard,
    testing,
)

WIDTH, HIDDEN, RANK, VOCAB, BLOCKS = 64, 192, 3, 40, 3
STEPS, SAMPLES = 4, 4
ODD = 37
PER_BLOCK = {"int8": 66, "nf4": 34}
"""Bytes of 64 elements: a code of 8 or 4 bits each, and a scale of 2 bytes."""


class Block(nn.Module):
    """Frozen matrices beside small trained ones, as LoRA has them; `odd` is never cut into equal parts."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH, bias=False)
        self.odd, self.narrow = nn.Linear(WIDTH, ODD, bias=False), nn.Linear(ODD, WIDTH)
        self.a, self.b = nn.Linear(WIDTH, RANK, bias=False), nn.Linear(RANK, WIDTH, bias=False)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return x + self.down(torch.relu(self.up(h))) + self.narrow(self.odd(h)) + self.b(self.a(h))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


QUANTIZED = {f"blocks.{block}.{name}.weight" for block in range(BLOCKS) for name in ("up", "down", "odd")}
"""All but `narrow`, whose rows are no whole blocks of 64 elements."""


def net() -> Net:
    torch.manual_seed(0)
    model = Net()
    for name, param in model.named_parameters():
        param.requires_grad_(".a." in name or ".b." in name)
    return model


def batches() -> list[Tensor]:
    return [torch.randint(VOCAB, (SAMPLES, 9), generator=torch.Generator().manual_seed(step)) for step in range(STEPS)]


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())


def oracle(decoded: dict[str, Tensor]) -> dict[str, Any]:
    """Plain torch in one process, whose weights begin with the values that the quantized ones stand for."""
    model = net()
    model.load_state_dict(decoded)
    optim = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.0)
    losses = []
    for tokens in batches():
        optim.zero_grad()
        loss = loss_of(model, tokens)
        loss.backward()  # type: ignore[no-untyped-call]
        optim.step()
        losses.append(loss.item())
    return {"losses": losses, "params": {name: param.detach() for name, param in model.named_parameters()}}


def sharded_net(stage: int, kind: str, offload: OffloadConfig | None = None, param: str = "fp32") -> Sharded:
    return shard(net(), stage, precision=PrecisionConfig(param=param, frozen=kind), offload=offload)


def wholes(sharded: Sharded) -> dict[str, Tensor]:
    return {name: whole(param) for name, param in sharded.model.named_parameters()}


def train(sharded: Sharded, optim: AdamW, steps: list[Tensor]) -> list[float]:
    """Steps on this rank's part of the batches; the losses of all ranks."""
    losses, rank, ranks = [], dist.get_rank(), dist.get_world_size()
    for tokens in steps:
        loss = loss_of(sharded.model, tokens.chunk(ranks)[rank])
        loss.backward()  # type: ignore[no-untyped-call]
        optim.step()
        optim.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item() / ranks)
    return losses


Settings = tuple[int, OffloadConfig | None]
ALL_ON_HOST = dict.fromkeys(("param", "grad", "master", "moments"), "host")


def trained(rank: int, ranks: int, kind: str, cells: list[Settings]) -> list[dict[str, Any]]:
    """Losses of all steps, and whole weights before and after them."""
    found = []
    for stage, offload in cells:
        sharded = sharded_net(stage, kind, offload)
        optim, decoded = AdamW(sharded, lr=1e-2, weight_decay=0.0), wholes(sharded)
        losses = train(sharded, optim, batches())
        optim.synchronize()
        found.append({"losses": losses, "decoded": decoded, "params": wholes(sharded)})
    return found


@pytest.mark.parametrize("kind", ["param", "nf4"])
def test_steps_are_those_of_plain_torch(pool: Pool, tmp_path: Path, kind: str) -> None:
    """And stages and tiers have the same bits; others are asked in tests/trainer/test_lora.py."""
    tiers = OffloadConfig(**ALL_ON_HOST, frozen="disk", disk=DiskConfig(paths=[str(tmp_path)], block_bytes=4096))
    cells: list[Settings] = [(3, None), (3, tiers)] if kind == "nf4" else [(1, None)]
    found = pool.run(trained, 2, kind, cells)[0]
    want, model = oracle(found[0]["decoded"]), dict(net().named_parameters())
    changed = {name for name, param in model.items() if not torch.equal(param, found[0]["decoded"][name])}
    assert changed == (QUANTIZED if kind != "param" else set())
    for each in found:
        assert each["losses"] == pytest.approx(want["losses"], rel=1e-6)  # fp32, sums in another order
        for name, param in want["params"].items():
            if model[name].requires_grad:
                torch.testing.assert_close(each["params"][name], param, rtol=0, atol=1e-6)
            else:
                assert torch.equal(each["params"][name], param), name
        assert each["losses"] == found[0]["losses"], "all stages and tiers have the same bits"
        assert all(torch.equal(param, found[0]["params"][name]) for name, param in each["params"].items())


def measured(stage: int, kind: str) -> list[dict[str, Any]]:
    """What a rank holds between steps and moves in one, and what the formulas say; on the device and on the host."""
    found = []
    for offload in (None, OffloadConfig(frozen="host")):
        sharded = sharded_net(stage, kind, offload, "bf16")
        optim = AdamW(sharded)
        train(sharded, optim, batches()[:2])
        gc.collect()
        before = live_bytes()
        sharded.ledger.take()
        train(sharded, optim, batches()[2:3])
        moved = {entry: each for entry, each in sharded.ledger.take().items() if entry.phase == "unshard"}
        theory = {entry: each for entry, each in testing.expected_traffic(sharded).items() if entry.phase == "unshard"}
        held, foreseen, host = (
            optim.state_bytes(),
            testing.resting_bytes(sharded),
            testing.bytes_on_tiers(optim)["host"],
        )
        told = {"held": held, "foreseen": foreseen, "host": host, "moved": moved, "theory": theory}
        found.append({**told, "left": live_bytes() - before, "shown": repr(sharded)})
    return found


@pytest.mark.product(keep=1)
@pytest.mark.parametrize(("stage", "kind"), [(3, "nf4"), (0, "int8"), (3, "int8"), (0, "nf4")])
def test_a_rank_holds_and_sends_the_bytes_of_the_formula(stage: int, kind: str) -> None:
    def stored_bytes(rows: int, elems: int) -> int:
        return rows * elems // 64 * PER_BLOCK[kind]

    ranks = 2 if stage == 3 else 1
    odd = -(-ODD // ranks)
    quantized = BLOCKS * (
        stored_bytes(HIDDEN // ranks, WIDTH) + stored_bytes(WIDTH // ranks, HIDDEN) + stored_bytes(odd, WIDTH)
    )
    narrow, biases = WIDTH * ODD, HIDDEN + WIDTH
    others = 2 * (2 * VOCAB * WIDTH + BLOCKS * (narrow + biases + 2 * WIDTH)) // ranks
    trained = BLOCKS * WIDTH * 2 * RANK
    padded = BLOCKS * WIDTH // 2 if stage == 3 else 0  # the 3 rows of an `a` on 2 ranks are padded to 4
    with fake_ranks(2, rank=1):
        on_device, on_host = measured(stage, kind)
    frozen = on_device["foreseen"]["frozen"]
    assert frozen == on_host["foreseen"]["frozen"] == quantized + others
    assert (on_device["held"]["frozen"], on_host["held"]["frozen"]) == (frozen, 0)
    assert (on_device["host"], on_host["host"] >= frozen) == (0, True)
    for found in (on_device, on_host):
        assert found["held"]["param"] == found["foreseen"]["param"] == 2 * (trained // ranks + padded)
        assert found["moved"] == found["theory"]
        assert found["left"] == 0, "decoded weights are freed after use"
        assert kind in found["shown"]


def resumed(rank: int, ranks: int, stage: int, kind: str, folder: Path, first: int, last: int) -> dict[str, Any]:
    sharded = sharded_net(stage, kind)
    decoded = wholes(sharded)
    if first:  # other values, which the checkpoint's replace
        with torch.no_grad():
            for param in sharded.model.parameters():
                param.mul_(0.5)
    optim = AdamW(sharded, lr=1e-2, weight_decay=0.0)
    with Checkpointer(CheckpointConfig(folder=str(folder)), sharded, optim) as checkpoints:
        assert (checkpoints.resume("auto") is not None) == (first > 0)
        losses = train(sharded, optim, batches()[first:last])
        optim.synchronize()
        checkpoints.save(last, {})
    return {"losses": losses, "decoded": decoded, "params": wholes(sharded)}


@pytest.mark.product(keep=1)
@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_a_checkpoint_gives_back_the_same_bytes_on_other_ranks(pool: Pool, tmp_path: Path, kind: str) -> None:
    first = pool.run(resumed, 2, 3, kind, tmp_path, 0, 2)[0]
    second = pool.run(resumed, 1, 0, kind, tmp_path, 2, 4)[0]
    assert [*first["losses"], *second["losses"]] == pytest.approx(oracle(first["decoded"])["losses"], rel=1e-6)
    for name in QUANTIZED:
        assert torch.equal(second["params"][name], first["decoded"][name])


@pytest.mark.product(keep=1)
@pytest.mark.parametrize("tier", ["host", "device"])
@on_ranks(2)
def test_weights_that_are_written_are_quantized_anew(rank: int, ranks: int, tier: str) -> None:
    """Other values, as a state dict and by hand; what is held of them is what a model with those values holds."""
    sharded = sharded_net(3, "nf4", OffloadConfig(frozen=tier))
    train(sharded, AdamW(sharded), batches()[:1])
    values = {name: value.detach() * 2 for name, value in net().state_dict().items()}
    others = sharded_net(3, "param").model.state_dict()
    sharded.model.load_state_dict({name: value * 2 for name, value in others.items()})
    for added in (0, 1):
        with torch.no_grad():
            sharded.model.get_parameter("blocks.0.up.weight").add_(added)
        values["blocks.0.up.weight"] += added
        fresh = net()
        fresh.load_state_dict(values)
        want = wholes(shard(fresh, 3, precision=PrecisionConfig(param="fp32", frozen="nf4")))
        values = {name: whole(value) for name, value in sharded.model.state_dict().items()}
        assert all(torch.equal(value, want[name]) for name, value in values.items())
        plain = net()
        plain.load_state_dict(values)
        tokens = batches()[0]
        torch.testing.assert_close(loss_of(sharded.model, tokens), loss_of(plain, tokens), rtol=1e-6, atol=0)


def test_weights_without_values_are_refused() -> None:
    meta = torch.device("meta")
    with meta:
        model = net()
    told = r"precision.frozen=nf4: blocks.0.up.weight has no values on meta"
    with fake_ranks(1), pytest.raises(ValueError, match=told):
        shard(model, 3, precision=PrecisionConfig(frozen="nf4"), init=ModelInit(device=meta))


NARROW = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8).requires_grad_(False))


@pytest.mark.parametrize(
    ("model", "kind", "tier", "told"),
    [
        (net().requires_grad_(True), "nf4", None, "precision.frozen=nf4 has no effect with no frozen matrix"),
        (net().requires_grad_(True), "param", "host", "offload.frozen=host has no effect with only trained parameters"),
        (NARROW, "nf4", None, "precision.frozen=nf4 has no effect with no frozen matrix"),
    ],
)
def test_settings_without_effect_are_refused(model: nn.Module, kind: str, tier: str | None, told: str) -> None:
    with fake_ranks(1), pytest.raises(ValueError, match=told):
        shard(copy.deepcopy(model), 3, precision=PrecisionConfig(frozen=kind), offload=OffloadConfig(frozen=tier))
