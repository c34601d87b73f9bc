"""The exact average on the CPU in one pass: widen, add in rank order, scale, round once.

The bits are those of the torch operations in comm/reduction.py, which make one pass each. Totals stay in a tile that
fits the L1 cache.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
import torch

from dzero.utils.numba_views import as_array, compiled, from_bf16, has_memory, to_bf16

TILE_ELEMS = 2048
DTYPES = (torch.float32, torch.bfloat16)


def average(output: torch.Tensor, mine: torch.Tensor, incoming: torch.Tensor, rank: int) -> None:
    """Compute output = round(sum over ranks r, in order, of the payload of r / ranks).

    Args:
        output: [n], of one of `DTYPES`.
        mine: Payload [n] of this rank, of one of `DTYPES`; may be `output` itself.
        incoming: Payloads [ranks, >= n] of the other ranks; row `rank` is not read.
        rank: This rank.
    """
    if not has_memory(output):
        return
    kernel = _kernel(wire_bf16=mine.dtype == torch.bfloat16, output_bf16=output.dtype == torch.bfloat16)
    kernel(as_array(output), as_array(mine), as_array(incoming), rank)


@cache
def _kernel(*, wire_bf16: bool, output_bf16: bool) -> Callable[..., None]:
    def kernel(output, mine, incoming, rank):  # type: ignore[no-untyped-def]
        """Average flat arrays tile by tile, so that the fp32 sums stay in the cache."""
        ranks = incoming.shape[0]
        scale = np.float32(1.0 / ranks)
        total = np.empty(TILE_ELEMS, np.float32)
        for start in range(0, output.size, TILE_ELEMS):
            size = min(TILE_ELEMS, output.size - start)
            for r in range(ranks):
                payload = (mine if r == rank else incoming[r])[start : start + size]
                if r == 0:
                    for i in range(size):
                        total[i] = from_bf16(payload[i]) if wire_bf16 else payload[i]
                else:
                    for i in range(size):
                        total[i] += from_bf16(payload[i]) if wire_bf16 else payload[i]
            into = output[start : start + size]
            for i in range(size):
                mean = total[i] * scale
                into[i] = to_bf16(mean) if output_bf16 else mean

    wire, into = ("uint16" if bf16 else "float32" for bf16 in (wire_bf16, output_bf16))
    return compiled(kernel, f"void({into}[::1], {wire}[::1], {wire}[:, ::1], int64)")
