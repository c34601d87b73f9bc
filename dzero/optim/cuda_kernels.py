"""The AdamW update on CUDA: one launch for each way of storing that occurs, one host-to-device copy for all of them.

    what                                         where it lives                              written
    addresses of states, lengths, chunks         `CudaTable`, on the device                once
    gradient addresses, seeds, coefficients      a pinned buffer, then one on the device     every step, in one copy

The kernel (`adamw_triton.py`) has the bits of `rules.adamw` and of the CPU kernels. Preparing a step works on whole
columns: nothing runs once per parameter. Triton is imported when the first table on a GPU is made, because CPU builds
of torch come without it; therefore the kernel's source is the one module of dzero that is imported by its name.

Note: when the pinned buffer may be written again. When `copy_` from pinned memory returns, the copy is only enqueued,
and the host may run several steps ahead of the device. If it wrote step t + 1 into the buffer of step t at once, the
device might read coefficients of t + 1 in step t, without an error. So there are `RING` buffers, each with the event
that was recorded behind its last copy, and the host waits for that event before it writes the buffer again. It waits
only when it is `RING` steps ahead. The buffer on the device needs no ring: its stream runs the launches that read
step t before the copy of step t + 1.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from contextlib import nullcontext
from functools import cache
from typing import Any

import numpy as np
import torch

from dzero.host import Array
from dzero.optim.update_table import States, Variant, chunks_by_variant, states_table

BLOCK_ELEMS = 1024
"""Elements that one program updates: 8 per thread of 4 warps, so 16 bytes of bf16 in one access, of fp32 in two.

About 120 registers per thread then hold the chunk without spilling, and an H100's multiprocessor keeps 4 programs, of
which some fetch their addresses while others stream. 16 elements per thread need 240 registers for the same bytes in
flight. The chunk table has 8 bytes per 1024 elements."""
RING = 2
"""Pinned buffers that take turns."""
COEFFICIENTS = 9
"""Values of one `rules.Coefficients`, in their order."""
NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
"""The kernel's names for dtypes of gradients and working copies."""


class CudaTable:
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

    def __init__(self, states: Sequence[States], grad_dtypes: Sequence[torch.dtype]) -> None:
        devices = {tensor.device for each in states for tensor in (each.work, each.m, each.v)}
        if len(devices) > 1:
            raise ValueError(f"states are on {sorted(map(str, devices))}: make one table for each device")
        self.device = next(iter(devices), torch.device("cpu"))
        if self.device.type == "cuda":
            _source()
        self.states, self.params = list(states), len(states)
        variants = [Variant.of(each, grad) for each, grad in zip(states, grad_dtypes, strict=True)]
        table = states_table(states)
        self._table = torch.from_numpy(table).to(self.device)
        chunks = chunks_by_variant(variants, table[:, 5], BLOCK_ELEMS)
        self._chunks = {kind: torch.from_numpy(each).to(self.device) for kind, each in chunks.items()}
        self._staging = _Staging(3 * self.params + (COEFFICIENTS * self.params + 1) // 2, self.device)

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
            dynamic = self._staging.send(grads, seeds, rows, coefficients)
            for variant, chunks in self._chunks.items():
                _launch(variant, self._table, chunks, dynamic, self.params)


class _Staging:
    """The way of a step's columns to the device: `RING` pinned buffers of `elems` int64, and one on the device."""

    def __init__(self, elems: int, device: torch.device) -> None:
        pinned = device.type == "cuda"
        self._hosts = [torch.empty(elems, dtype=torch.int64, pin_memory=pinned) for _ in range(RING)]
        self._arrays = [host.numpy() for host in self._hosts]
        self._copied: list[Any] = [None] * RING  # the event behind each buffer's last copy
        self._device = torch.empty(elems, dtype=torch.int64, device=device)
        self._stream: torch.cuda.Stream | None = None
        self._turn = 0

    def send(self, grads: Array, seeds: Array, rows: Array, coefficients: Array) -> torch.Tensor:
        """Enqueue the copy of one step, and return the device's buffer."""
        self._turn = (self._turn + 1) % RING
        host, copied = self._hosts[self._turn], self._copied[self._turn]
        if copied is not None:
            copied.synchronize()
        params, array = len(grads), self._arrays[self._turn]
        array[:params], array[params : 2 * params], array[2 * params : 3 * params] = grads, seeds, rows
        array[3 * params :].view(np.float32)[: coefficients.size] = coefficients.reshape(-1)
        used = 3 * params + (coefficients.size + 1) // 2
        self._follow_stream()
        self._copied[self._turn] = _enqueue_copy(self._device[:used], host[:used])
        return self._device

    def _follow_stream(self) -> None:
        """Let a stream that takes over wait for the launches that read the device's buffer on the stream before."""
        if self._device.is_cuda:
            stream = torch.cuda.current_stream(self._device.device)
            if self._stream is not None and self._stream != stream:
                stream.wait_stream(self._stream)
            self._stream = stream


def _enqueue_copy(target: torch.Tensor, source: torch.Tensor) -> torch.cuda.Event | None:
    """Copy without waiting; return the event that tells when `source` has been read, None if it has been."""
    target.copy_(source, non_blocking=True)
    return torch.cuda.current_stream(target.device).record_event() if target.is_cuda else None


def _launch(variant: Variant, table: torch.Tensor, chunks: torch.Tensor, dynamic: torch.Tensor, params: int) -> None:
    """Start the kernel on the current stream, one program for each row of `chunks`."""
    source = _source()
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
def _source() -> Any:
    """Import the kernel's source, and triton with it."""
    try:
        return importlib.import_module("dzero.optim.adamw_triton")
    except ImportError as error:
        raise ModuleNotFoundError(
            f"AdamW on CUDA needs triton, which cannot be imported ({error}): CUDA builds of torch bring it, "
            "or install the version that your torch names with `pip install triton`"
        ) from error
