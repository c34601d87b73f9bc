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
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, overload

import torch
from torch import nn

from dzero.offload.attach import Offload
from dzero.optim.grads import Decision, Gradients
from dzero.optim.scaler import LossScaler, ScalerConfig
from dzero.zero.shard import Sharded
from dzero.zero.unit import Unit, as_module


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
        self.offload.take_params()
        self._hook_state_dicts()

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
        else:
            self._skip()
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

    def _skip(self) -> None:
        """Nothing is updated in this step."""
        self.offload.release()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop reduced gradients, e.g. of microbatches that are not to count. Raises as `Sharded.abandon_step` does."""
        self._sharded.abandon_step()
        self.gradients.clear()
        super().zero_grad(set_to_none)

    def introduce(self) -> list[str]:
        """For the log: what lives off the device, and how that works. Nothing where all is on it."""
        return self.offload.introduce()

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
