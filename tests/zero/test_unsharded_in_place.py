"""One rank alone computes with its shards where they lie; what lies elsewhere or beside others is copied as before."""

from __future__ import annotations

from typing import Any

import pytest
import small_decoders
import torch
from pool import Pool
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from training_loops import sharded_net, train, unequal

from dzero import AdamW, OffloadConfig, Sharded
from dzero.testing import local

HOST = OffloadConfig(param="host", grad="host", master="host", moments="host")


def used(sharded: Sharded) -> dict[str, int]:
    """Where in memory each parameter lies that a forward computes with, by its name in the model."""
    found: dict[str, int] = {}

    def look(module: nn.Module, _: Any) -> None:
        for name, param in module.named_parameters(recurse=False):
            assert not isinstance(param, DTensor)
            found[f"{names[module]}.{name}".lstrip(".")] = param.data_ptr()

    names = {module: name for name, module in sharded.model.named_modules()}
    hooks = [module.register_forward_pre_hook(look) for module in names]
    small_decoders.loss_fn(sharded.model, batch())
    for hook in hooks:
        hook.remove()
    return found


def batch() -> Tensor:
    return small_decoders.batches("even", steps=1, ranks=1, microbatches=1, samples=1, tokens=4)[0][0][0]


def shards(sharded: Sharded) -> dict[str, int]:
    return {name: local(param).data_ptr() for name, param in sharded.named_params().items()}


def where(_: int, __: int, stage: int, offload: OffloadConfig | None) -> tuple[dict[str, int], dict[str, int]]:
    sharded = sharded_net(stage=stage, offload=offload)
    optim = AdamW(sharded)  # which, with parameters on the host, brings them
    train(sharded, optim, steps=1)
    return used(sharded), shards(sharded)


@pytest.mark.parametrize(("ranks", "stage"), [(2, 0), (1, 0), (1, 2), (1, 3)])
def test_what_is_computed_with_are_the_shards(pool: Pool, ranks: int, stage: int) -> None:
    for computed, own in pool.run(where, ranks, stage, None):
        assert len(own) > 5
        assert computed == own


@pytest.mark.parametrize(("ranks", "stage", "offload"), [(2, 2, None), (1, 3, HOST)], ids=["gathered", "fetched"])
def test_what_other_ranks_or_the_host_have_is_copied(
    pool: Pool, ranks: int, stage: int, offload: OffloadConfig | None
) -> None:
    for computed, own in pool.run(where, ranks, stage, offload):
        assert own.keys() == computed.keys()
        assert not set(computed.values()) & set(own.values())


def assigned(_: int, __: int, together: bool) -> tuple[list[str], bool]:
    """A state dict's tensors put in the parameters' place, each in memory of its own or all `together` in one, after a
    step; another step. What then differs from a model that had those values copied, and from the memory's rest."""
    models = [sharded_net(stage=0, seed=seed) for seed in (0, 0, 1)]
    for model in models[:2]:
        train(model, AdamW(model), steps=1)
    values = {name: param.detach().clone() for name, param in models[2].model.state_dict().items()}
    models[0].model.load_state_dict(values)
    flat = torch.full((7 + sum(value.numel() for value in values.values()),), 3.0, dtype=torch.bfloat16)
    at = 0
    for name, value in values.items() if together else ():
        slot = flat[at : (at := at + value.numel())].view(value.shape).copy_(local(value))
        values[name] = DTensor.from_local(slot, value.device_mesh, value.placements)
    models[1].model.load_state_dict(values, assign=True)
    after = []
    for model in models[:2]:
        losses = []
        for _ in range(2):  # the second finds what the first made
            loss = small_decoders.loss_fn(model.model, batch())
            loss.backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach())
        after.append({f"loss {n}": loss for n, loss in enumerate(losses)} | grads(model))
    return unequal(*after), bool(flat[at:].eq(3.0).all())


def grads(sharded: Sharded) -> dict[str, Tensor]:
    return {name: local(param.grad) for name, param in sharded.model.named_parameters() if param.grad is not None}


@pytest.mark.parametrize("together", [False, True])
def test_tensors_that_are_assigned_are_used_and_nothing_beside_them_is_touched(pool: Pool, together: bool) -> None:
    ((differ, untouched),) = pool.run(assigned, 1, together)
    assert differ == []
    assert untouched
