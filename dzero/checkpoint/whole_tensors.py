"""Whole tensors of a sharded model, gathered one by one, whichever axes of the mesh cut them.

    every rank   tells which boxes of which tensors it has (shard_boxes.py); of several equal ones, one rank sends
    senders      send their boxes of one tensor after the other, in an order that all ranks know
    receivers    put them together, and hold those that are read together

The receiver is rank 0, which writes the tensors to disk, so that parts travel through host memory; or all ranks, each
on its device.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist

from dzero.checkpoint.box import Box
from dzero.checkpoint.first_rank import groups_on_host
from dzero.checkpoint.format import DTYPES, NAMES
from dzero.checkpoint.shard_boxes import ShardBox, ShardBoxes
from dzero.comm.collectives import gather_json
from dzero.models.tensor_views import Readable
from dzero.optim.state_placement import read
from dzero.utils.torch_internals import without_wrappers
from dzero.zero.dtensors import local_of
from dzero.zero.sharded import Sharded


class WholeTensors:
    """Parameters and persistent buffers of a sharded model, by their names in the model as built. Collective.

    Args:
        sharded: The sharded model.
        device: Device on which all ranks receive the tensors; None: rank 0 alone receives them, in host memory.

    Attributes:
        dtypes: Dtype of each tensor.
        trained: Names of the parameters that are trained.
        ranks: Number of ranks that take part.
    """

    def __init__(self, sharded: Sharded, device: torch.device | None = None) -> None:
        self._device = device
        self._own: dict[str, list[torch.Tensor | ShardBox]] = {}
        mine = _described(sharded, self._own)
        every = _of_all_ranks(sharded, mine)
        self.ranks = len(every)
        self._shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        self.trained: list[str] = []
        self._scalars: set[str] = set()
        self._senders: dict[str, list[tuple[int, list[Box]]]] = {}
        for of_rank in every:
            for name, told in of_rank["tensors"].items():
                first = name not in self._shapes
                if first:
                    self._shapes[name], self.dtypes[name] = tuple(told["shape"]), DTYPES[told["dtype"]]
                    self.trained += [name] if told["trained"] else []
                    self._scalars |= {name} if told["scalar"] else set()
                if told["boxes"] and (first or not told["alike"]):
                    boxes = [Box(tuple(offset), tuple(size)) for offset, size in told["boxes"]]
                    self._senders.setdefault(name, []).append((of_rank["rank"], boxes))
        self._waiting: list[str] = []
        self._groups: list[tuple[str, ...]] = []
        self._last: dict[str, int] = {}
        self._at = -1
        self._held: dict[str, torch.Tensor] = {}

    def readable(self) -> dict[str, Readable]:
        """Return the tensors as a receiver reads them, by name."""
        return {
            name: _Whole(self, name, () if name in self._scalars else shape) for name, shape in self._shapes.items()
        }

    def expect(self, groups: Iterable[tuple[str, ...]]) -> None:
        """Set the order: that of `groups`, the names of the tensors that are read together; the same on all ranks."""
        self._groups = [*groups]
        self._last = {name: number for number, group in enumerate(self._groups) for name in group}
        self._waiting = [name for name in dict.fromkeys(chain(*self._groups)) if self._elems(name)]
        self._at = -1

    def whole(self, name: str) -> torch.Tensor:
        """Return a tensor, on a receiver; the first calls for each are in the order of gathers.

        A tensor that several groups have is held until the last of them.
        """
        if not self._elems(name):
            return torch.empty(self._shapes[name], dtype=self.dtypes[name], device=self._device)
        if name not in self._held:
            while self._at < 0 or name not in self._groups[self._at]:
                self._at += 1
            self._held = {each: tensor for each, tensor in self._held.items() if self._last[each] >= self._at}
            for each in self._groups[self._at]:
                if each not in self._held and self._elems(each):
                    assert self._waiting[0] == each
                    self._held[each] = self._gather()
        return self._held[name]

    def skip_rest(self) -> None:
        """Take part in the gathers that are left."""
        while self._waiting:
            self._gather()

    def _elems(self, name: str) -> int:
        return math.prod(self._shapes[name])

    @torch.no_grad()
    def _gather(self) -> torch.Tensor:
        """Send this rank's part of the next tensor, and on a receiver put it together."""
        name = self._waiting.pop(0)
        return self._to_first(name) if self._device is None else self._to_all(name, self._device)

    def _to_first(self, name: str) -> torch.Tensor:
        rank = dist.get_rank()
        whole = torch.empty(self._shapes[name] if rank == 0 else 0, dtype=self.dtypes[name])
        for sender, boxes in self._senders[name]:
            if rank not in (0, sender):
                continue
            count = sum(box.elems for box in boxes)
            flat = self._part(name) if rank == sender else torch.empty(count, dtype=self.dtypes[name])
            if sender != 0:
                data = flat.view(torch.uint8)
                dist.recv(data, sender) if rank == 0 else dist.send(data, 0)
            if rank == 0:
                for cut, values in zip(_cuts(whole, boxes), _split(flat, boxes), strict=True):
                    cut.copy_(values)
        return whole

    def _to_all(self, name: str, device: torch.device) -> torch.Tensor:
        whole = torch.empty(self._shapes[name], dtype=self.dtypes[name], device=device)
        for sender, boxes in self._senders[name]:
            cuts = _cuts(whole, boxes)
            is_one = len(cuts) == 1 and cuts[0].is_contiguous()  # as rows are: they arrive where they belong
            flat = cuts[0].view(-1) if is_one else whole.new_empty(sum(box.elems for box in boxes))
            if sender == dist.get_rank():
                for values, part in zip(_split(flat, boxes), self._parts(name), strict=True):
                    values.copy_(part.view(values.shape))
            dist.broadcast(flat.view(torch.uint8), sender)
            if not is_one:
                for cut, values in zip(cuts, _split(flat, boxes), strict=True):
                    cut.copy_(values)
        return whole

    def _part(self, name: str) -> torch.Tensor:
        """Return the boxes of a tensor that this rank sends, flat and one after the other, on the CPU."""
        return torch.cat([part.detach().cpu() for part in self._parts(name)]).contiguous()

    def _parts(self, name: str) -> list[torch.Tensor]:
        """Return the boxes of a tensor that this rank sends, each flat, where they are stored."""
        parts: list[torch.Tensor] = []
        for each in self._own[name]:
            if isinstance(each, ShardBox):
                parts += each.apart(read(local_of(each.param)).reshape(-1))
            else:
                parts.append(each.reshape(-1))
        return parts


def _cuts(whole: torch.Tensor, boxes: Sequence[Box]) -> list[torch.Tensor]:
    """Return views of the boxes in a tensor."""
    return [whole[box.slices(Box.whole(tuple(whole.shape)))] for box in boxes]


def _split(flat: torch.Tensor, boxes: Sequence[Box]) -> list[torch.Tensor]:
    """Return the values of the boxes, which lie in `flat` one after the other, in their shapes."""
    pieces = torch.split(flat, [box.elems for box in boxes])
    return [piece.view(box.size) for box, piece in zip(boxes, pieces, strict=True)]


@dataclass(frozen=True)
class _Whole:
    """A tensor of the sharded model, gathered when it is read; see `models.tensor_views.Readable`."""

    tensors: WholeTensors
    where: str
    shape: tuple[int, ...]

    @property
    def stored(self) -> tuple[str, ...]:
        return (self.where,)

    def read(self, offset: Sequence[int], size: Sequence[int]) -> torch.Tensor:
        box = tuple(slice(first, first + count) for first, count in zip(offset, size, strict=True))
        return self()[box]

    def __call__(self) -> torch.Tensor:
        return self.tensors.whole(self.where).view(self.shape)  # which differs without dimensions alone


def _described(sharded: Sharded, own: dict[str, list[torch.Tensor | ShardBox]]) -> dict[str, Any]:
    """Return what this rank has, as JSON values, and add the tensors to `own`.

    Tensors that are `alike` are the same on all ranks that have them, so that the first of these sends them.
    """
    model, places = sharded.model, _places(sharded)
    aliases = {} if sharded.stages is None else sharded.stages.aliases
    told: dict[str, Any] = {}

    def add(name: str, dtype: torch.dtype, shape: Sequence[int], boxes: list[Box], **flags: bool) -> None:
        described = told.setdefault(name, {"shape": [*shape], "dtype": NAMES[dtype], "boxes": [], **flags})
        described["boxes"] += [[box.offset, box.size] for box in boxes]

    first_names = {name for name, _ in model.named_parameters()}
    params = dict(model.named_parameters(remove_duplicate=False))
    for name, param in params.items():
        place = places.get(aliases.get(name, name))
        if place is None or name not in first_names:
            continue
        boxes = [*place.boxes] if place.saves and place.elems else []
        flags = {"trained": param.requires_grad, "alike": False, "scalar": name in sharded.scalars}
        add(place.name, local_of(param).dtype, place.shape, boxes, **flags)
        if boxes:
            own.setdefault(place.name, []).append(place)
    among_params = {without_wrappers(name): name in first_names for name in params}
    for name, tensor in ((without_wrappers(name), tensor) for name, tensor in model.state_dict().items()):
        alone = name not in among_params or (among_params[name] and not tensor.is_floating_point())
        if alone and name not in told and isinstance(tensor, torch.Tensor) and tensor.dtype in NAMES:
            add(
                name,
                tensor.dtype,
                tensor.shape,
                [Box.whole(tuple(tensor.shape))],
                trained=False,
                alike=True,
                scalar=False,
            )
            own[name] = [tensor]
    return {"rank": dist.get_rank(), "tensors": told}


def _places(sharded: Sharded) -> dict[str, ShardBox]:
    """Return the shard boxes of this rank by name in the sharded model, after the updates in flight."""
    boxes, found = ShardBoxes(sharded), dict[str, ShardBox]()
    for unit in sharded.units:
        unit.await_update()
        found |= {place.own_name: place for place in boxes.of(unit)}
    return found


def _of_all_ranks(sharded: Sharded, mine: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what all ranks of the mesh have, in the order of ranks. Collective."""
    every = [mine]
    for group in groups_on_host(sharded):
        every = [of_rank for of_group in gather_json(every, group) for of_rank in of_group]
    return sorted(every, key=lambda of_rank: int(of_rank["rank"]))
