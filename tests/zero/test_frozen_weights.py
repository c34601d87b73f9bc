"""Frozen weights on every tier and in every format: the numbers of plain torch on decoded weights, in counted bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from parity_cells import whole
from pool import Pool, WorkerError
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
)
from dzero.zero.cost_model import expected_traffic, resting_bytes
from dzero.zero.fsdp_internals import groups_of
from dzero.zero.quantized_weights import CODECS

WIDTH, HIDDEN, RANK, VOCAB, BLOCKS = 64, 192, 3, 40, 3
STEPS, SAMPLES = 4, 4
ODD = 37


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


def net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    model = Net()
    for name, param in model.named_parameters():
        param.requires_grad_(".a." in name or ".b." in name)
    return model


def batches() -> list[Tensor]:
    return [torch.randint(VOCAB, (SAMPLES, 9), generator=torch.Generator().manual_seed(step)) for step in range(STEPS)]


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())


def stored(model: Net, kind: str) -> Net:
    """The model with the values that its quantized weights stand for, rounded to the dtype they have."""
    for name, param in model.named_parameters():
        if name in QUANTIZED and kind != "param":
            CODECS[kind].decode(CODECS[kind].encode(param.data), param.data)
    return model


def oracle(kind: str) -> dict[str, Any]:
    """Plain torch in one process."""
    model = stored(net(), kind)
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


def trained(rank: int, ranks: int, stage: int, kind: str, offload: OffloadConfig | None = None) -> dict[str, Any]:
    sharded = sharded_net(stage, kind, offload)
    optim = AdamW(sharded, lr=1e-2, weight_decay=0.0)
    losses = train(sharded, optim, batches())
    optim.synchronize()
    return {"losses": losses, "params": {name: whole(param) for name, param in sharded.model.named_parameters()}}


def tiers(folder: Path) -> dict[str, OffloadConfig]:
    disk = DiskConfig(paths=[str(folder)], block_bytes=4096)
    every = dict.fromkeys(("param", "grad", "master", "moments"), "host")
    return {
        "frozen on the host": OffloadConfig(frozen="host"),
        "frozen on disk": OffloadConfig(frozen="disk", disk=disk),
        "all on the host": OffloadConfig(**every),
        "frozen on the device": OffloadConfig(**every, frozen="device"),
        "frozen on disk, the rest on the host": OffloadConfig(**every, frozen="disk", disk=disk),
        "frozen on the host, the rest on disk": OffloadConfig(**dict.fromkeys(every, "disk"), frozen="host", disk=disk),
        "all on disk": OffloadConfig(**dict.fromkeys(every, "disk"), disk=disk),
    }


@pytest.mark.parametrize("kind", ["param", *CODECS])
def test_steps_are_those_of_plain_torch_at_every_stage_and_tier(pool: Pool, tmp_path: Path, kind: str) -> None:
    want = oracle(kind)
    cells = [(stage, None) for stage in range(4)] + [(3, offload) for offload in tiers(tmp_path).values()]
    cells += [(0, OffloadConfig(frozen="host"))]
    for ranks in (1, 2):
        found = [pool.run(trained, ranks, stage, kind, offload)[0] for stage, offload in cells]
        for each in found:
            assert each["losses"] == pytest.approx(want["losses"], rel=1e-6)
            for name, param in want["params"].items():
                if param.requires_grad or ".a." in name or ".b." in name:
                    torch.testing.assert_close(each["params"][name], param, rtol=0, atol=1e-6)
                else:
                    assert torch.equal(each["params"][name], param), name
            assert each["losses"] == found[0]["losses"], "all stages and tiers have the same bits"
            assert all(torch.equal(param, found[0]["params"][name]) for name, param in each["params"].items())


def measured(rank: int, ranks: int, stage: int, kind: str, offload: OffloadConfig | None) -> dict[str, Any]:
    """What a rank holds between steps and moves in one, and what the formulas say."""
    sharded = sharded_net(stage, kind, offload, "bf16")
    optim = AdamW(sharded)
    train(sharded, optim, batches()[:1])
    sharded.ledger.take()
    train(sharded, optim, batches()[1:2])
    moved = {entry: each for entry, each in sharded.ledger.take().items() if entry.phase == "unshard"}
    theory = expected_traffic(sharded.layout, sharded.shapes)
    gathered = [
        tensor for unit in sharded.units for group in groups_of(unit.modules[0]) for tensor in group.fsdp_params
    ]
    return {
        "held": optim.state_bytes(),
        "foreseen": resting_bytes(sharded.layout, sharded.shapes),
        "moved": moved,
        "theory": {entry: each for entry, each in theory.items() if entry.phase == "unshard"},
        "host": sum(
            each.elems * each.dtype.itemsize
            for (name, key), each in optim.offload.buffer_layout.at.items()
            if each.slot.startswith("frozen")
        ),
        "left": sum(t.untyped_storage().nbytes() for p in gathered for t in p._unsharded_inner_tensors),
        "shown": repr(sharded),
    }


PER_BLOCK = {"int8": 66, "nf4": 34}


@pytest.mark.parametrize("kind", CODECS)
@pytest.mark.parametrize("stage", [0, 3])
def test_a_rank_holds_and_sends_the_bytes_of_the_formula(pool: Pool, stage: int, kind: str) -> None:
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
    for offload in (None, OffloadConfig(frozen="host")):
        for found in pool.run(measured, 2, stage, kind, offload):
            foreseen, held = found["foreseen"], found["held"]
            assert foreseen.frozen == quantized + others
            assert held.get("frozen") == (0 if offload else foreseen.frozen)
            assert found["host"] == (foreseen.frozen if offload else 0)
            assert held["param"] == foreseen.param == 2 * (trained // ranks + padded)
            assert found["moved"] == found["theory"]
            assert found["left"] == 0, "decoded weights are freed after use"
            assert kind in found["shown"]


def resumed(rank: int, ranks: int, stage: int, kind: str, folder: Path, first: int, last: int) -> dict[str, Any]:
    sharded = sharded_net(stage, kind)
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
    return {"losses": losses, "params": {name: whole(param) for name, param in sharded.model.named_parameters()}}


@pytest.mark.parametrize("kind", CODECS)
def test_a_checkpoint_gives_back_the_same_bytes_on_other_ranks(pool: Pool, tmp_path: Path, kind: str) -> None:
    want = pool.run(trained, 2, 3, kind, None)[0]
    first = pool.run(resumed, 2, 3, kind, tmp_path, 0, 2)[0]
    second = pool.run(resumed, 1, 0, kind, tmp_path, 2, 4)[0]
    assert [*first["losses"], *second["losses"]] == pytest.approx(want["losses"], rel=1e-6)
    for name in QUANTIZED:
        assert torch.equal(second["params"][name], want["params"][name])


def written(rank: int, ranks: int, kind: str, offload: OffloadConfig | None) -> dict[str, Tensor]:
    """Other values, as a state dict and by hand."""
    sharded = sharded_net(3, kind, offload)
    optim = AdamW(sharded)
    train(sharded, optim, batches()[:1])
    others = sharded_net(3, "param").model.state_dict()
    sharded.model.load_state_dict({name: value * 2 for name, value in others.items()})
    with torch.no_grad():
        sharded.model.get_parameter("blocks.0.up.weight").add_(1)
    state = {name: whole(value) for name, value in sharded.model.state_dict().items()}
    loss = loss_of(sharded.model, batches()[0])
    return {**state, "loss": loss.detach()}


@pytest.mark.parametrize("tier", ["device", "host"])
def test_weights_that_are_written_are_quantized_anew(pool: Pool, tier: str) -> None:
    found = pool.run(written, 2, "nf4", OffloadConfig(frozen=tier))[0]
    model = net()
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(2)
        stored(model, "nf4")
        first = model.get_parameter("blocks.0.up.weight")
        first.add_(1)
        CODECS["nf4"].decode(CODECS["nf4"].encode(first.data), first.data)
    assert all(torch.equal(found[name], param) for name, param in model.named_parameters())
    torch.testing.assert_close(found["loss"], loss_of(model, batches()[0]).detach(), rtol=1e-6, atol=0)


def without_values(rank: int, ranks: int) -> None:
    with torch.device("meta"):
        model = net()
    shard(model, 3, precision=PrecisionConfig(frozen="nf4"), init=ModelInit(device=torch.device("meta")))


def test_weights_without_values_are_refused(pool: Pool) -> None:
    with pytest.raises(WorkerError, match=r"precision.frozen=nf4: blocks.0.up.weight has no values on meta"):
        pool.run(without_values, 1)


def refused(rank: int, ranks: int, model: nn.Module, kind: str, tier: str | None) -> None:
    shard(model, 3, precision=PrecisionConfig(frozen=kind), offload=OffloadConfig(frozen=tier))


NARROW = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8).requires_grad_(False))


@pytest.mark.parametrize(
    ("model", "kind", "tier", "told"),
    [
        (net().requires_grad_(True), "nf4", None, "precision.frozen=nf4 has no effect with no frozen matrix"),
        (net().requires_grad_(True), "param", "host", "offload.frozen=host has no effect with only trained parameters"),
        (NARROW, "nf4", None, "precision.frozen=nf4 has no effect with no frozen matrix"),
    ],
)
def test_settings_without_effect_are_refused(
    pool: Pool, model: nn.Module, kind: str, tier: str | None, told: str
) -> None:
    with pytest.raises(WorkerError, match=told):
        pool.run(refused, 1, model, kind, tier)
