"""Settings of block transformations that leave the model unchanged (parallel/blocks.py)."""

from __future__ import annotations

from dataclasses import dataclass

from dzero.utils.ranges import check, whole

ACTIVATIONS = ("none", "selective", "full")
MOST_TILES = 2**16


@dataclass(frozen=True, kw_only=True)
class BlockConfig:
    """Transformations of blocks that leave the model unchanged (parallel/blocks.py)."""

    activation_checkpoint: str = "none"
    """Activations that backward recomputes: none, selective (all but matrix products), or full (every block)."""
    compile: bool | None = None
    """Apply torch.compile to each block. null: only on CUDA, without tiles and without mesh.ep."""
    tiles: int = 1
    """Tiles of each block's MLPs, gathered and freed one after the other. 1: no tiling."""
    loss_tiles: int = 1
    """Tiles of the logits and their loss. 1: no tiling."""

    def __post_init__(self) -> None:
        if self.activation_checkpoint not in ACTIVATIONS:
            raise ValueError(
                f"block.activation_checkpoint={self.activation_checkpoint!r}: choose one of {[*ACTIVATIONS]}"
            )
        check("block", self, tiles=whole(1, MOST_TILES), loss_tiles=whole(1, MOST_TILES))
        if self.tiles > 1 and self.activation_checkpoint == "selective":
            raise ValueError(
                f"block.activation_checkpoint=selective with block.tiles={self.tiles}: what it computes again gathers "
                "all tiles of a block at once; take activation_checkpoint=full, which recomputes tile by tile, or none"
            )
        if self.tiles > 1 and self.compile:
            raise ValueError(
                f"block.compile=true with block.tiles={self.tiles}: a tile is gathered inside its block, which ends "
                "compiled code there; leave compile unset or take false"
            )

    def compiles(self, device_type: str) -> bool:
        """Return whether blocks are compiled on a device of this type."""
        return device_type == "cuda" and self.tiles == 1 if self.compile is None else self.compile
