"""Embedding and head as units of their own: what they move and hold, and that no bit depends on it."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from parity_cells import whole
from pool import Pool
from torch import Tensor
from training_loops import params_of

from dzero import AdamW, CheckpointConfig, Checkpointer, OffloadConfig, Sharded, ZeroConfig, make_mesh, shard
from dzero.comm.ledger import Entry
from dzero.models.config import LlamaShape
from dzero.models.llama import Llama
from dzero.zero import units as units_module
from dzero.zero.cost_model import expected_traffic
from dzero.zero.fsdp_internals import groups_of

LAYERS, WIDTH, VOCAB = 2, 64, 512
TIERS = {
    "device": OffloadConfig(),
    "host": OffloadConfig(param="host", grad="host", master="host", moments="host"),
}


def sharded_llama(
    stage: int = 3, units: list[str] | None = None, *, tied: bool = False, tier: str = "device", microbatches: int = 1
) -> Sharded:
    torch.manual_seed(0)
    sizes = {"hidden_size": WIDTH, "layers": LAYERS, "heads": 4, "kv_heads": 2, "ffn_size": 96}
    model = Llama(LlamaShape(vocab_size=VOCAB, **sizes, tied=tied))
    ranks = torch.distributed.get_world_size()
    mesh = make_mesh("cpu", replicate=ranks if stage == 0 else 1)
    zero = ZeroConfig(stage=stage, units=units)
    with patch.object(units_module, "OWN_UNIT_ELEMS", VOCAB * WIDTH):
        return shard(model, zero, offload=TIERS[tier], mesh=mesh, microbatches=microbatches)


def tokens(seed: int) -> Tensor:
    return torch.randint(VOCAB, (2, 9), generator=torch.Generator().manual_seed(seed))


def loss_of(sharded: Sharded, seed: int) -> Tensor:
    drawn = tokens(seed)
    return F.cross_entropy(sharded.model(drawn[:, :-1]).float().flatten(0, 1), drawn[:, 1:].flatten())


def step(sharded: Sharded, optim: AdamW, seed: int = 0) -> None:
    microbatches, rank = sharded.layout.microbatches, torch.distributed.get_rank()
    for index in range(microbatches):
        with sharded.microbatch(is_last=index == microbatches - 1):
            loss_of(sharded, 100 * seed + 10 * index + rank).backward()  # type: ignore[no-untyped-call]
    optim.step()


def gathers(rank: int, ranks: int, stage: int, tied: bool, tier: str) -> list[int]:
    """Calls of a step, as the ledger and as the table has them."""
    sharded = sharded_llama(stage, tied=tied, tier=tier, microbatches=2)
    optim = AdamW(sharded)
    step(sharded, optim)
    sharded.ledger.take()
    step(sharded, optim)
    optim.synchronize()
    entry = Entry("unshard", "all_gather", "shard", "bfloat16")
    return [moved[entry].calls for moved in (sharded.ledger.take(), expected_traffic(sharded.layout, sharded.shapes))]


@pytest.mark.parametrize(("stage", "tied", "tier"), [(2, False, "device"), (3, False, "device"), (3, True, "device")])
def test_head_and_root_are_gathered_once_for_forward_and_backward(
    pool: Pool, stage: int, tied: bool, tier: str
) -> None:
    units = LAYERS + 1 if tied else LAYERS + 3  # blocks and the root, which has the ends where they are tied
    stay = 1 if tied else 2
    by_hand = units if stage == 2 else 2 * 2 * units - 2 * stay
    assert pool.run(gathers, 2, stage, tied, tier)[0] == [by_hand, by_hand]


def test_so_they_are_where_parameters_come_from_the_host(pool: Pool) -> None:
    assert pool.run(gathers, 2, 3, False, "host")[0] == [2 * (2 * 5 - 2)] * 2


def gathered(sharded: Sharded) -> list[str]:
    return [unit.shape.name for unit in sharded.units if any(g.is_unsharded for g in groups_of(unit.modules[0]))]


def held(rank: int, ranks: int) -> list[list[str]]:
    """The gathered units after a forward, its backward, and a forward without gradients before and between them."""
    sharded = sharded_llama()
    found = []
    with torch.no_grad():
        loss_of(sharded, 0)
    found.append(gathered(sharded))
    loss = loss_of(sharded, 1)
    found.append(gathered(sharded))
    assert all(isinstance(each, torch.distributed.tensor.DTensor) for each in sharded.model.parameters())
    with torch.no_grad():
        loss_of(sharded, 2)
    found.append(gathered(sharded))
    loss.backward()  # type: ignore[no-untyped-call]
    found.append(gathered(sharded))
    return found


def test_what_stays_for_backward_is_freed_where_none_comes(pool: Pool) -> None:
    assert pool.run(held, 2)[0] == [[], ["head", "root"], [], []]


def trained(rank: int, ranks: int, stage: int, units: list[str] | None, tier: str) -> list[Tensor]:
    sharded = sharded_llama(stage, units, tier=tier, microbatches=2 if stage == 3 else 1)
    optim = AdamW(sharded, lr=1e-2)
    for index in range(3):
        step(sharded, optim, index)
        with torch.no_grad():  # gathers head and root, whose next values must not be these
            loss_of(sharded, index)
    optim.synchronize()
    return [whole(param.full_tensor()) for _, param in sorted(sharded.named_params().items())]


@pytest.mark.parametrize(("stage", "tier"), [(0, "device"), (1, "device"), (2, "device"), (3, "device"), (3, "host")])
def test_no_bit_depends_on_whether_the_ends_are_units(pool: Pool, stage: int, tier: str) -> None:
    apart = pool.run(trained, 2, stage, None, tier)
    together = pool.run(trained, 2, stage, ["Block"], "device")
    for first, second in zip(apart, together, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def called_apart(rank: int, ranks: int, stage: int) -> list[bool]:
    """The embedding by itself, as transformers users make `inputs_embeds`, and the head; before and after a forward."""
    sharded, found = sharded_llama(stage), []
    model = sharded.model
    assert isinstance(model, Llama)
    with torch.no_grad():
        wanted = whole(model.embedding.weight)[tokens(0)]
        for _ in range(2):
            found.append(torch.equal(model.embedding(tokens(0)), wanted))
            features = torch.ones(2, WIDTH, dtype=torch.bfloat16)
            found.append(torch.equal(model.head(features), F.linear(features, whole(model.head.weight))))
            loss_of(sharded, 0)
    return found


@pytest.mark.parametrize("stage", [1, 3])
def test_ends_can_be_called_by_themselves(pool: Pool, stage: int) -> None:
    assert all(pool.run(called_apart, 2, stage)[0])


def saved_and_loaded(rank: int, ranks: int, folder: Path, units: list[str] | None) -> list[bool]:
    """Whether a run with the other units takes a checkpoint's parameters and states to the bit."""
    there = sharded_llama(units=units)
    optim = AdamW(there)
    step(there, optim)
    config = CheckpointConfig(folder=str(folder), every=1)
    with Checkpointer(config, there, optim) as checkpoints:
        checkpoints.save(1, {})
        checkpoints.finish()
    here = sharded_llama(2, ["Block"] if units is None else None)
    other = AdamW(here)
    with Checkpointer(config, here, other) as checkpoints:
        checkpoints.resume("auto")
    pairs = [(states(there, optim), states(here, other)), (params_of(there), params_of(here))]
    return [torch.equal(value, found[name]) for wanted, found in pairs for name, value in wanted.items()]


def states(sharded: Sharded, optim: AdamW) -> dict[str, Tensor]:
    return {
        f"{key} {name}": whole(value)
        for name, param in sharded.named_params().items()
        for key, value in optim.state[param].items()
        if isinstance(value, Tensor)
    }


@pytest.mark.parametrize("units", [None, ["Block"]])
def test_checkpoints_do_not_depend_on_units(pool: Pool, tmp_path: Path, units: list[str] | None) -> None:
    equal = pool.run(saved_and_loaded, 2, tmp_path, units)[0]
    assert all(equal)
    assert len(equal) == 5 * (9 * LAYERS + 3), "a parameter, its master, two moments and a count of steps"
