"""Parameters that are split over one mesh axis as DTensors, and their initialization on a model on meta."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard

from dzero.utils.torch_internals import registered

Places = dict[nn.Parameter, list[tuple[nn.Module, str]]]


class CutParams:
    """Split parameters of a model on meta.

    Args:
        mesh: Axis that the parameters are split over.
        made: Split parameter, by the whole parameter that it was made from.
        places: Modules and attributes that hold each whole parameter, or now its split one.
    """

    def __init__(self, mesh: DeviceMesh, made: dict[nn.Parameter, nn.Parameter], places: Places) -> None:
        self._mesh, self._made, self._places = mesh, made, places

    def filling(self, materialise: Callable[[nn.Module], None]) -> Callable[[nn.Module], None]:
        """Return a function that fills modules with split parameters through `materialise`, which fills whole ones.

        `materialise` must be made from the model on meta before it was split. Each rank keeps its part; no values are
        stored here.
        """

        @torch.no_grad()
        def fill(module: nn.Module) -> None:
            inside = {param for _, _, param in own_of(module)}
            cut = {whole: part for whole, part in self._made.items() if part in inside}
            for whole in cut:
                self._put(whole, whole)
            materialise(module)
            for whole, part in cut.items():
                owner, attribute = self._places[whole][0]
                self._put(whole, part_of(part, getattr(owner, attribute), self._mesh))

        return fill

    def _put(self, whole: nn.Parameter, param: nn.Parameter) -> None:
        for owner, attribute in self._places[whole]:
            setattr(owner, attribute, param)


def part_of(like: nn.Parameter, whole: torch.Tensor, mesh: DeviceMesh) -> nn.Parameter:
    """Return a copy of this rank's part of `whole`, placed over `mesh` like `like`, which needs no values."""
    assert isinstance(like, DTensor)
    placement, local = like.placements[0], whole.view(like.shape)
    if isinstance(placement, Shard):
        size = local.shape[placement.dim] // mesh.size()
        part = local.narrow(placement.dim, mesh.get_local_rank() * size, size)
        local = part.clone(memory_format=torch.contiguous_format)
    made = DTensor.from_local(local, mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride())
    return nn.Parameter(made, like.requires_grad)


@contextmanager
def local_params(module: nn.Module, grads: Sequence[Placement] | None = None) -> Iterator[list[torch.Tensor]]:
    """Replace the parameters of a module by this rank's local tensors inside the context, and yield these.

    Gradients flow back through the local tensors, with the placements `grads`, or those of the parameters if None.
    """
    kept = [(owner, attribute, param) for owner, attribute, param in own_of(module) if isinstance(param, DTensor)]
    params = [param.to_local(grad_placements=grads) for _, _, param in kept]
    try:
        for (owner, attribute, _), local in zip(kept, params, strict=True):
            registered(owner)[attribute] = local  # type: ignore[assignment]
        yield params
    finally:
        for owner, attribute, param in kept:
            registered(owner)[attribute] = param


def own_of(module: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """Yield owner, attribute and parameter for every attribute that holds a parameter, tied ones included."""
    for owner in module.modules():
        for attribute, param in owner.named_parameters(recurse=False, remove_duplicate=False):
            yield owner, attribute, param
