"""Loading of a rank's states from a checkpoint, unit by unit; one unit is read while the previous one is used.

Besides the states themselves only two units of them are in memory, never a second copy of all.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import torch

from dzero.checkpoint.box import Box
from dzero.checkpoint.format import MASTER, PARAM
from dzero.checkpoint.io_buffers import IOBuffers
from dzero.checkpoint.quantized_moments import read_blocks
from dzero.checkpoint.reader import Checkpoint
from dzero.checkpoint.shard_boxes import ShardBox
from dzero.optim.base import PortableState
from dzero.optim.quantized_moments import KnownBlocks
from dzero.zero.rounding import to_working


class LoadedUnit(NamedTuple):
    """Loaded states of a unit.

    Attributes:
        portable_states: Flat states of parameters that have a master, by name in the sharded model.
        without_master: Values of all other parameters.
    """

    portable_states: dict[str, PortableState]
    without_master: list[tuple[ShardBox, torch.Tensor]]


class LoadRequest(NamedTuple):
    """Request for the state `key` of the parameter of `place`."""

    place: ShardBox
    key: str

    @property
    def stored(self) -> list[tuple[str, Box]]:
        """Name of the checkpoint's tensor, with each of this rank's boxes of it."""
        return [(f"{self.key}.{self.place.name}", box) for box in self.place.boxes]


@dataclass(frozen=True)
class UnitLoader:
    """Loader of the states in a checkpoint.

    Attributes:
        checkpoint: Checkpoint to read.
        owned: Names, in the sharded model, of the parameters that have a master.
        scalars: Scalar states of each parameter, by name in the model as built.
        stale: Also load the older values that forward still used (overlap=delayed), if they were saved.
    """

    checkpoint: Checkpoint
    owned: Collection[str]
    scalars: Mapping[str, Mapping[str, float]]
    stale: bool

    def units(self, shard_boxes: Sequence[Sequence[ShardBox]]) -> Iterator[LoadedUnit]:
        """Yield the saved states of each unit; raise `CheckpointError` if they are missing or damaged.

        Yielded states are valid until the next unit is requested.
        """
        wanted = [
            [LoadRequest(place, key) for place in of_unit for key in self._keys(place)] for of_unit in shard_boxes
        ]
        for place, key in (each for of_unit in wanted for each in of_unit):
            self.checkpoint.check_shape(f"{key}.{place.name}", place.shape)
        most = max(self.checkpoint.bytes_of(_stored(of_unit)) for of_unit in wanted)
        rooms = IOBuffers(2, block_bytes=max(1, most))  # a rank may hold no elements
        with ThreadPoolExecutor(1, "checkpoint ahead") as thread:
            coming = [thread.submit(self._read, *each, rooms) for each in zip(shard_boxes, wanted, strict=True)]
            try:
                for end in coming:
                    room, found = end.result()
                    try:
                        yield found
                    finally:
                        rooms.free.put(room)
            finally:
                for end in coming:
                    end.cancel()

    def _read(
        self, shard_boxes: Sequence[ShardBox], wanted: Sequence[LoadRequest], rooms: IOBuffers
    ) -> tuple[torch.Tensor, LoadedUnit]:
        """Read all states of a unit at once; return them with the buffer that holds them."""
        room = rooms.free.get()
        try:
            values = iter(self.checkpoint.read_all(_stored(wanted), room))
            found: dict[str, dict[str, torch.Tensor]] = defaultdict(dict)
            for place, key in wanted:
                found[place.own_name][key] = place.together([next(values) for _ in place.boxes]).view(-1)
            return room, self._sorted(shard_boxes, found)
        except BaseException:
            rooms.free.put(room)
            raise

    def _sorted(self, shard_boxes: Sequence[ShardBox], found: Mapping[str, dict[str, torch.Tensor]]) -> LoadedUnit:
        portable_states: dict[str, PortableState] = {}
        without_master = []
        for place in shard_boxes:
            tensors, dtype = found[place.own_name], place.param.dtype
            value = tensors.pop(MASTER if MASTER in tensors else PARAM)
            if place.own_name not in self.owned:
                without_master.append((place, value if dtype == value.dtype else to_working(value.float(), dtype)))
                continue
            tensors[MASTER] = value.float()
            blocks: dict[str, KnownBlocks] = {}
            for key in self.checkpoint.moments(place.name):
                if key not in tensors and place.is_fused:
                    decoded = [read_blocks(self.checkpoint, key, place, box)[0] for box in place.boxes]
                    values = [each.view(box.size) for each, box in zip(decoded, place.boxes, strict=True)]
                    tensors[key] = place.together(values).view(-1)
                elif key not in tensors:
                    tensors[key], blocks[key] = read_blocks(self.checkpoint, key, place, *place.boxes)
            portable_states[place.own_name] = PortableState(tensors, blocks, self.scalars.get(place.name, {}))
        return LoadedUnit(portable_states, without_master)

    def _keys(self, place: ShardBox) -> list[str]:
        """Return the states to read except 8-bit moments: the master, or else the parameter, comes first."""
        names = self.checkpoint.names
        values = [key for key in (MASTER, PARAM) if f"{key}.{place.name}" in names] or [MASTER]
        if place.own_name not in self.owned:
            return values[:1]
        moments = [key for key in self.checkpoint.moments(place.name) if f"{key}.{place.name}" in names]
        return values[: 2 if self.stale else 1] + moments


def _stored(wanted: Sequence[LoadRequest]) -> list[tuple[str, Box]]:
    return [stored for each in wanted for stored in each.stored]
