"""AdamW updates of one rank's flat states, in chunks so that no temporary has a parameter's size.

    states           executed by                                             result
    CPU              `cpu_kernels.adamw_kernel`, calls per storage variant   the bits of `adamw_math.adamw`
    CPU, fp16        `step` on chunks, torch operations                      the same bits
    CUDA             `adamw_triton.adamw_kernel`, a launch per variant       the same bits
    without memory   nothing                                                 none: a simulation has no values

Updates are in place, except those on a CPU that may be undone: they write new states to `ParamStates.targets`. Tables
of the states' addresses are built once (`optim/update_table.py`). Each step adds the addresses of its gradients.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from operator import is_
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from dzero.optim import adamw_math, cpu_kernels
from dzero.optim.cuda_kernels import CudaUpdateTable
from dzero.optim.update_table import (
    LocalStates,
    NoiseSeeds,
    Variant,
    chunks_by_variant,
    states_table,
    targets_table,
)
from dzero.utils.numba_views import Array, has_memory
from dzero.zero.rounding import join, split, to_working


@dataclass
class ParamStates:
    """Local states of one parameter. All tensors are flat [n] and contiguous.

    Attributes:
        name: Name of the parameter, which seeds the rounding noise.
        first: Global flat index of element 0.
        work: Working copy: fp32, bf16 or fp16.
        master: fp32 master, which is `work` itself for an fp32 parameter. None beside a remainder.
        remainder: int16 remainder, or None.
        m: First moment: fp32 or bf16.
        v: Second moment, of the dtype of `m`. Empty if the update rule keeps one moment.
        follows: Whether forward reads `work`, so that elements edited there since the last update replace the master's.
        passing: Whether these states are temporary and exist for one update only.
        targets: Where an update out of place writes work, master, remainder, m and v; None for those that it updates
            in place.
        exchanged: Whether the states are where an update out of place has written them, and the targets where it found
            them.
    """

    name: str
    first: int
    work: torch.Tensor
    master: torch.Tensor | None
    remainder: torch.Tensor | None
    m: torch.Tensor
    v: torch.Tensor
    follows: bool = False
    passing: bool = False
    targets: tuple[torch.Tensor | None, ...] = (None,) * 5
    exchanged: bool = False

    def slice(self, start: int, length: int) -> ParamStates:
        """Return the states of elements [start, start + length) as views."""

        def cut(state: torch.Tensor | None) -> torch.Tensor | None:
            return None if state is None else state[start : start + length]

        m, v, work = (state[start : start + length] for state in (self.m, self.v, self.work))
        master, remainder, targets = cut(self.master), cut(self.remainder), tuple(map(cut, self.targets))
        return ParamStates(self.name, self.first + start, work, master, remainder, m, v, self.follows, True, targets)

    def copied(self) -> ParamStates:
        """Copy the states that have a target there, and return the states with these copies."""
        names = ("work", "master", "remainder", "m", "v")
        targets = {name: target for name, target in zip(names, self.targets, strict=True) if target is not None}
        copies: dict[str, Any] = {name: target.copy_(getattr(self, name)) for name, target in targets.items()}
        return replace(self, **copies, targets=(None,) * 5, passing=True)


class ParamUpdate(NamedTuple):
    """Update of one parameter: its states, gradient [n], coefficients, and number of the update."""

    states: ParamStates
    grad: torch.Tensor
    coefficients: adamw_math.Coefficients
    step: int

    def chunks(self, elems: int) -> Iterator[ParamUpdate]:
        """Yield the update in pieces of at most `elems` elements, or itself if one piece is enough."""
        if 0 < self.grad.numel() <= elems:
            yield self
            return
        for start in range(0, self.grad.numel(), elems):
            piece = self.grad[start : start + elems]
            yield ParamUpdate(self.states.slice(start, piece.numel()), piece, self.coefficients, self.step)


BeforePiece = Callable[[], bool]
"""Called before each few pieces of an update; returns whether to go on."""

Piece = TypeVar("Piece")
KEPT_TABLES = 1024
"""Maximum number of cached tables. A unit has two with overlap=backward, more if not all parameters get gradients."""


class AdamWUpdater:
    """Executor of AdamW updates, with a thread pool for CPU kernels and a cache of tables.

    Args:
        threads: Number of CPU threads. 1: CPU kernels run in the calling thread, unless `cores` are given.
        cores: Cores to which the threads are bound, one each. Empty: no binding.
    """

    def __init__(self, threads: int, cores: Sequence[int] = ()) -> None:
        self._workers = Workers(threads, cores)
        self._tables: dict[tuple[object, ...], _Kept] = {}

    def forget_tables(self) -> None:
        """Drop all tables, before the states get other addresses."""
        self._tables.clear()

    @torch.no_grad()
    def run(self, updates: Sequence[ParamUpdate], before_piece: BeforePiece | None = None) -> None:
        """Apply all updates, and return when they are complete (on CUDA: enqueued on the current stream).

        Args:
            updates: The updates.
            before_piece: Called before each few pieces of updates on the host, which are out of place then, and end
                early when it returns False. None: updates are in place.
        """
        alike: dict[tuple[str, torch.dtype], list[ParamUpdate]] = {}
        for update in updates:
            if has_memory(update.grad):
                alike.setdefault((update.grad.device.type, update.grad.dtype), []).append(update)
        for (device, _), some in alike.items():
            if device == "cpu" and (halves := [each for each in some if _is_fp16(each)]):
                pieces = [piece for update in halves for piece in update.chunks(cpu_kernels.CHUNK_ELEMS)]
                apply = partial(_apply_with_torch, apart=before_piece is not None)
                for at_once in self._workers.in_turn(pieces, before_piece):
                    self._workers.each(apply, at_once)
                some = [each for each in some if not _is_fp16(each)]
            if some:
                self._update(some, before_piece)

    def _update(self, updates: list[ParamUpdate], before_piece: BeforePiece | None) -> None:
        """Update parameters on one kind of device, with gradients of one dtype, through their table."""
        kept = self._kept(updates)
        numbers: dict[int, int] = {}
        rows = [numbers.setdefault(id(update.coefficients), len(numbers)) for update in updates]
        found = {id(update.coefficients): update.coefficients for update in updates}
        columns = (
            np.array([update.grad.data_ptr() for update in updates], np.int64),
            kept.seeds(updates),
            np.array(rows, np.int64),
            np.array([found[each].floats for each in numbers], np.float32),
        )
        if isinstance(kept.table, CpuUpdateTable):
            kept.table.update(*columns, before_piece)
        else:
            kept.table.update(*columns)

    def _kept(self, updates: list[ParamUpdate]) -> _Kept:
        """Return the table of these parameters, from the cache if their states are still the same objects."""
        first = updates[0].grad
        key = (first.device, first.dtype, updates[0].states.exchanged, *(update.states.name for update in updates))
        kept = self._tables.get(key)
        if kept is None or not all(map(is_, kept.states, (update.states for update in updates))):
            kept = _Kept([update.states for update in updates], first, self._workers)
            if len(self._tables) >= KEPT_TABLES:
                self._tables.pop(next(iter(self._tables)))
            if not any(states.passing for states in kept.states):
                self._tables[key] = kept
        return kept


class _Kept:
    """Cached table, with the noise seeds of its parameters and with its states, whose addresses must stay valid."""

    def __init__(self, states: list[ParamStates], grad: torch.Tensor, workers: Workers) -> None:
        self.states = states
        dtypes = [grad.dtype] * len(states)
        targets = [each.targets for each in states]
        self.table: CpuUpdateTable | CudaUpdateTable = (
            CudaUpdateTable(states, dtypes) if grad.is_cuda else CpuUpdateTable(states, dtypes, workers, targets)
        )
        noisy = any(each.m.dtype == torch.bfloat16 for each in states)
        self._seeds = NoiseSeeds([each.name for each in states]) if noisy else None

    def seeds(self, updates: list[ParamUpdate]) -> Array:
        """Return the seeds of the rounding noise of this step, int64 [params]."""
        if self._seeds is None:
            return np.zeros(len(updates), np.int64)
        return self._seeds.at(np.array([update.step for update in updates]))


PIECES = 4
"""Pieces of work per thread. Smaller pieces leave less to do for a thread that is late."""

ALONE_ELEMS = 1 << 16
"""Minimum elements per piece. Fewer elements are not worth another thread."""


class CpuUpdateTable:
    """Counterpart of `CudaUpdateTable` for CPU states except fp16: a kernel call per variant and range of chunks.

    Args:
        states: States of all parameters.
        grad_dtypes: Dtypes of their gradients.
        workers: Threads that run the kernels.
        targets: Where the states of each parameter can be written out of place, as in `ParamStates.targets`.
    """

    def __init__(
        self,
        states: Sequence[LocalStates],
        grad_dtypes: Sequence[torch.dtype],
        workers: Workers,
        targets: Sequence[Sequence[torch.Tensor | None]] = (),
    ) -> None:
        variants = [Variant.of(each, grad) for each, grad in zip(states, grad_dtypes, strict=True)]
        self._table, self._workers, self._chunk_elems = states_table(states), workers, cpu_kernels.CHUNK_ELEMS
        self._targets = targets_table(targets)
        self._work = [
            (variant, chunks, self._ranges(chunks))
            for variant, chunks in chunks_by_variant(variants, self._table[:, 5], self._chunk_elems).items()
        ]

    def _ranges(self, chunks: Array) -> list[tuple[int, int]]:
        """Return ranges [begin, end) of chunks with about the same number of elements each."""
        left = self._table[chunks[:, 0], 5] - chunks[:, 1].astype(np.int64) * self._chunk_elems
        done = np.cumsum(np.minimum(left, self._chunk_elems))
        several = PIECES * self._workers.threads
        if self._targets.any():  # between two pieces, another update may run
            several = max(several, int(done[-1]) // self._chunk_elems)
        pieces = min(several, int(done[-1]) // ALONE_ELEMS) or 1
        ends = np.searchsorted(done, np.arange(1, pieces) * (int(done[-1]) / pieces)) + 1
        cuts = [0, *ends.tolist(), len(chunks)]
        return list(itertools.pairwise(cuts))

    def update(
        self,
        grads: Array,
        seeds: Array,
        rows: Array,
        coefficients: Array,
        before_piece: BeforePiece | None = None,
    ) -> None:
        """Update all parameters and return when done.

        The arguments are those of `CudaUpdateTable.update`, and that of `AdamWUpdater.run`.
        """

        def run(cut: tuple[int, int], kernel: Callable[..., None], chunks: Array) -> None:
            kernel(self._table, self._targets, chunks, *cut, self._chunk_elems, grads, seeds, rows, coefficients)

        for variant, chunks, ranges in self._work:
            update = partial(run, kernel=_kernel(variant, apart=before_piece is not None), chunks=chunks)
            for some in self._workers.in_turn(ranges, before_piece):
                self._workers.each(update, some)


def _kernel(variant: Variant, *, apart: bool) -> Callable[..., None]:
    return cpu_kernels.adamw_kernel(
        grad_bf16=variant.grad == torch.bfloat16,
        master=variant.master,
        moments_bf16=variant.moments_bf16,
        follows=variant.follows,
        apart=apart,
    )


class Workers:
    """Pool of `threads` threads, each bound to one of `cores` if given; one unbound thread is the caller itself."""

    def __init__(self, threads: int, cores: Sequence[int]) -> None:
        free = SimpleQueue[int]()
        for core in cores:
            free.put(core)
        self.threads = threads
        self._pool = ThreadPoolExecutor(threads, "update", _bind, (free,)) if threads > 1 or cores else None

    def in_turn(self, pieces: Sequence[Piece], before_piece: BeforePiece | None) -> Iterator[Sequence[Piece]]:
        """Yield `pieces`, a few per thread at a time as long as `before_piece` returns True; all at once without it."""
        at_once = max(1, len(pieces)) if before_piece is None else PIECES * self.threads
        for start in range(0, len(pieces), at_once):
            if before_piece is not None and not before_piece():
                return
            yield pieces[start : start + at_once]

    def each(self, do: Callable[[Any], None], pieces: Sequence[Any]) -> None:
        """Call `do` on each of `pieces`, in the pool or, for one piece or without a pool, in the calling thread."""
        if self._pool is None or len(pieces) == 1:
            for piece in pieces:
                do(piece)
        else:
            list(self._pool.map(do, pieces))


def _bind(free: SimpleQueue[int]) -> None:
    """Bind the calling thread to a core of its own, if one is left."""
    with suppress(Empty):
        os.sched_setaffinity(0, {free.get_nowait()})


def _is_fp16(update: ParamUpdate) -> bool:
    return torch.float16 in (update.states.work.dtype, update.grad.dtype)


@torch.no_grad()
def _apply_with_torch(update: ParamUpdate, *, apart: bool) -> None:
    s = update.states.copied() if apart else update.states
    coefficients = update.coefficients.as_tensors(s.work.device)
    seed = adamw_math.noise_seed(s.name, update.step)
    step(update.grad, s.work, s.master, s.remainder, s.m, s.v, coefficients, s.first, seed, s.follows)


def step(
    grad: torch.Tensor,
    work: torch.Tensor,
    master: torch.Tensor | None,
    remainder: torch.Tensor | None,
    m: torch.Tensor,
    v: torch.Tensor,
    coefficients: adamw_math.Coefficients,
    first: int,
    seed: int,
    follows: bool,
) -> None:
    """Update states in place by torch operations: decode, `adamw_math.adamw`, round.

    The states are those of `ParamStates`, flat [n]. `grad` [n] is still scaled and unclipped, and `seed` comes from
    `adamw_math.noise_seed`.
    """
    state = master_of(work, master, remainder, follows=follows)
    m32, v32 = m.float(), v.float()  # fp32 states are not copied
    adamw_math.adamw(grad.float(), state, m32, v32, coefficients)
    if m.dtype == torch.bfloat16:
        noise = adamw_math.rounding_noise(first, m.numel(), seed, m.device)
        m.copy_(adamw_math.stochastic_bf16(m32, noise & 0xFFFF))
        v.copy_(adamw_math.stochastic_bf16(v32, noise >> 16))
    write_back(state, work, remainder)


def master_of(
    work: torch.Tensor, master: torch.Tensor | None, remainder: torch.Tensor | None, *, follows: bool
) -> torch.Tensor:
    """Return the fp32 master [n], or a new tensor joined from `work` and `remainder`.

    The caller updates it in place and passes it to `write_back`. The arguments are those of `ParamStates`.
    """
    if master is not None:
        return follow_edits(master, work) if follows else master
    assert remainder is not None, "a state without fp32 master has a remainder"
    return join(work, remainder)


def follow_edits(master: torch.Tensor, work: torch.Tensor) -> torch.Tensor:
    """Copy elements of `work` that differ from the rounded fp32 `master` into `master` in place, and return it."""
    edited = to_working(master, work.dtype) != work
    return master.copy_(torch.where(edited, work.float(), master))


def write_back(state: torch.Tensor, work: torch.Tensor, remainder: torch.Tensor | None) -> None:
    """Round the updated fp32 master `state` [n] into the working copy, and its rounding error into the remainder."""
    if remainder is not None:
        rounded, low = split(state)
        work.copy_(rounded)
        remainder.copy_(low)
    elif work.dtype != torch.float32:
        work.copy_(to_working(state, work.dtype))
