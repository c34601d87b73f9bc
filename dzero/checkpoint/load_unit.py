"""Loading of a rank's states from a checkpoint, unit by unit; one unit is read while the previous one is used.

Besides the states themselves only two units of them are in memory, never a second copy of all. 8-bit moments are
decoded to fp32, and kept as stored where their blocks align with the reader's.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import torch

from dzero.checkpoint.box import Box, is_slab
from dzero.checkpoint.errors import CheckpointError
from dzero.checkpoint.format import MASTER, PARAM
from dzero.checkpoint.io_buffers import IOBuffers
from dzero.checkpoint.reader import Checkpoint
from dzero.checkpoint.shard_boxes import ShardBox
from dzero.optim.base import PortableState
from dzero.optim.quantized_moments import BLOCK_ELEMS, KnownBlocks, blocks_of, decode
from dzero.zero.rounding import to_working

CODES, SCALE = "_codes.", "_scale."
SIGNED = {"exp_avg": True, "exp_avg_sq": False}
Loaded = tuple[dict[str, PortableState], list[tuple[ShardBox, torch.Tensor]]]
"""Flat states of a unit's parameters that have a master, by name in the sharded model, and values of all others."""


@dataclass(frozen=True)
class UnitLoader:
    """Loader of the states in a checkpoint.

    Attributes:
        owned: Names, in the sharded model, of the parameters that have a master.
        scalars: Scalar states of each parameter, by name in the model as built.
        stale: Also load the older values that forward still used (overlap=delayed), if they were saved.
        unsharded: Names, in the sharded model, of the parameters whose states other than the master are read whole, and
            whether this rank needs them.
    """

    checkpoint: Checkpoint
    owned: Collection[str]
    scalars: Mapping[str, Mapping[str, float]]
    stale: bool
    unsharded: Mapping[str, bool] = field(default_factory=dict)

    def units(self, shard_boxes: Sequence[Sequence[ShardBox]]) -> Iterator[Loaded]:
        """Yield the saved states of each unit; raise `CheckpointError` if they are missing or damaged.

        Yielded states are valid until the next unit is requested.
        """
        for place in (place for of_unit in shard_boxes for place in of_unit):
            for key in self._keys(place):
                self.checkpoint.check_shape(f"{key}.{place.name}", place.shape)
        most = max(self.checkpoint.bytes_of(self._stored(of_unit)) for of_unit in shard_boxes)
        rooms = IOBuffers(2, block_bytes=max(1, most))  # a rank may hold no elements
        with ThreadPoolExecutor(1, "checkpoint ahead") as thread:
            coming = [thread.submit(self._read, of_unit, rooms) for of_unit in shard_boxes]
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

    def _read(self, shard_boxes: Sequence[ShardBox], rooms: IOBuffers) -> tuple[torch.Tensor, Loaded]:
        """Read all states of a unit at once; return them with the buffer that holds them."""
        room = rooms.free.get()
        try:
            values = iter(self.checkpoint.read_all(self._stored(shard_boxes), room))
            portable_states: dict[str, PortableState] = {}
            without_master = []
            for place in shard_boxes:
                tensors = {
                    key: place.together([next(values) for _ in place.boxes]).view(-1) for key in self._keys(place)
                }
                tensors |= {key: next(values) for key in self._whole_keys(place)}
                value, dtype = tensors.pop(MASTER if MASTER in tensors else PARAM), place.param.dtype
                if place.own_name in self.owned:
                    tensors[MASTER] = value.float()
                    blocks = {} if place.own_name in self.unsharded else self._add_quantized(place, tensors)
                    scalars = self.scalars.get(place.name, {})
                    portable_states[place.own_name] = PortableState(tensors, blocks, scalars)
                else:
                    without_master.append((place, value if dtype == value.dtype else to_working(value.float(), dtype)))
            return room, (portable_states, without_master)
        except BaseException:
            rooms.free.put(room)
            raise

    def _add_quantized(self, place: ShardBox, tensors: dict[str, torch.Tensor]) -> dict[str, KnownBlocks]:
        """Add the decoded 8-bit moments to `tensors`, and return the blocks that are known as stored."""
        blocks: dict[str, KnownBlocks] = {}
        for key in self.checkpoint.moments(place.name):
            if key not in tensors and place.is_fused:
                decoded = [read_blocks(self.checkpoint, key, place, box)[0] for box in place.boxes]
                values = [each.view(box.size) for each, box in zip(decoded, place.boxes, strict=True)]
                tensors[key] = place.together(values).view(-1)
            elif key not in tensors:
                tensors[key], blocks[key] = read_blocks(self.checkpoint, key, place, *place.boxes)
        return blocks

    def _keys(self, place: ShardBox) -> list[str]:
        """Return the states to read except 8-bit moments: the master, or else the parameter, comes first."""
        names = self.checkpoint.names
        values = [key for key in (MASTER, PARAM) if f"{key}.{place.name}" in names] or [MASTER]
        if place.own_name not in self.owned:
            return values[:1]
        values = values[: 2 if self.stale else 1]
        return values if place.own_name in self.unsharded else values + self._moments(place)

    def _whole_keys(self, place: ShardBox) -> list[str]:
        """Return the states that are read whole."""
        return self._moments(place) if self.unsharded.get(place.own_name) else []

    def _moments(self, place: ShardBox) -> list[str]:
        names = self.checkpoint.names
        return [key for key in self.checkpoint.moments(place.name) if f"{key}.{place.name}" in names]

    def _stored(self, shard_boxes: Sequence[ShardBox]) -> list[tuple[str, Box]]:
        """Return the tensors to read, each with this rank's boxes of it."""
        found = []
        for place in shard_boxes:
            found += [(f"{key}.{place.name}", box) for key in self._keys(place) for box in place.boxes]
            whole = [f"{key}.{place.name}" for key in self._whole_keys(place)]
            found += [(name, Box.whole(self.checkpoint.part(name).shape)) for name in whole]
        return found


def read_blocks(checkpoint: Checkpoint, key: str, place: ShardBox, box: Box) -> tuple[torch.Tensor, KnownBlocks]:
    """Read the moment `key` of a box, which was saved in 8 bits.

    Return its decoded fp32 values [box.elems], and the blocks that are known as stored.
    """
    stored = f"{key}{CODES}{place.name}"
    checkpoint.check_shape(stored, place.shape)
    values = torch.zeros(box.size)
    blocks = KnownBlocks(
        known=torch.zeros(blocks_of(box.elems), dtype=torch.bool),
        codes=torch.zeros(box.elems, dtype=torch.uint8),
        scale=torch.zeros(blocks_of(box.elems)),
    )
    for rank, entry, part in checkpoint.parts(stored):
        if (common := part.box.common(box)) is None:
            continue
        beside = entry.replace(CODES, SCALE, 1)
        found = checkpoint.read_entries(rank, [entry, beside])
        codes, scale = found[entry].view(-1), found[beside]
        if (codes.dtype, scale.dtype, *scale.shape) != (torch.uint8, torch.float32, blocks_of(codes.numel())):
            raise CheckpointError(str(checkpoint.path), f"{entry} and {beside} do not fit each other")
        decoded = decode(codes, scale, signed=SIGNED[key]).view(part.size)
        values[common.slices(box)] = decoded[common.slices(part.box)]
        if is_slab(common, box) and is_slab(common, part.box):
            _keep(blocks, common.rows(box), common.rows(part.box)[0], codes, scale)
    return values.view(-1), blocks


def _keep(blocks: KnownBlocks, own: tuple[int, int], start: int, codes: torch.Tensor, scale: torch.Tensor) -> None:
    """Keep whole stored blocks: elements [own) of `blocks` are those from `start` on of the stored `codes`."""
    first, last = own
    if (first - start) % BLOCK_ELEMS:
        return
    whole_first = blocks_of(first)
    whole_last = blocks_of(last) if last == blocks.codes.numel() else last // BLOCK_ELEMS
    if whole_first >= whole_last:
        return
    shift = start - first
    low, high = whole_first * BLOCK_ELEMS, min(whole_last * BLOCK_ELEMS, last)
    blocks.known[whole_first:whole_last] = True
    blocks.codes[low:high] = codes[low + shift : high + shift]
    by = shift // BLOCK_ELEMS
    blocks.scale[whole_first:whole_last] = scale[whole_first + by : whole_last + by]
