"""Sums of squares of many gradients on CUDA: one copy to the device and two launches for all of them.

Addresses of gradients are new in each step; lengths, and chunks that follow from them, are kept. All of it travels in
one copy, as a chunk takes 8 bytes of the table and 2^20 elements of memory. The host waits for the device only where
it is more than `staging.RING` calls of one table ahead, so at most two steps. The bits are those of
`host_kernels.sum_squares`; `sums_triton.py` says how.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch

from dzero.optim.column_upload import ColumnUpload
from dzero.optim.cpu_kernels import CHUNK_ELEMS, LANES
from dzero.optim.cuda_kernels import NAMES, kernels
from dzero.optim.update_table import chunks_of
from dzero.utils.numba_views import Array

SUMS = "dzero.optim.sums_triton"
"""The module that is the kernels' source."""
GROUP = 32
"""Lanes that one program sums: one per thread of a warp, so that a chunk has as many programs as possible."""
ROWS = 64
"""Elements of a lane that a thread reads ahead: at 16 cycles per addition, 64 hide 1000 cycles of latency."""
BLOCK_CHUNKS = 128
"""Chunks of a gradient whose lanes one program adds at once, each in one thread."""
TOTAL_ROWS = 16
"""Partial sums that a thread reads ahead."""
KEPT = 8
"""Tables that a `CudaSums` keeps. A unit asks for all its gradients in each step, and seldom for a few of them."""


class SumsTable:
    """Gradients of certain lengths, wherever they lie, and the launches that sum their squares.

    Args:
        sizes: The lengths of the gradients, in elements.
        dtype: The dtype of all gradients: fp32, bf16 or fp16.
        device: Where the gradients lie: a GPU, or a CPU whose kernels Triton interprets.
        chunk_elems: The length of a chunk; other lengths than the default give other sums.

    Raises:
        ValueError: There is no kernel for the dtype.
        ModuleNotFoundError: Triton cannot be imported.
    """

    def __init__(
        self, sizes: Sequence[int], dtype: torch.dtype, device: torch.device, chunk_elems: int = CHUNK_ELEMS
    ) -> None:
        if dtype not in NAMES:
            raise ValueError(f"no kernel for sums of gradients in {dtype}: have them in {', '.join(map(str, NAMES))}")
        self._dtype, self._device, self._chunk_elems = NAMES[dtype], device, chunk_elems
        self._source = kernels(SUMS)
        lengths = np.array(sizes, np.int64)
        self._columns = _columns(lengths, chunk_elems)
        self._grads, self._chunks = len(lengths), len(self._columns[-1])
        self._staging = ColumnUpload(len(lengths) + sum(-(-column.nbytes // 8) for column in self._columns), device)

    def sum_squares(self, addresses: Array) -> torch.Tensor:
        """Enqueue the launches on the current stream, and return the sums, fp64 [grads], on the device.

        The gradients' memory must not be given away or written before the stream has come to the end of the launches.

        Args:
            addresses: int64 [grads], of contiguous gradients with the dtype and lengths that the table was told.
        """
        sums = torch.empty(self._grads, dtype=torch.float64, device=self._device)
        if not self._chunks:
            return sums.zero_()
        with torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext():
            partials = torch.empty((LANES + 1) * self._chunks, dtype=torch.float64, device=self._device)
            table = self._staging.send(addresses, *self._columns)
            self._launch(table, partials, sums)
        return sums

    def _launch(self, table: torch.Tensor, partials: torch.Tensor, sums: torch.Tensor) -> None:
        options: dict[str, Any] = self._source.OPTIONS
        self._source.lane_sums_kernel[(self._chunks * (LANES // GROUP),)](
            table,
            partials,
            self._grads,
            self._chunks,
            DTYPE=self._dtype,
            CHUNK=self._chunk_elems,
            LANES=LANES,
            GROUP=GROUP,
            ROWS=ROWS,
            num_warps=1,
            **options,
        )
        self._source.totals_kernel[(self._grads,)](
            table,
            partials,
            sums,
            self._grads,
            self._chunks,
            LANES=LANES,
            BLOCK=BLOCK_CHUNKS,
            ROWS=TOTAL_ROWS,
            num_warps=4,
            **options,
        )


class CudaSums:
    """The tables of those gradients of one owner that were summed last; `KEPT` of them, each for other lengths."""

    def __init__(self) -> None:
        self._tables: dict[tuple[object, ...], SumsTable] = {}

    def sum_squares(self, grads: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return each one's sum of squares, fp64 [len(grads)], on their device, without waiting for it.

        Args:
            grads: At least one, contiguous, of one dtype (fp32, bf16 or fp16) and on one GPU. Their memory must not be
                given away or written before the current stream has come to the end of what is enqueued here.
        """
        sizes = tuple(grad.numel() for grad in grads)
        key = (sizes, grads[0].dtype, grads[0].device)
        table = self._tables.pop(key, None) or SumsTable(*key)
        self._tables[key] = table  # the last of the dict is the one used last
        if len(self._tables) > KEPT:
            del self._tables[next(iter(self._tables))]
        return table.sum_squares(np.array([grad.data_ptr() for grad in grads], np.int64))


def _columns(sizes: Array, chunk_elems: int) -> tuple[Array, Array, Array]:
    """Return lengths and first chunks of gradients, int64 [grads] and [grads + 1], and chunks, int32 [chunks, 2]."""
    firsts = np.concatenate([[0], np.cumsum(-(-sizes // chunk_elems))])
    return sizes, firsts, chunks_of(sizes, range(len(sizes)), chunk_elems)
