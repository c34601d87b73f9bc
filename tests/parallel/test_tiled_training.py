"""Sharded models in tiles train as untiled ones, move what theory says, and hold a tile's parameters at a time."""

from __future__ import annotations

from typing import Any

import decoders
import pytest
import torch
import torch.distributed as dist
from allocated_peak import allocated_peak_bytes
from pool import Pool
from tiled_models import VOCAB, assert_close, reference_loss, sharded_llama
from torch import Tensor, nn

from dzero import OffloadConfig, Sharded, TorchOptimizer, shard, tile
from dzero.testing import expected_traffic

STEPS = 2
WEIGHTS = 3 * 64 * 4096
LARGE = {"layers.0.ffn": (8, 4096), "embedding": (3 * 4096, 8)}
"""Vocabulary and hidden features of models that are little but one module of as many weights."""
HOST = {"param": "host", "grad": "host", "master": "host", "moments": "host", "activations": "host"}
Block = dict[str, Any]


def steps(sharded: Sharded, block: Block) -> list[float]:
    """SGD, whose update is linear in the gradient, so that rounding stays rounding; the losses."""
    optim, layout = TorchOptimizer(sharded, torch.optim.SGD, lr=0.1, momentum=0.9, max_norm=1.0), sharded.layout
    generator, losses = torch.Generator().manual_seed(dist.get_rank()), []
    for _ in range(STEPS):
        sharded.ledger.take()
        for index in range(layout.microbatches):
            drawn = torch.randint(VOCAB, (2, 9), generator=generator)
            with sharded.microbatch(is_last=index == layout.microbatches - 1):
                of_model = nn.Module.__call__ if block.get("loss_tiles", 1) > 1 else reference_loss
                loss = of_model(sharded.model, drawn[:, :-1], drawn[:, 1:])
                optim.scale_loss(loss / layout.microbatches).backward()  # type: ignore[no-untyped-call]
            losses.append(loss.item())
        moved = sharded.ledger.take()
        optim.step()
    theory = expected_traffic(sharded)
    assert {entry: moved[entry] for entry in theory} == theory
    return losses


Told = tuple[list[float], dict[str, Tensor], int]


def trained(rank: int, ranks: int, blocks: list[Block], cell: dict[str, Any]) -> list[Told]:
    """Of each way of tiling: losses, whole parameters by name, and the number of units."""
    found = []
    for block in blocks:
        sharded = sharded_llama(block, **cell)
        losses = steps(sharded, block)
        params = {name: value.full_tensor() for name, value in sharded.model.state_dict().items()}
        found.append((losses, params, len(sharded.units)))
    return found


CELLS: list[tuple[int, dict[str, Any], Block]] = [
    (2, {"stage": 1, "microbatches": 2}, {"tiles": 2, "loss_tiles": 7, "embedding_tiles": 3}),
    (2, {"stage": 3, "microbatches": 2}, {"tiles": 7, "loss_tiles": 3, "embedding_tiles": 5}),
]
MORE: list[tuple[int, dict[str, Any], Block]] = [
    (1, {"stage": 3}, {"tiles": 2, "loss_tiles": 3}),
    (2, {"stage": 0}, {"tiles": 2, "loss_tiles": 2}),
    (2, {"stage": 2, "microbatches": 2}, {"tiles": 3, "loss_tiles": 2, "activation_checkpoint": "full"}),
    (2, {"stage": 3, "tied": True}, {"tiles": 2, "loss_tiles": 2, "activation_checkpoint": "full"}),
    (4, {"stage": 3, "microbatches": 2}, {"tiles": 3, "loss_tiles": 7, "activation_checkpoint": "full"}),
]
FIRST = pytest.mark.full("tests/parallel/test_tiled_training.py::test_training_in_tiles_is_training")


@pytest.mark.parametrize(("ranks", "cell", "block"), [*CELLS, *(pytest.param(*cell, marks=FIRST) for cell in MORE)])
def test_training_in_tiles_is_training(pool: Pool, ranks: int, cell: dict[str, Any], block: Block) -> None:
    """fp32: after some steps what was added in another order differs by a few times 2^-24 of the values."""
    for (theirs, want, units), (ours, got, tiled_units) in pool.run(trained, ranks, [{}, block], cell):
        head = 0 if cell.get("tied") else block["loss_tiles"]
        assert tiled_units == units + 2 * block["tiles"] + head + block.get("embedding_tiles", 0)
        torch.testing.assert_close(ours, theirs, rtol=2e-6, atol=0)
        assert_close(got, want, rtol=1e-4, atol=1e-6)


def test_tiles_on_the_host_train_to_the_same_bits(pool: Pool) -> None:
    block = {"tiles": 3, "loss_tiles": 2, "embedding_tiles": 2, "activation_checkpoint": "full"}
    (want,), (got,) = (pool.run(trained, 2, [block], {"offload": OffloadConfig(**tiers)})[0] for tiers in ({}, HOST))
    assert got[0] == want[0]
    assert_close(got[1], want[1], rtol=0, atol=0)


def peaks(rank: int, ranks: int, what: str) -> dict[tuple[int, bool], tuple[int, int]]:
    """By the number of tiles, and whether they are frozen: what is allocated in forward, and in forward and backward,
    by a model that is little but an MLP or an embedding."""
    return {(n, frozen): peak(what, n, frozen) for n in (1, 8) for frozen in (True, False)}


def peak(what: str, n: int, frozen: bool) -> tuple[int, int]:
    vocab, ffn = LARGE[what]
    model: Any = decoders.with_values(vocab, hidden_size=64, layers=1, heads=2, kv_heads=2, ffn_size=ffn)
    model.head = torch.nn.Linear(64, 8, bias=False)
    tile(model.get_submodule(what).requires_grad_(not frozen), n)
    shard(model, stage=3, precision="fp32")
    tokens, outputs = torch.zeros(1, 4, dtype=torch.int64), []

    def forward() -> None:
        outputs.append(model(tokens).sum())

    def both() -> None:
        forward()
        outputs.pop().backward()

    both()  # FSDP2 and autograd make their lasting buffers
    model.zero_grad()
    cpu = torch.device("cpu")
    in_forward = allocated_peak_bytes(forward, cpu)
    outputs.pop().backward()
    model.zero_grad()
    return in_forward, allocated_peak_bytes(both, cpu)


GATHERED = "tests/parallel/test_tiled_training.py::test_a_tile_of_the_parameters_is_gathered_at_a_time"


@pytest.mark.parametrize("what", ["layers.0.ffn", pytest.param("embedding", marks=pytest.mark.full(GATHERED))])
def test_a_tile_of_the_parameters_is_gathered_at_a_time(pool: Pool, what: str) -> None:
    """What is gathered takes twice its bytes, FSDP2's buffer and the parameters. In backward a tile's gradients
    are whole as well; the reduced ones, 1/ranks of all, stay."""
    ranks, n, weights = 2, 8, 4 * WEIGHTS
    rest = 0.12 * weights  # attention, embedding, activations
    found = pool.run(peaks, ranks, what)[0]
    for frozen in (True, False):
        assert found[1, frozen][0] >= 2 * weights
        assert found[n, frozen][0] <= 2 * weights / n + rest
    assert found[1, True][1] >= 2 * weights
    assert found[n, True][1] <= 2 * weights / n + rest
    assert found[n, False][1] <= 3 * weights / n + weights / ranks + rest
