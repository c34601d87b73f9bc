"""The optimizer base class: a `torch.optim.Optimizer` over sharded parameters that owns the fp32 masters.

A step runs after the backward of the last microbatch, when `Gradients` holds the reduced gradients:

    decide   all ranks agree on the norm, finiteness and the clipping factor    (optim/grad_decision.py)
    update   every rank updates its shard in fp32 and rounds it once            (flat_update.py, torch_optimizer.py)
    record   `last_decision` is set, and the loss scale is updated

If a gradient is non-finite on any rank, the step changes only the loss scale and the skip counts. States exist from
construction on, and loading copies values into them. Their dtype, device and placement are those of the layout
(zero/layout.py), not those of the parameter or the file.
"""

from __future__ import annotations

import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, overload

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from dzero.comm.ledger import Entry, Traffic
from dzero.comm.spans import span
from dzero.offload.manager import OffloadManager
from dzero.optim.grad_decision import Gradients, StepDecision
from dzero.optim.group_settings import (
    UnfitSettings,
    check_rate,
    checked_norm,
    is_number,
    restore_groups,
    saved_groups,
)
from dzero.optim.loss_scaler import LossScaler, ScalerConfig
from dzero.optim.master_handover import take_over
from dzero.optim.quantized_moments import KnownBlocks
from dzero.optim.state_mapping import REPLACED, StateMapping
from dzero.utils.registrations import registrations
from dzero.zero.guards import refuse_unknown
from dzero.zero.layout import RuleStates
from dzero.zero.sharded import Sharded, check_sharded
from dzero.zero.unit import Unit, as_module

Hooks = OrderedDict[int, Callable[..., Any]]


class StateSpec(NamedTuple):
    """Portable state `key` of the parameter `name`: dtype, elements [shard], and `shape` if it is unsharded."""

    name: str
    key: str
    dtype: torch.dtype
    elems: int
    shape: tuple[int, ...] | None = None


class PortableState(NamedTuple):
    """States of one parameter in a form that any layout can load; tensors are flat [shard] and on the CPU.

    Attributes:
        tensors: `master` in fp32, the moments in any dtype, and `param` if forward still uses older values than the
            master's (offload.overlap=delayed). Unsharded states have their own shape.
        blocks: For 8-bit moments, the blocks whose stored codes are known.
        scalars: States that are not tensors, e.g. `step`.
    """

    tensors: Mapping[str, torch.Tensor]
    blocks: Mapping[str, KnownBlocks]
    scalars: Mapping[str, float]


def trained(sharded: Sharded) -> list[nn.Parameter]:
    """Return the trained parameters in the order of `model.parameters()`, in which torch's optimizers number them."""
    named = sharded.named_params()
    return [named[name] for name in sharded.names if name in named and named[name].requires_grad]


def _registered(hooks: Hooks, hook: Callable[..., Any], *, prepend: bool) -> RemovableHandle:
    """Add a hook as the last, or as the first if `prepend`, and return the handle that removes it."""
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    if prepend:
        hooks.move_to_end(handle.id, last=False)
    return handle


class MasterOptimizer(torch.optim.Optimizer):
    """Base class of the optimizers: gradients, step decisions, loss scaling and state dicts; subclasses add the update.

    Args:
        sharded: The sharded model.
        params: Parameters or parameter groups of the model, as for any optimizer; None for every trained parameter.
        defaults: Default settings of parameter groups.
        max_norm: Global gradient norm to clip to; None for no clipping.
        scaler: Loss scaling for fp16 parameters; None for the defaults.

    Attributes:
        last_decision: Decision of the last step with gradients; None before the first.
        skipped_steps: Number of steps that were skipped because of non-finite values.
        consecutive_skips: Number of steps skipped in a row up to the last one.
    """

    def __init__(
        self,
        sharded: Sharded,
        params: Iterable[nn.Parameter] | Iterable[dict[str, Any]] | None,
        defaults: dict[str, Any],
        *,
        max_norm: float | None,
        scaler: ScalerConfig | None,
    ) -> None:
        check_sharded(sharded, type(self).__name__)
        _refuse_no_params(params, type(self).__name__)
        sharded.check_unparked()
        named = sharded.named_params()
        self._sharded, self.max_norm, self._is_made = sharded, max_norm, False
        self._before_load, self._after_load = Hooks(), Hooks()
        super().__init__(trained(sharded) if params is None else params, defaults)
        fp16 = sharded.layout.param.dtype == torch.float16
        self.scaler = LossScaler((scaler or ScalerConfig()) if fp16 else None)
        self.last_decision: StepDecision | None = None
        self.skipped_steps = 0
        self.consecutive_skips = 0
        self._is_fp16, self._loss_was_scaled, self._is_unscaled = fp16, not fp16, False
        self._refusal: Callable[[], str] | None = None
        self._check_groups(named)
        self._refuse_unknown(named)
        owned = [self._names[param] for group in self.param_groups for param in group["params"]]
        take_over(sharded)
        self.offload = OffloadManager(sharded, self._rule_states())
        self.gradients = Gradients(sharded, owned, self.offload)
        if fp16:
            self.gradients.refuse_scaled(self)
        self.offload.take_params()
        self._hook_state_dicts()
        for unit in sharded.units:
            unit.watch(self)
        self._known = {param for group in self.param_groups for param in group["params"]}
        self._is_made = True

    @property  # type: ignore[override]
    def state(self) -> StateMapping:
        """States by parameter, once no update is in progress; values may be written in place, but entries are fixed."""
        if self._is_made:
            self.synchronize()
            self._refresh_states()
        return self._state

    @state.setter
    def state(self, _: object) -> None:
        if self._is_made:
            raise RuntimeError(REPLACED)
        self._state = StateMapping()

    def _refresh_states(self) -> None:
        """Put the states that updates use now into `_state`."""

    @property
    def max_norm(self) -> float | None:
        """Global gradient norm to clip to, which may be set between steps; None for no clipping."""
        return self._max_norm

    @max_norm.setter
    def max_norm(self, to: float | None) -> None:
        self._max_norm = checked_norm(to)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group between steps, e.g. for parameters that were just unfrozen.

        Args:
            param_group: As for any optimizer. Its parameters must have required gradients when the model was sharded.

        Raises:
            ValueError: A parameter is in a group already, does not belong to the model, or was frozen in shard().
            RuntimeError: Another optimizer updates a parameter.
        """
        super().add_param_group(param_group)
        if not self._is_made:
            return
        try:
            self._check_groups(self._sharded.named_params())
            self.synchronize()
            self.gradients.own([self._names[param] for group in self.param_groups for param in group["params"]])
        except (ValueError, RuntimeError):
            self.param_groups.pop()
            raise
        self._take_group(self.param_groups[-1])
        self._known.update(self.param_groups[-1]["params"])

    def _rule_states(self) -> RuleStates | None:
        """Return the states of a class that lie where the layout has moments, or None for those of AdamW."""
        return None

    def _take_group(self, group: dict[str, Any]) -> None:
        """Create the states of a parameter group that was added after construction."""
        raise NotImplementedError

    def _hook_state_dicts(self) -> None:
        """Make state dicts of the model and its units wait for updates, and refresh masters after loading."""
        waits, follows = weakref.WeakMethod(self.synchronize), weakref.WeakMethod(self._follow)

        def before(*_: object) -> None:
            if (wait := waits()) is not None:
                wait()

        def after(unit: Unit, *_: object) -> None:
            unit.adopt_padded()
            if (follow := follows()) is not None:
                follow(unit)

        for unit in self._sharded.units:
            for module in (as_module(each) for each in unit.modules):
                module.register_state_dict_pre_hook(before)  # type: ignore[no-untyped-call]
                module.register_load_state_dict_pre_hook(before)  # type: ignore[no-untyped-call]
                module.register_load_state_dict_post_hook(partial(after, unit))  # type: ignore[no-untyped-call]

    def _follow(self, unit: Unit) -> None:
        """Refresh the masters of a unit whose parameters were loaded with other values."""
        raise NotImplementedError

    def _follow_edits(self, unit: Unit) -> None:
        """Copy the edited elements of a unit's parameters into its masters off the device."""
        raise NotImplementedError

    def take_edits(self) -> None:
        """Copy what was written into parameters since the last update into masters off the device.

        Masters on the device are compared with their working copies by the update itself.
        """
        edited = [unit for unit in self._sharded.units if unit.is_edited]
        if edited:
            self.synchronize()
        for unit in edited:
            self._follow_edits(unit)
            unit.is_edited = False

    def _check_settings(self, settings: Mapping[str, Any]) -> None:
        """Raise ValueError for a value that no update can use; `settings` are some or all of a group's."""
        check_rate("lr", settings)

    def _check_groups(self, named: dict[str, nn.Parameter]) -> None:
        names = {param: name for name, param in named.items()}
        lists = [group["params"] for group in self.param_groups]
        for group in self.param_groups:
            if any(param not in names for param in group["params"]):
                raise ValueError(
                    "a parameter group holds a parameter that is not one of the sharded model's: build the groups from "
                    "sharded.named_params(), after shard() has replaced the parameters"
                )
        reduced = {name for unit in self._sharded.units for name in unit.buffered}
        for name, count in Counter(names[param] for params in lists for param in params).items():
            if count > 1:
                raise ValueError(
                    f"the parameter groups hold {name} {count} times, instead of once. If nothing in your code did it, "
                    "accelerate's prepare(model, optim) with FSDP2 has replaced the lists: prepare loader and schedule "
                    "only, and call optim.step() where accelerator.sync_gradients is true"
                )
            if name not in reduced:
                raise ValueError(
                    f"{name} was frozen when the model was sharded, so it gets no gradients: set requires_grad before "
                    "shard(), and leave it out of the optimizer until it is to be trained"
                )
        for group in self.param_groups:
            self._check_settings(group)
        self._names, self._in_groups = names, self._ids_in_groups()

    def _refuse_unknown(self, named: dict[str, nn.Parameter]) -> None:
        """Raise RuntimeError if parameters were added to the model since it was sharded."""
        count = registrations().count
        if self._sharded.stages is None:
            refuse_unknown(self._sharded.model, named.values())
        self._registrations = count  # not after an error, which is raised again if it was caught

    def _ids_in_groups(self) -> list[list[int]]:
        """Return the ids of the parameters of each group, whose lists anybody may change."""
        return [[*map(id, group["params"])] for group in self.param_groups]

    def _check_known(self) -> None:
        """Raise ValueError if the lists of the groups were given a parameter that the optimizer has no states for."""
        for param in (param for group in self.param_groups for param in group["params"]):
            if param not in self._known and param in self._names:
                raise ValueError(
                    f"{self._names[param]} was put into the list of a parameter group, so it has no states: call "
                    'optim.add_param_group({"params": [param]}) for it'
                )

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss to call backward on: `loss` times the loss scale for fp16, otherwise `loss` itself.

        Raises:
            RuntimeError: Gradients that `unscale_` has divided are still there.
        """
        self._loss_was_scaled = True
        if self._is_unscaled:
            if any(True for _ in self._grads()):
                raise RuntimeError(
                    "a backward after unscale_() would add scaled gradients to unscaled ones: call step() or "
                    "zero_grad() before it"
                )
            self._is_unscaled = False
        return loss if self.scaler.scale == 1.0 else loss * self.scaler.scale

    @property
    def grad_scale(self) -> float:
        """Factor by which the present gradients are multiplied: for fp16 the loss scale, until `unscale_`; else 1."""
        return 1.0 if self._is_unscaled else self.scaler.scale

    @torch.no_grad()
    def unscale_(self) -> None:
        """Divide the gradients of this step by the loss scale, before `.grad` is clipped or edited; all ranks call it.

        Without fp16, nothing changes. `max_norm` needs no call.

        Raises:
            RuntimeError: There are no gradients of a last microbatch, or they are fp16, in which small ones would
                become zero.
        """
        if self.grad_scale == 1.0:
            return
        if self._sharded.layout.grad.dtype == torch.float16:
            raise RuntimeError(
                "unscale_() of fp16 gradients would set small ones to zero: take precision.grad=fp32, or clip by "
                "max_norm= of the optimizer"
            )
        grads = [*self._grads()]
        if not grads:
            raise RuntimeError("unscale_() without gradients: call it after the backward of the last microbatch")
        for grad in grads:
            grad.mul_(1.0 / self.grad_scale)
        self._is_unscaled = True

    def _grads(self) -> Iterator[torch.Tensor]:
        """Yield the `.grad` that the parameters of the groups have."""
        for group in self.param_groups:
            yield from (param.grad for param in group["params"] if param.grad is not None)

    def refuse_step(self, why: Callable[[], str]) -> None:
        """Make the next `step` change nothing, as if a gradient were non-finite; call this on all ranks.

        Args:
            why: Called after the ranks have decided on the gradients, when the host has already waited for the device.
                Returns a description of what is non-finite, or an empty string if the step may run.
        """
        self._refusal = why

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update the parameters from the reduced gradients, or skip the step if a gradient is non-finite.

        Args:
            closure: Computes the gradients and returns the loss, which is then returned here.

        Raises:
            ValueError: The parameter groups hold a parameter twice, or one that is not the model's.
            RuntimeError: The model was given parameters since it was sharded, there are no gradients, backward raised,
                no microbatch was the last one, the microbatches do not fit the layout, or an fp16 loss was not scaled.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._registrations != registrations().count:
            self._refuse_unknown(self._sharded.named_params())
        if self._in_groups != self._ids_in_groups():
            self._check_known()
            self._check_groups(self._sharded.named_params())
            self.gradients.own([self._names[param] for group in self.param_groups for param in group["params"]])
        self._sharded.end_step()
        # A forward without backward (evaluation) may have left unsharded parameters, which the update would make stale.
        self._sharded.reshard()
        with span("step decide"):
            decision = self.gradients.decide(scale=self.grad_scale, max_norm=self.max_norm)
        why, self._refusal = self._refusal() if self._refusal is not None else "", None
        if why:
            decision = replace(decision, finite=False, nonfinite_params=(why, *decision.nonfinite_params))
        grads = self.gradients.arriving()
        if not grads:
            self._without_gradients()
            return loss
        if not self._loss_was_scaled:
            raise RuntimeError("fp16 gradients of an unscaled loss: call backward on optim.scale_loss(loss)")
        if decision.finite:
            with span("step update"):
                self._update(grads, decision.factor)
            for unit in self._sharded.units:
                unit.version += not grads.keys().isdisjoint(unit.params)
        else:
            self._skip()
        self._record(decision)
        return loss

    def _without_gradients(self) -> None:
        raise RuntimeError(
            "step() without gradients: run backward first, and the last microbatch under microbatch(is_last=True), or "
            "after set_requires_gradient_sync(True)"
        )

    def _record(self, decision: StepDecision) -> None:
        self._loss_was_scaled, self._is_unscaled = not self._is_fp16, False
        self.gradients.clear()
        self.last_decision = decision
        self.scaler.update(finite=decision.finite)
        self.consecutive_skips = 0 if decision.finite else self.consecutive_skips + 1
        self.skipped_steps += not decision.finite

    def _update(self, grads: dict[str, torch.Tensor], factor: float) -> None:
        raise NotImplementedError

    def _skip(self) -> None:
        """Leave all states as they are in this step."""
        self.offload.release()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients, reduced or not, e.g. of microbatches that must not count or of a backward that raised."""
        self.gradients.drop()
        self._is_unscaled = False
        super().zero_grad(set_to_none)

    def describe(self) -> list[str]:
        """Return log lines on what is stored off the device and how its updates run; empty without offload."""
        return self.offload.describe()

    def synchronize(self) -> None:
        """Wait until no update is in progress, so that parameters read directly have the values of the last step.

        State dicts of the model and of the optimizer do this themselves, and forward does it unit by unit. If replicas
        divide the states (`zero.optimizer_shard_axes`), new values may still have to be gathered, so all ranks must
        call this.

        Raises:
            OffloadError: An update failed.
            RuntimeError: States are parked (`Sharded.park`).
        """
        self._sharded.check_unparked()
        self.offload.synchronize()
        for unit in self._sharded.units if self._sharded.layout.replica_shards > 1 else ():
            unit.wait_for_update()

    def state_dict(self) -> dict[str, Any]:
        """Return the state dict of any optimizer, after `synchronize`."""
        packed: dict[str, Any] = super().state_dict()  # reads `state`, which synchronizes
        packed["state"] = {number: dict(states) for number, states in packed["state"].items()}
        return packed

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copy the values of a state dict into the states, and its settings into the groups.

        Args:
            state_dict: State dict of this class, or of the class of `torch.optim` that it stands for, from which each
                rank copies its own shards.

        Raises:
            ValueError: The groups or states are others. Nothing has been changed.
        """
        state_dict = dict(state_dict)  # for hooks, as in torch
        for before in self._before_load.values():
            if (changed := before(self, state_dict)) is not None:
                state_dict = changed
        self.synchronize()
        self._take_state_dict(state_dict)
        for after in self._after_load.values():
            after(self)

    def _take_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Copy the values of a state dict; called when no update is under way."""
        raise NotImplementedError

    def _check_lengths(self, saved_groups: Iterable[Mapping[str, Any]]) -> None:
        """Raise ValueError if the groups of a state dict have other numbers of parameters."""
        saved, own = ([len(group["params"]) for group in some] for some in (saved_groups, self.param_groups))
        if saved != own:
            raise ValueError(f"state dict has groups of {saved} parameters, this optimizer {own}")

    def register_load_state_dict_pre_hook(self, hook: Callable[..., Any], prepend: bool = False) -> RemovableHandle:
        """Call `hook(optimizer, state_dict)` before states are loaded; it may return another state dict."""
        return _registered(self._before_load, hook, prepend=prepend)

    def register_load_state_dict_post_hook(self, hook: Callable[..., Any], prepend: bool = False) -> RemovableHandle:
        """Call `hook(optimizer)` after states were loaded."""
        return _registered(self._after_load, hook, prepend=prepend)

    @property
    def unsharded_states(self) -> Mapping[str, bool]:
        """Names of the parameters whose states, but for the master, are unsharded, and whether this rank has them."""
        return {}

    def portable_states(self, unit: Unit) -> list[StateSpec]:
        """Return the specs of what `export_state` passes on for a unit, in the same order."""
        raise NotImplementedError

    def export_state(self, unit: Unit, put: Callable[[str, str, torch.Tensor], None]) -> None:
        """Pass each state of a unit to `put`, flat [shard], in a form that any layout can load.

        Call this between steps, after `await_updates`.

        Args:
            unit: The unit to export.
            put: Called with parameter name, state key and tensor; the tensor is the state itself, not a copy.
        """
        raise NotImplementedError

    def import_state(self, unit: Unit, portable_states: Mapping[str, PortableState]) -> None:
        """Load a unit's states, by parameter name, and its parameters; call this between steps, after `synchronize`."""
        raise NotImplementedError

    def await_updates(self) -> None:
        """Wait for the updates of the last step; working copies that overlap=delayed holds back are not sent."""
        self._sharded.check_unparked()
        self.offload.await_updates()

    def device_tensors(self) -> Iterable[torch.Tensor]:
        """Return the tensors of all states that are stored on the device."""
        raise NotImplementedError

    def forget_addresses(self) -> None:
        """Drop what depends on the addresses of the states, which are about to change."""

    def scalars(self) -> dict[str, Any]:
        """Return everything but tensors as JSON values, with parameters by name; collective with `unsharded_states`."""
        groups = saved_groups(self.param_groups, map(self._names_of, self.param_groups))
        counts = {"skipped_steps": self.skipped_steps, "consecutive_skips": self.consecutive_skips}
        return {"rule": self.rule_name, "groups": groups, "scaler": self.scaler.state_dict(), **counts}

    def take_scalars(self, scalars: Mapping[str, Any], keep: Collection[str] = ()) -> None:
        """Load the settings of parameter groups, the skip counts and the loss scale from `scalars`.

        Args:
            scalars: What `scalars` returned.
            keep: Settings of parameter groups that stay as they are, such as `lr`.

        Raises:
            ValueError: `scalars` was saved by another rule, or with groups that do not fit (`restore_groups`).
        """
        if scalars["rule"] != self.rule_name:
            raise ValueError(
                f"the states are of rule {scalars['rule']}, this optimizer is {self.rule_name}: take "
                f"optim.rule={scalars['rule']}"
            )
        self.take_settings(scalars["groups"], keep)
        self.skipped_steps = int(scalars["skipped_steps"])
        self.consecutive_skips = int(scalars["consecutive_skips"])
        self.scaler.load_state_dict(scalars["scaler"])

    def take_settings(self, groups: Iterable[Mapping[str, Any]], keep: Collection[str] = ()) -> None:
        """Load the settings of parameter groups from `scalars()["groups"]`, but for those in `keep`.

        Raises:
            UnfitSettings: The constructor would refuse a setting. Nothing has been changed.
            ValueError: The groups do not fit (`restore_groups`).
        """
        groups = [*groups]
        for number, group in enumerate(groups):
            try:
                self._check_settings({key: value for key, value in group.items() if key not in keep})
            except (TypeError, ValueError) as error:
                raise UnfitSettings(f"groups[{number}]: {error}") from error
        restore_groups(self.param_groups, map(self._names_of, self.param_groups), groups, keep)

    @property
    def rule_name(self) -> str:
        """Name of the rule, as in `optim.rule`."""
        raise NotImplementedError

    def _names_of(self, group: Mapping[str, Any]) -> list[str]:
        return [self._names[param] for param in group["params"]]

    @property
    def traffic(self) -> dict[Entry, Traffic]:
        """Calls and bytes that this rank sends for the update of one step, by ledger entry."""
        return {}

    def state_bytes(self) -> dict[str, int]:
        """Return the bytes of this rank's param, master and moments on the device between steps."""
        raise NotImplementedError


def _refuse_no_params(params: object, call: str) -> None:
    """Raise TypeError for a rate or a module where an optimizer takes parameters or groups."""
    if isinstance(params, nn.Module):
        raise TypeError(
            f"{call}(sharded, {type(params).__name__}): give parameters, {call}(sharded, model.parameters(), ...), or "
            "none for all of them"
        )
    if is_number(params) and not isinstance(params, nn.Parameter):
        raise TypeError(f"{call}(sharded, {params!r}): parameters or groups come second; name the rate, lr={params!r}")
