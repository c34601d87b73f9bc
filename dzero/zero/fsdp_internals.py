"""Private parts of FSDP2: the only file that uses them (utils/torch_internals.py has those of the rest of torch).

FSDP2 keeps, for what `fully_shard` was applied to,

    FSDPState        one per unit: hooks of its modules, and what it does at the end of a backward
    FSDPParamGroup   what a unit gathers and reduces together; at most one in torch 2.11, and none without parameters
    FSDPParam        one parameter: its shard, and between gather and release its unsharded tensor and gradient

Other files pass these objects to the functions here, and use none of their attributes. The table `SEAMS` lists
the names that are needed, and what happens in a torch without them.

Notes on what FSDP2 does, and why dzero intervenes:

Deferred gradients. FSDP2 looks for the gradients of a unit's parameters when the gradients of the unit's inputs are
ready. Zero-bubble pipelines compute parameter gradients later, and leave them in `.grad` of the unsharded parameters,
even if these were freed. `reduce_deferred_grads` makes FSDP2 look again, as torch.distributed.pipelining does for the
same purpose.

Backports. Since torch 2.13, FSDP2 can reset a backward that raised, and ends the forward of a unit of which only some
modules ran. Since 2.12, it finds tensors in dataclasses that a module returns; otherwise it would not gather the unit
again for backward. `recover` and `follow_outputs` do this for earlier versions, and for objects of any class.

Outputs in place. FSDP2 detects a unit's backward by hooks on its outputs. Writing in place into an output that is a
view, such as that of a linear layer with a bias, replaces its part of the graph, and the hook never runs. A hook on the
tensor that it is a view of does, so FSDP2's warning about such outputs (since torch 2.13) is silenced.

Use in place. Where the shard axis has one rank, a unit's shards are its whole parameters. FSDP2 has no such case, and
fills the output of an all-gather. `use_shards` makes the shard itself that output, so that nothing is copied or freed.
A parameter that is used in another dtype, is offloaded, or shares its memory with others is still copied.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from dataclasses import fields, is_dataclass
from functools import cache, partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.utils.parametrize import is_parametrized

from dzero.utils.forward_hooks import after_forward, before_forward
from dzero.utils.torch_internals import Seam, base_of, found_by, is_view, tree_leaves

if TYPE_CHECKING:
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam as FSDPParam
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup as FSDPParamGroup
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState as FSDPState

Step = Literal["pre_forward", "post_forward", "pre_backward", "post_backward"]
"""Steps that FSDP2 takes around each use of a parameter group."""

MODULE = "torch.distributed.fsdp:FSDPModule."
STATE = "torch.distributed.fsdp._fully_shard._fsdp_state:FSDPState."
CONTEXT = "torch.distributed.fsdp._fully_shard._fsdp_state:FSDPStateContext."
GROUP = "torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup."
PARAM = "torch.distributed.fsdp._fully_shard._fsdp_param:FSDPParam."

UNITS = Seam(
    (
        f"{MODULE}_get_fsdp_state",
        f"{STATE}_state_ctx",
        f"{STATE}_fsdp_param_groups or {STATE}_fsdp_param_group",
        f"{CONTEXT}all_states",
        f"{GROUP}fsdp_params",
        f"{PARAM}sharded_param",
        f"{PARAM}unsharded_param",
        f"{PARAM}_unsharded_param",
    ),
    "finding the parameters of a unit",
)
REGISTRATION = Seam(
    (
        f"{GROUP}pre_forward",
        f"{GROUP}post_forward",
        f"{GROUP}pre_backward",
        f"{GROUP}is_sharded",
        f"{GROUP}is_unsharded",
        f"{GROUP}_to_sharded",
        f"{CONTEXT}iter_forward_root",
        f"{PARAM}_setattr_on_modules",
        f"{PARAM}_module_info",
        f"{PARAM}_sharded_post_forward_param",
    ),
    "registering shards outside of forward and backward, where code may edit parameters",
)
GRADIENTS = Seam(
    (
        f"{GROUP}post_backward",
        f"{GROUP}reduce_grads",
        f"{GROUP}_orig_dtype",
        f"{GROUP}_training_state",
        f"{PARAM}unsharded_accumulated_grad",
        f"{PARAM}accumulate_unsharded_grad_if_needed",
        f"{PARAM}to_accumulated_grad_if_needed",
        f"{PARAM}to_sharded_dtensor",
        f"{PARAM}reduce_dtype",
        f"{PARAM}init_unsharded_param",
        f"{STATE}_root_post_backward_final_callback",
        f"{CONTEXT}post_backward_final_callback_queued",
        "torch:_C._will_engine_execute_node",
    ),
    "reducing all gradients of a unit in one buffer",
)
SCALARS = Seam(
    (f"{PARAM}_orig_size", f"{PARAM}_contiguous_orig_stride"),
    "telling parameters without dimensions, which it gathers in their own shape",
)
RECOVERY = Seam(
    (
        f"{MODULE}reset_iter_state or {STATE}_modules_to_run_forward",
        f"{MODULE}reset_iter_state or {STATE}_training_state",
        f"{MODULE}reset_iter_state or {GROUP}_partial_reduce_output",
        f"{MODULE}reset_iter_state or {CONTEXT}is_last_backward",
        f"{STATE}_register_pre_backward_hook",
    ),
    "repeating a step whose backward raised, units of which only some modules ran, and outputs written in place",
)
CHANGES = Seam(
    (f"{STATE}_pre_backward",),
    "refusing a backward whose parameters have changed since its forward",
    "such a backward runs, with wrong gradients. Call backward() before step()",
)
FIRST_CALLS = Seam(
    (f"{STATE}_lazy_init",),
    "calling a unit such as an embedding before the model",
    "FSDP2 rejects the model after such a call. Run the whole model first",
)
IN_PLACE = Seam(
    (
        f"{PARAM}_sharded_param_data",
        f"{PARAM}all_gather_outputs",
        f"{PARAM}init_all_gather_outputs",
        f"{PARAM}free_unsharded_param",
    ),
    "using parameters in place where the shard axis has one rank",
    "FSDP2 copies them for each use, which takes time and the memory of one more copy of what is gathered",
)
SEAMS = (UNITS, REGISTRATION, GRADIENTS, SCALARS, RECOVERY, CHANGES, FIRST_CALLS, IN_PLACE)
"""What sharding needs of FSDP2."""

FINDS_DATACLASSES = found_by("torch.distributed.fsdp._common_utils:collect_grad_tensors")
"""FSDP2's own search for tensors in dataclasses, or None in torch 2.11."""

warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module .* returned a view tensor")

# States and groups.


def state_of(module: Any) -> FSDPState:
    """Return FSDP2's state of a module that `fully_shard` was applied to."""
    return module._get_fsdp_state()  # type: ignore[no-any-return]


def states_below(root: Any) -> list[FSDPState]:
    """Return FSDP2's state of every unit once, in the order of the model; torch 2.11 repeats it for each module."""
    return [*dict.fromkeys(state_of(root)._state_ctx.all_states)]


def groups_of(module: FSDPModule) -> list[FSDPParamGroup]:
    """Return FSDP2's parameter groups of a unit."""
    return _of_state(state_of(module))


def groups_below(root: FSDPModule) -> list[FSDPParamGroup]:
    """Return FSDP2's parameter groups of all units, in the order of the model."""
    return [group for state in states_below(root) for group in _of_state(state)]


def _of_state(state: Any) -> list[FSDPParamGroup]:
    found = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    return [group for group in found if group is not None]


def wrap_step(group: FSDPParamGroup, step: Step, around: Callable[..., Any]) -> None:
    """Make FSDP2 call `around(step's own method, *arguments)` instead of a step of `group`."""
    setattr(group, step, partial(around, getattr(group, step)))


def wrap_end_of_backward(modules: Iterable[nn.Module | FSDPModule], around: Callable[..., None]) -> None:
    """Make FSDP2 call `around(its own method)` where a backward ends, for the unit that the backward reached first."""
    for state in dict.fromkeys(map(state_of, modules)):
        end = partial(around, state._root_post_backward_final_callback)
        state._root_post_backward_final_callback = end  # type: ignore[method-assign]


def follow_root(module: nn.Module, root: FSDPModule) -> None:
    """Allow a unit without child modules, such as an embedding, to be called before the model; call this once.

    FSDP2 would take the unit for a root, and later reject the root of the whole model.
    """

    def before(*_: object) -> None:
        handle.remove()
        state_of(root)._lazy_init()

    if FIRST_CALLS.is_there and not any(True for _ in module.children()):
        handle = before_forward(module, before, prepend=True)


def has_failed(root: FSDPModule) -> bool:
    """Return whether the last backward raised and left FSDP2 in the middle of it; call this outside of backward."""
    return is_in_backward(root)


def is_outermost(module: FSDPModule, *, is_root: bool) -> bool:
    """Return whether the unit's forward that just ended is neither inside another's nor recomputed in backward."""
    inside = not is_root and state_of(module)._state_ctx.iter_forward_root is not None
    return not (is_in_backward(module) or inside)


def is_in_backward(module: FSDPModule) -> bool:
    """Return whether a backward of the model that a unit belongs to is running."""
    return state_of(module)._state_ctx.post_backward_final_callback_queued


def generate_alone(module: nn.Module) -> None:
    """Let ranks generate by themselves: for FSDP2's modules, transformers waits at each token for the other ranks."""
    module._is_fsdp_managed_module = False  # type: ignore[assignment]


# The check of a backward: FSDP2 registers a method of its state as a hook of the tensors that a forward returns.

BackwardHook = Callable[[torch.Tensor], torch.Tensor]


def backward_hook(state: FSDPState) -> BackwardHook | None:
    """Return the method that FSDP2 registers as a hook of outputs, or None where it has another name."""
    return getattr(state, "_pre_backward", None) if CHANGES.is_there else None


def set_backward_hook(state: FSDPState, hook: BackwardHook) -> None:
    """Make FSDP2 register `hook` in place of its own method, from its next `post_forward` on."""
    state._pre_backward = hook  # type: ignore[assignment, method-assign]


# Registered parameters.


def is_sharded(group: FSDPParamGroup) -> bool:
    """Return whether the unit's modules register shards, and nothing of the group is gathered."""
    return group.is_sharded


def is_unsharded(group: FSDPParamGroup) -> bool:
    """Return whether the group's unsharded parameters exist."""
    return group.is_unsharded


def free(group: FSDPParamGroup) -> None:
    """Free unsharded parameters; `reshard` has no effect in the forward state, which a forward that raised leaves."""
    group._to_sharded()  # type: ignore[no-untyped-call]


def register_shards(group: FSDPParamGroup) -> None:
    """Register the shards on the modules, without freeing what is gathered."""
    for held in group.fsdp_params:
        held._setattr_on_modules(held.sharded_param)


def register_gathered(group: FSDPParamGroup) -> None:
    """Register the unsharded parameters, which a forward left, on the modules."""
    for held in group.fsdp_params:
        held._setattr_on_modules(held.unsharded_param)


def shards_of(group: FSDPParamGroup) -> list[nn.Parameter]:
    """Return the sharded parameters of a group, trained or frozen."""
    return [held.sharded_param for held in group.fsdp_params]


def gathered_in(group: FSDPParamGroup) -> list[nn.Parameter]:
    """Return the unsharded parameters of a group that is gathered, trained or frozen."""
    return [held.unsharded_param for held in group.fsdp_params]


def follow_frozen(group: FSDPParamGroup) -> int | None:
    """Freeze unsharded parameters like their shards; return the index of a parameter that was replaced, or None.

    With `zero.reshard_after_forward=<int>`, a module may also register the secondary shard, kept for backward.
    """
    for index, held in enumerate(group.fsdp_params):
        shard, param, place = held.sharded_param, held.__dict__.get("_unsharded_param"), held._module_info
        shown = place.module._parameters.get(place.param_name)
        if shown is not shard and shown is not param and shown is not held.__dict__.get("_sharded_post_forward_param"):
            return index
        if param is not None and param.requires_grad != shard.requires_grad:
            param.requires_grad_(shard.requires_grad)
    return None


def parametrized_in(group: FSDPParamGroup, otherwise: int | None) -> int | None:
    """Return the index of a parameter in whose place a module computes another tensor; `otherwise` if there is none."""
    places = [held._module_info for held in group.fsdp_params]
    found = (index for index, place in enumerate(places) if is_parametrized(place.module, place.param_name))
    return next(found, otherwise)


# Gradients that are not reduced yet.


def trained_params(group: FSDPParamGroup) -> list[FSDPParam]:
    """Return FSDP2's parameters that are trained, in the order of its buffers."""
    return [held for held in group.fsdp_params if held.sharded_param.requires_grad]


def shard_of(held: FSDPParam) -> nn.Parameter:
    """Return the sharded parameter."""
    return held.sharded_param


def unreduced(params: Iterable[FSDPParam]) -> list[FSDPParam]:
    """Return the FSDP2 parameters in `params` with an unreduced gradient; one loop, because every step runs it."""
    return [
        held
        for held in params
        if held.unsharded_accumulated_grad is not None
        or ((param := held.__dict__.get("_unsharded_param")) is not None and param.grad is not None)
    ]


def unreduced_in(group: FSDPParamGroup) -> list[FSDPParam]:
    """Return the parameters of a group that have an unreduced gradient."""
    return unreduced(group.fsdp_params)


def drop_unreduced(held: FSDPParam) -> None:
    """Drop the unreduced gradient of a parameter."""
    held.unsharded_accumulated_grad = None
    if (param := held.__dict__.get("_unsharded_param")) is not None:
        param.grad = None


def fill_missing(params: list[FSDPParam], also_all: Callable[[], bool]) -> list[int]:
    """Set missing gradients to zeros, and return the indices of the missing.

    If all are missing, this is only done if the parameters are trained at present and `also_all` returns True.
    """
    found = unreduced(params)
    if len(found) == len(params):
        return []
    if not found and not (any(shard_of(held).requires_grad for held in params) and also_all()):
        return []
    missing = [index for index, held in enumerate(params) if held not in found]
    waiting = any(held.unsharded_accumulated_grad is not None for held in params)
    for held in params if waiting else ():  # FSDP2 accumulates over microbatches in the reduction's dtype
        held.accumulate_unsharded_grad_if_needed()  # the next line would overwrite earlier microbatches
        held.to_accumulated_grad_if_needed()
    for index in missing:
        held = params[index]
        if waiting:
            held.unsharded_accumulated_grad = torch.zeros_like(held._unsharded_param, dtype=held.reduce_dtype)
        else:
            held._unsharded_param.grad = torch.zeros_like(held._unsharded_param)
    return missing


def reduces(group: FSDPParamGroup) -> bool:
    """Return whether this backward reduces gradients, instead of accumulating them unreduced."""
    return group.reduce_grads


def came_through(module: FSDPModule, group: FSDPParamGroup) -> bool:
    """Return whether the backward that is running came through a group's modules, and adds to any `.grad` of the model.

    `torch.autograd.grad` adds to none.
    """
    if group._training_state.name != "PRE_BACKWARD":  # backward has not reached what they returned, or has left them
        return False
    groups = (each for state in state_of(module)._state_ctx.all_states for each in _of_state(state))
    every = (held.__dict__.get("_unsharded_param") for each in groups for held in each.fsdp_params)
    return any(
        param is not None and param.requires_grad and torch._C._will_engine_execute_node(get_gradient_edge(param).node)
        for param in every
    )


def was_gathered(group: FSDPParamGroup) -> bool:
    """Return whether the group was gathered at least once, so that unsharded parameters exist."""
    return "_unsharded_param" in group.fsdp_params[0].__dict__


def wrap_unsharded(held: FSDPParam, around: Callable[[nn.Parameter], None]) -> None:
    """Call `around` once with each unsharded parameter that FSDP2 makes of a shard, as soon as it is trained."""
    done: list[nn.Parameter] = []

    def init(run: Callable[[], None]) -> None:
        run()
        if (param := held._unsharded_param).requires_grad and not any(param is each for each in done):
            done[:] = [param]
            around(param)

    held.init_unsharded_param = partial(init, held.init_unsharded_param)  # type: ignore[method-assign]


def reduce_late(group: FSDPParamGroup) -> None:
    """Reduce gradients that autograd made after the group's reduction in this backward."""
    if group.reduce_grads and group._training_state.name == "POST_BACKWARD" and unreduced(group.fsdp_params):
        group.post_backward()


def set_grad_dtype(group: FSDPParamGroup, dtype: torch.dtype) -> None:
    """Set the dtype to which FSDP2 casts the reduced buffer for `.grad`."""
    group._orig_dtype = dtype


def wrap_grad(held: FSDPParam, around: Callable[[Callable[[torch.Tensor], DTensor], torch.Tensor], DTensor]) -> None:
    """Make FSDP2 call `around(its own method, part of the reduced buffer)` for the `.grad` of a parameter."""
    held.to_sharded_dtensor = partial(around, held.to_sharded_dtensor)  # type: ignore[method-assign]


def unsharded_params(root: FSDPModule) -> list[nn.Parameter]:
    """Return the unsharded, trained parameters that the last forward of all units below `root` used."""
    held = [each for group in groups_below(root) for each in group.fsdp_params]
    return [each.unsharded_param for each in held if each.unsharded_param.requires_grad]


def reduce_deferred_grads(root: FSDPModule) -> None:
    """Accumulate or reduce gradients, and free parameters, of all units below `root`, as at the end of backward."""
    for group in reversed(groups_below(root)):
        group.post_backward()
    state_of(root)._root_post_backward_final_callback()


# Parameters without dimensions, which are sharded with one.


def gather_without_dims(module: FSDPModule, places: set[tuple[nn.Module, str]]) -> None:
    """Make FSDP2 gather the parameters at `places` (module and attribute) without dimensions."""
    for group in groups_of(module):
        for held in group.fsdp_params:
            if (held._module_info.module, held._module_info.param_name) in places:
                held._orig_size, held._contiguous_orig_stride = torch.Size([]), ()


def is_without_dims(held: FSDPParam) -> bool:
    """Return whether a parameter is gathered without dimensions."""
    return not held._orig_size


def widen_gradient(held: FSDPParam) -> None:
    """Give the gradient of a parameter that was gathered without dimensions shape (1,), before FSDP2 reduces it."""
    own, waiting = held._unsharded_param.grad, held.unsharded_accumulated_grad
    if own is not None or waiting is not None:
        held._unsharded_param.grad = None
        both: Any = own if waiting is None else waiting if own is None else waiting + own
        held.unsharded_accumulated_grad = both.view(1)


# Backports.


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
    # Not the wrapper of `wrap_end_of_backward`, which reduces gradients that are left.
    type(state)._root_post_backward_final_callback(state)
    context.is_last_backward, context.iter_forward_root = is_last, None
    for group in groups:
        group.reshard()


def follow_outputs(module: nn.Module, *, is_root: bool) -> None:
    """Register the hooks that this version of torch needs; call this once, after `fully_shard`."""
    after_forward(module, _show_bases, with_kwargs=True)
    after_forward(module, _show_objects, with_kwargs=True)
    if is_root and not hasattr(module, "reset_iter_state"):
        after_forward(module, _end_parts)


def _show_bases(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
    """Let FSDP2 detect a backward by what outputs are views of; a view that is written in place leaves the graph.

    Inputs do not count: autograd reaches them after the unit.
    """
    state = state_of(module)
    views = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor) and is_view(leaf)]
    if not views or _is_repeated(state):
        return
    given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    own = {id(leaf) for leaf in given} | {id(base_of(leaf)) for leaf in given}
    state._register_pre_backward_hook([base for base in map(base_of, views) if id(base) not in own])


def _show_objects(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
    """Let FSDP2 detect a backward by tensors that pytree does not see: those in objects, returned or written into.

    Where a unit returns a tensor, or a container of some, FSDP2 finds it. A dataclass it finds since torch 2.12.
    """
    state = state_of(module)
    if not torch.is_grad_enabled() or _is_repeated(state):
        return
    leaves = tree_leaves(output)
    if any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves):
        if FINDS_DATACLASSES is None and (inside := _inside(output)):
            state._register_pre_backward_hook(inside)
        return
    found = _tensors_in(
        [*leaves, *(leaf for leaf in tree_leaves((args, kwargs)) if not isinstance(leaf, torch.Tensor))]
    )
    if found:
        state._register_pre_backward_hook([tensor if not is_view(tensor) else base_of(tensor) for tensor in found])


def _tensors_in(values: list[Any]) -> list[torch.Tensor]:
    """Return the tensors made by operations in plain objects and containers, at any depth, each once."""
    found, seen, waiting = [], set[int](), [*values]
    while waiting:
        value = waiting.pop()
        if id(value) in seen or isinstance(value, (nn.Module, type, str, bytes, int, float)) or callable(value):
            continue
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            found += [value] if value.grad_fn is not None else []
        elif isinstance(value, dict):
            waiting += value.values()
        elif isinstance(value, (list, tuple, set)):
            waiting += value
        else:
            waiting += getattr(value, "__dict__", {}).values()
            slots = [name for cls in type(value).__mro__ for name in _as_names(vars(cls).get("__slots__", ()))]
            waiting += [getattr(value, name, None) for name in slots]
    return found


def _as_names(slots: Any) -> list[str]:
    return [slots] if isinstance(slots, str) else [*slots]


def _end_parts(root: nn.Module, _: object, output: Any) -> None:
    """End the forward of units of which only some modules ran; otherwise they would stay gathered."""
    own = state_of(root)
    for state in reversed(states_below(root)) if not _is_repeated(own) else ():
        if state is not own and state._modules_to_run_forward:
            for group in _of_state(state):
                group.post_forward(None, None, output)  # type: ignore[arg-type]
            state._register_pre_backward_hook([output, *_inside(output)])
            state._training_state = type(state._training_state).IDLE
            state._modules_to_run_forward.clear()


def _is_repeated(state: FSDPState) -> bool:
    """Return whether this forward is a recomputation in backward."""
    return state._training_state.name == "PRE_BACKWARD"


def _inside(output: Any) -> list[Any]:
    """Return the values in the dataclasses of `output`, including nested ones."""
    boxes = [leaf for leaf in tree_leaves(output) if is_dataclass(leaf) and not isinstance(leaf, type)]
    held = [getattr(box, each.name) for box in boxes for each in fields(box)]
    return [*held, *_inside(held)] if held else []


# Use in place.


def use_shards(module: FSDPModule) -> None:
    """Use the shards of `module` in place; call this once, after `fully_shard` over one rank."""
    for group in groups_of(module) if IN_PLACE.is_there else ():
        for held in group.fsdp_params:
            if type(held._sharded_param_data) is torch.Tensor:  # else it is brought to the device for each use
                held.__class__ = _used_in_place()


@cache
def _used_in_place() -> Any:
    base: Any = import_module("torch.distributed.fsdp._fully_shard._fsdp_param").FSDPParam

    class UnshardedInPlace(base):  # type: ignore[misc]
        """FSDP2's parameter whose shard, on an axis of one rank, is also its all-gather output."""

        _gathered: torch.Tensor | None = None
        """Shard for which the all-gather outputs were made."""

        def init_all_gather_outputs(
            self,
            all_gather_input_numels: list[int],
            all_gather_input_dtypes: list[torch.dtype],
            world_size: int,
            device: torch.device,
            **others: Any,
        ) -> None:
            """Make the shard the all-gather output; called before each use.

            The shard is replaced if the model is moved, or its state dict is assigned. `others` is one more argument
            in torch 2.11 and 2.12.
            """
            shard = self._sharded_param_data
            if shard is self._gathered:
                return
            self._gathered, self.all_gather_outputs = shard, []
            self.__dict__.pop("_unsharded_param", None)
            if all_gather_input_dtypes == [shard.dtype] and shard.untyped_storage().nbytes() == shard.nbytes:
                self.all_gather_outputs = [shard]
            else:
                super().init_all_gather_outputs(
                    all_gather_input_numels, all_gather_input_dtypes, world_size, device, **others
                )

        def free_unsharded_param(self) -> None:
            """Free the parameter as FSDP2 does, unless it is the shard."""
            if self.all_gather_outputs[0] is not self._gathered:
                super().free_unsharded_param()

    return UnshardedInPlace
