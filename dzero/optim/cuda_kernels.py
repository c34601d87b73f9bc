"""The AdamW update on CUDA: one launch for each way of storing that occurs, one host-to-device copy for all of them.

    what                                         where it lives                              written
    addresses of states, lengths, chunks         `UpdateTable`, on the device                once
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
import zlib
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import numpy as np
import torch

from dzero.host import Array

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


class States(Protocol):
    """One parameter's local states on one device, flat [n] and contiguous, as `update.ParamStates` has them.

    work: fp32, bf16 or fp16. master: fp32, `work` itself for an fp32 parameter, None beside a remainder. remainder:
    int16, or None. m, v: both fp32 or both bf16. first: global flat index of element 0. follows: elements of `work`
    that were edited since the last update are the master's new values.
    """

    @property
    def work(self) -> torch.Tensor: ...
    @property
    def master(self) -> torch.Tensor | None: ...
    @property
    def remainder(self) -> torch.Tensor | None: ...
    @property
    def m(self) -> torch.Tensor: ...
    @property
    def v(self) -> torch.Tensor: ...
    @property
    def first(self) -> int: ...
    @property
    def follows(self) -> bool: ...


@dataclass(frozen=True)
class Variant:
    """One way of storing a parameter, for which the kernel is compiled.

    master: "param" (the fp32 working copy is the master), "fp32", or "remainder".
    """

    grad: torch.dtype
    work: torch.dtype
    master: str
    moments_bf16: bool
    follows: bool

    @classmethod
    def of(cls, states: States, grad: torch.dtype) -> Variant:
        """Return the variant of a parameter with gradients in dtype `grad`.

        Raises:
            ValueError: The kernel has no such variant, or the states are not flat, contiguous and of one length.
        """
        work, master, remainder = states.work, states.master, states.remainder
        kind = "remainder" if master is None else "param" if work.dtype == torch.float32 else "fp32"
        held = [each for each in (work, master, remainder, states.m, states.v) if each is not None]
        dtypes = [str(each.dtype).removeprefix("torch.") for each in held]
        if any(each.shape != (work.numel(),) or not each.is_contiguous() for each in held):
            shapes = [tuple(each.shape) for each in held]
            raise ValueError(f"states have shapes {shapes}: make them flat, contiguous and of one length")
        stored = {
            "param": remainder is None and master is not None and master.data_ptr() == work.data_ptr(),
            "fp32": remainder is None and master is not None and master.dtype == torch.float32,
            "remainder": remainder is not None and remainder.dtype == torch.int16 and work.dtype == torch.bfloat16,
        }[kind]
        moments = states.m.dtype == states.v.dtype and states.m.dtype in (torch.float32, torch.bfloat16)
        if not (stored and moments and work.dtype in NAMES and grad in NAMES):
            raise ValueError(
                f"no CUDA kernel for gradients in {grad} and states in {dtypes}: use an fp32 parameter that is its own "
                "master, an fp32 master beside bf16 or fp16, or an int16 remainder beside bf16; and both moments in "
                "fp32 or both in bf16"
            )
        return cls(grad, work.dtype, kind, states.m.dtype == torch.bfloat16, states.follows and kind == "fp32")


class UpdateTable:
    """Parameters whose states stay where they are, and the launches that update them.

    The table holds the states' tensors, so their addresses stay valid. Make a new one when a parameter's storage is
    replaced. All launches go to the current stream.

    Args:
        states: The parameters' states, all on one device; `update` takes its columns in this order.
        grad_dtypes: The dtype of each parameter's gradient.

    Raises:
        ValueError: States are on several devices, or stored in a way for which there is no kernel.
        ModuleNotFoundError: The states are on a GPU, and triton cannot be imported.
    """

    def __init__(self, states: Sequence[States], grad_dtypes: Sequence[torch.dtype]) -> None:
        columns = [(each.work, each.master, each.remainder, each.m, each.v) for each in states]
        self._held = [tensor for row in columns for tensor in row if tensor is not None]
        devices = {tensor.device for tensor in self._held}
        if len(devices) > 1:
            raise ValueError(f"states are on {sorted(map(str, devices))}: make one table for each device")
        self.device = next(iter(devices), torch.device("cpu"))
        if self.device.type == "cuda":
            _source()
        self.params = len(states)
        variants = [Variant.of(each, grad) for each, grad in zip(states, grad_dtypes, strict=True)]
        elems = np.array([each.work.numel() for each in states], np.int64)
        table = [
            [*(0 if tensor is None else tensor.data_ptr() for tensor in row), each.work.numel(), each.first]
            for row, each in zip(columns, states, strict=True)
        ]
        self._table = torch.tensor(table, dtype=torch.int64).view(-1, 7).to(self.device)
        alike = {kind: [i for i, each in enumerate(variants) if each == kind] for kind in dict.fromkeys(variants)}
        chunks = {kind: _chunks(elems, members) for kind, members in alike.items()}
        self._chunks = {kind: torch.from_numpy(each).to(self.device) for kind, each in chunks.items() if len(each)}
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


def _chunks(elems: Array, params: list[int]) -> Array:
    """Return int32 [chunks, 2]: parameter and number of each chunk of those `params`, `elems` [all] long."""
    counts = -(-elems[params] // BLOCK_ELEMS)
    before = np.cumsum(counts) - counts
    numbers = np.arange(counts.sum()) - np.repeat(before, counts)
    return np.stack([np.repeat(params, counts), numbers], axis=1).astype(np.int32)


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


class NoiseSeeds:
    """`rules.noise_seed` of many parameters at once.

    CRC-32 is affine: that of `prefix + name` is that of `name`, xor a word that depends on the prefix and on the length
    of the name alone. So a step costs one CRC per length that occurs, and an xor of columns.

    Args:
        names: The parameters' names.
    """

    def __init__(self, names: Sequence[str]) -> None:
        encoded = [name.encode() for name in names]
        self._alone = np.array([zlib.crc32(name) for name in encoded], np.int64)
        self._lengths, self._which = np.unique([len(name) for name in encoded], return_inverse=True)

    def at(self, steps: Array) -> Array:
        """Return int64 [names]: the seeds of updates number `steps`, int [names]."""
        numbers, when = np.unique(steps, return_inverse=True)
        zeros = [bytes(int(length)) for length in self._lengths]
        prefixes = [zlib.crc32(f"{number}:".encode()) for number in numbers]
        words = [[zlib.crc32(zero, prefix) ^ zlib.crc32(zero) for zero in zeros] for prefix in prefixes]
        return self._alone ^ np.array(words, np.int64).reshape(len(numbers), len(zeros))[when, self._which]
