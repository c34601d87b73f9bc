"""Backports of FSDP2's behavior in torch 2.13 to earlier versions.

Since 2.13, FSDP2 can reset a backward that raised, and ends the forward of a unit of which only some modules ran. Since
2.12, it finds tensors in dataclasses that a module returns; otherwise it would not gather the unit again for
backward. This module uses private attributes of FSDP2.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule, _common_utils
from torch.utils._pytree import tree_leaves

from dzero.zero.deferred_grads import groups_below, groups_of, state_of, states_below


def recover(root: FSDPModule) -> None:
    """Reset FSDP2 after a backward that raised, and free what it gathered."""
    if hasattr(root, "reset_iter_state"):
        root.reset_iter_state()
        return
    state, groups = state_of(root), groups_below(root)
    context = state._state_ctx
    for each in states_below(root):
        each._modules_to_run_forward.clear()
    for group in groups:
        group._training_state = type(group._training_state).POST_BACKWARD  # so that the end of backward reduces nothing
        group._partial_reduce_output = None
    is_last, context.is_last_backward = context.is_last_backward, True
    type(state)._root_post_backward_final_callback(
        state
    )  # not the wrapper of registered_params.py, which reduces gradients that are left
    context.is_last_backward, context.iter_forward_root = is_last, None
    for group in groups:
        group.reshard()


def follow_outputs(module: nn.Module, *, is_root: bool) -> None:
    """Register the hooks that this version of torch needs; call this once, after `fully_shard`."""
    if not hasattr(_common_utils, "collect_grad_tensors"):
        module.register_forward_hook(_show_dataclasses)
    if is_root and not hasattr(module, "reset_iter_state"):
        module.register_forward_hook(_end_parts)


def _show_dataclasses(module: nn.Module, _: object, output: Any) -> None:
    state = state_of(module)
    if not _is_repeated(state):
        state._register_pre_backward_hook(_inside(output))


def _end_parts(root: nn.Module, _: object, output: Any) -> None:
    """End the forward of units of which only some modules ran; otherwise they would stay gathered."""
    own = state_of(root)
    for state in reversed(states_below(root)) if not _is_repeated(own) else ():
        if state is not own and state._modules_to_run_forward:
            for group in groups_of(state._modules[0]):
                group.post_forward(None, None, output)
            state._register_pre_backward_hook([output, *_inside(output)])
            state._training_state = type(state._training_state).IDLE
            state._modules_to_run_forward.clear()


def _is_repeated(state: Any) -> bool:
    """Return whether this forward is a recomputation in backward."""
    return bool(state._training_state.name == "PRE_BACKWARD")


def _inside(output: Any) -> list[Any]:
    """Return the values in the dataclasses of `output`, including nested ones."""
    boxes = [leaf for leaf in tree_leaves(output) if is_dataclass(leaf) and not isinstance(leaf, type)]
    held = [getattr(box, each.name) for box in boxes for each in fields(box)]
    return [*held, *_inside(held)] if held else []
