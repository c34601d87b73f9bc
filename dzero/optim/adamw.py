"""AdamW over sharded master parameters on device, host or disk: updates, state dicts, and memory use."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, TypeVar

import torch
from torch import nn

from dzero.offload.lane import copy_all
from dzero.optim.adamw_math import Coefficients
from dzero.optim.base import MasterOptimizer, PortableState, StateSpec
from dzero.optim.flat_update import AdamWUpdater, BeforePiece, ParamUpdate
from dzero.optim.group_settings import check_rate, is_number
from dzero.optim.loss_scaler import ScalerConfig
from dzero.optim.offloaded_step import OffloadedStep, PendingUpdate, work_of
from dzero.optim.param_state import MOMENTS, InitialValues, ParamState
from dzero.optim.speculative_step import SpeculativeStep
from dzero.optim.state_placement import StatePlacement, params_device_bytes, read
from dzero.optim.torch_state_dict import check_torchs, is_torchs, refuse_other_rules, take_torchs
from dzero.zero.dtensors import local_of, refuse_other_ranks_shard
from dzero.zero.rounding import to_working
from dzero.zero.sharded import Sharded
from dzero.zero.unit import Unit

Value = TypeVar("Value")
How = dict[str, tuple[int, Any]]
"""Number of the update (from 1) and coefficients of each parameter, by parameter name."""


class AdamW(MasterOptimizer):
    """AdamW over fp32 master parameters, which may be stored as bf16 plus an int16 remainder.

    The layout of the sharded model sets the storage of masters and moments. Moments are fp32, bf16 or 8-bit. The
    defaults are those of `torch.optim.AdamW`; `train.py` has others (`OptimConfig`), and decays matrices only.

    Args:
        sharded: The sharded model.
        params: Parameters or parameter groups of the sharded model. None: all trained parameters.
        lr: Learning rate.
        betas: Decay rates of the first and the second moment.
        eps: Term added to the denominator.
        weight_decay: Decoupled weight decay.
        max_norm: Maximum global gradient norm over all ranks. None: no clipping.
        scaler: Settings of the loss scaler, which is used for fp16 parameters only.
        threads: Number of CPU threads for updates. None: `torch.get_num_threads()`, or, for states offloaded from a
            GPU, one thread bound to each of this rank's cores.
    """

    def __init__(
        self,
        sharded: Sharded,
        params: Iterable[nn.Parameter] | Iterable[dict[str, Any]] | None = None,
        *,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        max_norm: float | None = None,
        scaler: ScalerConfig | None = None,
        threads: int | None = None,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(sharded, params, defaults, max_norm=max_norm, scaler=scaler)
        self._cores = self.offload.cores if threads is None and self.offload.schedule.slots else []
        self._threads = threads or len(self._cores) or torch.get_num_threads()
        self._updater = AdamWUpdater(self._threads, self._cores)
        self._tiers: OffloadedStep[ParamState] = OffloadedStep(sharded, self.offload)
        self._ahead = SpeculativeStep(self.offload.undo)
        self.gradients.tell(self)
        self._placement = StatePlacement(sharded, self.offload)
        self._stored: dict[nn.Parameter, ParamState] = {}
        owned = {param for group in self.param_groups for param in group["params"]}
        for unit in sharded.units:
            self._take(unit, owned)
        self._count_together()
        self.offload.settle()
        sharded.holders.add(self)

    def _check_groups(self, named: dict[str, nn.Parameter]) -> None:
        super()._check_groups(named)
        for group in self.param_groups:
            refuse_other_rules(group, "a parameter group")

    def _check_settings(self, settings: Mapping[str, Any]) -> None:
        super()._check_settings(settings)
        for key in ("eps", "weight_decay"):
            check_rate(key, settings)
        betas = settings.get("betas", (0.0, 0.0))
        is_pair = isinstance(betas, (tuple, list)) and len(betas) == 2 and all(map(is_number, betas))
        if not is_pair or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas={betas!r}: pass two numbers in [0, 1), such as (0.9, 0.999)")

    def _take_group(self, group: dict[str, Any]) -> None:
        for unit in self._sharded.units:
            self._take(unit, set(group["params"]))
        self._count_together()

    def _count_together(self) -> None:
        """Make each `step` a view of one fp32 tensor [parameters], so that all are read or incremented at once."""
        each = [stored.tensors["step"] for stored in self._stored.values()]
        self._steps = torch.stack(each) if each else torch.zeros(0)
        for number, stored in enumerate(self._stored.values()):
            stored.number, stored.tensors["step"] = number, self._steps[number]
            self._state.put(stored.param, stored.tensors)
        self._params_of = Counter(self.offload.unit_of(stored.name) for stored in self._stored.values())

    def _take(self, unit: Unit, owned: set[nn.Parameter]) -> None:
        """Create and initialize the states of the `owned` parameters of a unit.

        On disk, the states of a unit are stored together, and an fp32 parameter is its own master there. The first
        call for such a unit therefore initializes the states of its other parameters too.
        """
        owned = owned - self._stored.keys()  # one that was taken out of a group has its states
        shapes = {shape.name: shape for shape in unit.shape.params}
        initial: list[tuple[ParamState, InitialValues]] = []
        placement, is_first = self._placement, not self._of(unit)
        for name, param in unit.params.items() if owned.intersection(unit.params.values()) else ():
            if param in owned or (is_first and self.offload.buffer_layout.on_disk("master", name)):
                stored = ParamState.create(shapes[name], param, unit.layout, placement, self._moments_of(param))
                # Other parameters keep their fp32 origin for a group that is added later.
                initial.append((stored, stored.initial(unit.take_origin(name) if param in owned else None)))
                if param in owned:
                    self._stored[param] = stored
        if initial:
            self.offload.visit(unit.shape.name, partial(_each, ParamState.fill, initial), fresh=is_first)
        own = [stored for stored, _ in initial if stored.param in owned]
        unit.origin |= {stored.name: kept for stored in own if (kept := stored.kept_master()) is not None}

    def _moments_of(self, param: nn.Parameter) -> tuple[str, ...]:
        """Return the keys of the moments that are kept for a parameter."""
        return MOMENTS

    def _follow(self, unit: Unit) -> None:
        values = [(stored, stored.values()) for stored in self._of(unit)]
        if values:
            self.offload.visit(unit.shape.name, partial(_each, ParamState.refresh_master, values))

    def _follow_edits(self, unit: Unit) -> None:
        values = [(stored, stored.values()) for stored in self._of(unit) if stored.work is not None]
        if values:
            self.offload.visit(unit.shape.name, partial(_each, ParamState.follow_edits, values))

    def _update(self, grads: dict[str, torch.Tensor], factor: float) -> None:
        self.take_edits()
        pending, how = self._plan(grads, factor)
        done = self._ahead.resolve(how, clipped=factor != 1.0 / self.scaler.scale)
        updates = int(self._steps.max()) if len(self._steps) else 0
        if len(pending) == len(self._stored):
            self._steps += 1
        else:
            self._steps[[each.stored.number for each in pending.values()]] += 1
        self._tiers.start(pending, partial(self._run, how), updates, done)
        self._share([each.stored for each in pending.values()])

    def _share(self, updated: Collection[ParamState]) -> None:
        """Gather the updated values of all replicas, where each replica updates only its replica shard.

        With `offload.overlap=forward`, the gather of a unit that has a pending update runs when the unit's next forward
        waits for that update. Otherwise it runs here.
        """
        if self._sharded.layout.replica_shards == 1:
            return
        names, coming = {stored.name for stored in updated}, []
        for unit in self._sharded.units:
            gather = self._gather_of(unit, names)
            if gather is not None and unit.replica_shards is not None:
                unit.replica_shards.book(names.intersection(unit.params))
            if gather is not None and unit.pending is not None and self._sharded.layout.offload.mode == "forward":
                unit.pending = partial(_in_turn, unit.pending, gather)
            elif gather is not None:
                unit.wait_for_update()
                coming.append(gather())
                for arrived in coming[:-1]:  # one gather is in flight while the previous one is copied out
                    arrived()
                del coming[:-1]
        for arrived in coming:
            arrived()

    def _gather_of(self, unit: Unit, names: Collection[str]) -> Callable[[], Callable[[], None]] | None:
        """Return a function that starts the gather of a unit's updated `names`, or None if there is none."""
        shards = {stored.name: local_of(stored.param).view(-1) for stored in self._of(unit) if stored.name in names}
        return None if unit.replica_shards is None or not shards else partial(unit.replica_shards.gather, shards)

    def _skip(self) -> None:
        self._ahead.abandon()
        super()._skip()

    def describe(self) -> list[str]:
        """Return log lines about offload, including the threads of updates on the host."""
        where = f"bound to cores {self._cores}" if self._cores else "not bound"
        updates = [f"offload: updates on {self._threads} host threads, {where}"]
        return super().describe() + (updates if self.offload.schedule.slots else [])

    def synchronize(self) -> None:
        """Wait for all pending updates, and roll back early updates of a step that is not decided yet."""
        self._ahead.abandon()
        super().synchronize()

    def await_updates(self) -> None:
        """Wait for the updates of the last step, and roll back early updates of a step that is not decided yet."""
        self._ahead.abandon()
        super().await_updates()

    def begin(self, unit: str, grads: dict[str, torch.Tensor]) -> bool:
        """Start a unit's update before the decision, as if nothing is clipped, and return whether it was started.

        It is not if a parameter of the unit has no gradient, as the places of all its states are exchanged.
        """
        if not self._ahead.allows(unit) or any(each.is_edited for each in self._sharded.units):
            return False
        pending, how = self._plan(grads, 1.0 / self.scaler.scale)
        if not pending or len(pending) < self._params_of[unit]:
            return False
        updates, exchanged = [*pending.values()], self.offload.undo.is_exchanged(unit)
        for each in updates:
            each.exchanged = exchanged
        self._ahead.start(unit, how, partial(self._run, how, updates))
        return True

    def rollback(self) -> None:
        """Roll back all early updates of the step."""
        self._ahead.abandon()

    def _plan(self, grads: dict[str, torch.Tensor], factor: float) -> tuple[dict[str, PendingUpdate[ParamState]], How]:
        """Return the updates from `grads` and their coefficients, by parameter name, and change no state."""
        pending: dict[str, PendingUpdate[ParamState]] = {}
        how: How = {}
        steps = self._steps.int().tolist()
        for group in self.param_groups:
            coefficients = self._coefficients(group, factor)
            for param in group["params"]:
                stored = self._stored[param]
                if (grad := grads.get(stored.name)) is not None:
                    step = steps[stored.number] + 1
                    how[stored.name] = step, coefficients(stored, step)
                    pending[stored.name] = PendingUpdate(stored, grad)
        return pending, how

    def _coefficients(self, group: Mapping[str, Any], scale: float) -> Callable[[ParamState, int], Any]:
        """Return a function of a parameter's state and update number that computes the coefficients of `group`.

        `scale` is the factor of the gradients.
        """
        refuse_other_rules(group, "a parameter group")
        lr, betas, eps, decay = (group[key] for key in ("lr", "betas", "eps", "weight_decay"))
        settings = float(lr), tuple(betas), float(eps), float(decay), scale
        return lambda stored, step: _coefficients(step, *settings)

    def _run(
        self, how: How, pending: Sequence[PendingUpdate[ParamState]], before_piece: BeforePiece | None = None
    ) -> None:
        """Run updates on one device; `before_piece` is that of `AdamWUpdater.run`."""
        for some in _decoded_together(pending):
            updates = []
            for each in some:
                step, coefficients = how[each.stored.name]
                states = each.stored.states(each.moved, exchanged=each.exchanged)
                updates.append(ParamUpdate(states, each.grad, coefficients, step))
            self._updater.run(updates, before_piece)
            for update, each in zip(updates, some, strict=True):
                if each.stored.moments8:
                    each.stored.keep(update.states, exchanged=each.exchanged != (before_piece is not None))

    def _take_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Copy the values of a state dict into the existing states, bit for bit.

        Args:
            state_dict: State dict of this class, or of `torch.optim.AdamW`, from which each rank copies its own shards.

        Raises:
            ValueError: The kind, dtype or shape of a state differs. No state has been changed.
        """
        groups = state_dict["param_groups"]
        self._check_lengths(groups)
        for saved in groups:
            self._check_settings(saved)
        foreign = is_torchs(state_dict)
        saved_of: dict[nn.Parameter, dict[str, torch.Tensor]] = {}
        for own, saved in zip(self.param_groups, groups, strict=True):
            for param, index in zip(own["params"], saved["params"], strict=True):
                if index not in state_dict["state"] and not foreign:
                    raise ValueError(f"the state dict has no states of {self._names[param]}")
                saved_of[param] = state_dict["state"].get(index, {})
                if foreign:
                    check_torchs(saved, self._stored[param], saved_of[param])
                else:
                    _check_states(self._stored[param], saved_of[param])
        for own, saved in zip(self.param_groups, groups, strict=True):
            own.update({key: value for key, value in saved.items() if key != "params" and (key in own or not foreign)})
        for unit in self._sharded.units:
            if foreign:
                values = [(stored, saved_of[stored.param]) for stored in self._of(unit)]
                self.offload.visit(unit.shape.name, partial(_each, take_torchs, values))
            else:
                self._load_states(unit, saved_of)

    def _load_states(self, unit: Unit, saved_of: Mapping[nn.Parameter, Mapping[str, torch.Tensor]]) -> None:
        copies = [
            (stored.tensors["step"], value) if key == "step" else (stored.flat(key), read(local_of(value)).reshape(-1))
            for stored in self._of(unit)
            for key, value in saved_of[stored.param].items()
        ]
        if copies:
            self.offload.visit(unit.shape.name, partial(copy_all, copies))
            unit.is_edited = True  # unless the model is loaded too, its current values override the loaded masters

    def portable_states(self, unit: Unit) -> list[StateSpec]:
        """Return the specs of the states that `export_state` exports for a unit, in that order."""
        of_unit = self._of(unit)
        states = [
            StateSpec(stored.name, key, *kind) for stored in of_unit for key, kind in stored.portable_states().items()
        ]
        if self.offload.held_back(unit.shape.name):
            states += [StateSpec(stored.name, "param", stored.dtype, stored.local.numel()) for stored in of_unit]
        return states

    def export_state(self, unit: Unit, put: Callable[[str, str, torch.Tensor], None]) -> None:
        """Pass each state of a unit to `put(parameter, key, tensor)`, flat [shard]."""
        of_unit = self._of(unit)
        self.take_edits()

        def carry_all() -> None:
            for stored in of_unit:
                for key, tensor in stored.export_state():
                    put(stored.name, key, tensor)

        if of_unit:
            self.offload.visit(unit.shape.name, carry_all, changes=False)
        if self.offload.held_back(unit.shape.name):
            for stored in of_unit:
                put(stored.name, "param", stored.values())

    def import_state(self, unit: Unit, portable_states: Mapping[str, PortableState]) -> None:
        """Import the exported states of a unit, by parameter name, and set its parameters accordingly."""
        taking = []
        for stored in self._of(unit):
            master = (each := portable_states[stored.name]).tensors["master"]
            taking.append((stored, each, InitialValues(to_working(master, stored.dtype), master)))

        def take_all() -> None:
            for stored, each, initial in taking:
                stored.import_state(initial, each.tensors, each.blocks)

        if taking:
            self.offload.visit(unit.shape.name, take_all)
        for stored, each, initial in taking:
            stored.tensors["step"].fill_(each.scalars["step"])
            stored.local.copy_(each.tensors.get("param", initial.param))
        unit.is_edited = False
        if taking and all("param" in each.tensors for _, each, _ in taking):
            self.offload.hold_back(unit.shape.name, work_of([stored for stored, _, _ in taking]))
        if (gather := self._gather_of(unit, portable_states)) is not None:
            unit.pending = partial(_in_turn, unit.pending, gather)

    def scalars(self) -> dict[str, Any]:
        """Return the scalar state in JSON types, including the number of updates of each parameter."""
        return super().scalars() | {
            "states": {stored.name: {"step": int(stored.tensors["step"])} for stored in self._stored.values()}
        }

    @property
    def rule_name(self) -> str:
        """Name of the update rule, as in `optim.rule`."""
        return "adamw"

    def _of(self, unit: Unit) -> list[ParamState]:
        return [stored for param in unit.params.values() if (stored := self._stored.get(param)) is not None]

    def device_tensors(self) -> Iterator[torch.Tensor]:
        """Yield the masters and moments that are stored on the device."""
        for stored in self._stored.values():
            yield from stored.device_tensors()

    def forget_addresses(self) -> None:
        """Drop the tables of the states' addresses."""
        self._updater.forget_tables()

    def state_bytes(self) -> dict[str, int]:
        """Return the device bytes of this rank's param, master, moments and frozen between steps."""
        totals = {"param": 0, "master": 0, "moments": 0, **params_device_bytes(self._sharded.named_params().values())}
        for stored in self._stored.values():
            for kind, count in stored.device_bytes().items():
                totals[kind] += count
        return totals


@lru_cache(maxsize=16)
def _coefficients(
    step: int, lr: float, betas: tuple[float, float], eps: float, decay: float, scale: float
) -> Coefficients:
    """Return the coefficients of a group; the cache gives all of its parameters the same object."""
    return Coefficients.of(step=step, lr=lr, betas=betas, eps=eps, weight_decay=decay, scale=scale)


DECODED_ELEMS = 1 << 24
"""Maximum elements with 8-bit moments per batch of updates, unless one parameter is larger; 128 MiB decoded."""


def _decoded_together(pending: Sequence[PendingUpdate[ParamState]]) -> Iterator[Sequence[PendingUpdate[ParamState]]]:
    """Yield batches of `pending` that each decode at most DECODED_ELEMS elements of 8-bit moments."""
    some: list[PendingUpdate[ParamState]] = []
    elems = 0
    for each in pending:
        decoded = each.grad.numel() if each.stored.moments8 else 0
        if some and decoded and elems + decoded > DECODED_ELEMS:
            yield some
            some, elems = [], 0
        some.append(each)
        elems += decoded
    yield some


def _each(do: Callable[[ParamState, Value], None], values: Iterable[tuple[ParamState, Value]]) -> None:
    for stored, value in values:
        do(stored, value)


def _in_turn(wait: Callable[[], None] | None, gather: Callable[[], Callable[[], None]]) -> None:
    if wait is not None:
        wait()
    gather()()


def _check_states(stored: ParamState, saved: Mapping[str, torch.Tensor]) -> None:
    if saved.keys() != stored.tensors.keys():
        raise ValueError(
            f"{stored.name}: the state dict holds {sorted(saved)}, this optimizer keeps {sorted(stored.tensors)}; "
            "set precision.master and precision.moments to what was saved"
        )
    for key, own in stored.tensors.items():
        value = saved[key]
        if value.dtype != own.dtype or value.shape != own.shape:
            raise ValueError(
                f"{stored.name}.{key}: the state dict has {value.dtype} {tuple(value.shape)}, this optimizer "
                f"{own.dtype} {tuple(own.shape)}"
            )
        if local_of(value).shape != local_of(own).shape:
            raise ValueError(
                f"{stored.name}.{key}: a local shard of {tuple(local_of(value).shape)} where this rank's is "
                f"{tuple(local_of(own).shape)}; load resharded states through DCP"
            )
        refuse_other_ranks_shard(f"{stored.name}.{key}", value, own)
