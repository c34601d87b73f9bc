"""Settings of block transformations that leave the model unchanged (parallel/blocks.py)."""

from __future__ import annotations

from dataclasses import dataclass

from dzero.compatibility import check_compatible
from dzero.utils.ranges import check, whole
from dzero.utils.rules import Settings

ACTIVATIONS = ("none", "selective", "full")
MOST_TILES = 2**16


@dataclass(frozen=True, kw_only=True)
class BlockConfig:
    """Transformations of blocks that leave the model unchanged (parallel/blocks.py)."""

    activation_checkpoint: str = "none"
    """Activations that backward recomputes: none, selective (all but matrix products), or full (every block)."""
    compile: bool | None = None
    """Apply torch.compile to each block. null: only on CUDA, and where no modules of a block are gathered by
    themselves (tiles, mesh.ep, zero.unit_bytes)."""
    tiles: int = 1
    """Tiles of each block's MLPs, gathered and freed one after the other. 1: no tiling."""
    loss_tiles: int | None = None
    """Tiles of the logits and their loss, along the vocabulary; with mesh.tp or mesh.pp, along tokens. 1: no tiling.
    null: as many along tokens as keep the logits of a tile within 128 MiB in fp32."""
    embedding_tiles: int = 1
    """Tiles of the input embedding, along the vocabulary, gathered and freed one after the other. 1: no tiling."""

    def __post_init__(self) -> None:
        if self.activation_checkpoint not in ACTIVATIONS:
            raise ValueError(
                f"block.activation_checkpoint={self.activation_checkpoint!r}: choose one of {[*ACTIVATIONS]}"
            )
        if self.compile is not None and not isinstance(self.compile, bool):
            raise ValueError(f"block.compile={self.compile!r}: choose true, false or null")
        tiles = whole(1, MOST_TILES)
        check("block", self, tiles=tiles, loss_tiles=tiles, embedding_tiles=tiles)
        check_compatible(Settings.of(block=self))

    def compiles(self, device_type: str) -> bool:
        """Return whether blocks are compiled on a device of this type."""
        return device_type == "cuda" and self.tiles == 1 if self.compile is None else self.compile
