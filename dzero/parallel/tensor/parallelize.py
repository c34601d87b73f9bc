"""Tensor parallelism, with sequence parallelism between blocks, by torch's plans over one axis of the mesh.

    rank r of tp holds                  modules                              their output
    columns of the result               query, key, value, gate, up, head    its own heads or features
    rows of the input                   out, down                            a part of a sum: reduce-scattered
    rows of the vocabulary              embedding                            a part of a sum: reduce-scattered
    everything                          norms, routers of experts            its part of the sequence

Between attention and feed-forward a rank has 1/tp of every sequence, so nothing is computed twice, and their inputs are
gathered. Logits stay split along the vocabulary, and `TensorParallel.loss` computes cross-entropy from them.

`parallelize_tensor` takes a plan of torch, a style for each module by name, for a model of any kind. Without one it
uses the plan of `tensor/plans.py`, for the kinds listed there. Adapters are cut like the matrices beside them
(tensor/adapters.py).

A module without a style computes with plain parameters. If it has its whole input, all ranks compute the same
gradients. If it has a part, each rank silently computes a part of them. A plan must therefore name every module with
parameters; parameters that are used on the whole input are listed in `alike`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from fnmatch import fnmatch
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.distributed.tensor.parallel import loss_parallel, parallelize_module
from torch.distributed.tensor.parallel.style import ParallelStyle

from dzero.parallel.cut_params import CutParams, Places, own_of
from dzero.parallel.tensor.adapters import with_adapters
from dzero.parallel.tensor.plans import plan_for
from dzero.utils.ranges import divisors
from dzero.utils.torch_internals import tree_map_only

Plan = Mapping[str, ParallelStyle]


class TensorParallel(CutParams):
    """The split parameters of a model, as returned by `parallelize_tensor`."""

    def loss(self) -> AbstractContextManager[None]:
        """Return a context for forward and backward in which torch's cross_entropy takes split logits."""
        return loss_parallel()


def parallelize_tensor(
    model: nn.Module, mesh: DeviceMesh, plan: Plan | None = None, *, alike: Sequence[str] = ()
) -> TensorParallel:
    """Split `model` in place over one axis of a mesh of `make_mesh`: `mesh["tp"]`.

    Call this before `shard`, and after `parallelize_experts`, whose parameters it does not touch. Tied parameters stay
    tied. Parameters with values get those of the axis's first rank.

    Args:
        model: Model to split.
        mesh: The axis.
        plan: Style by module name, with wildcards; None for a model of a known kind.
        alike: Names, with wildcards, of parameters that the plan leaves whole and all ranks use on the same inputs.

    Raises:
        ValueError: If the model is of an unknown kind, a dim is not divisible, a parameter is neither in `plan` nor in
            `alike`, or a tied parameter is split in two ways.
    """
    axis = (mesh.mesh_dim_names or ("tp",))[0]
    if plan is None:
        plan, of_kind = plan_for(model, mesh.size(), axis)
        alike = [*alike, *of_kind]
    elif unknown := [each for each in plan if not any(fnmatch(name, each) for name, _ in model.named_modules())]:
        kind = type(model).__name__
        raise ValueError(f"{axis}={mesh.size()}: the plan names {unknown}, which {kind} has not as modules")
    plan = with_adapters(model, plan, f"{axis}={mesh.size()}")
    places: Places = {}
    for owner, attribute, param in own_of(model):
        if not isinstance(param, DTensor):
            places.setdefault(param, []).append((owner, attribute))
    names = {param: name for name, param in model.named_parameters()}
    parallelize_module(model, mesh, dict(plan))
    for name, module in model.named_modules():
        if any(fnmatch(name, each) for each in plan):
            module.register_forward_pre_hook(_arrive_first, with_kwargs=True)  # both are behind those of the styles
            module.register_forward_hook(_arrive)
    made: dict[nn.Parameter, nn.Parameter] = {}
    left_whole: list[str] = []
    for whole, owners in places.items():
        parts = [getattr(owner, attribute) for owner, attribute in owners]
        cut = [part for part in parts if isinstance(part, DTensor)]
        if not cut:
            left_whole.append(names[whole])
            continue
        _check(names[whole], cut, parts, axis)
        parts[0].requires_grad_(whole.requires_grad)  # torch's SequenceParallel makes trained parameters of frozen ones
        made[whole] = parts[0]
        for owner, attribute in owners:
            setattr(owner, attribute, parts[0])
    if unsaid := [name for name in left_whole if not any(fnmatch(name, each) for each in alike)]:
        raise ValueError(
            f"{axis}={mesh.size()}: the plan says nothing of {unsaid}; where a rank sees a part of their input, it "
            "would find a part of their gradients. Give their modules a style (SequenceParallel for such a part), or "
            "name them in alike= where all ranks see the same; experts are shared before (parallelize_experts)"
        )
    _equalise(model, mesh)
    on_meta = {whole: part for whole, part in made.items() if whole.is_meta}  # the others have values already
    return TensorParallel(mesh, on_meta, {whole: places[whole] for whole in on_meta})


class _Arrived(torch.autograd.Function):
    """A tensor whose collective may be under way, as an ordinary one, after its end."""

    @staticmethod
    def forward(ctx: Any, tensor: Any) -> Any:
        return tensor.trigger_wait()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0]


def _arrive(module: nn.Module, args: object, output: Any) -> Any:
    """Return the output of a module that ranks share as ordinary tensors, whose collectives have ended.

    The styles of torch return a subclass of Tensor that waits at its first use. If that use is a compiled block, the
    block gives zeros as its gradient, without an error (torch 2.13). Within a compiled block, the compiler knows of the
    collective.
    """
    return output if torch.compiler.is_compiling() else tree_map_only(Tensor, _arrived, output)


def _arrive_first(module: nn.Module, args: Any, kwargs: Any) -> Any:
    """Do the same for its inputs, which a style may have gathered: the module may be a compiled block itself."""
    return (args, kwargs) if torch.compiler.is_compiling() else tree_map_only(Tensor, _arrived, (args, kwargs))


def _arrived(tensor: Tensor) -> Any:
    return _Arrived.apply(tensor) if hasattr(type(tensor), "trigger_wait") else tensor  # type: ignore[no-untyped-call]


@torch.no_grad()
def _equalise(model: nn.Module, mesh: DeviceMesh) -> None:
    """Broadcast what the plan leaves whole, parameters and buffers, from the first rank; torch scatters the rest."""
    for tensor in (*model.parameters(), *model.buffers()):
        is_cut = isinstance(tensor, DTensor) and any(isinstance(each, Shard) for each in tensor.placements)
        if is_cut or tensor.is_meta or not tensor.numel():
            continue
        if not isinstance(tensor, DTensor):
            tensor.data = tensor.data.to(mesh.device_type).contiguous()
        values = tensor.to_local() if isinstance(tensor, DTensor) else tensor.data
        dist.broadcast(values.view(-1).view(torch.uint8), group=mesh.get_group(), group_src=0)


def _check(name: str, cut: list[DTensor], parts: list[object], axis: str) -> None:
    placements: set[tuple[Placement, ...]] = {part.placements for part in cut}
    if len(cut) < len(parts) or len(placements) > 1:
        raise ValueError(f"parameter {name} is tied, and the plan cuts it in several ways: {placements}")
    dims = [(each.dim, cut[0].shape[each.dim]) for each in cut[0].placements if isinstance(each, Shard)]
    for dim, size in dims:
        if size % cut[0].device_mesh.size():
            raise ValueError(
                f"{axis}={cut[0].device_mesh.size()} does not divide dim {dim} of parameter {name}, which is {size}; "
                f"allowed: {divisors(size)}"
            )
