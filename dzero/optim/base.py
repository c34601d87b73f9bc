"""The optimizer that owns the fp32 masters: a real `torch.optim.Optimizer` over sharded parameters.

A step, after the last microbatch's backward has left the reduced gradients in `Gradients`:

    decide   all ranks agree on norm, finiteness and the clipping factor      (optim/grad_decision.py)
    update   every rank its own shard, in fp32, rounded once                  (optim/flat_update.py, torch_optimizer.py)
    record   the decision stays in `last_decision`; the loss scale moves

A step with a non-finite gradient on any rank changes nothing but the loss scale and the skip count. States exist from
construction on, and loading copies values into them: their dtype, device and placement are the table's, not the
parameter's or the file's.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, overload

import torch
from torch import nn

from dzero.comm.ledger import Entry, Traffic
from dzero.comm.spans import span
from dzero.offload.manager import OffloadManager
from dzero.optim.grad_decision import Gradients, StepDecision
from dzero.optim.loss_scaler import LossScaler, ScalerConfig
from dzero.optim.master_handover import take_over
from dzero.optim.quantized_moments import KnownBlocks
from dzero.optim.state_mapping import REPLACED, StateMapping
from dzero.zero.guards import refuse_unknown
from dzero.zero.shard import Sharded
from dzero.zero.unit import Unit, as_module


class StateSpec(NamedTuple):
    """A state of the parameter `name` as it is carried: dtype and elements [shard]."""

    name: str
    key: str
    dtype: torch.dtype
    elems: int


class PortableState(NamedTuple):
    """A parameter's states on their way between layouts, flat [shard] on the CPU. `tensors`: `master` in fp32, the
    moments in any dtype, and `param` where forward still uses older values than the master's (overlap=delayed).
    `blocks`: of 8-bit moments, what is known as it was stored. `scalars`: what is no tensor, e.g. `step`."""

    tensors: Mapping[str, torch.Tensor]
    blocks: Mapping[str, KnownBlocks]
    scalars: Mapping[str, float]


def trained(sharded: Sharded) -> list[nn.Parameter]:
    """The parameters that are trained, in the order of `model.parameters()`, as torch's optimizers number them."""
    named = sharded.named_params()
    return [named[name] for name in sharded.names if name in named and named[name].requires_grad]


class MasterOptimizer(torch.optim.Optimizer):
    """What all rules share: gradients, decisions, loss scaling, state dicts. Subclasses say how to update.

    places_moments: whether the moments are kept where the table says; else by the subclass.
    """

    places_moments = True

    def __init__(
        self,
        sharded: Sharded,
        params: Iterable[nn.Parameter] | Iterable[dict[str, Any]] | None,
        defaults: dict[str, Any],
        *,
        max_norm: float | None,
        scaler: ScalerConfig | None,
    ) -> None:
        named = sharded.named_params()
        self._sharded, self.max_norm, self._is_made = sharded, max_norm, False
        super().__init__(trained(sharded) if params is None else params, defaults)
        fp16 = sharded.layout.param.dtype == torch.float16
        self.scaler = LossScaler((scaler or ScalerConfig()) if fp16 else None)
        self.last_decision: StepDecision | None = None
        self.skipped_steps = 0
        self.consecutive_skips = 0
        self._loss_was_scaled = not fp16
        self._refusal: Callable[[], str] | None = None
        self._check_groups(named)
        if sharded.parts is None:
            refuse_unknown(sharded.model, named.values())
        owned = [self._names[param] for group in self.param_groups for param in group["params"]]
        take_over(sharded)
        self.offload = OffloadManager(sharded, moments=self.places_moments)
        self.gradients = Gradients(sharded, owned, self.offload)
        self.offload.take_params()
        self._hook_state_dicts()
        for unit in sharded.units:
            unit.watch(self)
        self._is_made = True

    @property  # type: ignore[override]
    def state(self) -> StateMapping:
        """As any optimizer's, once no update is on its way. Values may be written in place; entries stay."""
        if self._is_made:
            self.synchronize()
        return self._state

    @state.setter
    def state(self, _: object) -> None:
        if self._is_made:
            raise RuntimeError(REPLACED)
        self._state = StateMapping()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Train more of the model's parameters from now on, e.g. as they are unfrozen. Between steps.

        Args:
            param_group: As of any optimizer. The parameters were trained (requires_grad) when the model was sharded.

        Raises:
            ValueError: For parameters that are in a group already, are not the model's, or were frozen in shard().
            RuntimeError: For parameters that another optimizer updates.
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

    def _take_group(self, group: dict[str, Any]) -> None:
        """Make the states of a group that came later."""
        raise NotImplementedError

    def _hook_state_dicts(self) -> None:
        """State dicts of the model, or of a unit's modules, wait for updates; masters follow what they load."""
        waits, follows = weakref.WeakMethod(self.synchronize), weakref.WeakMethod(self._follow)

        def before(*_: object) -> None:
            if (wait := waits()) is not None:
                wait()

        def after(unit: Unit, *_: object) -> None:
            unit.hold()
            if (follow := follows()) is not None:
                follow(unit)

        for unit in self._sharded.units:
            for module in (as_module(each) for each in unit.modules):
                module.register_state_dict_pre_hook(before)  # type: ignore[no-untyped-call]
                module.register_load_state_dict_pre_hook(before)  # type: ignore[no-untyped-call]
                module.register_load_state_dict_post_hook(partial(after, unit))  # type: ignore[no-untyped-call]

    def _follow(self, unit: Unit) -> None:
        """The model has loaded other values into a unit: its masters take them."""
        raise NotImplementedError

    def _follow_edits(self, unit: Unit) -> None:
        """Parameters of a unit were edited in place: its masters off the device take those elements."""
        raise NotImplementedError

    def take_edits(self) -> None:
        """Let masters off the device follow what was written into parameters since the last update.

        Those on the device are compared with their working copies by the update itself.
        """
        edited = [unit for unit in self._sharded.units if unit.is_edited]
        if edited:
            self.synchronize()
        for unit in edited:
            self._follow_edits(unit)
            unit.is_edited = False

    def _check_groups(self, named: dict[str, nn.Parameter]) -> None:
        names = {param: name for name, param in named.items()}
        for group in self.param_groups:
            if any(param not in names for param in group["params"]):
                raise ValueError(
                    "a parameter group holds a parameter that is not one of the sharded model's: build the groups from "
                    "sharded.named_params(), after shard() has replaced the parameters"
                )
        reduced = {name for unit in self._sharded.units for name in unit.buffered}
        for name in [names[param] for group in self.param_groups for param in group["params"]]:
            if name not in reduced:
                raise ValueError(
                    f"{name} was frozen when the model was sharded, so it gets no gradients: set requires_grad before "
                    "shard(), and leave it out of the optimizer until it is to be trained"
                )
        self._names = names

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss to call backward on: multiplied by the loss scale (fp16), else itself."""
        self._loss_was_scaled = True
        return loss if self.scaler.scale == 1.0 else loss * self.scaler.scale

    def refuse_step(self, why: Callable[[], str]) -> None:
        """Let the next `step` change nothing, as if a gradient were not finite. On all ranks alike.

        Args:
            why: Called once the ranks have decided upon the gradients, when the host has waited for the device anyway.
                Returns what is not finite, or nothing where the step may be made.
        """
        self._refusal = why

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update from the reduced gradients, or skip; see `last_decision`. Raises RuntimeError without gradients."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._sharded.end_step()
        # A forward without backward (evaluation) may have left unsharded copies that the update would make stale.
        self._sharded.reshard()
        with span("step decide"):
            decision = self.gradients.decide(scale=self.scaler.scale, max_norm=self.max_norm)
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
        self.gradients.clear()
        self.last_decision = decision
        self.scaler.update(finite=decision.finite)
        self.consecutive_skips = 0 if decision.finite else self.consecutive_skips + 1
        self.skipped_steps += not decision.finite

    def _update(self, grads: dict[str, torch.Tensor], factor: float) -> None:
        raise NotImplementedError

    def _skip(self) -> None:
        """Nothing is updated in this step."""
        self.offload.release()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop gradients, reduced or not, e.g. of microbatches that are not to count, or of a backward that raised.

        Raises as `Sharded.abandon_step` does.
        """
        self.gradients.drop()
        super().zero_grad(set_to_none)

    def describe(self) -> list[str]:
        """For the log: what lives off the device, and how that works. Nothing where all is on it."""
        return self.offload.describe()

    def synchronize(self) -> None:
        """Return when no update is on its way any more. Parameters read directly are then those of the last step.

        State dicts of the model and of the optimizer do this by themselves, and so does the next forward, unit by unit.
        Where copies share out states (zero.states_over=all) new values may still have to travel: all ranks call this.
        Raises OffloadError for an update that failed.
        """
        self.offload.synchronize()
        for unit in self._sharded.units if self._sharded.layout.shares > 1 else ():
            unit.arrive()

    def state_dict(self) -> dict[str, Any]:
        """As any optimizer's; see `synchronize`."""
        packed: dict[str, Any] = super().state_dict()  # reads `state`, which synchronizes
        packed["state"] = {number: dict(states) for number, states in packed["state"].items()}
        return packed

    def portable_states(self, unit: Unit) -> list[StateSpec]:
        """What `export_state` gives for a unit, in that order."""
        raise NotImplementedError

    def export_state(self, unit: Unit, put: Callable[[str, str, torch.Tensor], None]) -> None:
        """Give each state of a unit to `put(parameter, key, tensor)`, flat [shard], in a form that any layout can take.

        Between steps, after `await_updates`. The tensors are the states themselves: copy what is to stay as it is.
        """
        raise NotImplementedError

    def import_state(self, unit: Unit, portable_states: Mapping[str, PortableState]) -> None:
        """Become what was carried, by parameter; the parameters too. Between steps, after `synchronize`."""
        raise NotImplementedError

    def await_updates(self) -> None:
        """Return when the last step's updates have ended; what overlap=delayed holds back stays where it is."""
        self.offload.await_updates()

    def scalars(self) -> dict[str, Any]:
        """What is no tensor, as JSON takes it; parameters by name."""
        groups = [
            {**{key: value for key, value in group.items() if key != "params"}, "params": self._names_of(group)}
            for group in self.param_groups
        ]
        counts = {"skipped_steps": self.skipped_steps, "consecutive_skips": self.consecutive_skips}
        return {"rule": self.rule_name, "groups": groups, "scaler": self.scaler.state_dict(), **counts}

    def take_scalars(self, scalars: Mapping[str, Any]) -> None:
        """Continue where `scalars` was taken; the groups' settings stay this optimizer's own.

        Raises ValueError for another rule's.
        """
        if scalars["rule"] != self.rule_name:
            raise ValueError(
                f"the states are of rule {scalars['rule']}, this optimizer is {self.rule_name}: take "
                f"optim.rule={scalars['rule']}"
            )
        self.skipped_steps = int(scalars["skipped_steps"])
        self.consecutive_skips = int(scalars["consecutive_skips"])
        self.scaler.load_state_dict(scalars["scaler"])

    @property
    def rule_name(self) -> str:
        """As in `optim.rule`."""
        raise NotImplementedError

    def _names_of(self, group: Mapping[str, Any]) -> list[str]:
        return [self._names[param] for param in group["params"]]

    @property
    def traffic(self) -> dict[Entry, Traffic]:
        """Calls and bytes that this rank sends for a step's update, by the ledger's entries."""
        return {}

    def state_bytes(self) -> dict[str, int]:
        """Bytes of this rank's param, master and moments on the device between steps."""
        raise NotImplementedError
