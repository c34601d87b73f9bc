"""Refusal of operations on the `.grad` of fp16 parameters that take the loss scale for a part of the gradient.

Between backward and step, `.grad` is multiplied by the loss scale. A norm or a limit of its values would be that of the
scaled gradient: clipping to a norm of 1 would then set nearly all of it to zero, and the model would not train.
"""

from __future__ import annotations

import weakref
from typing import Any, Protocol

from torch.distributed.tensor import DTensor

from dzero.optim.grad_views import OffloadedGradStorage
from dzero.utils.torch_internals import (
    Arguments,
    Keywords,
    clipping_operators,
    handle_operators,
    local_tensor_of,
    run_next,
    tree_leaves,
)
from dzero.zero.offloaded_param import OffDeviceShard
from dzero.zero.watched_tensor import WatchedTensor


class Scaled(Protocol):
    """Interface of the optimizer whose gradients are scaled."""

    @property
    def grad_scale(self) -> float:
        """Factor by which the present gradients are multiplied."""


_owners: weakref.WeakKeyDictionary[object, weakref.ref[Scaled]] = weakref.WeakKeyDictionary()


def refuse_scaled(owner: object, optim: Scaled) -> None:
    """Refuse norms and limits of `.grad` from now on while they are scaled.

    Args:
        owner: What the `.grad` report their uses to (`grad_views.GradUse`).
        optim: The optimizer that knows their scale.
    """
    _owners[owner] = weakref.ref(optim)
    handle_operators(_refuse, clipping_operators())


def refuse_if_scaled(owner: object) -> None:
    """Raise RuntimeError if the gradients of `owner` are multiplied by a loss scale."""
    optim = found() if (found := _owners.get(owner)) is not None else None
    if optim is not None and optim.grad_scale != 1:
        raise RuntimeError(
            f"the norm or a limit of fp16 gradients, which are multiplied by the loss scale {optim.grad_scale:g}: "
            "call optim.unscale_() before, with precision.grad=fp32, or clip by max_norm= of the optimizer"
        )


def _refuse(operator: Any, args: Arguments, kwargs: Keywords) -> Any:
    for leaf in tree_leaves(args) if _owners else ():
        if (owner := _owner_of(leaf)) is not None:
            refuse_if_scaled(owner)
    return run_next(_refuse, operator, args, kwargs)


def _owner_of(grad: Any) -> object | None:
    """Return what a sharded parameter's `.grad` reports its uses to, or None for another tensor."""
    local = local_tensor_of(grad) if isinstance(grad, DTensor) else grad
    if isinstance(local, WatchedTensor):
        return local.use()
    if isinstance(local, OffDeviceShard) and isinstance(storage := local.memory.storage, OffloadedGradStorage):
        return storage.use()
    return None
