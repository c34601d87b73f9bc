"""8-bit moments of a checkpoint: decoded to fp32, and kept as stored where blocks align with the reader's."""

from __future__ import annotations

import torch

from dzero.checkpoint.box import Box, is_slab
from dzero.checkpoint.errors import CheckpointError
from dzero.checkpoint.reader import Checkpoint
from dzero.checkpoint.shard_boxes import ShardBox
from dzero.optim.quantized_moments import BLOCK_ELEMS, KnownBlocks, blocks_of, decode

CODES, SCALE = "_codes.", "_scale."
SIGNED = {"exp_avg": True, "exp_avg_sq": False}


def read_blocks(checkpoint: Checkpoint, key: str, place: ShardBox, box: Box) -> tuple[torch.Tensor, KnownBlocks]:
    """Read the moment `key` of a box, which was saved in 8 bits.

    Returns:
        Decoded fp32 values [box.elems], and the blocks that are known as stored.
    """
    stored = f"{key}{CODES}{place.name}"
    checkpoint.check_shape(stored, place.shape)
    values = torch.zeros(box.size)
    blocks = KnownBlocks(
        known=torch.zeros(blocks_of(box.elems), dtype=torch.bool),
        codes=torch.zeros(box.elems, dtype=torch.uint8),
        scale=torch.zeros(blocks_of(box.elems)),
    )
    for rank, entry, part in checkpoint.meeting(stored, box):
        beside = entry.replace(CODES, SCALE, 1)
        found = checkpoint.read_entries(rank, [entry, beside])
        codes, scale = found[entry].view(-1), found[beside]
        if (codes.dtype, scale.dtype, *scale.shape) != (torch.uint8, torch.float32, blocks_of(codes.numel())):
            raise CheckpointError(str(checkpoint.path), f"{entry} and {beside} do not fit each other")
        common = part.box.common(box)
        assert common is not None
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
