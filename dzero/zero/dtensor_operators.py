"""Operators on sharded parameters and gradients for which DTensor silently does something else than for whole tensors.

    expression                          DTensor by itself               here
    if p.grad.isnan().any(): continue   ranks may branch differently    the value of the whole, as all ranks call it
    p.grad.norm().item()                another number on every rank    error: often only rank 0 calls it, to log it,
                                                                        and would wait for the others
    weight[0].zero_()                   writes into a gathered copy     error; reads of weight[0] are as they were
    weight[:2] = 0                      torch's error                   the same, and at stage 0 as for whole tensors
    nn.init.normal_(weight), on CPU     the same rows on every rank     rows of what one process draws for the whole
    F.mse_loss(weight, anchor)          gradients times the ranks       gradients of the whole mean
    loss + weight.norm()                an error in backward            the gradient of `loss` is an ordinary tensor
    loss(weight.full_tensor(), data)    a shard gets the gradient of    the mean over the ranks, as for any loss
                                        its own rank's data

Only DTensors on meshes of sharded models are affected.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache, wraps
from typing import Any
from weakref import WeakSet

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, distribute_tensor

from dzero.utils.torch_internals import (
    Arguments,
    Keywords,
    handle_operators,
    local_tensor_of,
    number_operator,
    run_unhandled,
    set_local_tensor,
    storage_key,
    tree_leaves,
)
from dzero.zero.dtensors import local_of
from dzero.zero.watched_tensor import WatchedTensor

aten = torch.ops.aten
SUMS = (aten.add.Tensor, aten.sub.Tensor)
VIEWS = (aten.select.int, aten.slice.Tensor, aten.split.Tensor, aten.split_with_sizes.default, aten.diagonal.default)
FILLS = (aten.normal_.default, aten.uniform_.default, aten.bernoulli_.float)
DRAWS = (aten.randn_like.default, aten.rand_like.default)
BACKWARDS = (
    aten.mse_loss_backward.default,
    aten.smooth_l1_loss_backward.default,
    aten.huber_loss_backward.default,
)
MEAN, SUM = 1, 2
"""Numbers of `reduction` in the arguments of losses."""

_meshes: WeakSet[DeviceMesh] = WeakSet()


def watch_operators(meshes: Iterable[DeviceMesh]) -> None:
    """Run operators on DTensors on `meshes` as the table says from now on."""
    _meshes.update(meshes)
    _average_over_ranks()
    handle_operators(
        {
            number_operator(): _number,
            aten.fill_.Tensor: _set,
            **dict.fromkeys(SUMS, _add),
            **dict.fromkeys(VIEWS, _view),
            **dict.fromkeys(FILLS, _fill),
            **dict.fromkeys(DRAWS, _draw),
            **dict.fromkeys(BACKWARDS, _loss_backward),
        }
    )


@cache
def _average_over_ranks() -> None:
    """Let the backward of `full_tensor()` average the gradients of the ranks, unless the caller says what they are.

    The whole tensor is the same on all ranks, but what each computes of it may depend on its own data.
    """
    whole_of = DTensor.full_tensor

    @wraps(whole_of)
    def full_tensor(self: DTensor, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        if grad_placements is None and self.requires_grad and torch.is_grad_enabled() and _is_sharded_models(self):
            sizes = self.device_mesh.shape
            grad_placements = [Partial("avg") if size > 1 else Replicate() for size in sizes]
            if any(each.is_partial() for each in self.placements):  # a norm, whose gradient takes no sums
                self = self.redistribute(placements=[Replicate()] * len(sizes))
        return whole_of(self, grad_placements=grad_placements)

    DTensor.full_tensor = full_tensor  # type: ignore[method-assign]


def _is_sharded_models(tensor: Any) -> bool:
    return isinstance(tensor, DTensor) and tensor.device_mesh in _meshes


def _cut_along(tensor: Any) -> list[Placement]:
    """Return the placements by which ranks have different parts of a DTensor of a sharded model; none for others."""
    if not _is_sharded_models(tensor):
        return []
    mesh = tensor.device_mesh
    return [p for axis, p in enumerate(tensor.placements) if mesh.size(axis) > 1 and not p.is_replicate()]


def _number(operator: Any, args: Arguments, kwargs: Keywords) -> Any:
    tensor = args[0]
    assert isinstance(tensor, DTensor)
    if not (cut := _cut_along(tensor)):
        return operator(local_tensor_of(tensor))
    if tensor.dtype == torch.bool:
        return tensor.full_tensor().item()
    raise RuntimeError(
        f"item() or float() of a DTensor whose ranks have different parts ({cut[0]}), as of p.grad.norm(): "
        "call .full_tensor() of it on all ranks before; optim.last_decision has the norm of all gradients"
    )


def _add(operator: Any, args: Arguments, kwargs: Keywords) -> Any:
    """Add, and let the gradient of an ordinary tensor beside a DTensor be ordinary: that of a loss, say."""
    if any(map(_is_sharded_models, args)):
        for each in args:
            if isinstance(each, torch.Tensor) and not isinstance(each, DTensor) and each.requires_grad:
                each.register_hook(_as_ordinary)  # type: ignore[no-untyped-call]
    return run_unhandled(operator, args, kwargs)


def _as_ordinary(grad: torch.Tensor) -> torch.Tensor:
    return grad.full_tensor() if isinstance(grad, DTensor) else grad


class _CopiedRows:
    """Watcher of a gathered copy of rows of a sharded tensor, in which a write would be lost."""

    def before_read(self) -> None:
        """Allow reads."""

    def before_address(self) -> None:
        """Allow requests for the address."""

    def before_write(self) -> None:
        """Raise RuntimeError."""
        raise RuntimeError(
            "a write into rows, or another view, of a sharded parameter or gradient, of which it is a gathered copy: "
            "the write would be lost. Write into the whole tensor on all ranks: full = weight.full_tensor(), change "
            "full, then weight.copy_(distribute_tensor(full, weight.device_mesh, weight.placements))"
        )


def _view(operator: Any, args: Arguments, kwargs: Keywords) -> Any:
    """Run an operator that makes views, and refuse writes into those that DTensor gathered, and so copied."""
    found = run_unhandled(operator, args, kwargs)
    if _cut_along(args[0]):
        assert isinstance(args[0], DTensor)
        own = storage_key(local_of(args[0]).untyped_storage())
        for view in tree_leaves(found):
            local = local_of(view)
            if type(local) is torch.Tensor and storage_key(local.untyped_storage()) != own:
                set_local_tensor(view, WatchedTensor(local, _CopiedRows))
    return found


def _set(operator: Any, args: Arguments, kwargs: Keywords) -> Any:
    """Fill a DTensor with the number that a tensor without dimensions holds."""
    tensor, value = args
    if _is_sharded_models(tensor) and not isinstance(value, DTensor):
        assert isinstance(tensor, DTensor)
        assert isinstance(value, torch.Tensor)
        return tensor.fill_(value.item())
    return run_unhandled(operator, args, kwargs)


def _fill(operator: Any, args: Arguments, kwargs: Keywords) -> Any:
    """Draw values in place; on a CPU, where DTensor has no generator per rank, those of the whole tensor."""
    tensor = args[0]
    assert isinstance(tensor, DTensor)
    if not _is_drawn_whole(tensor):
        return run_unhandled(operator, args, kwargs)
    local_tensor_of(tensor).copy_(local_of(_own_part(operator(_like(tensor), *args[1:], **kwargs), tensor)))
    return tensor


def _draw(operator: Any, args: Arguments, kwargs: Keywords) -> Any:
    """Draw a tensor like another one, as `_fill` does."""
    tensor = args[0]
    assert isinstance(tensor, DTensor)
    if not _is_drawn_whole(tensor):
        return run_unhandled(operator, args, kwargs)
    return _own_part(operator(_like(tensor), *args[1:], **kwargs), tensor)


def _is_drawn_whole(tensor: DTensor) -> bool:
    cut = _cut_along(tensor)
    return bool(cut) and tensor.device_mesh.device_type == "cpu" and all(each.is_shard() for each in cut)


def _like(tensor: DTensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype)


def _own_part(whole: torch.Tensor, like: DTensor) -> DTensor:
    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)


def _loss_backward(operator: Any, args: Arguments, kwargs: Keywords) -> Any:
    """Run the backward of a loss; of a mean, as that of the sum over the number of elements, which are not all here."""
    grad, given, target, reduction, *rest = args
    if reduction != MEAN or not (_cut_along(given) or _cut_along(target)):
        return run_unhandled(operator, args, kwargs)
    assert isinstance(given, torch.Tensor)
    return run_unhandled(operator, (grad, given, target, SUM, *rest), kwargs) / given.numel()
