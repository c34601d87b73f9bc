"""Any element-wise `torch.optim` class over the same fp32 masters; outside the bit contract where its kernels are.

The class sees this rank's masters as plain parameters with fp32 gradients. An optimizer that mixes elements of a
parameter (Adafactor's row means, LAMB's trust ratio, Muon, LBFGS) would be silently wrong on a shard: it is refused
unless nothing is sharded (stage 0).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from dzero.optim.master import MasterOptimizer
from dzero.optim.scaler import ScalerConfig
from dzero.optim.storage import local_of, sharded_like
from dzero.zero.layout import Layout
from dzero.zero.shard import Sharded
from dzero.zero.working import to_working

ELEMENTWISE = ("SGD", "Adam", "AdamW", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "RMSprop", "ASGD", "Rprop")


class TorchOptimizer(MasterOptimizer):
    """`rule` (a class such as torch.optim.SGD) with its own `options`, over fp32 masters.

    elementwise: assert it for a class of your own that updates every element by itself. Raises ValueError for other
    classes at stages 1-3, and for the `remainder` master and 16- or 8-bit moments, which only AdamW keeps.
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
        check_rule(rule, sharded.layout, elementwise)
        super().__init__(sharded, params, dict(options), max_norm=max_norm, scaler=scaler)
        if "foreach" in inspect.signature(rule).parameters:
            options.setdefault("foreach", False)  # foreach keeps temporaries of every parameter at once
        origins = {name: origin for unit in sharded.units for name, origin in unit.origin.items()}
        self._masters: dict[nn.Parameter, nn.Parameter] = {}
        groups = []
        for group in self.param_groups:
            masters = [self._master(p, origins.get(self._names[p])) for p in group["params"]]
            groups.append({**{k: v for k, v in group.items() if k != "params"}, "params": masters})
        for unit in sharded.units:
            unit.origin.clear()
        self.inner = rule(groups, **options)
        for own, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            own.update({key: value for key, value in inner.items() if key != "params"})

    def _master(self, param: nn.Parameter, origin: torch.Tensor | None) -> nn.Parameter:
        local = local_of(param.detach())
        master = local if local.dtype == torch.float32 else local.float() if origin is None else origin
        self._masters[param] = nn.Parameter(master)
        return self._masters[param]

    def _update(self, grads: dict[str, torch.Tensor], factor: float) -> None:
        for param, master in self._masters.items():
            grad = grads.get(self._names[param])
            master.grad = None if grad is None else grad.float().mul(factor).view(master.shape)
        self._step_inner()
        for param, master in self._masters.items():
            local = local_of(param.detach())
            if master.grad is not None and local.dtype != torch.float32:
                local.copy_(to_working(master.detach(), local.dtype))
            master.grad = None

    def _step_inner(self) -> None:
        for own, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            inner.update({key: value for key, value in own.items() if key != "params"})
        self.inner.step()
        if not self.state:  # now there are states to show
            self.state.update({param: self._states(param) for param in self._masters})

    def _without_gradients(self) -> None:
        """torch's checkpoint helpers create the states of a fresh optimizer by a step with zero `.grad`s and rates."""
        if self.state or any(param.grad is None for param in self._masters):
            super()._without_gradients()
        for master in self._masters.values():
            master.grad = torch.zeros_like(master)
        self._step_inner()
        for master in self._masters.values():
            master.grad = None

    def _states(self, param: nn.Parameter) -> dict[str, Any]:
        """The master and the class's states of a parameter, those of its shape as DTensors placed like it."""
        master = self._masters[param]
        own = local_of(param.detach()).dtype == torch.float32
        states: dict[str, Any] = {} if own else {"master": sharded_like(master.detach(), param)}
        for key, value in self.inner.state.get(master, {}).items():
            same = isinstance(value, torch.Tensor) and value.shape == master.shape and value.ndim > 0
            states[key] = sharded_like(value, param) if same else value
        return states

    def state_dict(self) -> dict[str, Any]:
        """Masters and the class's own states."""
        packed = super().state_dict()
        params = [p for group in self.param_groups for p in group["params"]]
        packed["state"] = {index: self._states(param) for index, param in enumerate(params)}
        return packed

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copy masters and states; dtypes and devices stay the masters'."""
        for own, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            own.update({key: value for key, value in saved.items() if key != "params"})
            for param, index in zip(own["params"], saved["params"], strict=True):
                master = self._masters[param]
                values = dict(state_dict["state"].get(index, {}))
                if "master" in values:
                    master.data.copy_(local_of(values.pop("master")))
                self.inner.state[master] = {
                    key: local_of(value).clone() if isinstance(value, torch.Tensor) else value
                    for key, value in values.items()
                }
        self.state.update({param: self._states(param) for param in self._masters})

    def state_bytes(self) -> dict[str, int]:
        """As `MasterOptimizer.state_bytes`; the class's states count as moments."""
        totals = {"param": 0, "master": 0, "moments": 0}
        for param in self._sharded.named_params().values():
            totals["param"] += local_of(param.detach()).untyped_storage().nbytes()
        for param, master in self._masters.items():
            own = local_of(param.detach()).dtype == torch.float32
            totals["master"] += 0 if own else master.untyped_storage().nbytes()
            tensors = [v for v in self.inner.state.get(master, {}).values() if isinstance(v, torch.Tensor) and v.ndim]
            totals["moments"] += sum(v.untyped_storage().nbytes() for v in tensors)
        return totals


def check_rule(rule: type[torch.optim.Optimizer], layout: Layout, elementwise: bool | None = None) -> None:
    """Raises ValueError where `rule` would go wrong on the table's shards, or keeps states in none of its dtypes."""
    torchs_own = rule.__module__.startswith("torch.optim")
    known = torchs_own and rule.__name__ in ELEMENTWISE
    if not (known if elementwise is None else elementwise) and layout.master.sharded:
        foreign = "" if torchs_own else ", or pass elementwise=True if it does"
        raise ValueError(
            f"{rule.__name__} is not known to update every element by itself, so on shards (zero.stage="
            f"{layout.stage}) its result would be silently wrong: take zero.stage=0 or one of {list(ELEMENTWISE)}"
            f"{foreign}"
        )
    if layout.remainder or layout.moments.dtype != torch.float32:
        raise ValueError(
            f"{rule.__name__} keeps fp32 masters and its own states: take precision.master=fp32 and "
            "precision.moments=fp32, or optim.rule=adamw"
        )
