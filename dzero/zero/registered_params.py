"""Registration of parameters on modules: outside of forward and backward, shards, even if units stay gathered.

In FSDP2, the unsharded parameters of stages 1 and 2 stay registered from a forward until the end of a backward:
forever if there is no backward, and at stage 1 until the last microbatch. At stage 3 this holds for units that stay
gathered for backward, and for the secondary shards of `zero.reshard_after_forward=<int>`. Code that edits, freezes or
clips `model.parameters()` in that time would change temporary tensors. Here, modules register:

    from the start of a unit's forward or backward          unsharded parameters, gathered again if a shard was written
    from the end of the outermost forward, or of backward   shards; gathered parameters are kept for the next use

After a forward without gradients, stage 3 frees the units that stay gathered for backward. Tensors that autograd saved
are unaffected. Before each use, unsharded parameters are frozen like their shards, and an error is raised if a
parameter was replaced, or its `.data` set, which a DTensor ignores. A backward raises an error if parameters have
changed since its forward, which torch detects by version counters that gathered parameters lack. A backward with
create_graph=True raises an error too, because sharded parameters are freed before it is differentiated.

This module uses private attributes of FSDP2.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn

from dzero.zero.deferred_grads import groups_of, is_outermost, state_of, unreduced
from dzero.zero.dtensors import local_of
from dzero.zero.layout import Layout
from dzero.zero.unit import Unit, as_module


def follow_shards(units: list[Unit], roots: list[nn.Module], layout: Layout) -> None:
    """Make every unit register unsharded parameters while it computes, and shards otherwise; call this once.

    Args:
        units: All units of the model.
        roots: The root of the model; empty for pipeline stages, whose schedule ends with sharded parameters.
        layout: Layout of the model, from which that of a unit may differ.
    """
    stays = [unit for unit in units if unit.layout.reshard_after_forward is not True]
    waits = [unit for unit in stays if layout.reshard_after_forward is True and unit.layout.param.sharded]
    for unit in units:
        for group in groups_of(unit.modules[0]):
            shown = _Shown(unit, group, state_of(unit.modules[0]))
            for root in roots:
                root.register_state_dict_pre_hook(shown.before_state_dict)  # type: ignore[no-untyped-call]
            group.pre_forward = partial(shown.before_forward, group.pre_forward)
            if roots:
                group.post_forward = partial(shown.after_forward, group.post_forward)
                group.pre_backward = partial(shown.before_backward, group.pre_backward)
        for module in map(as_module, unit.modules) if roots else ():
            is_root = any(module is root for root in roots)
            if unit in stays or is_root:  # the root in any case, because a forward that raises leaves units gathered
                after = partial(_after_forward, unit, units, waits, is_root)
                module.register_forward_hook(after, always_call=True)

    # At the end of a backward, FSDP2 calls this method of the unit that the backward reached first.
    for state in dict.fromkeys(map(state_of, [*roots, *(unit.modules[0] for unit in units)])) if roots else ():
        end = partial(_end_backward, units, state._root_post_backward_final_callback, bool(stays))
        state._root_post_backward_final_callback = end


def put_shards(units: Iterable[Unit]) -> None:
    """Register the shards of every unit that is gathered."""
    for unit in units:
        for group in groups_of(unit.modules[0]):
            if not group.is_sharded:
                _put(group)


def put_gathered(unit: Unit) -> bool:
    """Register the unsharded parameters of a unit if its forward left them valid, and return whether it did."""
    groups = groups_of(unit.modules[0])
    if unit.is_stale or not all(group.is_unsharded for group in groups):
        return False
    for group in groups:
        _put_gathered(group)
    return True


def drop_waiting(units: list[Unit], names: Container[str]) -> None:
    """Drop unsharded gradients of `names` that would be reduced with those of the last microbatch."""
    for unit in units:
        waiting = [held for group in groups_of(unit.modules[0]) for held in unreduced(group.fsdp_params)]
        name_of = {param: name for name, param in unit.params.items()} if waiting else {}
        for held in waiting:
            if name_of.get(held.sharded_param) in names:
                held.unsharded_accumulated_grad = None
                if (param := held.__dict__.get("_unsharded_param")) is not None:
                    param.grad = None


class _Shown:
    """Wrappers of FSDP2's steps around each use of a parameter group, which register its parameters."""

    def __init__(self, unit: Unit, group: Any, state: Any) -> None:
        self._unit, self._group, self._state = unit, group, state
        self._pre_backward = state._pre_backward
        self._data = [_data_of(held) for held in group.fsdp_params]

    def before_state_dict(self, *_: object) -> None:
        """Raise RuntimeError if `.data` was set, because the state dict would lack the new values."""
        self._refuse_data()

    def _refuse_data(self) -> None:
        """Raise RuntimeError if `.data` was set, which changes the storage of a parameter's wrapper, not its shard."""
        for index, held in enumerate(self._group.fsdp_params):
            (storage, shard), (old_storage, old_shard) = _data_of(held), self._data[index]
            if storage is old_storage and shard is old_shard:
                continue
            if storage is not old_storage and shard is old_shard:
                raise RuntimeError(
                    f"{_name_of(held)}.data was set to another tensor (vector_to_parameters does that too), which a "
                    "sharded parameter ignores: write param.data.copy_(tensor) instead"
                )
            self._data[index] = storage, shard  # the model was moved, or FSDP2 padded the shard again

    def before_forward(self, run: Callable[..., Any], *args: Any) -> Any:
        """Run FSDP2's `pre_forward` with unsharded parameters, gathered again if a shard was written."""
        group, unit = self._group, self._unit
        self._refuse_data()
        _follow_frozen(group)
        if unit.is_stale and not group.is_sharded:
            group._to_sharded()  # `reshard` has no effect in the forward state, which a forward that raised leaves
        elif group.is_unsharded:
            _put_gathered(group)
        unit.is_stale = False
        if not torch.is_inference_mode_enabled():
            return run(*args)
        with torch.inference_mode(mode=False), torch.no_grad():  # training uses this memory later
            return run(*args)

    def after_forward(self, run: Callable[..., Any], module: Any, args: Any, output: Any) -> Any:
        """Run FSDP2's `post_forward` so that the backward of this forward fails if parameters change before it."""
        # FSDP2 is about to register this method as a hook of the output tensors, by which it detects the backward.
        self._state._pre_backward = partial(_unless_changed, self._unit, self._unit.version, self._pre_backward)
        return run(module, args, output)

    def before_backward(self, run: Callable[..., Any], *args: Any) -> None:
        """Run FSDP2's `pre_backward`, and register what is gathered already, for modules that are recomputed."""
        if torch.is_grad_enabled() and self._unit.layout.shard > 1:
            raise RuntimeError(
                f"unit {self._unit.shape.name}: backward with create_graph=True, as gradient penalties need it, takes "
                "parameters that FSDP2 frees before it is differentiated again. Take zero.stage=0, or penalise "
                "differences of outputs"
            )
        if self._group.is_unsharded:
            _follow_frozen(self._group)
            _put_gathered(self._group)
        run(*args)


def _end_backward(units: list[Unit], run: Callable[[], None], stays: bool) -> None:
    """Reduce gradients that autograd made after their unit's reduction, end FSDP2's backward, and register shards.

    Such gradients exist if a function of a weight is older than the forward of this backward: a cast in the cache of
    autocast, or a parametrization in `cached()`. FSDP2 would leave them to the next backward, or lose them.
    """
    for unit in units:
        for group in groups_of(unit.modules[0]):
            is_reduced = group.reduce_grads and group._training_state.name == "POST_BACKWARD"
            if is_reduced and unreduced(group.fsdp_params):
                group.post_backward()
    run()
    if stays:
        put_shards(units)


def _unless_changed(
    unit: Unit, version: int, pre_backward: Callable[[torch.Tensor], torch.Tensor], grad: torch.Tensor
) -> torch.Tensor:
    """Run FSDP2's `_pre_backward` unless parameters have changed since the forward, which used `version`."""
    if unit.version != version:
        raise RuntimeError(
            f"unit {unit.shape.name}: its parameters were changed after the forward that this backward belongs to, by "
            "step() or by hand, so its gradients would be wrong: call backward() before, or run the forward again"
        )
    return pre_backward(grad)


def _after_forward(unit: Unit, units: list[Unit], waits: list[Unit], is_root: bool, *_: object) -> None:
    if is_outermost(unit.modules[0], is_root=is_root):
        for each in waits if not torch.is_grad_enabled() else ():  # no backward follows
            for module in each.modules:
                module.reshard()
        put_shards(units)


def _put(group: Any) -> None:
    for held in group.fsdp_params:
        held._setattr_on_modules(held.sharded_param)


def _put_gathered(group: Any) -> None:
    for held in group.fsdp_params:
        held._setattr_on_modules(held.unsharded_param)


def _data_of(held: Any) -> tuple[object, object]:
    """Return the storage of a sharded parameter, which setting `.data` changes, and its shard, which stays."""
    param = held.sharded_param
    return param.untyped_storage(), local_of(param)


def _name_of(held: Any) -> str:
    return str(held._param_fqn or held._module_info.param_name)


def _second_shard(held: Any) -> Any:
    """Return the secondary shard, which FSDP2 keeps for backward with `zero.reshard_after_forward=<int>`."""
    return held.__dict__.get("_sharded_post_forward_param")


def _follow_frozen(group: Any) -> None:
    """Freeze unsharded parameters like their shards; raise RuntimeError if a parameter was replaced."""
    for held in group.fsdp_params:
        shard, param, place = held.sharded_param, held.__dict__.get("_unsharded_param"), held._module_info
        shown = place.module._parameters.get(place.param_name)
        if shown is not shard and shown is not param and shown is not _second_shard(held):
            raise RuntimeError(
                f"{_name_of(held)} was replaced by another tensor, which FSDP2 would pass over: "
                "copy values into the parameter that is there (param.copy_(...) under no_grad), or replace it before "
                "shard()"
            )
        if param is not None and param.requires_grad != shard.requires_grad:
            param.requires_grad_(shard.requires_grad)
