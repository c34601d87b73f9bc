"""The AdamW update on CUDA: one launch for each way of storing that occurs, one host-to-device copy for all of them.

    what                                         where it lives                              written
    addresses of states, lengths, chunks         `CudaUpdateTable`, on the device                once
    gradient addresses, seeds, coefficients      `ColumnUpload`, pinned and on the device      every step, in one copy

The kernel (`adamw_triton.py`) has the bits of `rules.adamw` and of the CPU kernels. Preparing a step works on whole
columns: nothing runs once per parameter. Triton is imported when the first table on a GPU is made, because CPU builds
of torch come without it; therefore the sources of kernels are the modules of dzero that are imported by their names.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from contextlib import nullcontext
from functools import cache
from typing import Any

import numpy as np
import torch

from dzero.optim.column_upload import ColumnUpload
from dzero.optim.update_table import LocalStates, Variant, chunks_by_variant, states_table
from dzero.utils.numba_views import Array

BLOCK_ELEMS = 1024
"""Elements that one program updates: 8 per thread of 4 warps, so 16 bytes of bf16 in one access, of fp32 in two.

About 120 registers per thread then hold the chunk without spilling, and an H100's multiprocessor keeps 4 programs, of
which some fetch their addresses while others stream. 16 elements per thread need 240 registers for the same bytes in
flight. The chunk table has 8 bytes per 1024 elements."""
COEFFICIENTS = 9
"""Values of one `rules.Coefficients`, in their order."""
ADAMW = "dzero.optim.adamw_triton"
"""The module that is the kernel's source."""
NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
"""The kernel's names for dtypes of gradients and working copies."""


class CudaUpdateTable:
    """Parameters whose states stay where they are, and the launches that update them.

    The table holds the states, so their addresses stay valid. Make a new one when a parameter's storage is
    replaced. All launches go to the current stream.

    Args:
        states: The parameters' states, all on one device; `update` takes its columns in this order.
        grad_dtypes: The dtype of each parameter's gradient.

    Raises:
        ValueError: States are on several devices, or stored in a way for which there is no kernel.
        ModuleNotFoundError: The states are on a GPU, and triton cannot be imported.
    """

    def __init__(self, states: Sequence[LocalStates], grad_dtypes: Sequence[torch.dtype]) -> None:
        devices = {tensor.device for each in states for tensor in (each.work, each.m, each.v)}
        if len(devices) > 1:
            raise ValueError(f"states are on {sorted(map(str, devices))}: make one table for each device")
        self.device = next(iter(devices), torch.device("cpu"))
        if self.device.type == "cuda":
            kernels(ADAMW)
        self.states, self.params = list(states), len(states)
        variants = [Variant.of(each, grad) for each, grad in zip(states, grad_dtypes, strict=True)]
        table = states_table(states)
        self._table = torch.from_numpy(table).to(self.device)
        chunks = chunks_by_variant(variants, table[:, 5], BLOCK_ELEMS)
        self._chunks = {kind: torch.from_numpy(each).to(self.device) for kind, each in chunks.items()}
        self._staging = ColumnUpload(3 * self.params + (COEFFICIENTS * self.params + 1) // 2, self.device)

    @property
    def launches(self) -> int:
        """The number of launches of one `update`."""
        return len(self._chunks)

    def update(self, grads: Array, seeds: Array, rows: Array, coefficients: Array) -> None:
        """Enqueue one step on the current stream: one copy to the device, and one launch for each variant.

        The gradients' memory must not be given away or written before the stream has come to the end of the launches.

        Args:
            grads: int64 [params], the address of each gradient: contiguous, of the dtype that the table was told, and
                as long as the states. 0 leaves the parameter as it is.
            seeds: int64 [params], `rules.noise_seed` of each; used for bf16 moments only.
            rows: int64 [params], the row of `coefficients` for each parameter.
            coefficients: fp32 [rows, 9], each row a `rules.Coefficients`.

        Raises:
            ValueError: A column has not one value per parameter, or names a row that is not there.
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
        if len(coefficients) > self.params:  # the buffer has room for as many as can be in use
            used, rows = np.unique(rows, return_inverse=True)
            coefficients = coefficients[used]
        with torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext():
            whole = [column.astype(np.int64, copy=False) for column in (grads, seeds, rows)]
            dynamic = self._staging.send(*whole, coefficients.astype(np.float32, copy=False))
            for variant, chunks in self._chunks.items():
                _launch(variant, self._table, chunks, dynamic, self.params)


def _launch(variant: Variant, table: torch.Tensor, chunks: torch.Tensor, dynamic: torch.Tensor, params: int) -> None:
    """Start the kernel on the current stream, one program for each row of `chunks`."""
    source = kernels(ADAMW)
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


@cache
def kernels(module: str) -> Any:
    """Import the source of kernels, and triton with it.

    Raises:
        ModuleNotFoundError: Triton cannot be imported.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ModuleNotFoundError(
            f"kernels on CUDA need triton, which cannot be imported ({error}): CUDA builds of torch bring it, "
            "or install the version that your torch names with `pip install triton`"
        ) from error
