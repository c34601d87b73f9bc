"""Tensor parallelism, with sequence parallelism between the blocks: torch's plans over one axis of the mesh.

    rank r of tp holds                  of                                   its output
    columns of the result               query, key, value, gate, up, head    heads or features of its own
    rows of what comes in               out, down                            a part of a sum: reduce-scattered
    rows of the vocabulary              embedding                            a part of a sum: reduce-scattered
    everything                          norms, routers of experts            its part of the sequence

Between attention and feed-forward a rank has 1/tp of every sequence, so nothing is computed twice; what comes into them
is gathered. Logits stay cut along the vocabulary, and `TensorParallel.loss` makes cross-entropy of them.

`parallelize_tensor` takes torch's own plan, a style for each module by its name, for a model of any kind; without one
the plan of `plans.py`, for the kinds listed there.

A module that no style names computes with plain parameters. Where it sees all of its input, all ranks find the same
gradients; where it sees a part, each would find a part of them, silently. So a plan names every module with parameters;
those that see everything are listed in `alike`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from fnmatch import fnmatch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.distributed.tensor.parallel import loss_parallel, parallelize_module
from torch.distributed.tensor.parallel.style import ParallelStyle
from torch.nn import functional

from dzero.parallel.cut_params import CutParams, Places, own_of
from dzero.parallel.tensor.plans import plan_for
from dzero.utils.ranges import divisors

Plan = Mapping[str, ParallelStyle]


class TensorParallel(CutParams):
    """What `parallelize_tensor` did to a model."""

    def loss(self) -> AbstractContextManager[None]:
        """Inside, torch's cross_entropy takes logits that are cut along the vocabulary; also around its backward."""
        return loss_parallel()


def parallelize_tensor(
    model: nn.Module, mesh: DeviceMesh, plan: Plan | None = None, *, alike: Sequence[str] = ()
) -> TensorParallel:
    """Cut `model` in place over `mesh`, one axis of that of `make_mesh`: `mesh["tp"]`. Before `shard`, and after
    `parallelize_experts`, whose parameters it leaves alone.

    plan: by the names of modules, with wildcards; None for a model of a known kind. Tied parameters stay tied.
    alike: names (wildcards too) of parameters that the plan leaves whole, and that all ranks use on the same inputs.
    What has values gets those of the axis's first rank. Raises ValueError for a model of another kind, dims that do not
    divide, parameters that neither names, and ties that the plan cuts in two ways.
    """
    axis = (mesh.mesh_dim_names or ("tp",))[0]
    if plan is None:
        plan, of_kind = plan_for(model, mesh.size(), axis)
        alike = [*alike, *of_kind]
    elif unknown := [each for each in plan if not any(fnmatch(name, each) for name, _ in model.named_modules())]:
        kind = type(model).__name__
        raise ValueError(f"{axis}={mesh.size()}: the plan names {unknown}, which {kind} has not as modules")
    places: Places = {}
    for owner, attribute, param in own_of(model):
        if not isinstance(param, DTensor):
            places.setdefault(param, []).append((owner, attribute))
    names = {param: name for name, param in model.named_parameters()}
    parallelize_module(model, mesh, dict(plan))
    made: dict[nn.Parameter, nn.Parameter] = {}
    left_whole: list[str] = []
    for whole, owners in places.items():
        parts = [getattr(owner, attribute) for owner, attribute in owners]
        cut = [part for part in parts if isinstance(part, DTensor)]
        if not cut:
            left_whole.append(names[whole])
            continue
        _check(names[whole], cut, parts, axis)
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
    on_meta = {whole: part for whole, part in made.items() if whole.is_meta}  # the others have values, and no use here
    return TensorParallel(mesh, on_meta, {whole: places[whole] for whole in on_meta})


@torch.no_grad()
def _equalise(model: nn.Module, mesh: DeviceMesh) -> None:
    """What the plan leaves whole, parameters and buffers, as the first rank has it; torch scatters what it cuts."""
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


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean over targets int64 [batch, time], a scalar in fp32. logits [batch, time, vocab]: whole, or cut along the
    vocabulary, inside of `TensorParallel.loss`."""
    loss = functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
    return loss.to_local() if isinstance(loss, DTensor) else loss
