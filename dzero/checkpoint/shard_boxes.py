"""Which part of which tensor of a checkpoint a rank's shard is, or its part of a shard's states
(zero/replica_shards.py).

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

from dzero.checkpoint.box import Box
from dzero.mesh import PIPELINE, REPLICATE, SHARD
from dzero.parallel.tiling.state_dicts import tiled
from dzero.zero.shard import Sharded
from dzero.zero.unit import Unit
from dzero.zero.unit_shapes import ParamShape, rows_of


@dataclass(frozen=True)
class HeldTensor:
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


class UntiledRows:
    """Where rows of a model's parameters lie in it as it was built, before modules were tiled."""

    def __init__(self, model: nn.Module) -> None:
        self._tiles = {part: (name, cut, at) for name, cut, parts in tiled(model) for at, part in enumerate(parts)}

    def name(self, own: str) -> str:
        """Of the parameter that `own` is a tile of, else its own."""
        return self._tiles[own][0] if own in self._tiles else own

    def held(self, shape: ParamShape, first: int, rows: int) -> HeldTensor:
        """So many rows, from `first` on, of what the ranks of one data-parallel group have of a parameter."""
        offset, size = [first, *(0 for _ in shape.shape[1:])], [rows, *shape.shape[1:]]
        if shape.split is not None and shape.split.dim is not None:
            offset[shape.split.dim] += shape.split.index * shape.shape[shape.split.dim]
        whole, name = [*shape.whole], shape.name
        if name in self._tiles:
            name, cut, index = self._tiles[name]
            if cut.dim is not None:
                offset[cut.dim] += cut.span(index)[0]
                whole[cut.dim] = sum(cut.sizes)
        return HeldTensor(name, tuple(whole), _boxes(shape, offset, size), tuple(size))


def _boxes(shape: ParamShape, offset: Sequence[int], size: Sequence[int]) -> tuple[Box, ...]:
    """The box at `offset` of `size`; of a fused parameter that in [..., results, columns], as boxes of [..., results *
    columns]."""
    if not shape.fused:
        return (Box(tuple(offset), tuple(size)),)
    columns = shape.whole[-1] // shape.shape[-2]
    return tuple(
        Box((*offset[:-2], result * columns + offset[-1]), (*size[:-2], size[-1]))
        for result in range(offset[-2], offset[-2] + size[-2])
    )


@dataclass(frozen=True)
class ShardBox(HeldTensor):
    """`own_name`: of the parameter in the sharded model. `saves`: whether this rank saves it, and no copy elsewhere."""

    param: nn.Parameter
    own_name: str
    saves: bool


class ShardBoxes:
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
        self._as_built = UntiledRows(sharded.model)
        self.whole = {name: self._as_built.name(name) for name in self._number}

    def of(self, unit: Unit) -> Iterator[ShardBox]:
        """A unit's, in its order."""
        shards = unit.mesh.get_group(SHARD)
        copies = {REPLICATE: unit.mesh.get_group(REPLICATE), **self._along_model}
        for shape in unit.shape.params:
            own = shards.rank(), shards.size()
            rows = rows_of(shape.shape[0], *((own, self._part) if shape.name in self._parted else (own,)))
            held = self._as_built.held(shape, *rows)
            yield ShardBox(
                held.name,
                held.shape,
                held.boxes,
                held.held,
                param=unit.params[shape.name],
                own_name=shape.name,
                saves=self._saves(shape, copies),
            )

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
