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

import copy
import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from dzero.comm.collectives import gather_json
from dzero.comm.ledger import Entry, Traffic
from dzero.mesh import SHARD
from dzero.optim.base import MasterOptimizer, PortableState, StateSpec
from dzero.optim.class_states import ClassStates, summary_of
from dzero.optim.class_step import ClassStep
from dzero.optim.element_states import Make, check_initial, element_states, shrunk, tried_states
from dzero.optim.group_settings import KERNELS
from dzero.optim.loss_scaler import ScalerConfig
from dzero.optim.master_param import MasterParam, initial_master
from dzero.optim.offloaded_step import OffloadedStep, PendingUpdate, device_of, work_of
from dzero.optim.requires_unsharded import ELEMENTS, PARAMETERS, check_rule, check_whole, needs_of
from dzero.optim.state_placement import StatePlacement, params_device_bytes, read
from dzero.optim.unsharded_class import INPUTS, PAYLOAD, ClassUpdate, cost_of, stand_in, update_whole
from dzero.optim.unsharded_updates import UnshardedUpdates
from dzero.zero.dtensors import local_of, part_of, refuse_other_ranks_shard
from dzero.zero.layout import RuleStates
from dzero.zero.rounding import to_working
from dzero.zero.sharded import Sharded, check_sharded
from dzero.zero.unit import Unit
from dzero.zero.unit_shapes import ParamShape

Value = TypeVar("Value")


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
            that tiles or ep cut, or the layout stores states in a way that only AdamW supports, such as
            remainders and 16- or 8-bit moments.
    """

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
        check_sharded(sharded, type(self).__name__)
        if not (isinstance(rule, type) and issubclass(rule, torch.optim.Optimizer)):
            raise TypeError(
                f"TorchOptimizer of rule={_shown(rule)}: give a class of torch.optim, with its options beside it, such "
                "as TorchOptimizer(sharded, torch.optim.SGD, lr=0.1)"
            )
        self._rule, self._needs = rule.__name__, needs_of(rule, elementwise)
        check_rule(self._rule, self._needs, sharded.layout.settings)
        if "foreach" in inspect.signature(rule).parameters:
            options.setdefault("foreach", False)  # foreach keeps temporaries of all parameters at once
        shape = sharded.shapes[0].params[0].shape if self._needs == PARAMETERS else (1,)
        self._class_step = ClassStep()
        self._class_states = ClassStates(self._class_step, whole=self._needs == PARAMETERS)
        self._make: Make = lambda groups: rule(groups, **options)
        self._try: Make = lambda groups: rule(groups, **copy.deepcopy(options))
        self._arguments = inspect.signature(rule).parameters.keys() - {"params", *KERNELS}
        self._try_settings: Callable[[dict[str, Any]], object] = lambda settings: rule(
            [stand_in(shape, torch.device("cpu"))], **copy.deepcopy(options) | settings
        )
        self._try([{"params": [stand_in(shape, torch.device("cpu"))]}])  # raises for options before states are moved
        super().__init__(sharded, params, dict(options), max_norm=max_norm, scaler=scaler)
        self._unsharded = self._assigned()
        self._placement = StatePlacement(sharded, self.offload)
        self._held: dict[nn.Parameter, MasterParam] = {}
        self._first_states: dict[str, dict[str, Any]] = {}
        self._is_shown = True
        self._tiers: OffloadedStep[MasterParam] = OffloadedStep(sharded, self.offload)
        groups = [self._held_group(group) for group in self.param_groups]
        self.offload.settle()
        with shrunk(self._on_disk(groups)):
            self.inner = self._class_step.inner = self._make(groups)
        self._place_first()
        self.defaults.update(self.inner.defaults)
        for own, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            own.update({key: value for key, value in inner.items() if key != "params"})
            own["updates"] = 0  # saved with the group, because classes like SGD keep no step count
        sharded.holders.add(self)

    def _rule_states(self) -> RuleStates:
        tier = self._sharded.layout.master.tier
        if self._needs != ELEMENTS or tier == "device":
            return ()
        groups = [{key: value for key, value in group.items() if key != "params"} for group in self.param_groups]
        if tier == "disk":
            check_initial(self._try, groups)
        return element_states(partial(tried_states, self._try, groups))

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
        for unit in self._sharded.units:
            self._hold(unit, owned=set(group["params"]))
        targets = [self._held[param].target for param in group["params"]]
        return {**group, "params": [target for target in targets if target is not None]}

    def _hold(self, unit: Unit, owned: set[nn.Parameter]) -> None:
        """Create the masters of the `owned` parameters of a unit.

        On disk, an fp32 parameter is its own master, and the masters of a unit lie together. The first call for such a
        unit therefore writes those of its other parameters too.
        """
        owned = owned - self._held.keys()  # one that was taken out of a group has its states
        made: list[tuple[MasterParam, torch.Tensor]] = []
        keys, is_first = [key for key, _ in self.offload.buffer_layout.layout.rule_states or ()], not self._of(unit)
        for name, param in unit.params.items() if owned.intersection(unit.params.values()) else ():
            if param in owned or (is_first and self.offload.buffer_layout.on_disk("master", name)):
                values = initial_master(param, unit.take_origin(name) if param in owned else None)
                made.append((MasterParam.create(name, param, values, self._placement, keys), values))
        if made:
            self.offload.visit(unit.shape.name, partial(_each, MasterParam.fill, made), fresh=is_first)
        for held in (held for held, _ in made if held.param in owned):
            self._held[held.param] = held
            if (kept := held.kept_master(unit.shape.name, self.offload)) is not None:
                unit.origin[held.name] = kept
            if self._unsharded is not None:
                is_owner = held.name in self._unsharded.owned
                held.target = stand_in(held.param.shape, device_of(held)) if is_owner else None

    def _on_disk(self, groups: Iterable[Mapping[str, Any]]) -> list[nn.Parameter]:
        """Return the masters on disk of groups of an element-wise class."""
        if self._sharded.layout.master.tier != "disk" or self._needs != ELEMENTS:
            return []
        masters = {held.master for held in self._held.values() if held.mesh is not None}
        return [target for group in groups for target in group["params"] if target in masters]

    def _place_first(self) -> None:
        """Move the states that the class has made before any update to their places."""
        for unit in self._sharded.units:
            if any(held.places and self._class_states.of(held) for held in self._of(unit)):
                self.offload.visit(unit.shape.name, partial(self._class_states.place, self._of(unit)))

    def _take_group(self, group: dict[str, Any]) -> None:
        if self._unsharded is not None and self._sharded.layout.shard > 1:
            self.param_groups.remove(group)
            raise ValueError(
                f"{self._rule} takes no groups later, since ranks share whole parameters out once: give it all groups "
                "when it is made"
            )
        self._unsharded = self._assigned()
        self._regroup(self.param_groups[:-1])
        made = self._held_group(group)
        with shrunk(self._on_disk([made])):
            self.inner.add_param_group(made)
        self._place_first()
        group.update({key: value for key, value in self.inner.param_groups[-1].items() if key != "params"})
        group["updates"] = self.param_groups[0]["updates"]

    def _check_settings(self, settings: Mapping[str, Any]) -> None:
        """Let the class itself check what its constructor takes, on a stand-in."""
        super()._check_settings(settings)
        self._try_settings({key: value for key, value in settings.items() if key in self._arguments})

    def _check_groups(self, named: dict[str, nn.Parameter]) -> None:
        super()._check_groups(named)
        if self._needs != ELEMENTS:
            mixed = [self._names[param] for group in self.param_groups for param in group["params"]]
            check_whole(mixed, self._sharded, self._rule, self._needs)

    def _update(self, grads: dict[str, torch.Tensor], factor: float) -> None:
        self.synchronize()  # updates of the last step still use the settings and states of the wrapped class
        self.take_edits()
        self._begin()
        held = [self._held[param] for group in self.param_groups for param in group["params"]]
        pending = {each.name: PendingUpdate(each, grads[each.name]) for each in held if each.name in grads}
        if self._unsharded is not None:
            self._unsharded.record_lanes(pending)
        self._tiers.start(pending, partial(self._run, factor), self.param_groups[0]["updates"])
        for group in self.param_groups:
            group["updates"] += 1
        self._is_shown = False
        if not self.offload.schedule.slots:
            self._class_step.finish()
        if self._unsharded is not None and not self._first_states:
            # torch's helpers make a step to have states, and leave them where a file has none.
            self.synchronize()
            self._first_states = {each.name: summary_of(self._class_states.of(each)) for each in self._held.values()}

    def _begin(self) -> None:
        """Begin a step of the class, with the parameters and settings that the groups have now."""
        self._regroup(self.param_groups)
        self._class_step.begin(self.param_groups)

    def _regroup(self, groups: Iterable[Mapping[str, Any]]) -> None:
        """Let the class have the parameters of `groups`, whose lists anybody may change."""
        targets = [[self._held[param].target for param in group["params"]] for group in groups]
        self._class_step.regroup([[each for each in some if each is not None] for some in targets])

    def _run(self, factor: float, pending: Sequence[PendingUpdate[MasterParam]]) -> None:
        if self._unsharded is not None:
            by_name = {each.stored.name: each for each in pending}
            self._unsharded.run(ClassUpdate(self._class_step, by_name, factor), by_name)
            return
        with self._class_step.in_use:
            for each in pending:
                each.stored.follow_edits()
                master = each.stored.master
                master.grad = each.grad.float().mul(factor).view(master.shape)
            self._class_step.run()  # skips masters without gradient
            for each in pending:
                each.stored.master.grad = None
                each.stored.write_back()
            self._class_states.place(each.stored for each in pending)

    def synchronize(self) -> None:
        """Wait as any optimizer, and take over what the class has written into its groups."""
        super().synchronize()
        self._class_step.finish()

    def await_updates(self) -> None:
        """Wait as any optimizer, and take over what the class has written into its groups."""
        super().await_updates()
        self._class_step.finish()

    def _follow(self, unit: Unit) -> None:
        values = [(held, held.values()) for held in self._of(unit)]
        if values:
            self.offload.visit(unit.shape.name, partial(_each, MasterParam.refresh_master, values))

    def _follow_edits(self, unit: Unit) -> None:
        values = [(held, held.values()) for held in self._of(unit) if held.mesh is not None]
        if values:
            self.offload.visit(unit.shape.name, partial(_each, MasterParam.take_edits, values))

    def describe(self) -> list[str]:
        """Return log lines about offload and the kind of updates."""
        updates = [f"offload: {self.rule_name} updates with torch's own operations, not in one pass"]
        if self._unsharded is not None and self._sharded.layout.moments.tier == "disk":
            updates.append(
                f"offload: what {self.rule_name} keeps of whole parameters stays in host memory, not on disk"
            )
        return super().describe() + (updates if self.offload.schedule.slots else [])

    def _refresh_states(self) -> None:
        if not self._is_shown:
            self._show_states()

    def _show_states(self) -> None:
        """Show the states that the class has now: it may make or replace some in any update."""
        self._is_shown = True
        for param in self._held:
            self._state.put(param, self._states(param))

    def _without_gradients(self) -> None:
        """Create initial states for torch's checkpoint helpers, which call `step` with zero gradients and rates."""
        if self._state or any(param.grad is None for param in self._held):
            super()._without_gradients()
        self._begin()
        if self._unsharded is not None:
            for target in (held.target for held in self._held.values() if held.target is not None):
                update_whole(self._class_step, target, *torch.zeros(2, *target.shape, device=target.device))
        for unit in self._sharded.units if self._unsharded is None else ():
            if of_unit := self._of(unit):
                self.offload.visit(unit.shape.name, partial(self._class_states.make, of_unit))
        self._class_step.finish()
        self._show_states()

    def _states(self, param: nn.Parameter) -> dict[str, Any]:
        """Return the master and states of a parameter; sharded ones of its shape are DTensors placed like it."""
        held, states = self._held[param], self._class_states.of(self._held[param])
        if self._unsharded is not None:
            return {**held.shown({}, self._placement), **states}
        return held.shown(states, self._placement)

    def state_dict(self) -> dict[str, Any]:
        """Return the state dict, with masters and the states of the wrapped class; with masters before any update."""
        packed = super().state_dict()
        if not packed["state"]:
            params = [param for group in self.param_groups for param in group["params"]]
            packed["state"] = {index: self._states(param) for index, param in enumerate(params)}
        return packed

    def _take_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Copy masters and states from a state dict, also of the class itself in one process.

        Dtype and device of the masters do not change.

        Raises:
            ValueError: The states are another rank's. Nothing has been changed.
        """
        self._check_lengths(state_dict["param_groups"])
        if any("updates" not in group for group in state_dict["param_groups"]):
            state_dict = self._of_one_process(state_dict)
        for own, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            for param, index in zip(own["params"], saved["params"], strict=True):
                for key, value in state_dict["state"].get(index, {}).items():
                    refuse_other_ranks_shard(f"{self._held[param].name}.{key}", value, param)
        if self._unsharded is not None:
            self._check_owners(state_dict)
        index_of: dict[nn.Parameter, int] = {}
        for own, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            own.update({key: value for key, value in saved.items() if key != "params"})
            index_of |= dict(zip(own["params"], saved["params"], strict=True))
        for unit in self._sharded.units:
            in_groups = [held for held in self._of(unit) if held.param in index_of]
            values = [(held, _read(state_dict["state"].get(index_of[held.param], {}))) for held in in_groups]
            if values:
                self.offload.visit(unit.shape.name, partial(_each, self._class_states.load, values))
                unit.is_edited = True  # unless the model is loaded too, its current values override the loaded masters
        self._show_states()

    def _of_one_process(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """Return a state dict of the class in one process, with this rank's parts of its tensors."""
        states: dict[int, dict[str, Any]] = {}
        groups = [{**group, "updates": 0} for group in state_dict["param_groups"]]
        for own, group in zip(self.param_groups, groups, strict=True):
            group.update({key: own[key] for key in ("foreach", "fused") if key in own})
            for param, index in zip(own["params"], group["params"], strict=True):
                held, saved = self._held[param], state_dict["state"].get(index, {})
                if isinstance(param, DTensor) and param.device_mesh.ndim > 1:
                    raise ValueError(
                        f"{held.name} is cut along other axes too: load a state dict of torch.optim without them"
                    )
                group["updates"] = max(group["updates"], int(saved.get("step", 1 if saved else 0)))
                states[index] = {} if held.target is None else dict(saved)
                for key, value in saved.items() if self._unsharded is None and isinstance(param, DTensor) else ():
                    if isinstance(value, torch.Tensor):
                        states[index][key] = part_of(value, param)
        return {"state": states, "param_groups": groups}

    def _check_owners(self, state_dict: Mapping[str, Any]) -> None:
        """Raise ValueError if states of whole parameters were saved on other ranks than those that own them now."""
        are_first, most = list[bool](), 0
        for own, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            most = max(most, saved["updates"])
            for param, index in zip(own["params"], saved["params"], strict=True):
                held, states = self._held[param], state_dict["state"].get(index, {})
                if saved["updates"] and (states.keys() <= {"master"}) == (held.target is not None):
                    raise ValueError(
                        f"{held.name}: the state dict was saved where another rank owned this parameter: load it "
                        "through DCP, or save and resume with dzero.Checkpointer"
                    )
                if held.target is not None:
                    are_first.append(summary_of(_read(states)) == self._first_states.get(held.name))
        if self.param_groups[0]["updates"] <= 1 < most and are_first and all(are_first):
            raise ValueError(
                "the state dict has no states of the parameters that this rank owns. With full_state_dict=True, torch "
                "saves those of rank 0: save without it, or with dzero.Checkpointer"
            )

    @property
    def unsharded_states(self) -> Mapping[str, bool]:
        """Names of the parameters that the class needs whole, and whether this rank owns them."""
        held = self._held.values() if self._unsharded is not None else ()
        return {each.name: each.target is not None for each in held}

    def portable_states(self, unit: Unit) -> list[StateSpec]:
        """Return the specs of the states that `export_state` exports for a unit, in that order."""
        of_unit = self._of(unit)
        states = [
            StateSpec(held.name, key, tensor.dtype, tensor.numel(), shape)
            for held in of_unit
            for key, tensor, shape in self._class_states.export(held)
        ]
        if self.offload.held_back(unit.shape.name):
            states += [StateSpec(held.name, "param", held.param.dtype, held.local.numel()) for held in of_unit]
        return states

    def export_state(self, unit: Unit, put: Callable[[str, str, torch.Tensor], None]) -> None:
        """Pass each state of a unit to `put(parameter, key, tensor)`, flat [shard]."""
        of_unit = self._of(unit)
        self.take_edits()

        def put_all() -> None:
            for held in of_unit:
                held.follow_edits()
                for key, tensor, _ in self._class_states.export(held):
                    put(held.name, key, tensor)

        if of_unit:
            self.offload.visit(unit.shape.name, put_all, changes=False)
        if self.offload.held_back(unit.shape.name):
            for held in of_unit:
                put(held.name, "param", held.values())

    def import_state(self, unit: Unit, portable_states: Mapping[str, PortableState]) -> None:
        """Import the exported states of a unit, by parameter name, and set its parameters accordingly."""
        of_unit = [(held, portable_states[held.name]) for held in self._of(unit)]
        if not of_unit:
            return
        self.offload.visit(unit.shape.name, partial(_each, self._class_states.take, of_unit))
        group_of = self._group_of()
        for held, each in of_unit:
            values = to_working(each.tensors["master"], held.param.dtype)
            held.local.copy_(each.tensors.get("param", values).view(-1))
            self._class_states.take_counts(group_of.get(held.param, {}), each.scalars)
        if all("param" in each.tensors for _, each in of_unit):
            self.offload.hold_back(unit.shape.name, work_of([held for held, _ in of_unit]))
        unit.is_edited = False
        self._show_states()

    def scalars(self) -> dict[str, Any]:
        """Return the scalar state in JSON types, including scalar states of the wrapped class."""
        group_of = self._group_of()
        states = {
            held.name: self._class_states.numbers(held, group_of.get(param, {})) for param, held in self._held.items()
        }
        if self._unsharded is not None and self._sharded.layout.shard > 1:
            every = gather_json(states, self._sharded.mesh.get_group(SHARD))
            states = {name: {key: value for each in every for key, value in each[name].items()} for name in states}
        return super().scalars() | {"states": states, "updates": self.param_groups[0]["updates"]}

    def _group_of(self) -> dict[nn.Parameter, dict[str, Any]]:
        """Return the group of each parameter."""
        return {param: group for group in self.param_groups for param in group["params"]}

    def take_scalars(self, scalars: Mapping[str, Any], keep: Collection[str] = ()) -> None:
        """Restore the values of `scalars`, including the number of updates."""
        super().take_scalars(scalars, keep)
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

    def device_tensors(self) -> Iterator[torch.Tensor]:
        """Yield the masters, and the states of the wrapped class, that are stored on the device."""
        for held in self._held.values():
            if held.work is None:
                yield from ([] if held.is_param else [held.master])
                yield from self._class_states.tensors_of(held)

    def state_bytes(self) -> dict[str, int]:
        """Return the device bytes of this rank's param, master, moments (states of the wrapped class) and frozen."""
        totals = {"param": 0, "master": 0, "moments": 0, **params_device_bytes(self._sharded.named_params().values())}
        for held in self._held.values():
            if held.work is None:
                totals["master"] += 0 if held.is_param else held.master.untyped_storage().nbytes()
                totals["moments"] += sum(
                    value.untyped_storage().nbytes() for value in self._class_states.tensors_of(held)
                )
        return totals


def _each(do: Callable[[MasterParam, Value], None], values: Iterable[tuple[MasterParam, Value]]) -> None:
    for held, value in values:
        do(held, value)


def _read(states: Mapping[str, Any]) -> dict[str, Any]:
    """Return states of a state dict as plain tensors and numbers."""
    return {key: read(local_of(each)) if isinstance(each, torch.Tensor) else each for key, each in states.items()}


def _shown(given: object) -> str:
    return f"an object of {type(given).__name__}" if isinstance(given, torch.optim.Optimizer) else repr(given)
