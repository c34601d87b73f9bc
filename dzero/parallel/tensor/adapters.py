"""Styles of layers with adapters of LoRA (peft), made of the styles of the layers without.

    y = W x + s * B (A x)     A [r, in]             between A and B                          B [out, r]
    column-wise               whole on every rank   [batch, time, r], nothing is sent        a rank's rows
    row-wise                  a rank's columns      a part of a sum: reduce-scattered        whole on every rank

The parts of a token's `r` numbers are summed along the sequence, where the layer's own output is too. A rank computes a
part of the gradient of a matrix that is whole: column-wise from its rows of B, row-wise from its part of the sequence.

A module that is trained whole (`modules_to_save`) has the style of the module that it replaces.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.distributed.tensor.parallel.style import ParallelStyle

from dzero.models.adapter_names import COPY, ORIGINAL
from dzero.models.merged_weights import lora_layers
from dzero.parallel.tensor.conv1d import become, cut_params

PEFT = "peft."


@dataclass(eq=False)
class AdapterStyle(ParallelStyle):
    """Style of one matrix of an adapter, an nn.Linear without bias.

    Attributes:
        weight: Placement of the matrix.
        weight_grad: Placement of its gradient as a rank computes it.
        input: Placement of the input; None for this rank's tensor.
        input_grad: Placement of the input's gradient as a rank computes it.
        made: Placement of the product that a rank computes.
        output: Placement of the output.
        output_grad: Placement of the output's gradient.
        is_local: Whether the output is this rank's tensor.
    """

    weight: Placement
    weight_grad: Placement
    input: Placement | None
    input_grad: Placement | None
    made: Placement
    output: Placement
    output_grad: Placement
    is_local: bool = True

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        cut_params(module, device_mesh, {"weight": self.weight}, self.src_data_rank)
        become(module, _CutMatrix)
        module.style = self  # type: ignore[assignment]
        return module


class _CutMatrix(nn.Module):
    """Base class that a matrix of an adapter gets: x [batch, time, in] -> x W^T, by its style."""

    weight: Tensor
    style: AdapterStyle

    def forward(self, x: Tensor) -> Tensor:
        """Multiply on this rank's tensors, and exchange only what the style says."""
        style, weight = self.style, self.weight
        assert isinstance(weight, DTensor)
        mesh = weight.device_mesh

        def dims(placement: Placement | None) -> tuple[Placement]:
            assert placement is not None
            return (Shard(placement.dim % x.ndim) if isinstance(placement, Shard) else placement,)

        if style.input is not None:
            placed = x if isinstance(x, DTensor) else DTensor.from_local(x, mesh, dims(style.input), run_check=False)
            if placed.placements != dims(style.input):  # even without effect, it would sum the gradient in backward
                placed = placed.redistribute(placements=dims(style.input))
            x = placed.to_local(grad_placements=dims(style.input_grad))
        out = F.linear(x, weight.to_local(grad_placements=dims(style.weight_grad)))
        if style.is_local and style.made == style.output:
            return out
        placed = DTensor.from_local(out, mesh, dims(style.made), run_check=False)
        placed = placed.redistribute(placements=dims(style.output))
        return placed.to_local(grad_placements=dims(style.output_grad)) if style.is_local else placed


def with_adapters(model: nn.Module, plan: Mapping[str, ParallelStyle], axis: str) -> dict[str, ParallelStyle]:
    """Return a plan that cuts adapters along with the modules beside them; without adapters, the plan itself.

    Args:
        model: Model, whole.
        plan: Style by module name, with wildcards, as for the model without adapters.
        axis: Name of the axis and its ranks, for messages.

    Raises:
        ValueError: If an adapter is beside a module whose style has no place for it, or is one of DoRA.
    """
    if not any(type(module).__module__.startswith(PEFT) for module in model.modules()):
        return dict(plan)
    layers = lora_layers(model)
    found: dict[str, ParallelStyle] = {}
    for pattern, style in plan.items():
        for name, module in model.named_modules():
            if not _matches(name, pattern):
                continue
            if name in layers:
                found |= _of_layer(name, module, style, axis)
            elif hasattr(module, COPY) and hasattr(module, ORIGINAL):
                copies = [f"{COPY}.{each}" for each, _ in module.get_submodule(COPY).named_children()]
                found |= {f"{name}.{each}": style for each in (ORIGINAL, *copies)}
            else:
                found[name] = style
    return found


def _matches(name: str, pattern: str) -> bool:
    """Return whether a name fits a pattern, whose wildcards stand for one part of the name each."""
    words, patterns = name.split("."), pattern.split(".")
    return len(words) == len(patterns) and all(map(fnmatch, words, patterns))


def _of_layer(name: str, layer: Any, style: ParallelStyle, axis: str) -> dict[str, ParallelStyle]:
    """Return the styles of a layer with adapters, and of its own matrix."""
    kind = type(layer.base_layer).__name__
    repair = f"name other modules (adapter.target_modules), or take {axis.partition('=')[0]}=1"
    if not isinstance(layer.base_layer, nn.Linear) or not isinstance(style, ColwiseParallel | RowwiseParallel):
        raise ValueError(f"{axis}: {name} is a {kind}, whose adapter is not cut along with it; {repair}")
    if any(len(getattr(layer, each, ())) for each in ("lora_magnitude_vector", "lora_variant")):
        raise ValueError(f"{axis}: {name} has norms of rows (DoRA), which need whole rows; {repair}, or use_dora=false")
    if any(matrix.bias is not None for matrix in layer.lora_B.values()):
        raise ValueError(f"{axis}: the adapter of {name} has a bias, which is not cut; take lora_bias=False")
    found: dict[str, ParallelStyle] = {f"{name}.base_layer": style}
    for adapter in layer.lora_A:
        for matrix, of_matrix in zip(("lora_A", "lora_B"), _styles(name, style, axis), strict=True):
            found[f"{name}.{matrix}.{adapter}"] = of_matrix
    return found


def _styles(name: str, style: ColwiseParallel | RowwiseParallel, axis: str) -> Iterator[AdapterStyle]:
    """Yield the styles of A and of B beside a matrix with `style`."""
    whole, summed = Replicate(), Partial()
    (given,), (out,), is_local = style.input_layouts, style.output_layouts, style.use_local_output
    if isinstance(style, ColwiseParallel):
        yield AdapterStyle(whole, summed, given, summed if given == whole else given, given, whole, summed)
        yield AdapterStyle(Shard(0), Shard(0), None, None, Shard(-1), out, out, is_local)
        return
    if not isinstance(out, Shard):
        raise ValueError(f"{axis}: the output of {name} is not cut along the sequence, so its adapter is not either")
    yield AdapterStyle(Shard(1), Shard(1), given, given, summed, out, out)
    yield AdapterStyle(whole, summed, None, None, out, out, out, is_local)
