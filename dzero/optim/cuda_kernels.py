"""AdamW update on CUDA: one kernel launch per storage variant, and one host-to-device copy per step.

    data                                         stored in                                  written
    addresses of states, lengths, chunks         `CudaUpdateTable`, on the device           once
    gradient addresses, seeds, coefficients      `ColumnUpload`, pinned and on the device   every step, in one copy

The kernel (`optim/adamw_triton.py`) gives the bits of `adamw_math.adamw` and of the CPU kernels. A step is prepared by
operations on whole columns, without a Python loop over parameters. CPU builds of torch do not include Triton, so it is
imported when the first table on a GPU is created. For this reason the kernel modules are imported by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import numpy as np
import torch

from dzero.optim.column_upload import ColumnUpload
from dzero.optim.update_table import LocalStates, Variant, chunks_by_variant, states_table
from dzero.utils.numba_views import Array
from dzero.utils.triton_modules import triton_module

BLOCK_ELEMS = 1024
"""Elements per program: 8 per thread of 4 warps. A thread reads them in one 16-byte access (bf16) or in two (fp32).

The chunk then fits into about 120 registers per thread without spilling. A multiprocessor of an H100 holds 4 such
programs: some load their addresses while others stream data. 16 elements per thread would take 240 registers for the
same bytes in flight. The chunk table has 8 bytes per 1024 elements."""
COEFFICIENTS = 9
"""Number of values of one `adamw_math.Coefficients`."""
ADAMW = "dzero.optim.adamw_triton"
"""Module with the source of the kernel."""
NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
"""Kernel names for the dtypes of gradients and working copies."""


class CudaUpdateTable:
    """Table of parameters whose states keep their addresses, with the launches that update them.

    The table holds references to the states, so their addresses stay valid. Create a new table when the storage of a
    state is replaced. All launches are enqueued on the current stream.

    Args:
        states: States of the parameters, all on one device. The columns of `update` have the same order.
        grad_dtypes: Dtype of each parameter's gradient.

    Raises:
        ValueError: The states are on several devices, or there is no kernel for their dtypes.
        ModuleNotFoundError: The states are on a GPU, and Triton cannot be imported.
    """

    def __init__(self, states: Sequence[LocalStates], grad_dtypes: Sequence[torch.dtype]) -> None:
        devices = {tensor.device for each in states for tensor in (each.work, each.m, each.v)}
        if len(devices) > 1:
            raise ValueError(f"states are on {sorted(map(str, devices))}: make one table for each device")
        self.device = next(iter(devices), torch.device("cpu"))
        if self.device.type == "cuda":
            triton_module(ADAMW)
        self.states, self.params = list(states), len(states)
        variants = [Variant.of(each, grad) for each, grad in zip(states, grad_dtypes, strict=True)]
        table = states_table(states)
        self._table = torch.from_numpy(table).to(self.device)
        chunks = chunks_by_variant(variants, table[:, 5], BLOCK_ELEMS)
        self._chunks = {kind: torch.from_numpy(each).to(self.device) for kind, each in chunks.items()}
        self._staging = ColumnUpload(3 * self.params + (COEFFICIENTS * self.params + 1) // 2, self.device)

    @property
    def launches(self) -> int:
        """Number of kernel launches of one `update`."""
        return len(self._chunks)

    def update(self, grads: Array, seeds: Array, rows: Array, coefficients: Array) -> None:
        """Enqueue one update on the current stream: one copy to the device, and one launch per variant.

        The memory of the gradients must not be freed or written until the stream has completed the launches.

        Args:
            grads: int64 [params], address of each gradient, which is contiguous, has the dtype given to the table, and
                is as long as the states. 0: the parameter is not updated.
            seeds: int64 [params], `adamw_math.noise_seed` of each parameter; used for bf16 moments only.
            rows: int64 [params], row of `coefficients` for each parameter.
            coefficients: fp32 [rows, 9], each row the values of one `adamw_math.Coefficients`.

        Raises:
            ValueError: A column does not have one value per parameter, or `rows` is out of range.
        """
        columns = (grads, seeds, rows)
        if any(column.shape != (self.params,) for column in columns):
            raise ValueError(f"columns have shapes {[c.shape for c in columns]}: give {self.params} values in each")
        if not self._chunks:
            return
        if coefficients.shape[1:] != (COEFFICIENTS,) or rows.min() < 0 or rows.max() >= len(coefficients):
            raise ValueError(
                f"rows {rows.min()} to {rows.max()} of coefficients of shape {coefficients.shape}: "
                f"give rows of {COEFFICIENTS} values, and indices of theirs"
            )
        if len(coefficients) > self.params:  # the upload buffer has space for one row per parameter
            used, rows = np.unique(rows, return_inverse=True)
            coefficients = coefficients[used]
        with torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext():
            whole = [column.astype(np.int64, copy=False) for column in (grads, seeds, rows)]
            dynamic = self._staging.send(*whole, coefficients.astype(np.float32, copy=False))
            for variant, chunks in self._chunks.items():
                _launch(variant, self._table, chunks, dynamic, self.params)


def _launch(variant: Variant, table: torch.Tensor, chunks: torch.Tensor, dynamic: torch.Tensor, params: int) -> None:
    """Launch the kernel on the current stream, one program per row of `chunks`."""
    source = triton_module(ADAMW)
    source.adamw_kernel[(len(chunks),)](
        table,
        chunks,
        dynamic,
        params,
        GRAD=NAMES[variant.grad],
        WORK=NAMES[variant.work],
        MASTER=variant.master,
        MOMENTS_BF16=variant.moments_bf16,
        FOLLOWS=variant.follows,
        BLOCK=BLOCK_ELEMS,
        **source.OPTIONS,
    )
