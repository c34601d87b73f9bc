"""Tables by which one kernel call updates many parameters.

    states    int64 [params, 7]   addresses of work, master, remainder, m, v (0: none), then elems and first
    targets   int64 [params, 5]   addresses to which an update out of place writes them (0: it is in place)
    chunks    int32 [chunks, 2]   a parameter, and the number of a chunk of it
    seeds     int64 [params]      seeds of the rounding noise, for bf16 moments

The first three are built once and are valid as long as the states keep their addresses. The kernels that read them are
`cpu_kernels.adamw_kernel` and, on CUDA, `adamw_triton.adamw_kernel`.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from dzero.utils.numba_views import Array

GRAD_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes that kernels support for gradients and working copies."""


class LocalStates(Protocol):
    """Local states of one parameter on one device, flat [n] and contiguous, such as `flat_update.ParamStates`."""

    @property
    def work(self) -> torch.Tensor:
        """Working copy: fp32, bf16 or fp16."""
        ...

    @property
    def master(self) -> torch.Tensor | None:
        """Master in fp32, which is `work` itself for an fp32 parameter; None beside a remainder."""
        ...

    @property
    def remainder(self) -> torch.Tensor | None:
        """Remainder in int16, or None."""
        ...

    @property
    def m(self) -> torch.Tensor:
        """First moment: fp32 or bf16."""
        ...

    @property
    def v(self) -> torch.Tensor:
        """Second moment, of the dtype of `m`."""
        ...

    @property
    def first(self) -> int:
        """Global flat index of element 0."""
        ...

    @property
    def follows(self) -> bool:
        """Whether elements of `work` that were edited since the last update replace the master's."""
        ...


@dataclass(frozen=True)
class Variant:
    """Combination of dtypes and storage of a parameter, for which a kernel is compiled.

    Attributes:
        master: "param" (the fp32 working copy is the master), "fp32" or "remainder".
        follows: Whether edited elements of the working copy replace the master's before the update.
    """

    grad: torch.dtype
    work: torch.dtype
    master: str
    moments_bf16: bool
    follows: bool

    @classmethod
    def of(cls, states: LocalStates, grad: torch.dtype) -> Variant:
        """Return the variant of a parameter whose gradient has dtype `grad`.

        Raises:
            ValueError: No kernel supports the dtypes, or the states are not flat, contiguous and of one length.
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
        if not (stored and moments and work.dtype in GRAD_DTYPES and grad in GRAD_DTYPES):
            raise ValueError(
                f"no kernel for gradients in {grad} and states in {dtypes}: use an fp32 parameter that is its own "
                "master, an fp32 master beside bf16 or fp16, or an int16 remainder beside bf16; and both moments in "
                "fp32 or both in bf16"
            )
        return cls(grad, work.dtype, kind, states.m.dtype == torch.bfloat16, states.follows and kind == "fp32")


def states_table(states: Sequence[LocalStates]) -> Array:
    """Return the table of `states`, int64 [params, 7]; the caller must keep their tensors alive."""
    rows = [
        (
            *(0 if held is None else held.data_ptr() for held in (each.work, each.master, each.remainder)),
            each.m.data_ptr(),
            each.v.data_ptr(),
            each.work.numel(),
            each.first,
        )
        for each in states
    ]
    return np.array(rows, np.int64).reshape(-1, 7)


def targets_table(targets: Sequence[Sequence[torch.Tensor | None]]) -> Array:
    """Return the table of `targets`, int64 [params, 5]; the caller must keep the tensors alive."""
    rows = [[0 if each is None else each.data_ptr() for each in of_param] for of_param in targets]
    return np.array(rows, np.int64).reshape(-1, 5)


def chunks_by_variant(variants: Sequence[Variant], elems: Array, chunk_elems: int) -> dict[Variant, Array]:
    """Return the chunk table of each variant that has elements; `elems` are the parameters' lengths, int64 [params]."""
    alike = {kind: [i for i, each in enumerate(variants) if each == kind] for kind in dict.fromkeys(variants)}
    chunks = {kind: chunks_of(elems, members, chunk_elems) for kind, members in alike.items()}
    return {kind: each for kind, each in chunks.items() if len(each)}


def chunks_of(elems: Array, params: Sequence[int], chunk_elems: int) -> Array:
    """Return the chunk table, int32 [chunks, 2], of the parameters `params` (indices into `elems`)."""
    counts = -(-elems[params] // chunk_elems)
    before = np.cumsum(counts) - counts
    numbers = np.arange(counts.sum()) - np.repeat(before, counts)
    return np.stack([np.repeat(params, counts), numbers], axis=1).astype(np.int32)


class NoiseSeeds:
    """Vectorized `adamw_math.noise_seed` of many parameters.

    CRC-32 is affine: the CRC of `prefix + name` is the CRC of `name`, xor a word that depends only on the prefix and on
    the length of the name. A step therefore costs one CRC per distinct length, and an xor of columns.

    Args:
        names: Names of the parameters.
    """

    def __init__(self, names: Sequence[str]) -> None:
        encoded = [name.encode() for name in names]
        self._alone = np.array([zlib.crc32(name) for name in encoded], np.int64)
        self._lengths, self._which = np.unique([len(name) for name in encoded], return_inverse=True)

    def at(self, steps: Array) -> Array:
        """Return the seeds, int64 [names], of the updates with numbers `steps`, int [names]."""
        numbers, when = np.unique(steps, return_inverse=True)
        zeros = [bytes(int(length)) for length in self._lengths]
        prefixes = [zlib.crc32(f"{number}:".encode()) for number in numbers]
        words = [[zlib.crc32(zero, prefix) ^ zlib.crc32(zero) for zero in zeros] for prefix in prefixes]
        return self._alone ^ np.array(words, np.int64).reshape(len(numbers), len(zeros))[when, self._which]
