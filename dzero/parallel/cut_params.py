"""Parameters of which a rank has a part, as DTensors over one axis: how those of a model on meta get their values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard

Places = dict[nn.Parameter, list[tuple[nn.Module, str]]]


class CutParams:
    """Which parameter on meta every part was made from. places: where the model had, and has, each of those."""

    def __init__(self, mesh: DeviceMesh, made: dict[nn.Parameter, nn.Parameter], places: Places) -> None:
        self._mesh, self._made, self._places = mesh, made, places

    def filling(self, materialise: Callable[[nn.Module], None]) -> Callable[[nn.Module], None]:
        """The same for modules that are cut: whole parameters are filled, then this rank keeps its part.

        materialise: made from the model as it was, on meta. Nothing of the values is kept here.
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
    """This rank's part of `whole`, a copy, placed over `mesh` as `like` is, which need have no values."""
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
    """Inside, its parameters are what this rank has of them, plain tensors through which gradients flow back; they are
    placed as `grads` says, or as the parameters are."""
    kept = [(owner, attribute, param) for owner, attribute, param in own_of(module) if isinstance(param, DTensor)]
    params = [param.to_local(grad_placements=grads) for _, _, param in kept]
    try:
        for (owner, attribute, _), local in zip(kept, params, strict=True):
            owner._parameters[attribute] = local  # type: ignore[assignment]
        yield params
    finally:
        for owner, attribute, param in kept:
            owner._parameters[attribute] = param


def own_of(module: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """Every place of a parameter."""
    for owner in module.modules():
        for attribute, param in owner.named_parameters(recurse=False, remove_duplicate=False):
            yield owner, attribute, param
