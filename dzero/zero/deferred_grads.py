"""Gradients of parameters that are made after the backward of their inputs, as zero-bubble pipelines make them.

FSDP2 looks for gradients when those of a unit's inputs are there. What comes later lies in `.grad` of its unsharded
parameters, also after they were freed; `collect` makes it look again. Both need what FSDP2 keeps to itself, as
torch.distributed.pipelining does for the same purpose.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule


def unsharded_params(root: FSDPModule) -> list[nn.Parameter]:
    """What the last forward of all units below `root` computed with, trained parameters alone."""
    held = [each for group in groups_below(root) for each in group.fsdp_params]
    return [each.unsharded_param for each in held if each.unsharded_param.requires_grad]


def follow_root(module: nn.Module, root: FSDPModule) -> None:
    """Let a unit without modules inside, as an embedding, be called before the model is; called once.

    FSDP2 would take it for a model of its own, and refuse the whole one later.
    """

    def before(*_: object) -> None:
        handle.remove()
        state_of(root)._lazy_init()

    if not any(True for _ in module.children()):
        handle = module.register_forward_pre_hook(before, prepend=True)


def collect(root: FSDPModule) -> None:
    """As at the end of a backward: of all units below `root`, the last first, accumulate or reduce, and free."""
    for group in reversed(groups_below(root)):
        group.post_backward()
    state_of(root)._root_post_backward_final_callback()


def has_failed(root: FSDPModule) -> bool:
    """Whether the last backward raised, and left FSDP2 in the middle of it; asked outside of any."""
    failed: bool = state_of(root)._state_ctx.post_backward_final_callback_queued
    return failed


def unreduced(params: Iterable[Any]) -> list[Any]:
    """Return those of FSDP2's parameters that have a gradient which is not reduced yet; one loop, run in every step."""
    return [
        held
        for held in params
        if held.unsharded_accumulated_grad is not None
        or ((param := held.__dict__.get("_unsharded_param")) is not None and param.grad is not None)
    ]


def is_outermost(module: FSDPModule, *, is_root: bool) -> bool:
    """Whether the forward of a unit that has just ended is in no other's, nor recomputed in a backward."""
    context = state_of(module)._state_ctx
    is_inside: bool = context.post_backward_final_callback_queued or (
        not is_root and context.iter_forward_root is not None
    )
    return not is_inside


def state_of(module: Any) -> Any:
    """FSDP2's state of a module that it cut."""
    return module._get_fsdp_state()


def states_below(root: Any) -> list[Any]:
    """Those of every unit, in the order of the model; torch 2.11 has that of several modules several times."""
    return [*dict.fromkeys(state_of(root)._state_ctx.all_states)]


def groups_of(module: FSDPModule) -> list[Any]:
    """FSDP2's groups of the parameters of one unit, none where it has none; torch 2.11 has one at most."""
    return _of_state(state_of(module))


def groups_below(root: FSDPModule) -> list[Any]:
    """Those of every unit, in the order of the model."""
    return [group for state in states_below(root) for group in _of_state(state)]


def _of_state(state: Any) -> list[Any]:
    found = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    return [group for group in found if group is not None]
