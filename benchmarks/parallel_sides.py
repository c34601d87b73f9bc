"""Every factoring of four ranks, by the library and by hand: the same model, plan of tensor parallelism and dtypes.

    side            ranks         by
    dzero_3_4x1     dp 4, tp 1    ZeroConfig(stage=3), make_mesh, AdamW with fp32 masters
    dzero_2_2x2     dp 2, tp 2    the same with parallelize before it
    hand_3_4x1      dp 4, tp 1    torch's fully_shard and fused AdamW on fp32 shards, bf16 compute and reduction
    hand_2_2x2      dp 2, tp 2    the same with parallelize_module before it

Stage 2 keeps unsharded parameters from forward to backward. Nobody clips.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from sides import ADAM, Step
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel, parallelize_module
from workload import loss_of

from dzero import AdamW, ZeroConfig, make_mesh, parallelize, shard
from dzero.models.llama import Llama, LlamaShape
from dzero.parallel.tensor_plans import plan_for

RANKS = 4
FACTORINGS = ((4, 1), (2, 2), (1, 4))
NAMES = [f"{by}_{stage}_{dp}x{tp}" for dp, tp in FACTORINGS for stage in (2, 3) for by in ("dzero", "hand")]


def parts_of(name: str) -> tuple[str, int, int, int]:
    """Of a side: by whom, stage, dp, tp."""
    by, stage, ranks = name.split("_")
    dp, tp = map(int, ranks.split("x"))
    return by, int(stage), dp, tp


def reader_of(name: str, rank: int) -> int:
    """Whose batches a rank reads: those of tp, which are neighbours, the same."""
    return rank // parts_of(name)[3]


def dzero_side(model: nn.Module, stage: int, tp: int) -> Step:
    """The library, as a user's plain loop would call it."""
    mesh = make_mesh("cpu", tp=tp)
    cut = parallelize(model, mesh["tp"]).loss if tp > 1 else nullcontext
    sharded = shard(model, ZeroConfig(stage=stage), mesh=mesh)
    optim = AdamW(sharded, **ADAM)
    return _step(sharded.model, optim, cut)


def hand_side(model: nn.Module, stage: int, dp: int, tp: int) -> Step:
    """torch's own pieces: tensor parallelism, then blocks, then the root."""
    mesh = init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
    if tp > 1:
        parallelize_module(model, mesh["tp"], plan_for(model, tp, "tp"))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    for block in model.get_submodule("layers").children():
        fully_shard(block, mesh=mesh["dp"], mp_policy=policy, reshard_after_forward=stage == 3)
    fully_shard(model, mesh=mesh["dp"], mp_policy=policy, reshard_after_forward=stage == 3)
    optim = torch.optim.AdamW(model.parameters(), fused=True, **ADAM)
    return _step(model, optim, loss_parallel if tp > 1 else nullcontext)


def _step(model: nn.Module, optim: torch.optim.Optimizer, cut: Any) -> Step:
    def step(batch: Tensor) -> Tensor:
        with cut():
            loss = loss_of(model, batch)
            loss.backward()  # type: ignore[no-untyped-call]
        optim.step()
        optim.zero_grad()
        found = loss.detach()
        return found.full_tensor() if isinstance(found, DTensor) else found

    return step


def warm_libraries(name: str) -> None:
    """Train a tiny model once, so that code pages, compiled kernels and library buffers precede the baseline."""
    shape = LlamaShape(vocab_size=256, hidden_size=64, layers=2, heads=4, kv_heads=4, ffn_size=64)
    step = build(name, Llama(shape), samples=1)
    step(torch.arange(33).unsqueeze(0))


def build(name: str, model: nn.Module, *, samples: int) -> Step:
    """The step function of a side. Call it on every rank of an initialised gloo group."""
    by, stage, dp, tp = parts_of(name)
    return dzero_side(model, stage, tp) if by == "dzero" else hand_side(model, stage, dp, tp)
