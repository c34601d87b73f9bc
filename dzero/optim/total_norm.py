"""Norm of gradients over all ranks, and clipping to it: `dzero.clip_grad_norm_`, and torch's own functions.

    function of torch.nn.utils    DTensor by itself                                 here
    clip_grad_norm_               a pipeline stage's own norm; an error with tp     the norm over dp, tp, ep and pp
                                  or ep; with inf, an error on a rank without
                                  rows, for which the others wait
    get_total_norm                the same                                          the same norm
    clip_grads_with_norm_         an error for parameters on other meshes           scales every `.grad`

Each rank sums |g|^p of its own elements in fp64, for p=2 the sums that the optimizer's step uses too. A replica counts
one chunk, a tied parameter of a pipeline counts at the first stage that passes it, and a parameter of which every rank
of tp has a copy counts on the first one. The few sums are gathered along each axis and added on every rank in the same
order, so that the norm has the same bits on all ranks. A maximum (p=inf) is taken of what was gathered, and so keeps a
NaN.

A refusal is gathered with the sums: either all ranks raise, or none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from functools import cache, wraps
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from dzero.comm.collectives import GatherScalars
from dzero.comm.ledger import EXCEPTIONAL
from dzero.mesh import PIPELINE, REPLICATE, SHARD
from dzero.optim.grad_accumulation import GradPhase, UnitGrads
from dzero.optim.scaled_grads import refuse_if_scaled
from dzero.utils.torch_internals import local_tensor_of, replace_clipping
from dzero.zero.dtensors import local_of
from dzero.zero.sharded import Sharded

REFUSALS = (
    "get_total_norm() of tensors that were computed from the .grad of a model cut by tp or pp, of which torch does not "
    "say whose parts they are: call dzero.clip_grad_norm_(parameters, max_norm), or take max_norm= of the optimizer",
    "the norm of .grad before those of parameters that the last microbatch did not reach were complete: call "
    "dzero.clip_grad_norm_(parameters, max_norm), or take max_norm= of the optimizer",
)
COPIES, HIDDEN = 1, 2
"""Numbers of the refusals, from 1."""

_models: WeakSet[Sharded] = WeakSet()


def clip_grad_norm_(
    parameters: nn.Parameter | Iterable[nn.Parameter] | torch.optim.Optimizer,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """Clip the gradients of parameters to a norm, as `torch.nn.utils.clip_grad_norm_` does in one process.

    Call it on all ranks, after the backward of the last microbatch and before `step()`. Gradients are changed in place.
    Before the last microbatch there are none, so that nothing is clipped and the norm is 0, as in FSDP2.
    `max_norm=` of the optimizer does the same for p=2 within the step, without a pass over the gradients.

    Args:
        parameters: Parameters of sharded models, some or all, or an optimizer, for those of its groups. In a pipeline
            each rank passes those that it has, even if it has none.
        max_norm: Largest norm.
        norm_type: p of the norm, more than 0; `math.inf` for the largest element.
        error_if_nonfinite: Raise on all ranks if the norm is NaN or infinite. Otherwise gradients are multiplied by
            max_norm / norm then too, as in torch.
        foreach: Has no effect on the values; for loops that pass it to torch's function.

    Returns:
        The norm of all gradients before they were clipped, fp32 without dimensions, the same on all ranks.

    Raises:
        ValueError: `norm_type` is not more than 0.
        RuntimeError: The norm is not finite and `error_if_nonfinite` is set, or gradients are multiplied by a loss
            scale. On all ranks.
    """
    given = _params_of(parameters)
    norm = _norm_of_params(given, norm_type, error_if_nonfinite, foreach)
    _scale(given, max_norm, norm, foreach)
    return norm


def take_part_in_norms(sharded: Sharded) -> None:
    """Let torch's functions take the norm of the gradients of a sharded model over all ranks from now on."""
    _models.add(sharded)
    _replace_functions_of_torch()


@cache
def _replace_functions_of_torch() -> None:
    replace_clipping(_torch_clip, _torch_norm, _torch_scale)


def _torch_clip(theirs: Callable[..., Any]) -> Callable[..., Any]:
    """Return torch's `clip_grad_norm_` that handles parameters of sharded models."""

    @wraps(theirs)
    def clip_grad_norm(
        parameters: Any,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> torch.Tensor:
        if not _models:
            return theirs(parameters, max_norm, norm_type, error_if_nonfinite, foreach)  # type: ignore[no-any-return]
        given = _params_of(parameters)
        if not _models_of(given):
            return theirs(given, max_norm, norm_type, error_if_nonfinite, foreach)  # type: ignore[no-any-return]
        norm = clip_grad_norm_(given, max_norm, norm_type, error_if_nonfinite, foreach)
        return _as_torch(norm, [param.grad for param in given if param.grad is not None])

    return clip_grad_norm


def _torch_norm(theirs: Callable[..., Any]) -> Callable[..., Any]:
    """Return torch's `get_total_norm` that handles `.grad` of sharded models."""

    @wraps(theirs)
    def get_total_norm(
        tensors: Any, norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: bool | None = None
    ) -> torch.Tensor:
        given = [tensors] if isinstance(tensors, torch.Tensor) else [*tensors]
        norm = _norm_of_tensors(given, float(norm_type), foreach) if _models else None
        if norm is None:
            return theirs(given, norm_type, error_if_nonfinite, foreach)  # type: ignore[no-any-return]
        return _as_torch(_checked(norm, float(norm_type), error_if_nonfinite), given)

    return get_total_norm


def _torch_scale(theirs: Callable[..., Any]) -> Callable[..., Any]:
    """Return torch's `clip_grads_with_norm_` that handles parameters of sharded models."""

    @wraps(theirs)
    def clip_grads_with_norm(
        parameters: Any, max_norm: float, total_norm: torch.Tensor, foreach: bool | None = None
    ) -> None:
        given = _params_of(parameters)
        if _models and any(_models_by_param().get(param) for param in given):
            _scale(given, max_norm, total_norm, foreach, theirs)
        else:
            theirs(given, max_norm, total_norm, foreach)

    return clip_grads_with_norm


def _params_of(parameters: Any) -> list[nn.Parameter]:
    if isinstance(parameters, torch.optim.Optimizer):
        return [param for group in parameters.param_groups for param in group["params"]]
    if isinstance(parameters, torch.Tensor):
        return [parameters]  # type: ignore[list-item]
    if isinstance(parameters, (nn.Module, Sharded)):
        raise TypeError(
            f"clip_grad_norm_ of a {type(parameters).__name__}: pass its parameters (model.parameters()), or the "
            "optimizer"
        )
    return [*parameters]


def _models_by_param() -> dict[torch.Tensor, tuple[Sharded, str]]:
    """Return the sharded model of every parameter that has one, and its name there."""
    return {param: (sharded, name) for sharded in _models for name, param in sharded.named_params().items()}


def _models_of(params: Iterable[nn.Parameter]) -> dict[Sharded, list[str]]:
    """Return the models that take part in a norm, with the names of the parameters that count.

    A rank of a pipeline takes part with none of its own, when the parameters are those of other stages.
    """
    known = _models_by_param()
    names: dict[Sharded, list[str]] = {}
    for sharded, name in (known[param] for param in dict.fromkeys(params) if param in known):
        names.setdefault(sharded, []).append(name)
    return names or {sharded: [] for sharded in _of_other_stages()}


def _of_other_stages() -> list[Sharded]:
    pipelines = [sharded for sharded in _models if sharded.stages is not None]
    with_grads = [
        sharded for sharded in pipelines if any(unit.phase is not GradPhase.EMPTY for unit in _units(sharded))
    ]
    return with_grads or pipelines[:1] if len(with_grads) < 2 else []


def _units(sharded: Sharded) -> Iterator[UnitGrads]:
    return (unit.attached for unit in sharded.units if isinstance(unit.attached, UnitGrads))


@torch.no_grad()
def _norm_of_params(
    params: list[nn.Parameter], norm_type: float, error_if_nonfinite: bool, foreach: bool | None
) -> torch.Tensor:
    """Return the norm of the gradients of parameters, of which some may be of no sharded model."""
    p = _checked_type(norm_type)
    models, known = _models_of(params), _models_by_param()
    norms = [_ModelNorm(sharded, p).of(names) for sharded, names in models.items()]
    others = [param.grad for param in dict.fromkeys(params) if param not in known and param.grad is not None]
    norms += [_norm_without_models(others, p, foreach)] if others else []
    device = next((grad.device for grad in (param.grad for param in params) if grad is not None), None)
    device = device or next((torch.device(sharded.mesh.device_type) for sharded in models), torch.device("cpu"))
    return _checked(torch.tensor(_together(norms, p), dtype=torch.float32, device=device), p, error_if_nonfinite)


@torch.no_grad()
def _norm_of_tensors(tensors: list[torch.Tensor], norm_type: float, foreach: bool | None) -> torch.Tensor | None:
    """Return the norm of tensors, or None if none of them is a `.grad` of a sharded model or computed from one."""
    places = {id(param.grad): place for param, place in _models_by_param().items() if param.grad is not None}
    names: dict[Sharded, list[str]] = {}
    copies: dict[Sharded, list[DTensor]] = {}
    others: list[torch.Tensor] = []
    for tensor in {id(tensor): tensor for tensor in tensors}.values():
        if (place := places.get(id(tensor))) is not None:
            names.setdefault(place[0], []).append(place[1])
        elif isinstance(tensor, DTensor) and (sharded := _model_on_mesh_of(tensor)) is not None:
            copies.setdefault(sharded, []).append(tensor)
        else:
            others.append(tensor)
    models = dict.fromkeys([*names, *copies]) or dict.fromkeys([] if tensors else _of_other_stages())
    if not models:
        return None
    p = _checked_type(norm_type)
    norms = [
        _ModelNorm(sharded, p).of(names.get(sharded, []), copies.get(sharded, []), shown=True) for sharded in models
    ]
    norms += [_norm_without_models(others, p, foreach)] if others else []
    device = tensors[0].device if tensors else torch.device("cpu")
    return torch.tensor(_together(norms, p), dtype=torch.float32, device=device)


def _norm_without_models(tensors: list[torch.Tensor], p: float, foreach: bool | None) -> float:
    norm = nn.utils.get_total_norm(tensors, p, foreach=foreach)
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)


def _model_on_mesh_of(tensor: DTensor) -> Sharded | None:
    return next((sharded for sharded in _models if any(_is_on_mesh(tensor, unit) for unit in _units(sharded))), None)


def _is_on_mesh(tensor: DTensor, unit: UnitGrads) -> bool:
    """Return whether a tensor may be computed from the unit's gradients."""
    return tensor.device_mesh in unit.grad_meshes


def _checked_type(norm_type: float) -> float:
    p = float(norm_type)
    if not p > 0:
        raise ValueError(f"norm_type={norm_type}: the norm of sharded gradients is one of p > 0, or math.inf")
    return p


def _checked(norm: torch.Tensor, norm_type: float, error_if_nonfinite: bool) -> torch.Tensor:
    if error_if_nonfinite and not math.isfinite(norm.item()):
        raise RuntimeError(
            f"The total norm of order {norm_type} for gradients from `parameters` is non-finite, so it cannot be "
            "clipped. To scale the gradients by the non-finite norm anyway, set `error_if_nonfinite=False`"
        )
    return norm


def _as_torch(norm: torch.Tensor, like: list[torch.Tensor]) -> torch.Tensor:
    """Return a norm as torch's functions do, a DTensor if the first gradient is one, but whole on every rank."""
    if not like or not isinstance(like[0], DTensor):
        return norm
    mesh = like[0].device_mesh
    return DTensor.from_local(norm, mesh, [Replicate()] * mesh.ndim, run_check=False)


@torch.no_grad()
def _scale(
    params: list[nn.Parameter],
    max_norm: float,
    norm: torch.Tensor,
    foreach: bool | None,
    theirs: Callable[..., Any] | None = None,
) -> None:
    """Multiply every `.grad` by max_norm / (norm + 1e-6) where that is less than 1, or NaN."""
    norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
    known = _models_by_param()
    others = [param for param in params if param not in known]
    if others:
        (theirs or nn.utils.clip_grads_with_norm_)(others, max_norm, norm, foreach)
    factor = float(torch.clamp(float(max_norm) / (norm.double() + 1e-6), max=1.0))
    if factor == 1.0:  # as a product, this would be taken for an edit, and norms be computed anew
        return
    for param in dict.fromkeys(params):
        if param in known and param.grad is not None:
            grad = param.grad
            (local_tensor_of(grad) if isinstance(grad, DTensor) else grad).mul_(factor)  # which reports the edit


def _together(norms: Iterable[float], p: float) -> float:
    """Return the norm of several vectors, from their norms."""
    values = torch.tensor([*norms], dtype=torch.float64)
    return float(values.amax() if math.isinf(p) else _power_sum(values, p) ** (1 / p)) if values.numel() else 0.0


def _power_sum(tensor: torch.Tensor, p: float) -> torch.Tensor:
    """Return the sum of |element|^p, or with p=inf the largest |element|, in fp64; 0 if there is no element."""
    if not tensor.numel():
        return torch.zeros((), dtype=torch.float64, device=tensor.device)
    norm: torch.Tensor = torch.linalg.vector_norm(tensor, p, dtype=torch.float64)
    return norm if math.isinf(p) else norm**p


class _ModelNorm:
    """Norm of gradients of one sharded model; every rank computes it, with the gradients that it has.

    The vector that ranks gather has one place for each set of axes along which parameters are cut, and one for each
    parameter that both ends of a pipeline have; behind them are flags, of which the largest counts.
    """

    def __init__(self, sharded: Sharded, p: float) -> None:
        self._sharded, self._p = sharded, p
        self._axes = [axis for axis in sharded.model_groups if axis != PIPELINE]
        self._tied = () if sharded.stages is None else sharded.stages.shared
        self._sets = 1 << len(self._axes)
        self._cut = {
            param.name: sum(param.is_cut_by(axis) << bit for bit, axis in enumerate(self._axes))
            for unit in sharded.shapes
            for param in unit.params
        }

    def of(self, names: Iterable[str], copies: Iterable[DTensor] = (), *, shown: bool = False) -> float:
        """Return the norm.

        Args:
            names: Parameters on this rank whose `.grad` count.
            copies: Tensors on the meshes of the gradients, computed from them.
            shown: Whether the caller chose among the `.grad` that were set, so that it may have missed some.
        """
        before = self._with_grad() if shown else set()
        is_complete = not self._sharded.is_accumulating  # else there is no `.grad` yet, as in FSDP2
        for optimizer in [*self._sharded.claims] if is_complete else ():
            optimizer.complete()
        refusal = HIDDEN if shown and self._with_grad() - before else 0
        own = torch.zeros(self._sets + len(self._tied), dtype=torch.float64)
        given = torch.zeros(len(self._tied), dtype=torch.float64)
        wanted = set(names) if is_complete else set()
        for unit in _units(self._sharded):
            refuse_if_scaled(unit)
            for name, power in self._powers(unit, wanted):
                tied = name in self._tied
                at = self._sets + self._tied.index(name) if tied else self._cut[name]
                own[at] = self._add(own[at], power)
                if tied:
                    given[at - self._sets] = 1.0
        for tensor in copies:
            if self._sharded.model_groups:
                refusal = COPIES
            elif not self._replica(tensor):
                own[0] = self._add(own[0], _power_sum(local_of(tensor), self._p).cpu())
        flags = torch.cat([torch.tensor([float(refusal)], dtype=torch.float64), given])
        total, refusal = self._over_ranks(own, flags)
        if refusal:
            raise RuntimeError(REFUSALS[refusal - 1])
        return total if math.isinf(self._p) else total ** (1 / self._p)

    def _with_grad(self) -> set[str]:
        return {name for name, param in self._sharded.named_params().items() if param.grad is not None}

    def _powers(self, unit: UnitGrads, wanted: set[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the power sums of this rank's chunks, fp64 on the CPU."""
        names = [name for name in unit.names if name in wanted and name in unit.views]
        if not names:
            return
        if self._p == 2:
            yield from zip(names, unit.sums.of(names).cpu(), strict=True)
            return
        chunks = unit.chunks(names)
        yield from ((name, _power_sum(chunk, self._p).cpu()) for name, chunk in chunks.items())

    def _replica(self, tensor: DTensor) -> int:
        """Return the index of this rank among the ranks that have the same part of a tensor."""
        unit = next(unit for unit in _units(self._sharded) if _is_on_mesh(tensor, unit))
        return 0 if unit.has_replica_shards else int(unit.mesh.get_local_rank(REPLICATE))

    def _add(self, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return torch.maximum(one, other) if math.isinf(self._p) else one + other  # a maximum with NaN is NaN

    def _over_ranks(self, own: torch.Tensor, flags: torch.Tensor) -> tuple[float, int]:
        """Return the sum or maximum over all ranks, and the number of a refusal or 0."""
        for axis in (REPLICATE, SHARD):
            rows, flag_rows = self._gather(self._sharded.mesh.get_group(axis), axis, own, flags)
            own, flags = self._fold(rows), flag_rows.amax(0)
        cut = torch.arange(self._sets)
        tied_cut = torch.tensor([self._cut.get(name, 0) for name in self._tied], dtype=torch.int64)
        cut = torch.cat([cut, tied_cut])
        for bit, axis in enumerate(self._axes):
            rows, flag_rows = self._gather(self._sharded.model_groups[axis], axis, own, flags)
            own = torch.where((cut >> bit & 1).bool() | ~rows.isfinite().all(0), self._fold(rows), rows[0])
            flags = flag_rows.amax(0)
        if self._sharded.stages is not None:
            rows, flag_rows = self._gather(self._sharded.model_groups[PIPELINE], PIPELINE, own, flags)
            has = flag_rows[:, 1:] > 0
            first = has & (has.cumsum(0) == 1)
            rows = torch.cat([rows[:, : self._sets], rows[:, self._sets :].where(first, 0.0)], 1)
            own, flags = self._fold(rows), flag_rows.amax(0)
        return float(self._fold(own.unsqueeze(1))), int(flags[0])

    def _gather(
        self, group: Any, axis: str, own: torch.Tensor, flags: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        gather = GatherScalars(group, axis, self._sharded.ledger, EXCEPTIONAL)
        rows = gather(torch.cat([own, flags]).to(self._sharded.mesh.device_type)).cpu()
        return rows[:, : len(own)], rows[:, len(own) :]

    def _fold(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the sums or maxima [n] of [ranks, n], in rank order; a maximum of NaN is NaN."""
        return rows.amax(0) if math.isinf(self._p) else rows.cumsum(0)[-1]
