"""What `shard` takes and how the sharded model behaves in unusual loops."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import reference
import small_decoders
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from pool import Pool
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from training_loops import backward, params_of, sharded_net, train, unequal

from dzero import AdamW, OffloadConfig, Sharded, ZeroConfig, make_mesh, shard
from dzero.testing import local

BF16 = torch.bfloat16


class Odd(nn.Module):
    """A model with what real ones have: mixed dtypes, a transposed parameter, buffers, integers, a frozen table."""

    shift: Tensor
    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(6, 8).to(BF16)
        self.norm = nn.LayerNorm(8)  # stays fp32
        self.turned = nn.Parameter(torch.randn(5, 8).t())  # [8, 5], not contiguous
        self.table = nn.Parameter(torch.arange(5), requires_grad=False)  # int64
        self.fixed = nn.Parameter(torch.ones(5), requires_grad=False)
        self.register_buffer("shift", torch.full((5,), 0.5))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y: Tensor = self.norm(self.inp(x)) @ self.turned
        return y * self.fixed + self.shift.to(y.dtype) + self.table


@on_ranks(2)
def test_mixed_dtypes_views_buffers_integers_and_frozen_parameters_are_handled(rank: int, ranks: int) -> None:
    for stage in (0, 2, 3):
        torch.manual_seed(0)
        plain = Odd()
        model = copy.deepcopy(plain)
        if rank:  # other ranks start elsewhere and must end with rank 0's values
            with torch.no_grad():
                for p in model.parameters():
                    p.add_(1)
        sharded = shard(model, ZeroConfig(stage=stage))
        params = params_of(sharded)
        assert sorted(params) == ["fixed", "inp.bias", "inp.weight", "norm.bias", "norm.weight", "turned"]
        for name, param in plain.named_parameters():
            if name != "table":  # mixed dtypes are cast to the working one
                assert torch.equal(params[name], reference.to_working(param.detach().float(), BF16)), name
        assert model.shift.dtype == torch.float32
        assert torch.equal(model.table, plain.table + min(rank, 1))  # integers are nobody's to move

        optim = AdamW(sharded, lr=1e-2)
        assert sharded.named_params()["fixed"] not in optim.state
        for _ in range(3):
            model(torch.ones(2, 6)).float().square().mean().backward()
            optim.step()
        after = params_of(sharded)
        assert torch.equal(after["fixed"], params["fixed"])
        assert not torch.equal(after["turned"], params["turned"])
        assert model.calls.item() == 3
        both: list[Any] = [None] * ranks
        dist.all_gather_object(both, after)
        assert unequal(*both) == []


def asynchronous(rank: int, ranks: int) -> list[float]:
    """Units gathered ahead by the user: `unshard(async_op=True)` of the next block before each block's forward."""
    losses = []
    for ahead in (False, True):
        sharded = sharded_net("even", stage=3)
        optim = AdamW(sharded, lr=1e-2)
        blocks = list(sharded.model.layers)  # type: ignore[arg-type]
        for of_step in small_decoders.batches("even", steps=3, ranks=ranks, microbatches=1):
            handles = [block.unshard(async_op=True) for block in blocks] if ahead else []
            for handle in handles[:2]:
                handle.wait()
            losses.append(backward(sharded, optim, of_step[rank]))
            optim.step()
    return losses


def test_asynchronous_unshard_gives_the_same_losses(pool: Pool) -> None:
    for losses in pool.run(asynchronous, 2):
        assert losses[:3] == losses[3:]


@dataclass(frozen=True)
class Record:
    values: list[Tensor]
    name: str = "record"


class Divided(nn.Module):
    """A model that divides its loss by a count, as models of transformers do, and keeps what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4)])

    def forward(self, x: Tensor, items: Tensor, more: dict[str, Any]) -> Tensor:
        self.given = [x.dtype, items.dtype, more["list"][0].dtype, more["ids"].dtype]
        self.given += [more["record"].values[0].dtype] if "record" in more else []
        self.more = more
        return self.layers[0](x).float().sum() / items


def counts_in_all_digits(rank: int, ranks: int) -> list[Any]:
    sharded = shard(Divided(), ZeroConfig(stage=2), mesh=make_mesh("cpu"))
    count = torch.tensor(100_003.0)  # of its 17 bits bf16 keeps 8; fp16 ends at 65,504
    x, more = torch.ones(2, 4), {"list": [torch.ones(1)], "ids": torch.arange(3)}
    ratio = sharded.model(x, torch.tensor(1.0), more) / sharded.model(x, items=count, more=more)
    given = sharded.model.given
    record = Record([torch.ones(1)])
    sharded.model(x, count, {**more, "record": record})
    given += [*sharded.model.given[-1:], record.values[0].dtype]
    cached = {"list": [torch.ones(1, dtype=BF16)], "ids": torch.arange(3)}
    sharded.model(x.to(BF16), count, cached)
    return [float(ratio), given, sharded.model.more is cached]


def test_a_number_that_divides_the_loss_keeps_its_digits_in_bf16(pool: Pool) -> None:
    for ratio, given, own in pool.run(counts_in_all_digits, 1):
        assert ratio == pytest.approx(100_003, rel=1e-6)
        assert given == [BF16, torch.float32, BF16, torch.int64, BF16, torch.float32], "the caller's record stays"
        assert own, "containers in which nothing is cast are the caller's"


# One rank alone computes with its shards where they lie; what lies elsewhere or beside others is copied

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
