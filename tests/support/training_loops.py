"""What most tests of the core need: a net cut by the table, a loop over seeded batches, and the states of both."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import small_decoders
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from dzero import OffloadConfig, PrecisionConfig, Sharded, ZeroConfig, make_mesh, shard
from dzero.testing import local


class Raising(torch.autograd.Function):
    """Raises in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        raise ArithmeticError("in backward")


def sharded_net(
    net: str = "even",
    *,
    stage: int = 2,
    microbatches: int = 1,
    replicate: int = 1,
    reshard: bool | int = True,
    optimizer_shard_axes: tuple[str, ...] = ("shard",),
    seed: int = 0,
    reduction: str = "exact",
    node_ranks: int | None = None,
    unit_bytes: int | None = None,
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


def losses_of(sharded: Sharded, optim: Any, batches: list[Tensor]) -> Iterator[Tensor]:
    """Forward and backward of one step's microbatches; what each adds to the mean loss, where it was computed."""
    for index, batch in enumerate(batches):
        with sharded.microbatch(is_last=index == len(batches) - 1):
            loss = small_decoders.loss_fn(sharded.model, batch.to(sharded.mesh.device_type)) / len(batches)
            optim.scale_loss(loss).backward()
        yield loss.detach()


def backward(sharded: Sharded, optim: Any, batches: list[Tensor]) -> float:
    """Forward and backward of one step's microbatches; the mean loss of this rank."""
    return sum(loss.item() for loss in losses_of(sharded, optim, batches))


def step(sharded: Sharded, optim: Any, batches: list[Tensor]) -> tuple[list[Tensor], float | None, float]:
    """One step, in which a host waits for its device only where dzero does: what `losses_of` gives, the norm, which is
    None where the step was skipped, and the loss scale."""
    losses, scale = [*losses_of(sharded, optim, batches)], optim.grad_scale
    optim.step()
    decision = optim.last_decision
    return losses, decision.norm if decision.finite else None, scale


def train(sharded: Sharded, optim: Any, net: str = "even", *, steps: int, seed: int = 0) -> list[float]:
    """`steps` steps on this rank's share of the batches of `seed`; the losses of this rank."""
    layout = sharded.layout
    drawn = small_decoders.batches(net, steps=steps, ranks=layout.ranks, microbatches=layout.microbatches, seed=seed)
    losses = []
    for of_step in drawn:
        losses.append(backward(sharded, optim, of_step[dist.get_rank()]))
        optim.step()
    return losses


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor, on every rank; integers of 16 bits, which gloo does not move, as others of 32."""
    tensor = tensor.detach()
    if tensor.dtype == torch.int16:
        tensor = tensor.int()
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.clone()


def states_of(sharded: Sharded, optim: Any) -> dict[str, dict[str, Tensor]]:
    """By parameter: its `value`, and every tensor that the optimizer keeps of it, in parts as they are."""
    states = {name: {"value": param, **optim.state.get(param, {})} for name, param in sharded.named_params().items()}
    return {name: {k: v for k, v in each.items() if isinstance(v, Tensor)} for name, each in states.items()}


def joined_master(states: Mapping[str, Tensor]) -> Tensor:
    """The fp32 master among a parameter's whole states, put together by integer arithmetic for the remainder."""
    if "master" in states or "remainder" not in states:
        return states.get("master", states["value"])
    bits = (states["value"].view(torch.int16).long() * 65536 + states["remainder"].long()) & 0xFFFFFFFF
    return torch.where(bits >= 1 << 31, bits - (1 << 32), bits).to(torch.int32).view(torch.float32)


def master_of(param: Tensor, state: Mapping[str, Tensor]) -> Tensor:
    """The whole fp32 master of a parameter, on every rank."""
    kept = {key: state[key] for key in ("master", "remainder") if key in state}
    return joined_master({key: whole(each) for key, each in {"value": param, **kept}.items()})


def params_of(sharded: Sharded) -> dict[str, Tensor]:
    """Whole parameters by name, on every rank."""
    return {name: whole(param) for name, param in sharded.named_params().items()}


def masters_of(sharded: Sharded, optim: Any) -> dict[str, Tensor]:
    """Whole fp32 masters of the trained parameters by name, on every rank."""
    return {n: master_of(p, optim.state[p]) for n, p in sharded.named_params().items() if p in optim.state}


def snapshot(sharded: Sharded, optim: Any) -> dict[str, Tensor]:
    """Copies of every tensor on this rank that a step may change: parameters and all states, by name and key."""
    return {
        name if key == "value" else f"{name}.{key}": local(tensor).clone()
        for name, states in states_of(sharded, optim).items()
        for key, tensor in states.items()
    }


def unequal(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """Keys under which two dictionaries of tensors are not equal in dtype and bits."""
    if a.keys() != b.keys():
        return sorted(a.keys() ^ b.keys())
    return [key for key in a if a[key].dtype != b[key].dtype or not torch.equal(bits(a[key]), bits(b[key]))]


def bits(tensor: Tensor) -> Tensor:
    """The patterns, so that NaN equals itself and -0 is not 0."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)
