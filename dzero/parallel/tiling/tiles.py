"""What a tiled module holds: its tiles, and how each of its parameters is cut."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class TileCut:
    """One parameter of the untiled module: its key there, the dim along which it is cut (None: it belongs to the first
    tile), and the tiles' sizes along it."""

    key: str
    dim: int | None
    sizes: tuple[int, ...]

    @property
    def owner(self) -> str:
        """Name of the module that holds it; empty for the tiled module itself."""
        return self.key.rpartition(".")[0]

    @property
    def attribute(self) -> str:
        """Its name there."""
        return self.key.rpartition(".")[2]

    def span(self, index: int) -> tuple[int, int]:
        """Where tile `index` begins along `dim`, and its size."""
        return sum(self.sizes[:index]), self.sizes[index]


class Tiles(nn.Module):
    """The tiles, children "0", "1", …: modules like the untiled one, with a part of each parameter.

    `on_meta`: untiled parameters without values, by key. `origins`: the parameters that were cut, held weakly.
    `recompute`: in backward, from the tiled module's input.
    """

    def __init__(self, cuts: Sequence[TileCut], whole: Mapping[TileCut, nn.Parameter], recompute: bool) -> None:
        super().__init__()
        self.cuts, self.recompute = cuts, recompute
        self.on_meta = {cut.key: param for cut, param in whole.items() if param.is_meta}
        self.origins = [weakref.ref(param) for param in whole.values()]

    def param(self, index: int, cut: TileCut) -> nn.Parameter | None:
        """The part of a parameter that tile `index` holds."""
        param = getattr(self.get_submodule(f"{index}.{cut.owner}".rstrip(".")), cut.attribute)
        return param if isinstance(param, nn.Parameter) else None

    def put(self, index: int, cut: TileCut, whole: nn.Parameter) -> None:
        """Give tile `index` its part of `whole`, a copy; and its Linear that part's sizes."""
        if cut.dim is None and index > 0:
            return
        linear = self.get_submodule(f"{index}.{cut.owner}".rstrip("."))
        data = whole.detach() if cut.dim is None else whole.detach().narrow(cut.dim, *cut.span(index))
        part = nn.Parameter(data.clone(memory_format=torch.contiguous_format), requires_grad=whole.requires_grad)
        setattr(linear, cut.attribute, part)
        if isinstance(linear, nn.Linear) and part.ndim == 2:
            linear.out_features, linear.in_features = part.shape
