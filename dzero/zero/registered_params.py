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
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn

from dzero.utils.forward_hooks import after_forward
from dzero.utils.numba_views import has_memory
from dzero.utils.registrations import registrations
from dzero.utils.torch_internals import is_transformed, storage_key, version_of
from dzero.zero import fsdp_internals as fsdp
from dzero.zero.dtensors import local_of
from dzero.zero.layout import Layout
from dzero.zero.unit import Unit, as_module

HASHED = {
    torch.float64: torch.int32,
    torch.float32: torch.int32,
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
}
"""Types of elements that are hashed, and the integers of their bits, or of half of them."""
HASHED_AT_ONCE = 1 << 20
ODD = 0x1E3779B97F4A7C15


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
        for group in fsdp.groups_of(unit.modules[0]):
            shown = _Shown(unit, group, fsdp.state_of(unit.modules[0]))
            for root in roots:
                root.register_state_dict_pre_hook(shown.before_state_dict)  # type: ignore[no-untyped-call]
            fsdp.wrap_step(group, "pre_forward", shown.before_forward)
            if roots:
                fsdp.wrap_step(group, "post_forward", shown.after_forward)
                fsdp.wrap_step(group, "pre_backward", shown.before_backward)
        for module in map(as_module, unit.modules) if roots else ():
            is_root = any(module is root for root in roots)
            if unit in stays or is_root:  # the root in any case, because a forward that raises leaves units gathered
                after = partial(_after_forward, unit, units, waits, is_root)
                after_forward(module, after, always_call=True)

    if roots:
        fsdp.wrap_end_of_backward(
            [*roots, *(unit.modules[0] for unit in units)], partial(_end_backward, units, bool(stays))
        )


def put_shards(units: Iterable[Unit]) -> None:
    """Register the shards of every unit that is gathered."""
    for unit in units:
        for group in fsdp.groups_of(unit.modules[0]):
            if not fsdp.is_sharded(group):
                fsdp.register_shards(group)


def put_gathered(unit: Unit) -> bool:
    """Register the unsharded parameters of a unit if its forward left them valid, and return whether it did."""
    groups = fsdp.groups_of(unit.modules[0])
    if unit.is_stale or not all(map(fsdp.is_unsharded, groups)):
        return False
    for group in groups:
        fsdp.register_gathered(group)
    return True


def drop_waiting(units: list[Unit], names: Container[str]) -> None:
    """Drop unsharded gradients of `names` that would be reduced with those of the last microbatch."""
    for unit in units:
        waiting = [held for group in fsdp.groups_of(unit.modules[0]) for held in fsdp.unreduced_in(group)]
        names_of = {param: name for name, param in unit.params.items()} if waiting else {}
        for held in waiting:
            if names_of.get(fsdp.shard_of(held)) in names:
                fsdp.drop_unreduced(held)


class _Shown:
    """Wrappers of FSDP2's steps around each use of a parameter group, which register its parameters."""

    def __init__(self, unit: Unit, group: fsdp.FSDPParamGroup, state: fsdp.FSDPState) -> None:
        self._unit, self._group, self._state = unit, group, state
        self._backward_hook = fsdp.backward_hook(state)
        self._registrations = registrations().count
        self._shards = [*fsdp.shards_of(group)]
        self._data = [_data_of(param) for param in self._shards]
        self._copies = _GatheredCopies(unit, group)

    def before_state_dict(self, *_: object) -> None:
        """Raise RuntimeError if `.data` was set, because the state dict would lack the new values."""
        self._refuse_data()

    def _refuse_data(self) -> None:
        """Raise RuntimeError if `.data` was set, which changes the storage of a parameter's wrapper, not its shard."""
        for index, param in enumerate(fsdp.shards_of(self._group)):
            (storage, shard), (old_storage, old_shard) = _data_of(param), self._data[index]
            if storage is old_storage and shard is old_shard:
                continue
            if storage is not old_storage and shard is old_shard:
                raise RuntimeError(
                    f"{_name_of(self._unit, self._shards[index])}.data was set to another tensor (vector_to_parameters "
                    "does that too), which a sharded parameter ignores: write param.data.copy_(tensor) instead"
                )
            self._data[index] = storage, shard  # the model was moved, or FSDP2 padded the shard again

    def _follow_frozen(self) -> None:
        """Freeze unsharded parameters like their shards; raise RuntimeError if a parameter was replaced.

        FSDP2 adopts parameters that were replaced before the first forward, and passes over those replaced later. It
        registers those again that a parametrization took away.
        """
        index = fsdp.follow_frozen(self._group)
        for at, shard in enumerate(fsdp.shards_of(self._group)):
            index = at if shard is not self._shards[at] else index
        if self._registrations != (count := registrations().count):
            index = fsdp.parametrized_in(self._group, index)
            self._registrations = count if index is None else self._registrations  # a caught error is raised again
        if index is not None:
            raise RuntimeError(
                f"{_name_of(self._unit, self._shards[index])} was replaced by another tensor, which FSDP2 would pass "
                "over: copy values into the parameter that is there (param.copy_(...) under no_grad), or replace it, "
                "or tie it to another, before shard()"
            )

    def before_forward(self, run: Callable[..., Any], *args: Any) -> Any:
        """Run FSDP2's `pre_forward` with unsharded parameters, gathered again if a shard was written."""
        group, unit = self._group, self._unit
        self._refuse_data()
        # FSDP2 registers this method as a hook of the tensors that modules of the unit return in this forward, by which
        # it detects the backward.
        if self._backward_hook is not None and not fsdp.is_in_backward(unit.modules[0]):
            hook = partial(_unless_changed, unit, unit.version, self._backward_hook)
            fsdp.set_backward_hook(self._state, hook)
        self._follow_frozen()
        if unit.is_stale and not fsdp.is_sharded(group):
            fsdp.free(group)
        elif fsdp.is_unsharded(group):
            fsdp.register_gathered(group)
        unit.is_stale = False
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(mode=False), torch.no_grad():  # training uses this memory later
                found = run(*args)
        else:
            found = run(*args)
        self._copies.note()
        return found

    def after_forward(self, run: Callable[..., Any], module: Any, args: Any, output: Any) -> Any:
        """Run FSDP2's `post_forward`, unless a backward recomputes, and refuse writes into gathered copies.

        A forward that backward recomputes leaves a unit inside another gathered, because its own backward is next.
        """
        if fsdp.is_in_backward(self._unit.modules[0]):
            return output
        self._copies.refuse_writes()
        return run(module, args, output)

    def before_backward(self, run: Callable[..., Any], *args: Any) -> None:
        """Run FSDP2's `pre_backward`, and register what is gathered already, for modules that are recomputed."""
        if torch.is_grad_enabled() and self._unit.layout.shard > 1:
            raise RuntimeError(
                f"unit {self._unit.shape.name}: backward with create_graph=True, as gradient penalties need it, takes "
                "parameters that FSDP2 frees before it is differentiated again. Take zero.stage=0, or penalise "
                "differences of outputs"
            )
        if fsdp.is_unsharded(self._group):
            self._follow_frozen()
            fsdp.register_gathered(self._group)
        run(*args)


class _GatheredCopies:
    """Unsharded parameters of a group during its forward, in which a write is lost where they are copies of shards.

    Writes are noticed by version counters, which `.data` goes around. Hence the first forward, where models initialize
    weights from data, normalize and clamp them, is compared by a hash of the values. If it raises a version counter and
    leaves the values as they are, as `register_parametrization` in forward does, all later ones are compared so too.
    Without shards, where writes are kept, only memory that `.data` was set to is noticed.
    """

    def __init__(self, unit: Unit, group: fsdp.FSDPParamGroup) -> None:
        self._unit, self._group, self._are_copies = unit, group, unit.layout.shard > 1
        self._versions: list[int] = []
        self._values: list[tuple[int, int]] | None = None
        self._compares_values, self._is_noted = True, False

    def note(self) -> None:
        """Note the state of the parameters before a forward, unless torch.func transforms it, which wraps tensors."""
        self._is_noted = (self._are_copies or self._compares_values) and not is_transformed()
        if self._is_noted:
            params = fsdp.gathered_in(self._group)
            self._versions = [*map(version_of, params)] if self._are_copies else []
            self._values = [*map(self._value, params)] if self._compares_values else None

    def refuse_writes(self) -> None:
        """Raise RuntimeError if the forward has written into a parameter."""
        if not self._is_noted:
            return
        params, values, self._values = fsdp.gathered_in(self._group), self._values, None
        versions = [*map(version_of, params)] if self._are_copies else []
        written = [new != old for new, old in zip(versions, self._versions, strict=True)]
        self._compares_values = any(written)
        if values is not None:
            written = [self._value(param) != value for param, value in zip(params, values, strict=True)]
        if any(written):
            name = _name_of(self._unit, fsdp.shards_of(self._group)[written.index(True)])
            raise RuntimeError(
                f"{name} was written in the forward of unit {self._unit.shape.name or 'root'}, where the write would "
                "be lost: write parameters between steps under torch.no_grad(), initialize them from data before "
                "shard(), and take an nn.Embedding without max_norm; zero.stage=0 keeps writes in place"
            )

    def _value(self, param: nn.Parameter) -> tuple[int, int]:
        """Return the key of a parameter's storage, and for a copy a hash of its elements if they are plain numbers."""
        local = local_of(param.detach())
        plain = self._are_copies and local.dtype in HASHED and has_memory(local)
        return storage_key(local.untyped_storage()), _hash_of(local) if plain else 0


def _end_backward(units: list[Unit], stays: bool, run: Callable[[], None]) -> None:
    """Reduce gradients that autograd made after their unit's reduction, end FSDP2's backward, and register shards.

    Such gradients exist if a function of a weight is older than the forward of this backward: a cast in the cache of
    autocast, or a parametrization in `cached()`. FSDP2 would leave them to the next backward, or lose them.
    """
    for unit in units:
        for group in fsdp.groups_of(unit.modules[0]):
            fsdp.reduce_late(group)
    run()
    if stays:
        put_shards(units)


def _unless_changed(unit: Unit, version: int, hook: fsdp.BackwardHook, grad: torch.Tensor) -> torch.Tensor:
    """Run FSDP2's own hook unless parameters have changed since the forward, which used `version`."""
    if unit.version != version:
        raise RuntimeError(
            f"unit {unit.shape.name}: its parameters were changed after the forward that this backward belongs to, by "
            "step() or by hand, so its gradients would be wrong: call backward() before, or run the forward again"
        )
    return hook(grad)


def _after_forward(unit: Unit, units: list[Unit], waits: list[Unit], is_root: bool, *_: object) -> None:
    if fsdp.is_outermost(unit.modules[0], is_root=is_root):
        for each in waits if not torch.is_grad_enabled() else ():  # no backward follows
            for module in each.modules:
                module.reshard()
        put_shards(units)


def _hash_of(tensor: torch.Tensor) -> int:
    """Return a sum of the elements' bits, each times an odd number of its place, modulo 2^64.

    `torch.hash_tensor` xors the bits: equal elements, and those of opposite signs, cancel each other.
    """
    flat = tensor.reshape(-1).view(HASHED[tensor.dtype])
    places = (2 * torch.arange(min(flat.numel(), HASHED_AT_ONCE), device=flat.device) + 1) * ODD
    found = torch.zeros((), dtype=torch.int64, device=flat.device)
    for piece in torch.split(flat, HASHED_AT_ONCE):
        found = found * ODD + (piece * places[: piece.numel()]).sum()
    return int(found.item())


def _name_of(unit: Unit, param: nn.Parameter) -> str:
    return next(name for name, own in unit.params.items() if own is param)


def _data_of(param: nn.Parameter) -> tuple[object, object]:
    """Return the storage of a sharded parameter, which setting `.data` changes, and its shard, which stays."""
    return param.untyped_storage(), local_of(param)
