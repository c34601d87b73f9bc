"""The optimizer that owns the fp32 masters: a real `torch.optim.Optimizer` over sharded parameters.

A step, after the last microbatch's backward has left the reduced gradients in `Gradients`:

    decide   all ranks agree on norm, finiteness and the clipping factor      (optim/grads.py)
    update   every rank its own shard, in fp32, rounded once                   (optim/update.py, optim/torch_rule.py)
    record   the decision stays in `last_decision`; the loss scale moves

A step with a non-finite gradient on any rank changes nothing but the loss scale and the skip count. States exist from
construction on, and loading copies values into them: their dtype, device and placement are the table's, not the
parameter's or the file's.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, overload

import torch
from torch import nn

from dzero.offload.attach import Offload
from dzero.optim.grads import Decision, Gradients
from dzero.optim.rules import Coefficients
from dzero.optim.scaler import LossScaler, ScalerConfig
from dzero.optim.storage import Homes, Stored, local_of
from dzero.optim.tiered import Pending, TieredUpdates
from dzero.optim.update import AdamWUpdater, Update
from dzero.zero.shard import Sharded


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
        super().__init__([p for p in named.values() if p.requires_grad] if params is None else params, defaults)
        self._sharded, self.max_norm = sharded, max_norm
        fp16 = sharded.layout.param.dtype == torch.float16
        self.scaler = LossScaler((scaler or ScalerConfig()) if fp16 else None)
        self.last_decision: Decision | None = None
        self.skipped_steps = 0
        self.consecutive_skips = 0
        self._loss_was_scaled = not fp16
        self._check_groups(named)
        owned = [self._names[param] for group in self.param_groups for param in group["params"]]
        self.offload = Offload(sharded, moments=self.places_moments)
        self.gradients = Gradients(sharded, owned, self.offload)
        current = weakref.WeakMethod(self.synchronize)
        model = sharded.model
        for register in (model.register_state_dict_pre_hook, model.register_load_state_dict_pre_hook):
            register(lambda *_: wait() if (wait := current()) else None)  # type: ignore[no-untyped-call]

    def _check_groups(self, named: dict[str, nn.Parameter]) -> None:
        names = {param: name for name, param in named.items()}
        for group in self.param_groups:
            if any(param not in names for param in group["params"]):
                raise ValueError(
                    "a parameter group holds a parameter that is not one of the sharded model's: build the groups from "
                    "sharded.named_params(), after shard() has replaced the parameters"
                )
        self._names = names

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss to call backward on: multiplied by the loss scale (fp16), else itself."""
        self._loss_was_scaled = True
        return loss if self.scaler.scale == 1.0 else loss * self.scaler.scale

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
        with torch.profiler.record_function("step decide"):
            decision = self.gradients.decide(scale=self.scaler.scale, max_norm=self.max_norm)
        grads = self.gradients.arriving()
        if not grads:
            self._without_gradients()
            return loss
        if not self._loss_was_scaled:
            raise RuntimeError("fp16 gradients of an unscaled loss: call backward on optim.scale_loss(loss)")
        if decision.finite:
            with torch.profiler.record_function("step update"):
                self._update(grads, decision.factor)
        self._record(decision)
        return loss

    def _without_gradients(self) -> None:
        raise RuntimeError(
            "step() without gradients: run backward first, and the last microbatch under microbatch(is_last=True)"
        )

    def _record(self, decision: Decision) -> None:
        self.gradients.clear()
        self.last_decision = decision
        self.scaler.update(finite=decision.finite)
        self.consecutive_skips = 0 if decision.finite else self.consecutive_skips + 1
        self.skipped_steps += not decision.finite

    def _update(self, grads: dict[str, torch.Tensor], factor: float) -> None:
        raise NotImplementedError

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop reduced gradients, e.g. of microbatches that are not to count. Raises as `Sharded.abandon_step` does."""
        self._sharded.abandon_step()
        self.gradients.clear()
        super().zero_grad(set_to_none)

    def synchronize(self) -> None:
        """Return when no update is on its way any more. Parameters read directly are then those of the last step.

        State dicts of the model and of the optimizer do this by themselves, and so does the next forward, unit by unit.
        Raises OffloadError for an update that failed.
        """
        self.offload.synchronize()

    def state_dict(self) -> dict[str, Any]:
        """As any optimizer's; see `synchronize`."""
        self.synchronize()
        return super().state_dict()

    def state_bytes(self) -> dict[str, int]:
        """Bytes of this rank's param, master and moments on the device between steps."""
        raise NotImplementedError


class AdamW(MasterOptimizer):
    """AdamW over fp32 masters (or fp32 + remainder), with moments in fp32, bf16 or 8 bits, as the table says.

    params: as for any optimizer (parameters or groups of the sharded model); None for every trained parameter.
    max_norm: global-norm clipping over all ranks. threads: of the CPU update; None for torch's number.
    """

    def __init__(
        self,
        sharded: Sharded,
        params: Iterable[nn.Parameter] | Iterable[dict[str, Any]] | None = None,
        *,
        lr: float = 3e-4,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        max_norm: float | None = None,
        scaler: ScalerConfig | None = None,
        threads: int | None = None,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(sharded, params, defaults, max_norm=max_norm, scaler=scaler)
        self._updater = AdamWUpdater(threads or torch.get_num_threads())
        self._tiers: TieredUpdates[Stored] = TieredUpdates(sharded, self.offload)
        homes = Homes(sharded, self.offload)
        self._stored: dict[nn.Parameter, Stored] = {}
        shapes = {p.name: (p, unit) for unit in sharded.units for p in unit.shape.params}
        for group in self.param_groups:
            for param in group["params"]:
                shape, unit = shapes[self._names[param]]
                origin = unit.origin.pop(shape.name, None)
                stored = Stored.create(shape, param, origin, sharded.layout, homes)
                self._stored[param] = stored
                self.state[param] = stored.tensors
        loaded = weakref.WeakMethod(self._follow_loaded)
        sharded.model.register_load_state_dict_post_hook(  # type: ignore[no-untyped-call]
            lambda *_: follow() if (follow := loaded()) else None
        )

    def _follow_loaded(self, *_: object) -> None:
        for stored in self._stored.values():
            stored.follow()

    def _update(self, grads: dict[str, torch.Tensor], factor: float) -> None:
        pending: dict[str, Pending[Stored]] = {}
        how: dict[str, tuple[int, Coefficients]] = {}
        for group in self.param_groups:
            options = {k: group[k] for k in ("lr", "betas", "eps", "weight_decay")}
            for param in group["params"]:
                stored = self._stored[param]
                if stored.name not in grads:
                    continue
                stored.tensors["step"] += 1
                step = int(stored.tensors["step"].item())
                how[stored.name] = step, Coefficients.of(step=step, scale=factor, **options)
                pending[stored.name] = Pending(stored, grads[stored.name])
        self._tiers.start(pending, partial(self._run, how))

    def _run(self, how: dict[str, tuple[int, Coefficients]], pending: Sequence[Pending[Stored]]) -> None:
        updates = []
        for each in pending:
            step, coefficients = how[each.stored.name]
            updates.append(Update(each.stored.states(each.moved), each.grad, coefficients, step))
        self._updater.run(updates)
        for each, update in zip(pending, updates, strict=True):
            each.stored.keep(update.states)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copy values into the existing states, bit for bit. Raises ValueError where kind, dtype or shape differ."""
        self.synchronize()
        groups = state_dict["param_groups"]
        if [len(g["params"]) for g in groups] != [len(g["params"]) for g in self.param_groups]:
            raise ValueError(
                f"state dict has groups of {[len(g['params']) for g in groups]} parameters, this optimizer "
                f"{[len(g['params']) for g in self.param_groups]}"
            )
        for own, saved in zip(self.param_groups, groups, strict=True):
            own.update({key: value for key, value in saved.items() if key != "params"})
            for param, index in zip(own["params"], saved["params"], strict=True):
                if index not in state_dict["state"]:
                    raise ValueError(f"the state dict has no states of {self._names[param]}")
                _copy_states(self._stored[param], state_dict["state"][index])

    def state_bytes(self) -> dict[str, int]:
        """Bytes of this rank's param, master and moments between steps; frozen parameters included."""
        totals = {"param": 0, "master": 0, "moments": 0}
        for stored in self._stored.values():
            for kind, count in stored.bytes_by_kind("device").items():
                totals[kind] += count
        for param in self._sharded.named_params().values():
            if param not in self._stored:
                totals["param"] += local_of(param.detach()).untyped_storage().nbytes()
        return totals


def _copy_states(stored: Stored, saved: dict[str, torch.Tensor]) -> None:
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
        local = local_of(value)
        if local.shape != local_of(own).shape:
            raise ValueError(
                f"{stored.name}.{key}: a local shard of {tuple(local.shape)} where this rank's is "
                f"{tuple(local_of(own).shape)}; load resharded states through DCP"
            )
        local_of(own).copy_(local)
