"""Another forward for modules that stay what they are: names, parameters and attributes do not change."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

Forward = Callable[..., Any]


def wrap_method(modules: Sequence[nn.Module], method: str, wrap: Callable[[Forward], Forward]) -> None:
    """Give each module a subclass whose `method` is wrapped: one per class, so that equal ones share a compilation.

    What a wrapped method needs of one run lies on its module, not in a closure: FSDP2 remembers every class that it has
    cut for as long as the process lives, and with it all that its methods refer to.
    """
    classes: dict[type[nn.Module], type[nn.Module]] = {}
    for module in dict.fromkeys(modules):
        cls = type(module)
        if cls not in classes:
            wrapped = {
                method: wrap(getattr(cls, method)),
                "__module__": cls.__module__,
                "__qualname__": cls.__qualname__,
            }
            classes[cls] = type(cls.__name__, (cls,), wrapped)
        module.__class__ = classes[cls]


def checkpointed(forward: Forward, **options: Any) -> Forward:
    """`forward`, whose inputs alone are kept for backward; the rest is computed again there."""

    @wraps(forward)
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, **options, **kwargs)

    return recomputed


def checkpointed_part(forward: Forward) -> Forward:
    """`forward(module, x)` with a second input `again`, from `keep`: where x is found in backward.

    For the parts of what may itself be checkpointed. A checkpoint computes again until it has all that was saved inside
    it, and stops there. `keep` saves x before the first part runs, and the parts save nothing that an outer checkpoint
    could see: so it stops before the first of them, and each runs once more in all, for its own backward.
    """

    def part(self: nn.Module, x: Tensor, again: Callable[[], Tensor] | None = None) -> Any:
        if again is None:
            return forward(self, x)
        given = [x]

        def run() -> Any:
            return forward(self, given.pop() if given else again())

        with saved_tensors_hooks(_same, _same):  # torch 2.11's checkpoint saves a tensor even without inputs
            return checkpoint(run, use_reentrant=False)

    return part


def keep(x: Tensor, parts: int) -> Callable[[], Tensor]:
    """Save `x` for backward, here and once, for so many parts."""
    saver = _Keep.apply(torch.empty(0, requires_grad=True), x)  # type: ignore[no-untyped-call]  # holds its node
    needs_grad = x.requires_grad
    found: list[Tensor] = []  # one entry per part that will still ask: an outer checkpoint hands x out once

    def again() -> Tensor:
        if not found:
            (kept,) = saver.grad_fn.saved_tensors
            found.extend([kept.detach()] * parts)
        return found.pop().detach().requires_grad_(needs_grad)

    return again


class _Keep(torch.autograd.Function):
    """A node that only saves; nothing flows through it."""

    @staticmethod
    def forward(ctx: Any, edge: Tensor, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return edge.clone()


def _same(saved: Tensor) -> Tensor:
    return saved
