"""Outside of forward and backward a model's parameters are its shards, also where units stay gathered in between.

FSDP2 leaves the gathered parameters of stages 1 and 2 on the modules from a forward until a backward ends: for good
after one that has no backward, and at stage 1 until the last microbatch. So it does at stage 3 with those of units that
stay for backward, which here are freed after a forward without gradients, and with the second shards of
`zero.reshard_after_forward=<int>`. Whoever then edits, freezes or clips `model.parameters()` would do that to copies.
So modules show

    from                                     until its end
    a unit's forward, or use in backward     gathered parameters; gathered anew where a shard was written since
    the outermost forward, a backward        shards, while what stays gathered waits for backward or the next forward

What autograd saved is not touched by that. Before each use the gathered parameters learn whether their shards were
frozen meanwhile, and a parameter that was replaced, or whose `.data` was set (which a DTensor ignores), is refused. A
backward over a forward whose parameters have changed since is refused, as torch does by its version
counters, which gathered copies do not have; and one that is to be differentiated again, where they are freed. This
needs what FSDP2 keeps to itself.
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
    """Let every unit show gathered parameters where it computes with them, and shards elsewhere; called once.

    Args:
        units: All of a model.
        roots: Its root; none for the parts of a pipeline, whose schedule ends with their shards.
        layout: Its table, from which those of some units differ.
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
            if unit in stays or is_root:  # of the root in any case: forwards that raise leave units gathered
                after = partial(_after_forward, unit, units, waits, is_root)
                module.register_forward_hook(after, always_call=True)

    # At the end of a backward FSDP2 calls this method of the unit that the backward reached first.
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
    """Register the gathered parameters of a unit that has them, as its forward left them; return whether it has."""
    groups = groups_of(unit.modules[0])
    if unit.is_stale or not all(group.is_unsharded for group in groups):
        return False
    for group in groups:
        _put_gathered(group)
    return True


def drop_waiting(units: list[Unit], names: Container[str]) -> None:
    """Forget whole gradients of `names` that wait for the last microbatch's, to be reduced with them."""
    for unit in units:
        waiting = [held for group in groups_of(unit.modules[0]) for held in unreduced(group.fsdp_params)]
        name_of = {param: name for name, param in unit.params.items()} if waiting else {}
        for held in waiting:
            if name_of.get(held.sharded_param) in names:
                held.unsharded_accumulated_grad = None
                if (param := held.__dict__.get("_unsharded_param")) is not None:
                    param.grad = None


class _Shown:
    """FSDP2's steps around each use of a group of a unit's parameters, with what its modules show."""

    def __init__(self, unit: Unit, group: Any, state: Any) -> None:
        self._unit, self._group, self._state = unit, group, state
        self._pre_backward = state._pre_backward
        self._data = [_data_of(held) for held in group.fsdp_params]

    def before_state_dict(self, *_: object) -> None:
        """Refuse a state dict that would lack what `.data` was set to."""
        self._refuse_data()

    def _refuse_data(self) -> None:
        """Raise RuntimeError for a parameter whose `.data` was set: its wrapper's storage is another, its shard not."""
        for index, held in enumerate(self._group.fsdp_params):
            (storage, shard), (old_storage, old_shard) = _data_of(held), self._data[index]
            if storage is old_storage and shard is old_shard:
                continue
            if storage is not old_storage and shard is old_shard:
                raise RuntimeError(
                    f"{_name_of(held)}.data was set to another tensor (vector_to_parameters does that too), which a "
                    "sharded parameter ignores: write param.data.copy_(tensor) instead"
                )
            self._data[index] = storage, shard  # the model was moved, or FSDP2 padded a shard anew

    def before_forward(self, run: Callable[..., Any], *args: Any) -> Any:
        """Show gathered parameters, gathered anew where a shard was written since, around FSDP2's `pre_forward`."""
        group, unit = self._group, self._unit
        self._refuse_data()
        _follow_frozen(group)
        if unit.is_stale and not group.is_sharded:
            group._to_sharded()  # `reshard` does nothing in the middle of a forward, where one that raised left it
        elif group.is_unsharded:
            _put_gathered(group)
        unit.is_stale = False
        if not torch.is_inference_mode_enabled():
            return run(*args)
        with torch.inference_mode(mode=False), torch.no_grad():  # memory that training goes on with
            return run(*args)

    def after_forward(self, run: Callable[..., Any], module: Any, args: Any, output: Any) -> Any:
        """Let the backward of this forward be refused where parameters change before it; FSDP2's `post_forward`."""
        # What FSDP2 is about to register as the hook of the output's tensors, by which it notices the backward.
        self._state._pre_backward = partial(_unless_changed, self._unit, self._unit.version, self._pre_backward)
        return run(module, args, output)

    def before_backward(self, run: Callable[..., Any], *args: Any) -> None:
        """Show what is gathered already, for modules that are computed again; FSDP2's `pre_backward`."""
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
    """FSDP2's end of a backward: reduce first what autograd left after a unit's reduction, and show shards at last.

    That is left where a function of a weight is older than the forward that goes backward: a cast in the cache of
    autocast, a parametrization in `cached()`. FSDP2 would leave it to the next backward, or forget it.
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
    """FSDP2's `_pre_backward`, for a forward that saw the parameters in `version`."""
    if unit.version != version:
        raise RuntimeError(
            f"unit {unit.shape.name}: its parameters were changed after the forward that this backward belongs to, by "
            "step() or by hand, so its gradients would be wrong: call backward() before, or run the forward again"
        )
    return pre_backward(grad)


def _after_forward(unit: Unit, units: list[Unit], waits: list[Unit], is_root: bool, *_: object) -> None:
    if is_outermost(unit.modules[0], is_root=is_root):
        for each in waits if not torch.is_grad_enabled() else ():  # no backward will come
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
    """Return what `.data =` changes of a sharded parameter, and what it does not: its storage, and its shard."""
    param = held.sharded_param
    return param.untyped_storage(), local_of(param)


def _name_of(held: Any) -> str:
    return str(held._param_fqn or held._module_info.param_name)


def _second_shard(held: Any) -> Any:
    """Return what FSDP2 keeps from forward to backward with `zero.reshard_after_forward=<int>`."""
    return held.__dict__.get("_sharded_post_forward_param")


def _follow_frozen(group: Any) -> None:
    """Let gathered parameters be frozen as their shards are. Raises RuntimeError where a shard was replaced."""
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
