"""Muon and AdamW in one optimizer, by parameter group, with a common gradient decision, step and state dict.

    rule of a group   its parameters                            states                    update
    muon              2-D matrices except embeddings and head   master, step, exp_avg     optim/newton_schulz.py
    adamw             all others                                as in AdamW               optim/flat_update.py

The momentum is an average of gradients, like AdamW's first moment. It is therefore stored as `exp_avg`, and is placed,
saved and loaded like AdamW's moments. Matrices are orthogonalized whole for any sharding, each by the rank that owns it
(`optim/unsharded_updates.py`), so all ZeRO stages give the same bits, as with AdamW.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from dzero.comm.ledger import Entry, Traffic
from dzero.hardware import dtype_of
from dzero.optim import newton_schulz
from dzero.optim.adamw import AdamW, How
from dzero.optim.config import MuonConfig
from dzero.optim.flat_update import BeforePiece, ParamStates
from dzero.optim.loss_scaler import ScalerConfig
from dzero.optim.newton_schulz import MatrixCoefficients
from dzero.optim.offloaded_step import PendingUpdate, device_of
from dzero.optim.param_state import MOMENTS, ParamState
from dzero.optim.requires_unsharded import PARAMETERS, check_rule, check_whole
from dzero.optim.unsharded_updates import UnshardedUpdates
from dzero.zero.layout import Layout
from dzero.zero.sharded import Sharded, check_sharded

RULES = ("muon", "adamw")
OPTIONS = ("lr", "momentum", "nesterov", "iterations", "scale")
"""Settings of a group with rule="muon", besides weight_decay."""


class Muon(AdamW):
    """Muon for parameter groups with rule="muon", AdamW for groups with rule="adamw" or without rule.

    Args:
        sharded: The sharded model.
        params: Parameter groups. None: all trained parameters, split by `matrices_of`.
        muon: Defaults of groups with rule="muon".
        lr: Learning rate. Groups with rule="muon" use `muon.lr` instead if it is set.
        betas: Betas of AdamW.
        eps: Epsilon of AdamW.
        weight_decay: Decoupled weight decay.
        max_norm: Maximum global gradient norm over all ranks. None: no clipping.
        scaler: Settings of the loss scaler, which is used for fp16 parameters only.
        threads: Number of CPU threads for updates, as for `AdamW`.

    Raises:
        ValueError: The groups are invalid, or matrices cannot be orthogonalized whole: states are split over replicas,
            or parameters are cut along other axes or into tiles.
    """

    def __init__(
        self,
        sharded: Sharded,
        params: Iterable[dict[str, Any]] | None = None,
        *,
        muon: MuonConfig | None = None,
        lr: float = 3e-4,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        max_norm: float | None = None,
        scaler: ScalerConfig | None = None,
        threads: int | None = None,
    ) -> None:
        check_sharded(sharded, type(self).__name__)
        check_rule("muon", PARAMETERS, sharded.layout.settings)
        muon = muon or MuonConfig()
        own = {key: getattr(muon, key) for key in OPTIONS} | {"lr": lr if muon.lr is None else muon.lr}
        groups = split_by_rule([{"params": _trained(sharded)}], matrices_of(sharded, muon.exclude))
        groups = [{"rule": "adamw", **group} for group in (groups if params is None else params)]
        self._rules: dict[nn.Parameter, str] = {}
        super().__init__(
            sharded,
            [own | group if group["rule"] == "muon" else group for group in groups],
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            max_norm=max_norm,
            scaler=scaler,
            threads=threads,
        )
        shapes = [shape for unit in sharded.shapes for shape in unit.params if shape.trainable]
        self._matrices = frozenset(self._names[param] for param, rule in self._rules.items() if rule == "muon")
        matrices = [shape for shape in shapes if shape.name in self._matrices]
        self._payload, tiers = _payload(muon.compute, sharded.layout), self.offload.buffer_layout
        self._unsharded = UnshardedUpdates(
            matrices, sharded, 1, self._payload, newton_schulz.cost_of, tiers, replicas_share=True
        )

    def _check_groups(self, named: dict[str, nn.Parameter]) -> None:
        super()._check_groups(named)
        for group in self.param_groups:
            if group["rule"] not in RULES:
                raise ValueError(f"a parameter group's rule={group['rule']!r}: choose one of {list(RULES)}")
            self._check_rule(group)
            self._rules |= dict.fromkeys(group["params"], group["rule"])
        matrices = {self._names[param]: param for param, rule in self._rules.items() if rule == "muon"}
        if not matrices:
            raise ValueError(
                "no parameter is Muon's: give a group rule='muon', shorten optim.muon.exclude, or take AdamW"
            )
        for name, param in matrices.items():
            if param.ndim != 2:
                raise ValueError(
                    f"{name} has {param.ndim} dims, Muon's parameters 2: put it in a group of rule='adamw'"
                )
        fused = [shape.name for unit in self._sharded.shapes for shape in unit.params if shape.fused]
        check_whole([*matrices, *fused], self._sharded, "muon")

    def _check_settings(self, settings: Mapping[str, Any]) -> None:
        super()._check_settings(settings)
        if settings.get("rule") == "muon":
            MuonConfig(**{key: settings[key] for key in OPTIONS if key in settings and key != "lr"})

    def _check_rule(self, group: Mapping[str, Any]) -> None:
        """Raise ValueError if a group has another rule than its parameters had when the optimizer was made."""
        for param in group["params"]:
            if self._rules.get(param, group["rule"]) != group["rule"]:
                raise ValueError(
                    f"{self._names[param]} has the states of rule={self._rules[param]!r}, and its group "
                    f"rule={group['rule']!r} now: make another optimizer for other rules"
                )

    def _take_group(self, group: dict[str, Any]) -> None:
        self.param_groups.remove(group)
        raise ValueError(
            "Muon takes no groups later, since ranks share its matrices out once: give it all groups when it is made"
        )

    def _moments_of(self, param: nn.Parameter) -> tuple[str, ...]:
        return MOMENTS[:1] if self._rules.get(param) == "muon" else MOMENTS

    def _coefficients(self, group: Mapping[str, Any], scale: float) -> Callable[[ParamState, int], Any]:
        self._check_rule(group)
        if group["rule"] != "muon":
            return super()._coefficients(group, scale)
        options = {key: group[key] for key in (*OPTIONS, "weight_decay")}
        return lambda stored, step: MatrixCoefficients.of(*stored.param.shape, grad_scale=scale, **options)

    def _update(self, grads: dict[str, torch.Tensor], factor: float) -> None:
        self._unsharded.record_lanes(self._matrices & grads.keys())
        super()._update(grads, factor)

    def _run(
        self, how: How, pending: Sequence[PendingUpdate[ParamState]], before_piece: BeforePiece | None = None
    ) -> None:
        matrices = {each.stored.name: each for each in pending if each.stored.name in self._matrices}
        super()._run(how, [each for each in pending if each.stored.name not in matrices], before_piece)
        if matrices:
            self._unsharded.run(_MatrixUpdate(matrices, how), matrices)

    def describe(self) -> list[str]:
        """Return log lines with the number of parameters per rule, and those of `AdamW.describe`."""
        others = len(self._rules) - len(self._matrices)
        return [f"muon: {len(self._matrices)} matrices, {others} other parameters by adamw", *super().describe()]

    def _take_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Copy the values of a state dict whose groups have the same rules."""
        saved = [group.get("rule") for group in state_dict["param_groups"]]
        own = [group["rule"] for group in self.param_groups]
        if saved != own:
            raise ValueError(f"the state dict's groups have the rules {saved}, this optimizer's {own}")
        super()._take_state_dict(state_dict)

    def take_scalars(self, scalars: Mapping[str, Any], keep: Collection[str] = ()) -> None:
        """Restore the values of `scalars`; raise ValueError if rule="muon" applied to other parameters."""
        groups = scalars["groups"] if scalars["rule"] == self.rule_name else []
        saved = {name for group in groups if group["rule"] == "muon" for name in group["params"]}
        if groups and saved != self._matrices:
            differ = sorted(saved ^ self._matrices)
            raise ValueError(f"the states were saved with other parameters by Muon: {differ}; see optim.muon.exclude")
        super().take_scalars(scalars, keep)

    @property
    def rule_name(self) -> str:
        """Name of the update rule, as in `optim.rule`."""
        return "muon"

    @property
    def traffic(self) -> dict[Entry, Traffic]:
        """Calls and bytes that this rank sends for a step's update, by entry of the ledger."""
        return self._unsharded.traffic


@dataclass
class _MatrixUpdate:
    """The update of a step's matrices, an `UnshardedRule`: owners orthogonalize what every rank mixes of its shards."""

    pending: Mapping[str, PendingUpdate[ParamState]]
    how: How
    states: dict[str, ParamStates] = field(default_factory=dict)
    """States of the matrices of a round, where the update runs; 8-bit moments are decoded in them."""

    @property
    def device(self) -> torch.device:
        """Device of the states."""
        return device_of(next(iter(self.pending.values())).stored)

    def prepare(self, name: str, inputs: Sequence[torch.Tensor]) -> None:
        """Update the momentum of a shard, and fill in the input of Newton-Schulz."""
        each, (step, coefficients) = self.pending[name], self.how[name]
        own = self.states[name] = each.stored.states(each.moved)
        inputs[0].copy_(newton_schulz.mixed(each.grad, own, coefficients, step))
        each.stored.keep(own)

    def update(self, name: str, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return a whole matrix, orthogonalized."""
        return newton_schulz.orthogonalise(inputs[0], self.how[name][1].iterations)

    def apply(self, name: str, result: torch.Tensor) -> None:
        """Update the master and the working copy of a shard."""
        newton_schulz.apply(result, self.states.pop(name), self.how[name][1])


def matrices_of(sharded: Sharded, exclude: Collection[str]) -> set[nn.Parameter]:
    """Return the trained 2-D parameters with several rows and columns that Muon updates.

    Parameters of embeddings are left out, also where the other end of a pipeline has the embedding, and those below a
    module whose name is in `exclude`.
    """
    modules = sharded.model.modules()
    embeddings = {param for module in modules if isinstance(module, nn.Embedding) for param in module.parameters()}
    tied = () if sharded.stages is None else sharded.stages.shared
    return {
        param
        for name, param in sharded.named_params().items()
        if param.requires_grad and param.ndim == 2 and min(param.shape) > 1
        if param not in embeddings and name not in tied and not set(exclude).intersection(name.split(".")[:-1])
    }


def split_by_rule(groups: Iterable[dict[str, Any]], matrices: Collection[nn.Parameter]) -> list[dict[str, Any]]:
    """Split each group into rule="muon" with its `matrices` and rule="adamw" with the rest; omit empty groups."""
    found = []
    for group in groups:
        for rule, params in (
            ("muon", [param for param in group["params"] if param in matrices]),
            ("adamw", [param for param in group["params"] if param not in matrices]),
        ):
            if params:
                found.append({**group, "params": params, "rule": rule})
    return found


def _trained(sharded: Sharded) -> list[nn.Parameter]:
    return [param for param in sharded.named_params().values() if param.requires_grad]


def _payload(compute: str, layout: Layout) -> torch.dtype:
    """Return the dtype in which matrices are sent and orthogonalized; `auto` is bf16 for bf16 parameters, else fp32."""
    if compute == "auto":
        return torch.bfloat16 if layout.param.dtype == torch.bfloat16 else torch.float32
    return dtype_of(compute)
