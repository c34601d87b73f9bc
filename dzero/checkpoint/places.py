"""Which part of which tensor of a checkpoint a rank's shard is, or its part of a shard's states (zero/shares.py).

A checkpoint knows nothing of ranks and tiles: a parameter has the name and shape of the model as it was built. What a
rank holds of it is a box, by FSDP2's cut along dim 0 and, in a tiled module, within its tile; where an axis cuts the
model itself, within its part.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from dzero.checkpoint.boxes import Box
from dzero.mesh import PIPELINE, REPLICATE, SHARD
from dzero.parallel.tile_dicts import tiled
from dzero.zero.shapes import ParamShape, rows_of
from dzero.zero.shard import Sharded
from dzero.zero.unit import Unit


@dataclass(frozen=True)
class Held:
    """What a rank has of the tensor `name` of `shape`, itself of the shape `held`.

    `boxes`: where that lies; several of a fused parameter, one for each of its results that this rank has something of.
    """

    name: str
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    held: tuple[int, ...]

    @property
    def is_fused(self) -> bool:
        """Whether its boxes lie beside each other along the dim before the last."""
        return len(self.held) > len(self.shape)

    @property
    def elems(self) -> int:
        """Of what this rank has."""
        return math.prod(self.held)

    def apart(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """What this rank has, box by box, each flat."""
        return [each.reshape(-1) for each in flat.view(self.held).unbind(-2)] if self.is_fused else [flat]

    def together(self, values: Sequence[torch.Tensor]) -> torch.Tensor:
        """[held] from the values of its boxes."""
        if not self.is_fused:
            return values[0]
        return torch.stack([*values], -2) if values else torch.empty(self.held)


@dataclass(frozen=True)
class Place(Held):
    """`own_name`: of the parameter in the sharded model. `saves`: whether this rank saves it, and no copy elsewhere."""

    param: nn.Parameter
    own_name: str
    saves: bool


class Places:
    """Of all parameters of a sharded model, on this rank. `whole`: names in the model as it was built, by its own.

    stateful: names of those that have states, and so may be cut over copies.
    """

    def __init__(self, sharded: Sharded, stateful: Collection[str] = ()) -> None:
        self._part = sharded.mesh[REPLICATE].get_local_rank(), sharded.layout.shares
        self._parted = frozenset(stateful if sharded.layout.shares > 1 else ())
        self._along_model = {axis: group for axis, group in sharded.model_groups.items() if axis != PIPELINE}
        self._number = {name: number for number, name in enumerate(sharded.named_params())}
        pipeline = sharded.parts
        self._elsewhere = {*pipeline.shared} if pipeline is not None and not pipeline.has_first else set()
        self._tiles: dict[str, tuple[str, int | None, int, int]] = {}
        for whole, cut, parts in tiled(sharded.model):
            for index, part in enumerate(parts):
                start, _ = (0, 0) if cut.dim is None else cut.span(index)
                self._tiles[part] = whole, cut.dim, start, sum(cut.sizes)

        self.whole = {name: self._tiles[name][0] if name in self._tiles else name for name in self._number}

    def of(self, unit: Unit) -> Iterator[Place]:
        """A unit's, in its order."""
        shards = unit.mesh.get_group(SHARD)
        copies = {REPLICATE: unit.mesh.get_group(REPLICATE), **self._along_model}
        for shape in unit.shape.params:
            own = shards.rank(), shards.size()
            rows = rows_of(shape.shape[0], *((own, self._part) if shape.name in self._parted else (own,)))
            offset, size = corner(shape, *rows)
            whole, name = [*shape.whole], shape.name
            if name in self._tiles:
                name, dim, start, total = self._tiles[name]
                if dim is not None:
                    offset[dim] += start
                    whole[dim] = total
            boxes = boxes_of(shape, offset, size)
            saves = self._saves(shape, copies)
            yield Place(name, tuple(whole), boxes, tuple(size), unit.params[shape.name], shape.name, saves)

    def _saves(self, shape: ParamShape, groups: Mapping[str, dist.ProcessGroup]) -> bool:
        """Ranks that have the same take turns; of a tied parameter, those of the first part. groups: of those that
        may."""
        if shape.name in self._elsewhere:
            return False
        copy, copies = 0, 1
        for axis, group in groups.items():
            if axis == REPLICATE and shape.name in self._parted:
                continue
            if not shape.is_cut_by(axis):
                copy, copies = copy * group.size() + group.rank(), copies * group.size()
        return self._number[shape.name] % copies == copy


def corner(shape: ParamShape, first: int, rows: int) -> tuple[list[int], list[int]]:
    """(offset, size) in the whole of so many rows, from `first` on, of what the ranks of one data-parallel group have
    of a parameter."""
    offset = [first, *(0 for _ in shape.shape[1:])]
    if shape.split is not None and shape.split.dim is not None:
        offset[shape.split.dim] += shape.split.index * shape.shape[shape.split.dim]
    return offset, [rows, *shape.shape[1:]]


def boxes_of(shape: ParamShape, offset: Sequence[int], size: Sequence[int]) -> tuple[Box, ...]:
    """The box at `offset` of `size`; of a fused parameter that in [..., results, columns], as boxes of [..., results *
    columns]."""
    if not shape.fused:
        return (Box(tuple(offset), tuple(size)),)
    columns = shape.whole[-1] // shape.shape[-2]
    return tuple(
        Box((*offset[:-2], result * columns + offset[-1]), (*size[:-2], size[-1]))
        for result in range(offset[-2], offset[-2] + size[-2])
    )
