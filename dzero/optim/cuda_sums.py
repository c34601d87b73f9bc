"""Sums of squares of many gradients on CUDA, by one copy to the device and two launches for all of them.

The addresses of gradients are new in each step, whereas their lengths and chunks are cached. All of these are uploaded
in one copy, because a chunk of 2^20 elements takes only 8 bytes of the table. The host waits for the device only when
it is more than `column_upload.RING` calls of one table ahead, so it runs up to two steps ahead. The bits are those of
`cpu_kernels.sum_squares`; `optim/sums_triton.py` explains why.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch

from dzero.optim.column_upload import ColumnUpload
from dzero.optim.cpu_kernels import CHUNK_ELEMS, LANES
from dzero.optim.cuda_kernels import NAMES
from dzero.optim.update_table import chunks_of
from dzero.utils.numba_views import Array
from dzero.utils.triton_modules import triton_module

SUMS = "dzero.optim.sums_triton"
"""Module with the source of the kernels."""
GROUP = 32
"""Lanes per program: one per thread of a warp, so that a chunk has as many programs as possible."""
ROWS = 64
"""Elements of a lane that a thread reads ahead. At 16 cycles per addition, 64 elements hide 1000 cycles of latency."""
BLOCK_CHUNKS = 128
"""Chunks whose lanes one program adds concurrently, one chunk per thread."""
TOTAL_ROWS = 16
"""Partial sums that a thread reads ahead."""
KEPT = 8
"""Tables that a `CudaSums` caches. A unit sums all its gradients in each step, and rarely only some of them."""


class SumsTable:
    """Table of gradients with fixed lengths and any addresses, with the launches that sum their squares.

    Args:
        sizes: Lengths of the gradients, in elements.
        dtype: Dtype of all gradients: fp32, bf16 or fp16.
        device: Device of the gradients: a GPU, or the CPU under Triton's interpreter.
        chunk_elems: Elements of a chunk. Other values than the default change the bits of the sums.

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
        self._source = triton_module(SUMS)
        lengths = np.array(sizes, np.int64)
        self._columns = _columns(lengths, chunk_elems)
        self._grads, self._chunks = len(lengths), len(self._columns[-1])
        self._staging = ColumnUpload(len(lengths) + sum(-(-column.nbytes // 8) for column in self._columns), device)

    def sum_squares(self, addresses: Array) -> torch.Tensor:
        """Enqueue the launches on the current stream, and return the sums, fp64 [grads], on the device.

        The memory of the gradients must not be freed or written until the stream has completed the launches.

        Args:
            addresses: int64 [grads], addresses of contiguous gradients with the dtype and lengths of the table.
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
    """Cache of the `KEPT` most recently used tables of one unit, one per combination of lengths and dtype."""

    def __init__(self) -> None:
        self._tables: dict[tuple[object, ...], SumsTable] = {}

    def sum_squares(self, grads: Sequence[torch.Tensor]) -> torch.Tensor:
        """Enqueue the sum of squares of each gradient, and return the sums, fp64 [len(grads)], on the device.

        Args:
            grads: One or more contiguous tensors of one dtype (fp32, bf16 or fp16) on one GPU. Their memory must not be
                freed or written until the current stream has completed the launches.
        """
        sizes = tuple(grad.numel() for grad in grads)
        key = (sizes, grads[0].dtype, grads[0].device)
        table = self._tables.pop(key, None) or SumsTable(*key)
        self._tables[key] = table  # the dict is ordered from least to most recently used
        if len(self._tables) > KEPT:
            del self._tables[next(iter(self._tables))]
        return table.sum_squares(np.array([grad.data_ptr() for grad in grads], np.int64))


def _columns(sizes: Array, chunk_elems: int) -> tuple[Array, Array, Array]:
    """Return lengths and first chunks of gradients, int64 [grads] and [grads + 1], and chunks, int32 [chunks, 2]."""
    firsts = np.concatenate([[0], np.cumsum(-(-sizes // chunk_elems))])
    return sizes, firsts, chunks_of(sizes, range(len(sizes)), chunk_elems)
