"""`torch.compile` of blocks and of a whole model around `shard()` makes the graphs that it makes with FSDP2 alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
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


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x)
        return out


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(2)), Head()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x)
        return out


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


FP32 = [
    {"stage": 0, "precision": "fp32"},
    {"stage": 2, "precision": "fp32"},
    {"stage": 3, "precision": "fp32"},
    {"stage": 3, "precision": "fp32", "offload": "host"},
]


@pytest.mark.parametrize("first", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("way", [blocks, blocks_and_head, forwards])
def test_blocks_in_one_graph_each_are_those_of_fsdp2(pool: Pool, way: Callable[[Any, Any], Any], first: bool) -> None:
    for of_fsdp2, *others in pool.run(compiled, 2, way, first, FP32):
        for graphs, operations, losses in others:
            assert [graphs, operations] == of_fsdp2[:2]
            assert losses == pytest.approx(of_fsdp2[2], rel=1e-6)


def test_casts_of_mixed_precision_are_outside_of_the_graphs(pool: Pool) -> None:
    settings = [{**each, "precision": "bf16"} for each in FP32]
    for of_fsdp2, *others in pool.run(compiled, 2, blocks, True, settings):
        assert [each[:2] for each in others] == [of_fsdp2[:2]] * len(settings)


@pytest.mark.parametrize("first", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("way", [in_place, wrapped])
def test_a_whole_model_breaks_its_graph_where_fsdp2_does(
    pool: Pool, way: Callable[[Any, Any], Any], first: bool
) -> None:
    for of_fsdp2, *others in pool.run(compiled, 2, way, first, FP32):
        for graphs, _, losses in others:
            assert graphs == of_fsdp2[0]
            assert losses == pytest.approx(of_fsdp2[2], rel=1e-6)


def refused(rank: int, ranks: int) -> str:
    torch._dynamo.reset()
    model = blocks(Net(), CompileCounter())
    dzero.shard(model, stage=3, precision="fp32")
    with pytest.raises(RuntimeError) as told:
        torch.func.grad(lambda x: model(x).sum())(torch.ones(2, 16))
    return str(told.value)


def test_gradients_of_func_are_refused_in_compiled_blocks_too(pool: Pool) -> None:
    (told,) = pool.run(refused, 1)
    assert told.startswith("torch.func.grad, vjp, jacrev or hessian of a sharded model")


def torchs_own(model: Any, counter: Any) -> Any:
    kinds = {"dropout": 0.0, "batch_first": True}
    model.blocks = nn.ModuleList(nn.TransformerEncoderLayer(16, 2, 32, **kinds) for _ in range(2))
    return forwards(model, counter)


def test_forwards_of_classes_of_torch_are_compiled(pool: Pool) -> None:
    """As docs/guides/training.md says, because `block.compile()` makes nothing of them."""
    for of_fsdp2, *others in pool.run(compiled, 2, torchs_own, True, FP32):
        assert of_fsdp2[0] == 2
        assert [each[:2] for each in others] == [of_fsdp2[:2]] * len(FP32)


def called_outside(rank: int, ranks: int) -> None:
    torch._dynamo.reset()
    model = blocks_and_head(Net(), CompileCounter())
    dzero.shard(model, stage=3, precision="fp32")
    with pytest.raises(RuntimeError):
        model.head(torch.ones(2, 16))
    model(torch.ones(2, 16)).sum().backward()


def test_shards_that_compiled_code_meets_outside_of_the_forward_are_refused_by_torch(pool: Pool) -> None:
    pool.run(called_outside, 2)
