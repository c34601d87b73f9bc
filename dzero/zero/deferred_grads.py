"""Access to FSDP2's private state, and gradients that are computed after the backward of the inputs.

FSDP2 looks for the gradients of a unit's parameters when the gradients of the unit's inputs are ready. Zero-bubble
pipelines compute parameter gradients later, and leave them in `.grad` of the unsharded parameters, even if these were
freed. `collect` makes FSDP2 look again. This module uses private attributes of FSDP2, as torch.distributed.pipelining
does for the same purpose.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule


def unsharded_params(root: FSDPModule) -> list[nn.Parameter]:
    """Return the unsharded, trained parameters that the last forward of all units below `root` used."""
    held = [each for group in groups_below(root) for each in group.fsdp_params]
    return [each.unsharded_param for each in held if each.unsharded_param.requires_grad]


def follow_root(module: nn.Module, root: FSDPModule) -> None:
    """Allow a unit without child modules, such as an embedding, to be called before the model; call this once.

    FSDP2 would take the unit for a root, and later reject the root of the whole model.
    """

    def before(*_: object) -> None:
        handle.remove()
        state_of(root)._lazy_init()

    if not any(True for _ in module.children()):
        handle = module.register_forward_pre_hook(before, prepend=True)


def collect(root: FSDPModule) -> None:
    """Accumulate or reduce gradients, and free parameters, of all units below `root`, as at the end of backward."""
    for group in reversed(groups_below(root)):
        group.post_backward()
    state_of(root)._root_post_backward_final_callback()


def has_failed(root: FSDPModule) -> bool:
    """Return whether the last backward raised and left FSDP2 in the middle of it; call this outside of backward."""
    failed: bool = state_of(root)._state_ctx.post_backward_final_callback_queued
    return failed


def unreduced(params: Iterable[Any]) -> list[Any]:
    """Return the FSDP2 parameters in `params` with an unreduced gradient; one loop, because every step runs it."""
    return [
        held
        for held in params
        if held.unsharded_accumulated_grad is not None
        or ((param := held.__dict__.get("_unsharded_param")) is not None and param.grad is not None)
    ]


def is_outermost(module: FSDPModule, *, is_root: bool) -> bool:
    """Return whether the unit's forward that just ended is neither inside another's nor recomputed in backward."""
    context = state_of(module)._state_ctx
    is_inside: bool = context.post_backward_final_callback_queued or (
        not is_root and context.iter_forward_root is not None
    )
    return not is_inside


def state_of(module: Any) -> Any:
    """Return FSDP2's state of a module that `fully_shard` was applied to."""
    return module._get_fsdp_state()


def states_below(root: Any) -> list[Any]:
    """Return FSDP2's state of every unit once, in the order of the model; torch 2.11 repeats it for each module."""
    return [*dict.fromkeys(state_of(root)._state_ctx.all_states)]


def groups_of(module: FSDPModule) -> list[Any]:
    """Return FSDP2's parameter groups of a unit; at most one in torch 2.11, and none without parameters."""
    return _of_state(state_of(module))


def groups_below(root: FSDPModule) -> list[Any]:
    """Return FSDP2's parameter groups of all units, in the order of the model."""
    return [group for state in states_below(root) for group in _of_state(state)]


def _of_state(state: Any) -> list[Any]:
    found = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    return [group for group in found if group is not None]
