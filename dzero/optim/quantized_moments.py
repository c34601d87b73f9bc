"""Moments in 8 bits: torchao's block-wise codes, padded so that any shard fits.

    codes   uint8 [blocks * 256]   index into a fixed table of 256 values (dynamic exponent, Dettmers et al. 2022)
    scale   fp32  [blocks]         the block's largest magnitude

Every rank pads to the largest shard, so that codes and scales are DTensors of their own, one row per rank, which a
state dict keeps exactly (for the same number of ranks: the blocks follow the shards). About 2 bytes per parameter for
both moments.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

BLOCK_ELEMS = 256


def blocks_of(elems: int) -> int:
    """Blocks that hold a shard of `elems`, without padding."""
    return -(-elems // BLOCK_ELEMS)


def decode(codes: torch.Tensor, scale: torch.Tensor, *, signed: bool) -> torch.Tensor:
    """fp32 [elems] of uint8 codes [elems] and the fp32 scale of each block of them."""
    whole = QuantizedMoment.zeros(codes.numel(), codes.numel(), signed=signed, device=codes.device)
    whole.put(codes, scale)
    return whole.load()


class KnownBlocks(NamedTuple):
    """Which blocks are `known` as they were stored, bool [blocks]; uint8 `codes` [elems], fp32 `scale` [blocks]."""

    known: torch.Tensor
    codes: torch.Tensor
    scale: torch.Tensor


def blank(elems: int, *, signed: bool, device: torch.device) -> Any:
    """torchao's state for `elems` zeros, a multiple of BLOCK_ELEMS."""
    # Imported here because it costs a second and prints about its CUDA extensions, which only this storage needs.
    from torchao.optim.subclass_8bit import OptimState8bit

    return OptimState8bit.zeros((elems,), signed, BLOCK_ELEMS, device)


@dataclass(frozen=True)
class QuantizedMoment:
    """A flat fp32 tensor of `elems` elements kept in 8 bits."""

    state: Any
    elems: int

    @classmethod
    def zeros(cls, elems: int, padded_elems: int, *, signed: bool, device: torch.device) -> QuantizedMoment:
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

    def export_state(self) -> dict[str, torch.Tensor]:
        """What is stored, without padding; see `put`."""
        blocks = blocks_of(self.elems)
        return {"codes": self.state.codes[: self.elems], "scale": self.state.scale[:blocks]}

    def put(self, codes: torch.Tensor, scale: torch.Tensor) -> None:
        """The way back, on any rank whose shard begins at the same element."""
        self.clear()
        self.state.codes[: self.elems] = codes
        self.state.scale[: scale.numel()] = scale

    def import_state(self, value: torch.Tensor, blocks: KnownBlocks | None) -> None:
        """As `store`; but blocks that are known stay what they were, since encoding is not the inverse of decoding."""
        self.store(value)
        if blocks is not None:
            known = blocks.known.repeat_interleave(BLOCK_ELEMS)[: self.elems]
            own = self.export_state()
            own["codes"].copy_(torch.where(known, blocks.codes, own["codes"].cpu()))
            own["scale"].copy_(torch.where(blocks.known, blocks.scale, own["scale"].cpu()))
