"""`torch.compile` of blocks and of a whole model around `shard()` makes the graphs that it makes with FSDP2 alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from on_ranks import on_ranks
from pool import Pool
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import dzero


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(16, 16), nn.LayerNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.linear(x)).tanh()


class Net(nn.Module):
    """Blocks, and a head that is not of a class of torch, of which `compile()` makes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(2)), Block()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def blocks(model: Any, counter: Any) -> Any:
    for block in model.blocks:
        block.compile(fullgraph=True, backend=counter)
    return model


def blocks_and_head(model: Any, counter: Any) -> Any:
    blocks(model, counter).head.compile(fullgraph=True, backend=counter)
    return model


def forwards(model: Any, counter: Any) -> Any:
    for block in model.blocks:
        block.forward = torch.compile(block.forward, fullgraph=True, backend=counter)
    return model


def in_place(model: Any, counter: Any) -> Any:
    model.compile(backend=counter)
    return model


def wrapped(model: Any, counter: Any) -> Any:
    return torch.compile(model, backend=counter)


def compiled(
    rank: int, ranks: int, way: Callable[[Any, Any], Any], first: bool, settings: list[dict[str, Any]]
) -> list[Any]:
    """For FSDP2 and each of `settings`: graphs, their operations, and losses of three steps."""
    found = []
    for given in [None, *settings]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model, counter = Net(), CompileCounter()
        trained = way(model, counter) if first else model
        if given is None:
            policy = MixedPrecisionPolicy(param_dtype={"fp32": None, "bf16": torch.bfloat16}[settings[0]["precision"]])
            for block in model.blocks:
                fully_shard(block, mp_policy=policy)
            fully_shard(model, mp_policy=policy)
            optim: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
        else:
            optim = dzero.AdamW(dzero.shard(model, **given), lr=1e-3)
        trained = trained if first else way(model, counter)
        losses = []
        for step in range(3):
            loss = trained(torch.full((2, 16), 1.0 + step)).square().mean()
            loss.backward()
            optim.step()
            optim.zero_grad()
            losses.append(loss.item())
        found.append([counter.frame_count, counter.op_count, losses])
    return found


def torchs_own(model: Any, counter: Any) -> Any:
    """As docs/guides/training.md says, because `block.compile()` makes nothing of classes of torch."""
    kinds = {"dropout": 0.0, "batch_first": True}
    model.blocks = nn.ModuleList(nn.TransformerEncoderLayer(16, 2, 32, **kinds) for _ in range(2))
    return forwards(model, counter)


FP32: list[dict[str, Any]] = [
    {"stage": 3, "precision": "fp32", "offload": "host"},
    {"stage": 0, "precision": "fp32"},
    {"stage": 2, "precision": "fp32"},
    {"stage": 3, "precision": "fp32"},
]
BLOCKS = [(way, first) for way in (blocks, blocks_and_head, forwards) for first in (True, False)]
WHOLE = [(way, first) for way in (in_place, wrapped) for first in (True, False)]


def test_blocks_in_one_graph_each_are_those_of_fsdp2(pool: Pool) -> None:
    for of_fsdp2, found in pool.run(compiled, 2, blocks_and_head, True, FP32[:1]):
        assert found[:2] == of_fsdp2[:2]
        assert found[2] == pytest.approx(of_fsdp2[2], rel=1e-6)


@pytest.mark.full("tests/habits/test_compiled.py::test_blocks_in_one_graph_each_are_those_of_fsdp2")
@pytest.mark.parametrize(
    ("way", "first", "precision"),
    [(*each, "fp32") for each in (*BLOCKS, *WHOLE, (torchs_own, True))] + [(blocks, True, "bf16")],
)
def test_graphs_are_those_of_fsdp2_at_every_stage(
    pool: Pool, way: Callable[[Any, Any], Any], first: bool, precision: str
) -> None:
    """Compiled before `shard`, or after it. Casts of mixed precision are outside of the graphs of blocks."""
    for of_fsdp2, *others in pool.run(compiled, 2, way, first, [{**each, "precision": precision} for each in FP32]):
        assert [each[0] for each in others] == [of_fsdp2[0]] * len(FP32)
        assert of_fsdp2[0] == 2 or way is not torchs_own
        for _, operations, losses in others:
            assert operations == of_fsdp2[1] or way in (in_place, wrapped)
            assert losses == pytest.approx(of_fsdp2[2], rel=1e-6) or precision == "bf16"


@on_ranks(2)
def test_what_cannot_work_is_refused_in_compiled_blocks_too(rank: int, ranks: int) -> None:
    """A head outside of the forward is refused by torch, in compiled code, and gradients of torch.func by dzero."""
    torch._dynamo.reset()
    model = blocks_and_head(Net(), CompileCounter())
    dzero.shard(model, stage=3, precision="fp32")
    with pytest.raises(RuntimeError):
        model.head(torch.ones(2, 16))
    torch._dynamo.reset()
    model = blocks(Net(), CompileCounter())
    dzero.shard(model, stage=3, precision="fp32")
    model(torch.ones(2, 16)).sum().backward()
    with pytest.raises(RuntimeError, match=r"^torch\.func\.grad, vjp, jacrev or hessian of a sharded model"):
        torch.func.grad(lambda x: model(x).sum())(torch.ones(2, 16))
