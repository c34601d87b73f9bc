"""What most tests of the core need: a net cut by the table, and a plain loop over seeded batches."""

from __future__ import annotations

from typing import Any

import small_decoders
import torch
import torch.distributed as dist
from parity_cells import master_of, whole
from torch import Tensor

from dzero import AdamW, OffloadConfig, PrecisionConfig, Sharded, ZeroConfig, make_mesh, shard
from dzero.optim.base import MasterOptimizer
from dzero.zero.dtensors import local_of


def sharded_net(
    net: str = "even",
    *,
    stage: int = 2,
    microbatches: int = 1,
    replicate: int = 1,
    reduction: str = "exact",
    reshard: bool | int = True,
    node_ranks: int | None = None,
    unit_bytes: int | None = None,
    optimizer_shard_axes: tuple[str, ...] = ("shard",),
    seed: int = 0,
    offload: OffloadConfig | None = None,
    **precision: Any,
) -> Sharded:
    """A net of `small_decoders.py` over all ranks of the group; `replicate` as in make_mesh, for stages 1 to 3."""
    zero = ZeroConfig(
        stage=stage,
        reduction=reduction,
        reshard_after_forward=reshard,
        optimizer_shard_axes=[*optimizer_shard_axes],
        node_ranks=node_ranks,
        unit_bytes=unit_bytes,
    )
    mesh = make_mesh("cpu", replicate=dist.get_world_size() if stage == 0 else replicate)
    model = small_decoders.build(net, seed)
    kinds = PrecisionConfig(**precision)
    return shard(model, zero, precision=kinds, offload=offload, mesh=mesh, microbatches=microbatches)


def backward(sharded: Sharded, optim: MasterOptimizer, batches: list[Tensor]) -> float:
    """Forward and backward of one step's microbatches; the mean loss of this rank."""
    total = 0.0
    for index, batch in enumerate(batches):
        with sharded.microbatch(is_last=index == len(batches) - 1):
            loss = small_decoders.loss_fn(sharded.model, batch) / len(batches)
            optim.scale_loss(loss).backward()  # type: ignore[no-untyped-call]
        total += loss.item()
    return total


def train(sharded: Sharded, optim: MasterOptimizer, net: str = "even", *, steps: int, seed: int = 0) -> list[float]:
    """`steps` steps on this rank's share of the batches of `seed`; the losses of this rank."""
    layout = sharded.layout
    drawn = small_decoders.batches(net, steps=steps, ranks=layout.ranks, microbatches=layout.microbatches, seed=seed)
    losses = []
    for of_step in drawn:
        losses.append(backward(sharded, optim, of_step[dist.get_rank()]))
        optim.step()
    return losses


def params_of(sharded: Sharded) -> dict[str, Tensor]:
    """Whole parameters by name, on every rank."""
    return {name: whole(param).clone() for name, param in sharded.named_params().items()}


def masters_of(sharded: Sharded, optim: AdamW) -> dict[str, Tensor]:
    """Whole fp32 masters of the trained parameters by name, on every rank."""
    return {n: master_of(p, optim.state[p]).clone() for n, p in sharded.named_params().items() if p in optim.state}


def snapshot(sharded: Sharded, optim: MasterOptimizer) -> dict[str, Tensor]:
    """Copies of every tensor on this rank that a step may change: parameters and all states, by name and key."""
    kept = {name: local_of(p.detach()).clone() for name, p in sharded.named_params().items()}
    for name, param in sharded.named_params().items():
        for key, value in optim.state.get(param, {}).items():
            kept[f"{name}.{key}"] = local_of(value).clone()
    return kept


def unequal(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """Keys under which two dictionaries of tensors are not equal in dtype and bits."""
    if a.keys() != b.keys():
        return sorted(a.keys() ^ b.keys())
    return [key for key in a if a[key].dtype != b[key].dtype or not torch.equal(bits(a[key]), bits(b[key]))]


def bits(tensor: Tensor) -> Tensor:
    """The patterns, so that NaN equals itself and -0 is not 0."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)
