"""Gradients of parameters that are made after the backward of their inputs, as zero-bubble pipelines make them.

FSDP2 looks for gradients when those of a unit's inputs are there. What comes later lies in `.grad` of its unsharded
parameters, also after they were freed; `collect` makes it look again. Both need what FSDP2 keeps to itself, as
torch.distributed.pipelining does for the same purpose.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule


def unsharded_params(root: FSDPModule) -> list[nn.Parameter]:
    """What the last forward of all units below `root` computed with, trained parameters alone."""
    held = [each for group in _below(root) for each in group.fsdp_params]
    return [each.unsharded_param for each in held if each.unsharded_param.requires_grad]


def collect(root: FSDPModule) -> None:
    """As at the end of a backward: of all units below `root`, the last first, accumulate or reduce, and free."""
    for group in reversed(_below(root)):
        group.post_backward()
    _state(root)._root_post_backward_final_callback()


def has_failed(root: FSDPModule) -> bool:
    """Whether the last backward raised, and left FSDP2 in the middle of it; asked outside of any."""
    failed: bool = _state(root)._state_ctx.post_backward_final_callback_queued
    return failed


def is_outermost(module: FSDPModule, *, is_root: bool) -> bool:
    """Whether the forward of a unit that has just ended is in no other's, nor recomputed in a backward."""
    context = _state(module)._state_ctx
    is_inside: bool = context.post_backward_final_callback_queued or (
        not is_root and context.iter_forward_root is not None
    )
    return not is_inside


def recover(root: FSDPModule) -> None:
    """Let FSDP2 forget that backward. Raises RuntimeError where torch cannot, before 2.13."""
    if not hasattr(root, "reset_iter_state"):
        raise RuntimeError("a backward raised, and this version of torch cannot go on after that: start the run anew")
    root.reset_iter_state()


def _state(module: FSDPModule) -> Any:
    return module._get_fsdp_state()


def groups_of(module: FSDPModule) -> list[Any]:
    """FSDP2's groups of the parameters of one unit, none where it has none; torch before 2.13 has one at most."""
    return _of_state(_state(module))


def _below(root: FSDPModule) -> list[Any]:
    """Those of every unit, in the order in which they were made."""
    return [group for state in _state(root)._state_ctx.all_states for group in _of_state(state)]


def _of_state(state: Any) -> list[Any]:
    found = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    return [group for group in found if group is not None]
