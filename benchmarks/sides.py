"""What is compared: each side turns a model into a step function. All train with AdamW(**ADAM) and none clips.

    side                  parameters       gradients on the wire    optimizer
    dzero_0 ... dzero_3   bf16             bf16, summed in fp32     dzero.AdamW, fp32 masters
    ..._remainder         bf16             bf16, summed in fp32     masters as 16-bit remainders
    ..._native            bf16             bf16, gloo's own         fp32 masters
    ddp                   fp32, autocast   fp32                     torch fused, on fp32 parameters
    ddp_bf16              bf16             bf16                     torch fused, bf16 states (no masters)
    fsdp2_2, fsdp2_3      fp32 -> bf16     fp32 (torchtitan's)      torch fused, on fp32 shards
    ..._bf16              fp32 -> bf16     bf16                     torch fused, on fp32 shards
    deepspeed_0 ... _3    bf16             bf16                     DeepSpeed's FusedAdam, fp32 masters

`fsdp2_2` keeps unsharded parameters between forward and backward, `fsdp2_3` reshards them.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from workload import loss_of

from dzero import AdamW, PrecisionConfig, ZeroConfig, shard
from dzero.models.config import LlamaShape
from dzero.models.llama import Llama

Step = Callable[[Tensor], Tensor]
ADAM: dict[str, Any] = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def dzero_side(
    model: nn.Module, *, stage: int, master: str = "fp32", reduction: str = "exact", reduce: str = "auto"
) -> Step:
    """The library, as a user's plain loop would call it."""
    zero = ZeroConfig(stage=stage, reduction=reduction)
    sharded = shard(model, zero, precision=PrecisionConfig(master=master, reduce=reduce))
    return plain_step(sharded.model, AdamW(sharded, **ADAM))


def ddp_side(model: nn.Module, *, autocast: bool) -> Step:
    """Hand-written DDP: autocast over fp32 parameters, or everything in bf16."""
    wrapped = DistributedDataParallel(model if autocast else model.bfloat16(), gradient_as_bucket_view=True)
    return plain_step(wrapped, torch.optim.AdamW(model.parameters(), fused=True, **ADAM), autocast=autocast)


def fsdp2_side(model: nn.Module, *, reshard: bool, reduce_dtype: torch.dtype) -> Step:
    """Hand-written FSDP2: blocks, then the root."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
    for block in model.get_submodule("layers").children():
        fully_shard(block, mp_policy=policy, reshard_after_forward=reshard)
    fully_shard(model, mp_policy=policy, reshard_after_forward=reshard)
    return plain_step(model, torch.optim.AdamW(model.parameters(), fused=True, **ADAM))


def deepspeed_side(model: nn.Module, *, stage: int, samples: int, zero: dict[str, Any] | None = None) -> Step:
    """DeepSpeed's engine with its own fused optimizer; `zero`: more of its section zero_optimization."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed  # type: ignore[import-untyped]

    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    config = {
        "train_micro_batch_size_per_gpu": samples,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage, **(zero or {})},
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": ADAM},
        "steps_per_print": 1 << 40,
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)

    def step(batch: Tensor) -> Tensor:
        loss = loss_of(engine, batch)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step


def plain_step(model: nn.Module, optimizer: torch.optim.Optimizer, *, autocast: bool = False) -> Step:
    """Forward, backward and update."""

    def step(batch: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = loss_of(model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


SIDES: dict[str, Callable[..., Step]] = {
    **{f"dzero_{s}": partial(dzero_side, stage=s) for s in range(4)},
    **{f"dzero_{s}_remainder": partial(dzero_side, stage=s, master="remainder") for s in range(4)},
    **{f"dzero_{s}_native": partial(dzero_side, stage=s, reduction="native", reduce="bf16") for s in range(4)},
    "ddp": partial(ddp_side, autocast=True),
    "ddp_bf16": partial(ddp_side, autocast=False),
    "fsdp2_2": partial(fsdp2_side, reshard=False, reduce_dtype=torch.float32),
    "fsdp2_3": partial(fsdp2_side, reshard=True, reduce_dtype=torch.float32),
    "fsdp2_2_bf16": partial(fsdp2_side, reshard=False, reduce_dtype=torch.bfloat16),
    "fsdp2_3_bf16": partial(fsdp2_side, reshard=True, reduce_dtype=torch.bfloat16),
    **{f"deepspeed_{s}": partial(deepspeed_side, stage=s) for s in range(4)},
}


def warm_libraries(name: str) -> None:
    """Train a tiny model once, so that code pages, compiled kernels and library buffers precede the baseline."""
    shape = LlamaShape(vocab_size=256, hidden_size=64, layers=2, heads=2, kv_heads=2, ffn_size=64)
    step = build(name, Llama(shape), samples=1)
    step(torch.arange(33).unsqueeze(0))


def reader_of(name: str, rank: int) -> int:
    """Whose batches a rank reads: each its own."""
    return rank


def build(name: str, model: nn.Module, *, samples: int) -> Step:
    """The step function of a side. Call it on every rank of an initialised gloo group."""
    assert dist.is_initialized()
    options = {"samples": samples} if name.startswith("deepspeed") else {}
    return SIDES[name](model, **options)
