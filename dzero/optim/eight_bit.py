"""Moments in 8 bits: torchao's block-wise codes, padded so that any shard fits.

    codes   uint8 [blocks * 256]   index into a fixed table of 256 values (dynamic exponent, Dettmers et al. 2022)
    scale   fp32  [blocks]         the block's largest magnitude

Every rank pads to the largest shard, so that codes and scales are DTensors of their own, one row per rank, which a
state dict keeps exactly (for the same number of ranks: the blocks follow the shards). About 2 bytes per parameter for
both moments.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

BLOCK_ELEMS = 256


def blank(elems: int, *, signed: bool, device: torch.device) -> Any:
    """torchao's state for `elems` zeros, a multiple of BLOCK_ELEMS."""
    # Imported here because it costs a second and prints about its CUDA extensions, which only this storage needs.
    from torchao.optim.subclass_8bit import OptimState8bit

    return OptimState8bit.zeros((elems,), signed, BLOCK_ELEMS, device)


@dataclass(frozen=True)
class EightBit:
    """A flat fp32 tensor of `elems` elements kept in 8 bits."""

    state: Any
    elems: int

    @classmethod
    def zeros(cls, elems: int, padded_elems: int, *, signed: bool, device: torch.device) -> EightBit:
        """Zeros for a shard of `elems`, stored as `padded_elems` in whole blocks; `signed`: may be negative."""
        blocks = max(1, -(-padded_elems // BLOCK_ELEMS))
        return cls(blank(blocks * BLOCK_ELEMS, signed=signed, device=device), elems)

    def place(self, codes: torch.Tensor, scale: torch.Tensor) -> None:
        """Keep codes and scales in these tensors from now on, with the values that these have."""
        self.state.codes, self.state.scale = codes, scale

    def clear(self) -> None:
        """All zeros."""
        self.state.codes.zero_()
        self.state.scale.zero_()

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """What is stored."""
        return {"codes": self.state.codes, "scale": self.state.scale}

    def load(self) -> torch.Tensor:
        """Decode into a new fp32 tensor [elems]."""
        decoded: torch.Tensor = self.state.dequantize()
        return decoded[: self.elems].clone()

    def store(self, value: torch.Tensor) -> None:
        """Encode fp32 [elems]; the padding stays zero."""
        padded = torch.zeros(self.state.codes.numel(), device=value.device)
        padded[: self.elems] = value
        self.state.copy_(padded)
