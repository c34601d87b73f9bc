"""What `shard` takes and how the sharded model behaves in unusual loops."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import reference
import small_decoders
import torch
import torch.distributed as dist
import torch.nn.functional as F
from fake_ranks import fake_ranks
from pool import Pool
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from training_loops import backward, params_of, sharded_net

from dzero import AdamW, PrecisionConfig, ZeroConfig, make_mesh, shard

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


def odd_model(rank: int, ranks: int) -> None:
    for stage in (0, 2, 3):
        torch.manual_seed(0)
        plain = Odd()
        torch.manual_seed(0)
        model = Odd()
        if rank:  # other ranks start elsewhere and must end with rank 0's values
            with torch.no_grad():
                for p in model.parameters():
                    p.add_(1)
        mesh = make_mesh("cpu", replicate=ranks if stage == 0 else 1)
        sharded = shard(model, ZeroConfig(stage=stage), mesh=mesh)
        params = params_of(sharded)
        assert sorted(params) == ["fixed", "inp.bias", "inp.weight", "norm.bias", "norm.weight", "turned"]
        assert {p.dtype for p in params.values()} == {BF16}  # mixed dtypes are cast to the working one
        for name, param in plain.named_parameters():
            if name != "table":
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
        dist.all_gather_object(both, {k: v.float().tolist() for k, v in after.items()})
        assert both[0] == both[1]


def test_mixed_dtypes_views_buffers_integers_and_frozen_parameters_are_handled(pool: Pool) -> None:
    pool.run(odd_model, 2)


MISUSES: dict[str, tuple[Any, tuple[str, ...]]] = {
    "step without gradients": (
        lambda: AdamW(sharded_net("even", stage=2, microbatches=2)).step(),
        ("run backward first", "microbatch(is_last=True)"),
    ),
    "empty": (lambda: shard(nn.ReLU(), ZeroConfig()), ("ReLU has no floating-point parameters",)),
    "meta": (lambda: shard(nn.Linear(2, 2, device="meta"), ZeroConfig()), ("weight is on meta", "dzero.empty_init")),
    "mesh": (
        lambda: shard(nn.Linear(2, 2), ZeroConfig(), mesh=init_device_mesh("cpu", (2,))),
        ("('replicate', 'shard')", "dzero.make_mesh"),
    ),
    "degrees": (lambda: make_mesh("cpu", replicate=3), ("replicate=3", "[(1, 2), (2, 1)]")),
    "units": (lambda: shard(nn.Linear(2, 2), ZeroConfig(units=["Block"])), ("zero.units=['Block']",)),
    "foreign": (
        lambda: AdamW(sharded_net("even"), [nn.Parameter(torch.zeros(2))]),
        ("sharded.named_params()",),
    ),
}


@pytest.mark.parametrize("key", MISUSES)
def test_misuse_raises_errors_that_teach(key: str) -> None:
    misuse, parts = MISUSES[key]
    with fake_ranks(2), pytest.raises((RuntimeError, ValueError)) as told:
        misuse()
    assert all(part in str(told.value) for part in parts), told.value


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


def materialised(rank: int, ranks: int) -> list[str]:
    """Values drawn unit by unit on meta modules; never more than one unit is whole."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3))
    whole: list[str] = []

    def fill(module: nn.Module) -> None:
        unsharded = [
            p for p in model.parameters() if not p.is_meta and not isinstance(p, torch.distributed.tensor.DTensor)
        ]
        whole.append(str(len(unsharded)))
        for child in module.modules():
            for name, p in child.named_parameters(recurse=False):
                if p.is_meta:
                    generator = torch.Generator().manual_seed(p.numel())
                    setattr(child, name, nn.Parameter(torch.randn(p.shape, generator=generator)))

    sharded = shard(model, ZeroConfig(stage=3), precision=PrecisionConfig(param="fp32"), init=fill)
    for p in params_of(sharded).values():
        generator = torch.Generator().manual_seed(p.numel())
        assert torch.equal(p, torch.randn(p.shape, generator=generator))
    optim = AdamW(sharded)
    F.mse_loss(model(torch.ones(1, 6)), torch.zeros(1, 3)).backward()  # type: ignore[no-untyped-call]
    optim.step()
    return whole


def test_meta_models_are_filled_unit_by_unit(pool: Pool) -> None:
    assert pool.run(materialised, 2)[0] == ["0"] * 4


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
