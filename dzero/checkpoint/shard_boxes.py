"""Boxes of a checkpoint's tensors that a rank's shards, or its replica shards (zero/replica_shards.py), correspond to.

A checkpoint is independent of ranks, tiles and wrappers: a parameter has the name and shape of the model as built,
and of its modules before `torch.compile` and torch's `checkpoint_wrapper` wrapped them. A rank's part of a parameter
is a box. FSDP2 splits it along dim 0. In a tiled module the box is within a tile, and where a mesh axis splits the
model, it is within this rank's part along that axis.
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
from dzero.utils.torch_internals import without_wrappers
from dzero.zero.sharded import Sharded
from dzero.zero.unit import Unit
from dzero.zero.unit_shapes import ParamShape, rows_of


@dataclass(frozen=True)
class HeldTensor:
    """The part of a tensor that a rank holds.

    Attributes:
        name: Name of the tensor in the model as built.
        shape: Shape of the whole tensor.
        boxes: Boxes that the rank holds. A fused parameter has one for each result that the rank holds part of.
        held: Shape of the part that the rank holds.
    """

    name: str
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    held: tuple[int, ...]

    @property
    def is_fused(self) -> bool:
        """Whether the boxes are stacked along the second-to-last dim."""
        return len(self.held) > len(self.shape)

    @property
    def elems(self) -> int:
        """Number of elements that the rank holds."""
        return math.prod(self.held)

    def apart(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Split the flat part that this rank holds into its boxes, each flat."""
        return [each.reshape(-1) for each in flat.view(self.held).unbind(-2)] if self.is_fused else [flat]

    def together(self, values: Sequence[torch.Tensor]) -> torch.Tensor:
        """Join the values of the boxes into a tensor of shape `held`."""
        if not self.is_fused:
            return values[0]
        return torch.stack([*values], -2) if values else torch.empty(self.held)


class UntiledRows:
    """Positions of a model's parameter rows in the model as built, before modules were tiled."""

    def __init__(self, model: nn.Module) -> None:
        self._tiles = {part: (name, cut, at) for name, cut, parts in tiled(model) for at, part in enumerate(parts)}

    def name(self, own: str) -> str:
        """Return the name as built of the parameter `own`, which may be a tile, or in a wrapped module."""
        return without_wrappers(self._tiles[own][0] if own in self._tiles else own)

    def held(self, shape: ParamShape, first: int, rows: int) -> HeldTensor:
        """Return the part of a tensor that some rows of a parameter cover, beginning with row `first`.

        `shape` is the parameter as the ranks of one data-parallel group hold it together.
        """
        offset, size = [first, *(0 for _ in shape.shape[1:])], [rows, *shape.shape[1:]]
        if shape.split is not None and shape.split.dim is not None:
            offset[shape.split.dim] += shape.split.index * shape.shape[shape.split.dim]
        whole, name = [*shape.whole], shape.name
        if name in self._tiles:
            name, cut, index = self._tiles[name]
            if cut.dim is not None:
                offset[cut.dim] += cut.span(index)[0]
                whole[cut.dim] = sum(cut.sizes)
        return HeldTensor(without_wrappers(name), tuple(whole), _boxes(shape, offset, size), tuple(size))


def _boxes(shape: ParamShape, offset: Sequence[int], size: Sequence[int]) -> tuple[Box, ...]:
    """Return the box at `offset` of `size`; for a fused parameter, one box for each result.

    A fused parameter has offset and size in [..., results, columns], and its boxes are in [..., results * columns].
    """
    if not shape.fused:
        return (Box(tuple(offset), tuple(size)),)
    columns = shape.whole[-1] // shape.shape[-2]
    return tuple(
        Box((*offset[:-2], result * columns + offset[-1]), (*size[:-2], size[-1]))
        for result in range(offset[-2], offset[-2] + size[-2])
    )


@dataclass(frozen=True)
class ShardBox(HeldTensor):
    """The part of a parameter that a rank holds.

    Attributes:
        own_name: Name of the parameter in the sharded model.
        saves: Whether this rank saves the part; if several ranks hold it, exactly one does.
        leads: Whether this rank is the first of those that hold the parameter cut, along axes other than ZeRO's.
    """

    param: nn.Parameter
    own_name: str
    saves: bool
    leads: bool = True


class ShardBoxes:
    """Shard boxes of all parameters of a sharded model on this rank.

    The parameters named in `stateful` have optimizer states, which may be sharded over replicas too. `whole` has the
    names in the model as built, by name in the sharded model.
    """

    def __init__(self, sharded: Sharded, stateful: Collection[str] = ()) -> None:
        self._part = sharded.mesh[REPLICATE].get_local_rank(), sharded.layout.replica_shards
        self._parted = frozenset(stateful if sharded.layout.replica_shards > 1 else ())
        self._along_model = {axis: group for axis, group in sharded.model_groups.items() if axis != PIPELINE}
        self._number = {name: number for number, name in enumerate(sharded.named_params())}
        pipeline = sharded.stages
        self._elsewhere = {*pipeline.shared} if pipeline is not None and not pipeline.has_first else set()
        self._as_built = UntiledRows(sharded.model)
        self.whole = {name: self._as_built.name(name) for name in self._number}

    def of(self, unit: Unit) -> Iterator[ShardBox]:
        """Yield the shard boxes of a unit's parameters, in order."""
        shards = unit.mesh.get_group(SHARD)
        replicas = {REPLICATE: unit.mesh.get_group(REPLICATE), **self._along_model}
        for shape in unit.shape.params:
            own = shards.rank(), shards.size()
            rows = rows_of(shape.shape[0], *((own, self._part) if shape.name in self._parted else (own,)))
            held = self._as_built.held(shape, *rows)
            param, saves = unit.params[shape.name], self._saves(shape, replicas)
            leads = shape.split is None or shape.split.dim is None or shape.split.index == 0
            yield ShardBox(**vars(held), param=param, own_name=shape.name, saves=saves, leads=leads)

    def _saves(self, shape: ParamShape, groups: Mapping[str, dist.ProcessGroup]) -> bool:
        """Return whether this rank saves its part of a parameter.

        Ranks of `groups` that hold the same part take turns. A tied parameter is saved by the first pipeline stage.
        """
        if shape.name in self._elsewhere:
            return False
        copy, replicas = 0, 1
        for axis, group in groups.items():
            if axis == REPLICATE and shape.name in self._parted:
                continue
            if not shape.is_cut_by(axis):
                copy, replicas = copy * group.size() + group.rank(), replicas * group.size()
        return self._number[shape.name] % replicas == copy
