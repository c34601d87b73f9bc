"""Embedding and head as units of their own: what they move and hold, and that no bit depends on it."""

from __future__ import annotations

from typing import Any

import decoders
import pytest
import small_decoders
import torch
import torch.distributed as dist
import torch.nn.functional as F
from fake_ranks import fake_ranks
from live_tensors import live_bytes
from on_ranks import on_ranks
from parity_cells import whole
from torch import Tensor
from torch.distributed.tensor import DTensor
from training_loops import backward, params_of, unequal

from dzero import AdamW, OffloadConfig, Sharded, ZeroConfig, make_mesh, shard, testing

LAYERS, WIDTH, VOCAB = 2, 64, 512
APART, TOGETHER = ["Embedding", "Block", "Linear"], ["Block"]
HOST = OffloadConfig(param="host", grad="host", master="host", moments="host")


def sharded_llama(
    stage: int = 3,
    units: list[str] = APART,  # is not changed
    *,
    tied: bool = False,
    offload: OffloadConfig | None = None,
    microbatches: int = 1,
) -> Sharded:
    sizes = {"hidden_size": WIDTH, "layers": LAYERS, "kv_heads": 2, "ffn_size": 96}
    model = decoders.with_values(VOCAB, **sizes, tied=tied)
    mesh = make_mesh("cpu", replicate=dist.get_world_size() if stage == 0 else 1)
    zero = ZeroConfig(stage=stage, units=units)
    return shard(model, zero, offload=offload, mesh=mesh, microbatches=microbatches)


def tokens(seed: int) -> Tensor:
    return torch.randint(VOCAB, (2, 9), generator=torch.Generator().manual_seed(seed))


def loss_of(sharded: Sharded, seed: int) -> Tensor:
    return small_decoders.loss_fn(sharded.model, tokens(seed))


def step(sharded: Sharded, optim: AdamW, seed: int = 0) -> None:
    seeds = [100 * seed + 10 * index + dist.get_rank() for index in range(sharded.layout.microbatches)]
    backward(sharded, optim, [tokens(each) for each in seeds])
    optim.step()


@pytest.mark.parametrize(
    ("stage", "tied", "offload"), [(2, False, None), (3, False, None), (3, True, None), (3, False, HOST)]
)
def test_head_and_root_are_gathered_once_for_forward_and_backward(
    stage: int, tied: bool, offload: OffloadConfig | None
) -> None:
    units = LAYERS + 1 if tied else LAYERS + 3  # blocks and the root, which has the ends where they are tied
    stay = 1 if tied else 2
    by_hand = units if stage == 2 else 2 * 2 * units - 2 * stay
    with fake_ranks(2):
        classes = ["Block"] if tied else APART
        sharded = sharded_llama(stage, classes, tied=tied, offload=offload, microbatches=2)
        optim = AdamW(sharded)
        step(sharded, optim)
        sharded.ledger.take()
        step(sharded, optim)
        optim.synchronize()
        for moved in (sharded.ledger.take(), testing.expected_traffic(sharded)):
            assert moved[testing.Entry("unshard", "all_gather", "shard", "bfloat16")].calls == by_hand


def test_what_stays_for_backward_is_freed_where_none_comes() -> None:
    """Head and root are whole from a forward to its backward, in bf16. (test_state_bytes.py counts after it.)"""
    ends = 2 * (VOCAB * WIDTH + WIDTH)
    with fake_ranks(2):
        sharded = sharded_llama()
        rest = live_bytes()
        with torch.no_grad():
            loss_of(sharded, 0)
        assert live_bytes() == rest
        loss = loss_of(sharded, 1)
        assert all(isinstance(each, DTensor) for each in sharded.model.parameters())
        before = live_bytes()
        with torch.no_grad():
            loss_of(sharded, 2)
        assert before - live_bytes() == ends
        loss.backward()  # type: ignore[no-untyped-call]


def trained(stage: int, units: list[str], offload: OffloadConfig | None) -> dict[str, Tensor]:
    sharded = sharded_llama(stage, units, offload=offload, microbatches=2 if stage == 3 else 1)
    optim = AdamW(sharded, lr=1e-2)
    for index in range(2):
        step(sharded, optim, index)
        with torch.no_grad():  # gathers head and root, whose next values must not be these
            loss_of(sharded, index)
    optim.synchronize()
    return params_of(sharded)


@on_ranks(2)
def test_no_bit_depends_on_whether_the_ends_are_units(rank: int, ranks: int) -> list[str]:
    """What differs between a run with ends apart and one with all in the root, on the device, of other offloads."""
    wrong = []
    for stage, offload in ((1, None), (2, None), (3, HOST)):
        wrong += unequal(trained(stage, APART, offload), trained(stage, TOGETHER, None))
    return wrong


@on_ranks(2)
def test_ends_can_be_called_by_themselves(rank: int, ranks: int) -> list[str]:
    """The embedding by itself, as transformers users make `inputs_embeds`, and the head; before and after a forward."""
    wrong = []
    for stage in (1, 3):
        sharded = sharded_llama(stage)
        model: Any = sharded.model
        with torch.no_grad():
            wanted = whole(model.embedding.weight)[tokens(0)]
            for _ in range(2):
                features = torch.ones(2, WIDTH, dtype=torch.bfloat16)
                of_head = F.linear(features, whole(model.head.weight))
                wrong += [] if torch.equal(model.embedding(tokens(0)), wanted) else [f"embedding at {stage}"]
                wrong += [] if torch.equal(model.head(features), of_head) else [f"head at {stage}"]
                loss_of(sharded, 0)
    return wrong
