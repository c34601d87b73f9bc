"""8-bit moments in torchao's block-wise format, padded so that any shard fits.

    codes   uint8 [blocks * 256]   index into a fixed table of 256 values (dynamic exponent, Dettmers et al. 2022)
    scale   fp32  [blocks]         largest magnitude of the block

Every rank pads to the largest shard. Codes and scales are therefore DTensors with one row per rank, which a state dict
stores exactly, but for the same number of ranks only, because the blocks follow the shards. Both moments take about
2 bytes per parameter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

BLOCK_ELEMS = 256
"""Elements of a block, which share one scale."""


def blocks_of(elems: int) -> int:
    """Return the number of blocks of an unpadded shard of `elems` elements."""
    return -(-elems // BLOCK_ELEMS)


def decode(codes: torch.Tensor, scale: torch.Tensor, *, signed: bool) -> torch.Tensor:
    """Decode uint8 codes [elems] and fp32 scales [blocks] into a new fp32 tensor [elems]."""
    whole = QuantizedMoment.zeros(codes.numel(), codes.numel(), signed=signed, device=codes.device)
    whole.put(codes, scale)
    return whole.load()


class KnownBlocks(NamedTuple):
    """Blocks of a saved 8-bit moment that can be restored exactly.

    Attributes:
        known: bool [blocks], whether a block is known as it was stored.
        codes: uint8 [elems], codes of the known blocks.
        scale: fp32 [blocks], scales of the known blocks.
    """

    known: torch.Tensor
    codes: torch.Tensor
    scale: torch.Tensor


def blank(elems: int, *, signed: bool, device: torch.device) -> Any:
    """Return a torchao state of `elems` zeros, where `elems` is a multiple of BLOCK_ELEMS."""
    # Imported here, because the import takes a second.
    from torchao.optim.subclass_8bit import OptimState8bit

    return OptimState8bit.zeros((elems,), signed, BLOCK_ELEMS, device)


@dataclass(frozen=True)
class QuantizedMoment:
    """Flat tensor of `elems` elements, stored in 8 bits and decoded to fp32."""

    state: Any
    elems: int

    @classmethod
    def zeros(cls, elems: int, padded_elems: int, *, signed: bool, device: torch.device) -> QuantizedMoment:
        """Create zeros for a shard of `elems`, stored as `padded_elems` in whole blocks; `signed` allows negatives."""
        blocks = max(1, -(-padded_elems // BLOCK_ELEMS))
        return cls(blank(blocks * BLOCK_ELEMS, signed=signed, device=device), elems)

    def place(self, codes: torch.Tensor, scale: torch.Tensor) -> None:
        """Use these tensors, with their current values, as storage of codes and scales."""
        self.state.codes, self.state.scale = codes, scale

    def like(self, codes: torch.Tensor, scale: torch.Tensor) -> QuantizedMoment:
        """Return a moment of the same format that is stored in these tensors, with their current values."""
        return QuantizedMoment(type(self.state)(codes, scale, self.state.qmap, self.state.signed), self.elems)

    def clear(self) -> None:
        """Set all values to zero."""
        self.state.codes.zero_()
        self.state.scale.zero_()

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """Stored tensors `codes` and `scale`, padded."""
        return {"codes": self.state.codes, "scale": self.state.scale}

    def load(self) -> torch.Tensor:
        """Decode into a new fp32 tensor [elems]."""
        decoded: torch.Tensor = self.state.dequantize()
        return decoded[: self.elems].clone()

    def store(self, value: torch.Tensor) -> None:
        """Encode an fp32 tensor [elems]; the padding is zero."""
        padded = torch.zeros(self.state.codes.numel(), device=value.device)
        padded[: self.elems] = value
        self.state.copy_(padded)

    def export_state(self) -> dict[str, torch.Tensor]:
        """Return views of the stored `codes` and `scale` without padding."""
        blocks = blocks_of(self.elems)
        return {"codes": self.state.codes[: self.elems], "scale": self.state.scale[:blocks]}

    def put(self, codes: torch.Tensor, scale: torch.Tensor) -> None:
        """Store unpadded codes and scales that were exported from a shard with the same first element."""
        self.clear()
        self.state.codes[: self.elems] = codes
        self.state.scale[: scale.numel()] = scale

    def import_state(self, value: torch.Tensor, blocks: KnownBlocks | None) -> None:
        """Encode `value`, but copy known blocks exactly, because encoding is not the inverse of decoding."""
        self.store(value)
        if blocks is not None:
            known = blocks.known.repeat_interleave(BLOCK_ELEMS)[: self.elems]
            own = self.export_state()
            own["codes"].copy_(torch.where(known, blocks.codes, own["codes"].cpu()))
            own["scale"].copy_(torch.where(blocks.known, blocks.scale, own["scale"].cpu()))
