"""Linear layers that multiply in 8-bit floats (`precision.compute`), by torchao's recipes for training.

    recipe           scale of each operand               output, input gradient, weight gradient
    fp8_tensorwise   one for the whole matrix            e4m3 x e4m3, e5m2 x e4m3, e5m2 x e4m3
    fp8_rowwise      one for each row or column that     e4m3 x e4m3 for all three; scales are powers of two
                     the product sums over

Operands are rounded to 8 bits right before each product, by scales from their own largest magnitudes, and the result is
in the working dtype (Micikevicius et al., FP8 Formats for Deep Learning, 2022). Parameters, gradients, masters, their
collectives and checkpoints are those of 16-bit training. FSDP2 gathers a matrix whole, so that its scales, and with
them all bits, are the same at every stage and on every tier.

A layer keeps its place, name, hooks, parameters and class name. It becomes an instance of torchao's layer too, whose
forward and settings it takes, so that what refers to it (initializers, tensor parallelism, adapters) is undisturbed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any

import torch
from torch import nn

from dzero.parallel.blocks import find_blocks
from dzero.parallel.divisibility import FP8_MULTIPLE
from dzero.utils.terminal import Table
from dzero.zero.config import PrecisionConfig
from dzero.zero.dtensors import local_of

SHOWN = 3
OUTSIDE, EXCLUDED = "outside of blocks", "named in precision.fp8_exclude"
ODD_DIMS, OWN_FORWARD = f"dims that are no multiples of {FP8_MULTIPLE}", "a forward of its own"
ADAPTER = "matrix of an adapter"


@dataclass(frozen=True)
class Float8Layers:
    """Record of the linear layers of a model that multiply in 8 bits.

    Attributes:
        compute: Value of `precision.compute`.
        emulated: Whether products are emulated in fp32, for devices without units for them.
        converted: Names of the layers that multiply in 8 bits.
        kept: Reason why a linear layer stays in the working dtype, by its name.
    """

    compute: str
    emulated: bool
    converted: tuple[str, ...]
    kept: dict[str, str]

    def table(self) -> Table:
        """Return a row for the layers that multiply in 8 bits, and one for each reason why others do not."""
        rows = [(f"in 8 bits ({self.compute.removeprefix('fp8_')} scales)", *_counted(self.converted))]
        rows += [(reason, *_counted(self._kept_for(reason))) for reason in dict.fromkeys(self.kept.values())]
        return Table("products of linear layers", ("how, or why not in 8 bits", "layers", "names"), tuple(rows), left=1)

    def line(self) -> str:
        """Return the same in one line."""
        count = len(self.converted)
        kept = [f"{len(self._kept_for(each))} {each}" for each in dict.fromkeys(self.kept.values())]
        told = f"precision.compute={self.compute}: {count} linear layers multiply in 8 bits"
        return f"{told}; others do not: {', '.join(kept)}" if kept else told

    def _kept_for(self, reason: str) -> list[str]:
        return [name for name, each in self.kept.items() if each == reason]


def convert_linear_layers(
    model: nn.Module,
    precision: PrecisionConfig,
    *,
    emulate: bool,
    roots: Sequence[nn.Module] = (),
) -> Float8Layers | None:
    """Let the linear layers of a model's blocks multiply in 8 bits, in place; call this before it is sharded.

    Args:
        model: Model, which other axes of the mesh may have cut already.
        precision: Settings; with `compute=param`, nothing happens.
        emulate: Compute the products in fp32, from operands that are rounded to 8 bits.
        roots: This rank's stages of a pipeline; empty without one.

    Returns:
        What was converted, or None with `compute=param`.

    Raises:
        ValueError: If no layer can be converted, or a name of `fp8_exclude` is that of no linear layer.
    """
    if precision.compute == "param":
        return None
    modules = model.named_modules()
    linear = {name: each for name, each in modules if isinstance(each, nn.Linear) and [*each.parameters()]}
    for pattern in precision.fp8_exclude if not roots else ():  # other stages may have what this one has not
        if not any(fnmatch(name, pattern) for name in linear):
            raise ValueError(
                f"precision.fp8_exclude=[{pattern}]: no linear layer has such a name; {type(model).__name__} has "
                f"{_shortened([*linear])}"
            )
    blocks = [block for root in roots or [model] for _, block in find_blocks(root)]
    inside = {module for block in blocks for module in block.modules()}
    reasons = {
        name: OUTSIDE if layer not in inside else _reason(name, layer, precision) for name, layer in linear.items()
    }
    layers = [layer for name, layer in linear.items() if not reasons[name]]
    if not layers and not roots:
        found = "it has none" if not linear else f"they stay for these reasons: {sorted({*reasons.values()})}"
        raise ValueError(
            f"precision.compute={precision.compute}: no linear layer of a block of {type(model).__name__} can multiply "
            f"in 8 bits; {found}. Take precision.compute=param"
        )
    if layers:
        _become_float8(layers, precision.compute.removeprefix("fp8_"), emulate)
    kept = {name: why for name, why in reasons.items() if why}
    return Float8Layers(precision.compute, emulate, tuple(name for name in linear if name not in kept), kept)


def _reason(name: str, layer: nn.Linear, precision: PrecisionConfig) -> str:
    """Return why a layer of a block stays in the working dtype; empty if it does not."""
    if any(fnmatch(name, pattern) for pattern in precision.fp8_exclude):
        return EXCLUDED
    if type(layer).forward is not nn.Linear.forward or "forward" in vars(layer):
        return OWN_FORWARD
    if any(part.startswith("lora_") for part in name.split(".")):
        return ADAPTER
    if any(size % FP8_MULTIPLE for size in local_of(layer.weight).shape):
        return ODD_DIMS
    return ""


def _become_float8(layers: Sequence[nn.Linear], recipe: str, emulate: bool) -> None:
    """Give each layer a subclass with the forward of torchao's; layers of one class share it, and so a compilation."""
    # Imported here, because the import takes a second.
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = dataclasses.replace(Float8LinearConfig.from_recipe_name(recipe), emulate=emulate)
    with torch.device("meta"):
        plain = nn.Linear(FP8_MULTIPLE, FP8_MULTIPLE, bias=False)
    made = convert_to_float8_training(plain, config=config)
    settings = {name: value for name, value in vars(made).items() if name not in vars(plain)}
    classes: dict[type[nn.Module], Any] = {}
    for layer in dict.fromkeys(layers):
        cls = type(layer)
        if cls not in classes:
            named = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
            classes[cls] = type(cls.__name__, (type(made), cls), settings | named)
        layer.__class__ = classes[cls]


def _counted(names: Sequence[str]) -> tuple[str, str]:
    return str(len(names)), _shortened(names)


def _shortened(names: Sequence[str]) -> str:
    told = ", ".join(names[:SHOWN])
    return f"{told}, ... {names[-1]}" if len(names) > SHOWN else told
