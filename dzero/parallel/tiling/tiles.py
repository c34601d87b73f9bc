"""Contents of a tiled module: its tiles, and the cut of each of its parameters."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class TileCut:
    """Cut of a parameter of the untiled module.

    Attributes:
        key: Name of the parameter in the untiled module.
        dim: Dim along which it is cut; None if it belongs to the first tile.
        sizes: Size of each tile along the dim.
    """

    key: str
    dim: int | None
    sizes: tuple[int, ...]

    @property
    def owner(self) -> str:
        """Name of the submodule that holds the parameter; empty for the tiled module itself."""
        return self.key.rpartition(".")[0]

    @property
    def attribute(self) -> str:
        """Name of the parameter in its owner."""
        return self.key.rpartition(".")[2]

    def span(self, index: int) -> tuple[int, int]:
        """Return the start of tile `index` along `dim`, and its size."""
        return sum(self.sizes[:index]), self.sizes[index]


class Tiles(nn.Module):
    """Tiles, as children "0", "1", …: modules like the untiled one, each with a part of every parameter.

    Attributes:
        on_meta: Untiled parameters without values, by key.
        origins: Weak references to the parameters that were cut.
        recompute: Whether backward recomputes tiles from the tiled module's input.
    """

    def __init__(self, cuts: Sequence[TileCut], whole: Mapping[TileCut, nn.Parameter], recompute: bool) -> None:
        super().__init__()
        self.cuts, self.recompute = cuts, recompute
        self.on_meta = {cut.key: param for cut, param in whole.items() if param.is_meta}
        self.origins = [weakref.ref(param) for param in whole.values()]

    def param(self, index: int, cut: TileCut) -> nn.Parameter | None:
        """Return the part of a parameter that tile `index` holds, or None."""
        param = getattr(self.get_submodule(f"{index}.{cut.owner}".rstrip(".")), cut.attribute)
        return param if isinstance(param, nn.Parameter) else None

    def put(self, index: int, cut: TileCut, whole: nn.Parameter) -> None:
        """Copy the part of `whole` that belongs to tile `index` there, and set the features of its Linear."""
        if cut.dim is None and index > 0:
            return
        linear = self.get_submodule(f"{index}.{cut.owner}".rstrip("."))
        data = whole.detach() if cut.dim is None else whole.detach().narrow(cut.dim, *cut.span(index))
        part = nn.Parameter(data.clone(memory_format=torch.contiguous_format), requires_grad=whole.requires_grad)
        vars(part).update(vars(whole))
        setattr(linear, cut.attribute, part)
        if isinstance(linear, nn.Linear) and part.ndim == 2:
            linear.out_features, linear.in_features = part.shape
