"""Parallel styles for `Conv1D`, the projection of GPT-2 in transformers: y = x W + b with W [in, out].

    style                     a rank holds          weight    bias       input        output
    ColumnwiseConv1D          columns of y          Shard(1)  Shard(0)   everything   its columns
    RowwiseConv1D             rows of W             Shard(0)  Replicate  its columns  its part of the sequence
    FusedColumnwiseConv1D(n)  columns of each of n  Shard(2)  Shard(1)   everything   its columns of all n, side by side

`FusedColumnwiseConv1D` is for c_attn, whose columns are query, key and value. No slice of all columns has a rank's
heads of each, so its parameters become [in, n, out] and [n, out]: the same elements in the same order, split along the
last dim. Checkpoints store them as in the model as built (`ParamShape.fused` in zero/unit_shapes.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import PrepareModuleInput
from torch.distributed.tensor.parallel.style import ParallelStyle


class ColumnwiseConv1D(ParallelStyle):
    """Column-wise style: input is a DTensor, output this rank's tensor [batch, time, out / ranks]."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        cut_params(module, device_mesh, {"weight": Shard(1), "bias": Shard(0)}, self.src_data_rank)
        module.register_forward_hook(lambda _, inputs, output: output.to_local())
        return module


class RowwiseConv1D(ParallelStyle):
    """Row-wise style: from this rank's tensor [batch, time, in / ranks] to its [batch, time / ranks, out]."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        cut_params(module, device_mesh, {"weight": Shard(0), "bias": Replicate()}, self.src_data_rank)
        module.register_forward_pre_hook(
            lambda _, inputs: (DTensor.from_local(inputs[0], device_mesh, (Shard(-1),), run_check=False),)
        )
        module.register_forward_hook(lambda _, inputs, output: output.redistribute(placements=(Shard(1),)).to_local())
        become(module, RowsProjection)
        return module


class FusedColumnwiseConv1D(ParallelStyle):
    """Style of `n` fused results: input is a DTensor, output this rank's [batch, time, n * out / ranks]."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.n = n

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name in ("weight", "bias"):
            param = module.get_parameter(name)
            viewed = param.detach().view(*param.shape[:-1], self.n, -1)
            setattr(module, name, nn.Parameter(viewed, param.requires_grad))
        cut_params(module, device_mesh, {"weight": Shard(2), "bias": Shard(1)}, self.src_data_rank)
        become(module, FusedProjection)
        return module


class RowsProjection(nn.Module):
    """Base class that a row-wise module gets: every rank computes the whole gradient of its bias."""


class FusedProjection(nn.Module):
    """Base class that a fused module gets: weight [in, n, out], bias [n, out]."""

    weight: Tensor
    bias: Tensor

    def forward(self, x: Tensor) -> Tensor:
        """Map [batch, time, in], whole on every rank, to [batch, time, n * out / ranks]."""
        weight, bias = _local(self.weight), _local(self.bias)
        assert isinstance(x, DTensor)
        whole = x.to_local(grad_placements=(Partial(),))
        made = torch.addmm(bias.flatten(), whole.flatten(0, -2), weight.flatten(1))
        return made.view(*whole.shape[:-1], -1)


class FusedInput(PrepareModuleInput):
    """Input style of an attention with a `FusedColumnwiseConv1D`; it adapts the `split_size` of its output."""

    def _apply(self, module: Any, device_mesh: DeviceMesh) -> nn.Module:
        module.split_size //= device_mesh.size()
        prepared: nn.Module = super()._apply(module, device_mesh)
        return prepared


def cut_params(module: nn.Module, mesh: DeviceMesh, placements: Mapping[str, Placement], source: int | None) -> None:
    """Place the parameters of a module, by name, over an axis; `source` is the rank whose values all get."""
    for name, placement in placements.items():
        param = module.get_parameter(name)
        cut = distribute_tensor(param.detach(), mesh, [placement], src_data_rank=source)
        setattr(module, name, nn.Parameter(cut, param.requires_grad))


def become(module: nn.Module, kind: type[nn.Module]) -> None:
    """Make `module` an instance of `kind` too, under the same class name."""
    cls = type(module)
    named = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
    module.__class__ = type(cls.__name__, (kind, cls), named)


def _local(param: Tensor) -> Tensor:
    assert isinstance(param, DTensor)
    return param.to_local()
