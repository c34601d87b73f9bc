"""Replacement of a module's forward that leaves its class name, parameters and attributes unchanged."""

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
    """Give each module a subclass whose `method` is wrapped; modules of one class share it, and so a compilation.

    State that a wrapped method needs for one run belongs on its module, not in a closure: FSDP2 references every class
    that it has sharded until the process ends, and thereby everything that the methods of the class reference.
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
    """Return `forward` with only its inputs kept for backward, which recomputes the rest."""

    @wraps(forward)
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, **options, **kwargs)

    return recomputed


def checkpointed_part(forward: Forward) -> Forward:
    """Return `forward(module, x)` that backward recomputes, with a second input `again` (from `keep`) that returns x.

    This is for parts of a module that may itself be checkpointed. A checkpoint recomputes until it has every tensor
    that was saved inside it, and stops there. `keep` saves x before the first part runs, and the parts save nothing
    that an outer checkpoint can see. The outer recomputation therefore stops before the first part, and each part is
    recomputed only once, for its own backward.
    """

    def part(self: nn.Module, x: Tensor, again: Callable[[], Tensor] | None = None) -> Any:
        if again is None:
            return forward(self, x)
        given = [x]

        def run() -> Any:
            return forward(self, given.pop() if given else again())

        with saved_tensors_hooks(_same, _same):  # torch 2.11's checkpoint saves a tensor even without inputs: hide it
            return checkpoint(run, use_reentrant=False)

    return part


def keep(x: Tensor, parts: int) -> Callable[[], Tensor]:
    """Save `x` once for the backward of `parts` parts, and return a function that returns it there."""
    saver = _Keep.apply(torch.empty(0, requires_grad=True), x)  # type: ignore[no-untyped-call]  # keeps the node alive
    needs_grad = x.requires_grad
    found: list[Tensor] = []  # one entry per part to come: an outer checkpoint returns x only once

    def again() -> Tensor:
        if not found:
            (kept,) = saver.grad_fn.saved_tensors
            found.extend([kept.detach()] * parts)
        return found.pop().detach().requires_grad_(needs_grad)

    return again


class _Keep(torch.autograd.Function):
    """Autograd node that only saves a tensor; no gradient flows through it."""

    @staticmethod
    def forward(ctx: Any, edge: Tensor, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return edge.clone()


def _same(saved: Tensor) -> Tensor:
    return saved
