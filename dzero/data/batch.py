"""Microbatches of token ids, as a loss takes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

IGNORED = -100
"""Target of a token that does not count, as in `torch.nn.functional.cross_entropy`."""


class Batch(NamedTuple):
    """One microbatch of a rank: int64 tensors [sequences, tokens].

    Attributes:
        tokens: Inputs of the model.
        targets: The token that follows each input, or `IGNORED` where it does not count.
        positions: Position of each token in its document, where a sequence holds several. A document begins at each 0.
            None: every sequence is one document.
    """

    tokens: Tensor
    targets: Tensor
    positions: Tensor | None = None

    def map(self, change: Callable[[Tensor], Tensor]) -> Batch:
        """Return the microbatch with `change` made to each of its tensors."""
        positions = None if self.positions is None else change(self.positions)
        return Batch(change(self.tokens), change(self.targets), positions)
