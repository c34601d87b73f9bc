"""Lookup in an embedding that is in tiles of rows, so that one tile is gathered at a time.

Each id is looked up in every tile, in those that do not have it at some other row, whose result is not taken. Every
output is thus one row of the whole table, and every gradient of a row is a sum over the same tokens. The output so far
goes through each tile, so that backward ends a tile, and frees it, before it gathers the next.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from dzero.parallel.forward_wrapping import Forward
from dzero.parallel.tiling.tiles import Tiles

MAX_NORM = "max_norm changes rows when they are looked up, those of other tiles too"
BY_FREQUENCY = "scale_grad_by_freq counts the ids of a lookup, and a tile looks up others than its own"
SPARSE = "sparse gradients are those of whole tables"


def untileable(module: nn.Embedding) -> str | None:
    """Return why an embedding cannot be in tiles, or None if it can."""
    if type(module).forward is not nn.Embedding.forward:
        return f"{type(module).__name__} has a forward of its own, which may do more than look up rows"
    reasons = {MAX_NORM: module.max_norm is not None, BY_FREQUENCY: module.scale_grad_by_freq, SPARSE: module.sparse}
    return next((reason for reason, applies in reasons.items() if applies), None)


def set_rows(tile: nn.Module, start: int, rows: int) -> None:
    """Set the attributes of a tile that has `rows` rows of an embedding, from `start` on; others stay as they are."""
    if isinstance(tile, nn.Embedding):
        padding = -1 if tile.padding_idx is None else tile.padding_idx - start
        tile.num_embeddings, tile.padding_idx = rows, padding if 0 <= padding < rows else None


def tile_looking_up(forward: Forward) -> Forward:
    """Return the forward of a tile, from that of its embedding."""

    def looked_up(self: nn.Module, ids: Tensor, tiles: int, index: int, start: int, before: Tensor | None) -> Any:
        """Return `before` with the rows of this tile in the places of its ids.

        Args:
            self: The tile.
            ids: Ids in the whole table [...].
            tiles: Number of tiles.
            index: Number of this tile. The first also takes ids below 0 and the last those beyond the table, which its
                lookup refuses like that of the whole table.
            start: Id of its first row.
            before: Output of the tiles before [..., features]; None for the first tile.
        """
        rows = int(self.num_embeddings)  # type: ignore[arg-type]
        within = ids - start
        above = within >= 0 if index > 0 else torch.ones_like(ids, dtype=torch.bool)
        below = within < rows if index < tiles - 1 else torch.ones_like(above)
        own = above & below
        found = forward(self, within.where(own, within.remainder(rows)))
        return found if before is None else torch.where(own.unsqueeze(-1), found, before)

    return looked_up


def looked_up_in_tiles(_: Forward) -> Forward:
    """Return the forward of an embedding in tiles."""

    def forward(self: nn.Module, input: Tensor) -> Tensor:
        """Map ids [...] to rows [..., features]; raise IndexError if one is no id (on CUDA, an assertion there)."""
        tiles = self.tiles
        assert isinstance(tiles, Tiles)
        (cut,) = tiles.cuts
        out: Any = None
        for index, tile in enumerate(tiles.children()):
            out = tile(input, len(cut.sizes), index, cut.span(index)[0], out)
        assert isinstance(out, Tensor)
        return out

    return forward
