"""Classes of `torch.optim` over fp32 master parameters.

    an update needs        the class receives, as plain parameters with fp32 gradients     its states
    the element alone      this rank's shards of the masters                               sharded as the masters
    the whole parameter    whole masters of those that this rank owns, one at a time       whole, on the owner
    perhaps several        the same as the first, at stage 0 only                          whole, on every rank

A class that mixes elements of a parameter (Adafactor's row means, Shampoo's preconditioners) would be silently wrong on
a shard. `optim/unsharded_class.py` gives it whole parameters, so that its results have the same bits for any sharding.
Those of an element-wise class have the same bits only if its kernels guarantee it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from threading import Lock
from typing import Any

import torch
from torch import nn

from dzero.comm.collectives import gather_json
from dzero.comm.ledger import Entry, Traffic
from dzero.mesh import SHARD
from dzero.optim.base import MasterOptimizer, PortableState, StateSpec
from dzero.optim.loss_scaler import ScalerConfig
from dzero.optim.master_param import MasterParam
from dzero.optim.offloaded_step import OffloadedStep, PendingUpdate, device_of, work_of
from dzero.optim.requires_unsharded import ELEMENTS, PARAMETERS, UNKNOWN, check_rule, check_whole
from dzero.optim.state_numbers import numbers_from, numbers_of
from dzero.optim.state_placement import StatePlacement, params_device_bytes, read
from dzero.optim.unsharded_class import INPUTS, PAYLOAD, ClassUpdate, cost_of, stand_in, update_whole
from dzero.optim.unsharded_updates import UnshardedUpdates
from dzero.zero.dtensors import local_of, placed_like, refuse_other_ranks_shard
from dzero.zero.rounding import to_working
from dzero.zero.sharded import Sharded
from dzero.zero.unit import Unit
from dzero.zero.unit_shapes import ParamShape

ELEMENTWISE = ("SGD", "Adam", "AdamW", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "RMSprop", "ASGD", "Rprop")
PARAMETERWISE = ("Adafactor", "Muon")


class TorchOptimizer(MasterOptimizer):
    """Optimizer that runs a `torch.optim` class over fp32 master parameters.

        optim = dzero.TorchOptimizer(sharded, torch.optim.SGD, lr=0.1, momentum=0.9)
        optim = dzero.TorchOptimizer(sharded, torch.optim.Adafactor, lr=1e-2)
        optim = dzero.TorchOptimizer(sharded, MyShampoo, elementwise=False, lr=1e-3)

    Args:
        sharded: The sharded model.
        rule: Optimizer class, such as `torch.optim.SGD`.
        params: Parameters or parameter groups of the sharded model. None: all trained parameters.
        max_norm: Maximum global gradient norm over all ranks. None: no clipping.
        scaler: Settings of the loss scaler, which is used for fp16 parameters only.
        elementwise: What a custom class needs. True: it updates every element by itself. False: it updates every
            parameter by itself, and gets each whole, on one rank. None: unknown, which only stage 0 allows.
        **options: Keyword arguments of the class.

    Raises:
        ValueError: It is unknown what the class needs and masters are sharded (stages 1-3), it needs parameters whole
            that tiles or another mesh axis cut, or the layout stores states in a way that only AdamW supports, such as
            remainders and 16- or 8-bit moments.
    """

    places_moments = False

    def __init__(
        self,
        sharded: Sharded,
        rule: type[torch.optim.Optimizer],
        params: Iterable[nn.Parameter] | Iterable[dict[str, Any]] | None = None,
        *,
        max_norm: float | None = None,
        scaler: ScalerConfig | None = None,
        elementwise: bool | None = None,
        **options: Any,
    ) -> None:
        self._rule, self._needs = rule.__name__, needs_of(rule, elementwise)
        check_rule(self._rule, self._needs, sharded.layout.settings)
        super().__init__(sharded, params, dict(options), max_norm=max_norm, scaler=scaler)
        if "foreach" in inspect.signature(rule).parameters:
            options.setdefault("foreach", False)  # foreach keeps temporaries of all parameters at once
        first = torch.zeros(1) if self._needs != PARAMETERS else torch.zeros(1).expand(self._shapes()[0].shape)
        rule([nn.Parameter(first)], **options)  # raises for invalid options before any state is moved
        self._unsharded = self._assigned()
        self._placement, self._in_use = StatePlacement(sharded, self.offload), Lock()
        self._held: dict[nn.Parameter, MasterParam] = {}
        self._tiers: OffloadedStep[MasterParam] = OffloadedStep(sharded, self.offload)
        groups = [self._held_group(group) for group in self.param_groups]
        self.offload.settle()
        self.inner = rule(groups, **options)
        for own, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            own.update({key: value for key, value in inner.items() if key != "params"})
            own["updates"] = 0  # saved with the group, because classes like SGD keep no step count
        sharded.holders.add(self)

    def _shapes(self) -> list[ParamShape]:
        """Return the shapes of all parameters of the groups."""
        names = {self._names[param] for group in self.param_groups for param in group["params"]}
        return [shape for unit in self._sharded.shapes for shape in unit.params if shape.name in names]

    def _assigned(self) -> UnshardedUpdates | None:
        """Assign whole parameters to the ranks that own them, if the class needs them."""
        if self._needs != PARAMETERS:
            return None
        tiers = self.offload.buffer_layout
        return UnshardedUpdates(self._shapes(), self._sharded, INPUTS, PAYLOAD, cost_of, tiers)

    def _held_group(self, group: dict[str, Any]) -> dict[str, Any]:
        """Create the masters of a group's parameters, and return the group with masters for the wrapped class."""
        unit_of = {name: unit for unit in self._sharded.units for name in unit.params}
        for param in group["params"]:
            name = self._names[param]
            made = MasterParam.create(name, param, unit_of[name].take_origin(name), self._placement)
            if (kept := made.kept_master(unit_of[name].shape.name, self.offload)) is not None:
                unit_of[name].origin[name] = kept
            self._held[param] = made
            if self._unsharded is not None:
                owned = name in self._unsharded.owned
                made.target = stand_in(param.shape, device_of(made)) if owned else None
        targets = [self._held[param].target for param in group["params"]]
        return {**group, "params": [target for target in targets if target is not None]}

    def _take_group(self, group: dict[str, Any]) -> None:
        if self._unsharded is not None and self._sharded.layout.shard > 1:
            self.param_groups.remove(group)
            raise ValueError(
                f"{self._rule} takes no groups later, since ranks share whole parameters out once: give it all groups "
                "when it is made"
            )
        self._unsharded = self._assigned()
        self.inner.add_param_group(self._held_group(group))
        group.update({key: value for key, value in self.inner.param_groups[-1].items() if key != "params"})
        group["updates"] = self.param_groups[0]["updates"]

    def _check_groups(self, named: dict[str, nn.Parameter]) -> None:
        super()._check_groups(named)
        if self._needs != ELEMENTS:
            mixed = [self._names[param] for group in self.param_groups for param in group["params"]]
            check_whole(mixed, self._sharded, self._rule, self._needs)

    def _update(self, grads: dict[str, torch.Tensor], factor: float) -> None:
        self.synchronize()  # updates of the last step still use the settings and states of the wrapped class
        self.take_edits()
        self._settle_groups()
        pending = {m.name: PendingUpdate(m, grads[m.name]) for m in self._held.values() if m.name in grads}
        if self._unsharded is not None:
            self._unsharded.record_lanes(pending)
        self._tiers.start(pending, partial(self._run, factor), self.param_groups[0]["updates"])
        for group in self.param_groups:
            group["updates"] += 1
        if len(self._state) < len(self._held):
            self.synchronize()
            self._show_states()

    def _run(self, factor: float, pending: Sequence[PendingUpdate[MasterParam]]) -> None:
        if self._unsharded is not None:
            by_name = {each.stored.name: each for each in pending}
            self._unsharded.run(ClassUpdate(self.inner, by_name, factor, self._in_use), by_name)
            return
        with self._in_use:  # the host lane and, for updates on the device, this thread share the wrapped class
            for each in pending:
                each.stored.follow_edits()
                master = each.stored.master
                master.grad = each.grad.float().mul(factor).view(master.shape)
            self.inner.step()  # skips masters without gradient
            for each in pending:
                each.stored.master.grad = None
                each.stored.write_back()

    def _follow(self, unit: Unit) -> None:
        for param in unit.params.values():
            if param in self._held:
                self._held[param].refresh_master()

    def _follow_edits(self, unit: Unit) -> None:
        for held in self._of(unit):
            if held.mesh is not None:
                held.take_edits()

    def describe(self) -> list[str]:
        """Return log lines about offload and the kind of updates."""
        updates = [f"offload: {type(self.inner).__name__} updates with torch's own operations, not in one pass"]
        return super().describe() + (updates if self.offload.schedule.slots else [])

    def _settle_groups(self) -> None:
        for own, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            inner.update({key: value for key, value in own.items() if key != "params"})

    def _show_states(self) -> None:
        for param in self._held:
            self._state.put(param, self._states(param))

    def _without_gradients(self) -> None:
        """Create initial states for torch's checkpoint helpers, which call `step` with zero gradients and rates."""
        if self._state or any(param.grad is None for param in self._held):
            super()._without_gradients()
        targets = [held.target for held in self._held.values() if held.target is not None]
        self._settle_groups()
        if self._unsharded is not None:
            for target in targets:
                update_whole(self.inner, target, *torch.zeros(2, *target.shape, device=target.device))
        else:
            for target in targets:
                target.grad = torch.zeros_like(target)
            self.inner.step()
            for target in targets:
                target.grad = None
        self._show_states()

    def _states(self, param: nn.Parameter) -> dict[str, Any]:
        """Return the master and states of a parameter; sharded ones of its shape are DTensors placed like it."""
        held = self._held[param]
        master, mesh = held.master, held.mesh
        copied = held.param.dtype == torch.float32  # the master equals the parameter
        states: dict[str, Any] = {} if copied else {"master": placed_like(master.detach(), param, mesh)}
        for key, value in self._states_of(held).items():
            same = isinstance(value, torch.Tensor) and value.shape == master.shape and value.ndim > 0
            states[key] = placed_like(value, param, mesh) if same and self._unsharded is None else value
        return states

    def _states_of(self, held: MasterParam) -> Mapping[str, Any]:
        """Return the states that the class keeps for a parameter on this rank."""
        return {} if held.target is None else self.inner.state.get(held.target, {})

    def state_dict(self) -> dict[str, Any]:
        """Return the state dict, with masters and the states of the wrapped class."""
        packed = super().state_dict()  # waits for pending updates
        params = [p for group in self.param_groups for p in group["params"]]
        packed["state"] = {index: self._states(param) for index, param in enumerate(params)}
        return packed

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copy masters and states from a state dict; dtype and device of the masters do not change.

        Raises:
            ValueError: The states are another rank's. Nothing has been changed.
        """
        self.synchronize()
        for own, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            for param, index in zip(own["params"], saved["params"], strict=True):
                for key, value in state_dict["state"].get(index, {}).items():
                    refuse_other_ranks_shard(f"{self._held[param].name}.{key}", value, param)
                self._check_owner(self._held[param], state_dict["state"].get(index, {}), updates=saved["updates"])
        for own, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            own.update({key: value for key, value in saved.items() if key != "params"})
            for param, index in zip(own["params"], saved["params"], strict=True):
                master, target = self._held[param].master, self._held[param].target
                values = dict(state_dict["state"].get(index, {}))
                if "master" in values:
                    master.data.copy_(local_of(values.pop("master")))
                if target is not None:
                    self.inner.state[target] = {
                        key: local_of(value).to(master.device, copy=True) if isinstance(value, torch.Tensor) else value
                        for key, value in values.items()
                    }
        for unit in self._sharded.units:
            if self._of(unit):
                unit.is_edited = True  # unless the model is loaded too, its current values override the loaded masters
        self._show_states()

    def _check_owner(self, held: MasterParam, saved: Mapping[str, Any], *, updates: int) -> None:
        """Raise ValueError if unsharded states were saved on another rank than the one that owns the parameter now."""
        if self._unsharded is not None and updates and (saved.keys() <= {"master"}) == (held.target is not None):
            raise ValueError(
                f"{held.name}: the state dict was saved where another rank owned this parameter: load it through DCP, "
                "or save and resume with dzero.Checkpointer"
            )

    @property
    def unsharded_states(self) -> Mapping[str, bool]:
        """Names of the parameters that the class needs whole, and whether this rank owns them."""
        held = self._held.values() if self._unsharded is not None else ()
        return {each.name: each.target is not None for each in held}

    def portable_states(self, unit: Unit) -> list[StateSpec]:
        """Return the specs of the states that `export_state` exports for a unit, in that order."""
        return [
            StateSpec(held.name, key, tensor.dtype, tensor.numel(), shape)
            for held in self._of(unit)
            for key, tensor, shape in self._carried(unit, held)
        ]

    def export_state(self, unit: Unit, put: Callable[[str, str, torch.Tensor], None]) -> None:
        """Pass each state of a unit to `put(parameter, key, tensor)`, flat [shard]."""
        self.take_edits()
        for held in self._of(unit):
            held.follow_edits()
            for key, tensor, _ in self._carried(unit, held):
                put(held.name, key, tensor)

    def import_state(self, unit: Unit, portable_states: Mapping[str, PortableState]) -> None:
        """Import the exported states of a unit, by parameter name, and set its parameters accordingly."""
        for held in (of_unit := self._of(unit)):
            master, target, each = held.master, held.target, portable_states[held.name]
            tensors = dict(each.tensors)
            stale = tensors.pop("param", None)
            master.data.view(-1).copy_(tensors.pop("master"))
            held.write_back()
            held.local.copy_(to_working(master.data, held.param.dtype).view(-1) if stale is None else stale.view(-1))
            if stale is not None:
                self.offload.hold_back(unit.shape.name, work_of([held]))
            unit.is_edited = False
            if target is None:
                continue
            shaped = tensors if self._unsharded else {key: value.view(master.shape) for key, value in tensors.items()}
            moments = {key: value.to(master.device, copy=True) for key, value in shaped.items()}
            numbers = numbers_from(each.scalars)
            self.inner.state.pop(target, None)  # a save before the first update has no states
            if moments or numbers:
                self.inner.state[target] = {**numbers, **moments}
        if of_unit:
            self._show_states()

    def scalars(self) -> dict[str, Any]:
        """Return the scalar state in JSON types, including scalar states of the wrapped class."""
        states = {held.name: numbers_of(self.rule_name, self._states_of(held)) for held in self._held.values()}
        if self._unsharded is not None and self._sharded.layout.shard > 1:
            every = gather_json(states, self._sharded.mesh.get_group(SHARD))
            states = {name: {key: value for each in every for key, value in each[name].items()} for name in states}
        return super().scalars() | {"states": states, "updates": self.param_groups[0]["updates"]}

    def take_scalars(self, scalars: Mapping[str, Any]) -> None:
        """Restore the values of `scalars`, including the number of updates."""
        super().take_scalars(scalars)
        for group in self.param_groups:
            group["updates"] = int(scalars["updates"])

    @property
    def rule_name(self) -> str:
        """Name of the wrapped class, as in `optim.rule`."""
        return type(self.inner).__name__

    @property
    def traffic(self) -> dict[Entry, Traffic]:
        """Calls and bytes that this rank sends for a step's update, by entry of the ledger."""
        return {} if self._unsharded is None else self._unsharded.traffic

    def _of(self, unit: Unit) -> list[MasterParam]:
        return [held for param in unit.params.values() if (held := self._held.get(param)) is not None]

    def _carried(self, unit: Unit, held: MasterParam) -> Iterator[tuple[str, torch.Tensor, tuple[int, ...] | None]]:
        """Yield key, flat tensor, and shape if unsharded, of each state.

        These are the master, states of the class, and an older parameter that forward still uses.
        """
        master = held.master
        yield "master", master.detach().view(-1), None
        for key, value in sorted(self._states_of(held).items()):  # not in the order in which they were made or loaded
            if isinstance(value, torch.Tensor) and value.ndim and self._unsharded is not None:
                yield key, value.reshape(-1), tuple(value.shape)
            elif isinstance(value, torch.Tensor) and value.ndim and value.shape == master.shape:
                yield key, value.view(-1), None
        if self.offload.held_back(unit.shape.name):
            yield "param", read(held.local), None

    def device_tensors(self) -> Iterator[torch.Tensor]:
        """Yield the masters, and the states of the wrapped class, that are stored on the device."""
        for held in self._held.values():
            if held.work is None:
                yield from ([] if held.is_param else [held.master])
                yield from self._class_states(held)

    def _class_states(self, held: MasterParam) -> list[torch.Tensor]:
        return [value for value in self._states_of(held).values() if isinstance(value, torch.Tensor) and value.ndim]

    def state_bytes(self) -> dict[str, int]:
        """Return the device bytes of this rank's param, master, moments (states of the wrapped class) and frozen."""
        totals = {"param": 0, "master": 0, "moments": 0, **params_device_bytes(self._sharded.named_params().values())}
        for held in self._held.values():
            if held.work is None:
                totals["master"] += 0 if held.is_param else held.master.untyped_storage().nbytes()
                totals["moments"] += sum(value.untyped_storage().nbytes() for value in self._class_states(held))
        return totals


def needs_of(rule: type[torch.optim.Optimizer], elementwise: bool | None = None) -> str:
    """Return what an update by a class needs (optim/requires_unsharded.py); `elementwise` as in `TorchOptimizer`."""
    if elementwise is not None:
        return ELEMENTS if elementwise else PARAMETERS
    name = rule.__name__ if _is_torchs(rule) else ""
    return ELEMENTS if name in ELEMENTWISE else PARAMETERS if name in PARAMETERWISE else UNKNOWN


def _is_torchs(rule: type[torch.optim.Optimizer]) -> bool:
    return rule.__module__.startswith("torch.optim")
