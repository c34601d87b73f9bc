"""Sharded models in tiles train as untiled ones, move what theory says, and hold a tile's parameters at a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from allocated_peak import allocated_peak_bytes
from pool import Pool
from tiled_models import VOCAB, assert_close, reference_loss, sharded_llama
from torch import Tensor, nn

from dzero import OffloadConfig, PrecisionConfig, Sharded, TorchOptimizer, ZeroConfig, shard, tile
from dzero.models.config import LlamaShape
from dzero.models.llama import Llama
from dzero.parallel.config import BlockConfig
from dzero.zero.cost_model import expected_traffic

STEPS = 3
WEIGHTS = 3 * 64 * 4096
LARGE = {"layers.0.ffn": (8, 4096), "embedding": (3 * 4096, 8)}
"""Vocabulary and hidden features of models that are little but one module of as many weights."""
HOST = {"param": "host", "grad": "host", "master": "host", "moments": "host"}


def steps(sharded: Sharded, block: BlockConfig) -> list[float]:
    """SGD, whose update is linear in the gradient, so that rounding stays rounding; the losses."""
    optim, layout = TorchOptimizer(sharded, torch.optim.SGD, lr=0.1, momentum=0.9, max_norm=1.0), sharded.layout
    generator, losses = torch.Generator().manual_seed(dist.get_rank()), []
    for _ in range(STEPS):
        sharded.ledger.take()
        for index in range(layout.microbatches):
            drawn = torch.randint(VOCAB, (2, 9), generator=generator)
            with sharded.microbatch(is_last=index == layout.microbatches - 1):
                of_model = nn.Module.__call__ if (block.loss_tiles or 1) > 1 else reference_loss
                loss = of_model(sharded.model, drawn[:, :-1], drawn[:, 1:])
                optim.scale_loss(loss / layout.microbatches).backward()  # type: ignore[no-untyped-call]
            losses.append(loss.item())
        moved = sharded.ledger.take()
        optim.step()
    theory = expected_traffic(layout, sharded.shapes)
    assert {entry: moved[entry] for entry in theory} == theory
    return losses


def trained(
    rank: int, ranks: int, block: BlockConfig, cell: dict[str, Any]
) -> tuple[list[float], dict[str, Tensor], int]:
    """Losses, whole parameters by name, and the number of units."""
    sharded = sharded_llama(block, **cell)
    losses = steps(sharded, block)
    return losses, {k: v.full_tensor() for k, v in sharded.model.state_dict().items()}, len(sharded.units)


CELLS: list[tuple[int, dict[str, Any], dict[str, Any]]] = [
    (1, {"stage": 3}, {"tiles": 2, "loss_tiles": 3}),
    (2, {"stage": 0}, {"tiles": 2, "loss_tiles": 2}),
    (2, {"stage": 1, "microbatches": 2}, {"tiles": 2, "loss_tiles": 7, "embedding_tiles": 3}),
    (2, {"stage": 2, "microbatches": 2}, {"tiles": 3, "loss_tiles": 2, "activation_checkpoint": "full"}),
    (2, {"stage": 3, "microbatches": 2}, {"tiles": 7, "loss_tiles": 3, "embedding_tiles": 5}),
    (2, {"stage": 3, "tied": True}, {"tiles": 2, "loss_tiles": 2, "activation_checkpoint": "full"}),
    (4, {"stage": 3, "microbatches": 2}, {"tiles": 3, "loss_tiles": 7, "activation_checkpoint": "full"}),
]


@pytest.mark.product(keep=3)
@pytest.mark.parametrize(("ranks", "cell", "block"), CELLS, ids=[f"{r} ranks, stage {c['stage']}" for r, c, _ in CELLS])
def test_training_in_tiles_is_training(pool: Pool, ranks: int, cell: dict[str, Any], block: dict[str, Any]) -> None:
    """fp32: after three steps what was added in another order differs by a few times 2^-24 of the values."""
    plain = pool.run(trained, ranks, BlockConfig(), cell)
    tiled = pool.run(trained, ranks, BlockConfig(**block), cell)
    head = 0 if cell.get("tied") else block["loss_tiles"]
    assert tiled[0][2] == plain[0][2] + 2 * block["tiles"] + head + block.get("embedding_tiles", 0)
    for ours, theirs in zip(tiled, plain, strict=True):
        torch.testing.assert_close(ours[0], theirs[0], rtol=2e-6, atol=0)
        assert_close(ours[1], theirs[1], rtol=1e-4, atol=1e-6)


def test_training_in_16_bits_stays_near(pool: Pool) -> None:
    """bf16 parameters over fp32 masters: a working copy may round to the other neighbour, 2^-8 away."""
    cell = {"stage": 3, "param": "bf16"}
    plain = pool.run(trained, 2, BlockConfig(), cell)[0]
    tiled = pool.run(trained, 2, BlockConfig(tiles=3, loss_tiles=3), cell)[0]
    torch.testing.assert_close(tiled[0], plain[0], rtol=2e-3, atol=0)
    assert_close(tiled[1], plain[1], rtol=2.0**-7, atol=1e-3)


def offloaded(rank: int, ranks: int) -> None:
    """Tiers change no bit of a model in tiles either."""
    block = BlockConfig(tiles=3, loss_tiles=2, embedding_tiles=2, activation_checkpoint="full")
    seen = []
    for offload in (OffloadConfig(), OffloadConfig(**HOST, activations="host")):
        sharded = sharded_llama(block, offload=offload)
        seen.append((steps(sharded, block), {k: v.full_tensor() for k, v in sharded.model.state_dict().items()}))
    assert seen[0][0] == seen[1][0]
    assert_close(seen[1][1], seen[0][1], rtol=0, atol=0)


def test_tiles_on_the_host_train_to_the_same_bits(pool: Pool) -> None:
    pool.run(offloaded, 2)


def peaks(rank: int, ranks: int, what: str, n: int, frozen: bool) -> tuple[int, int]:
    """Allocated in forward, and in forward and backward, by a model that is little but an MLP or an embedding."""
    vocab, ffn = LARGE[what]
    model = Llama(LlamaShape(vocab_size=vocab, hidden_size=64, layers=1, heads=2, kv_heads=2, ffn_size=ffn))
    model.head = torch.nn.Linear(64, 8, bias=False)
    tile(model.get_submodule(what).requires_grad_(not frozen), n)
    shard(model, ZeroConfig(stage=3), precision=PrecisionConfig(param="fp32"))
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


@pytest.mark.parametrize("what", ["layers.0.ffn", "embedding"])
def test_a_tile_of_the_parameters_is_gathered_at_a_time(pool: Pool, what: str) -> None:
    """What is gathered takes twice its bytes, FSDP2's buffer and the parameters. In backward a tile's gradients
    are whole as well; the reduced ones, 1/ranks of all, stay."""
    ranks, n, weights = 2, 8, 4 * WEIGHTS
    rest = 0.12 * weights  # attention, embedding, activations
    whole, in_tiles = ([pool.run(peaks, ranks, what, tiles, frozen)[0] for frozen in (True, False)] for tiles in (1, n))
    for frozen in (0, 1):
        assert whole[frozen][0] >= 2 * weights
        assert in_tiles[frozen][0] <= 2 * weights / n + rest
    assert whole[0][1] >= 2 * weights
    assert in_tiles[0][1] <= 2 * weights / n + rest
    assert in_tiles[1][1] <= 3 * weights / n + weights / ranks + rest
