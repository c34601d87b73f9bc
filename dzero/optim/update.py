"""AdamW applied to one rank's states, flat and in place, in chunks so that no temporary has a parameter's size.

CPU                    host_kernels.adamw_kernel: a call for all     the bits of rules.adamw
                       parameters of a row of dtypes and thread
CPU, fp16              `step` on chunks, torch's operations          the same bits
CUDA                   `step` compiled to one kernel                 its own square root, division, contraction
without memory         nothing (a simulation has no values)
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

import numpy as np
import torch

from dzero.host import Array, has_memory
from dzero.optim import host_kernels, rules
from dzero.zero.working import join, split, to_working


@dataclass
class ParamStates:
    """One parameter's local states, all flat [n] and contiguous.

    work: the working copy (fp32, bf16, fp16). master: fp32; `work` itself for fp32 parameters; None with a remainder.
    remainder: int16 or None. m, v: fp32 or bf16, v empty where the rule keeps one moment. first: global flat index of
    element 0. name: keys the rounding noise. follows: `work` is what forward reads, and what was edited there since the
    last update is the master's new value.
    """

    name: str
    first: int
    work: torch.Tensor
    master: torch.Tensor | None
    remainder: torch.Tensor | None
    m: torch.Tensor
    v: torch.Tensor
    follows: bool = False

    @cached_property
    def addresses(self) -> tuple[int, ...]:
        """Of work, master, remainder, m and v, as the kernels take them: 0 where there is none, or no separate one."""
        own = self.work.dtype == torch.float32
        return (
            0 if own else self.work.data_ptr(),
            0 if self.master is None else self.master.data_ptr(),
            0 if self.remainder is None else self.remainder.data_ptr(),
            self.m.data_ptr(),
            self.v.data_ptr(),
        )

    @cached_property
    def dtypes(self) -> tuple[str, bool, bool]:
        """The kind of master as `host_kernels.adamw_kernel` has it; whether moments are bf16; whether work is fp16."""
        master = "param" if self.work.dtype == torch.float32 else "fp32" if self.remainder is None else "remainder"
        return master, self.m.dtype == torch.bfloat16, self.work.dtype == torch.float16

    def slice(self, start: int, length: int) -> ParamStates:
        """Elements [start, start + length)."""

        def cut(state: torch.Tensor | None) -> torch.Tensor | None:
            return None if state is None else state[start : start + length]

        m, v, work = (state[start : start + length] for state in (self.m, self.v, self.work))
        return ParamStates(
            self.name, self.first + start, work, cut(self.master), cut(self.remainder), m, v, self.follows
        )


@dataclass(frozen=True)
class Update:
    """One parameter's update of this step: its states, its gradient [n] and its coefficients."""

    states: ParamStates
    grad: torch.Tensor
    coefficients: rules.Coefficients
    step: int

    @property
    def row(self) -> Row:
        """Its dtypes."""
        master, noisy, fp16 = self.states.dtypes
        return Row(self.grad.dtype, master, noisy, self.states.follows, fp16 or self.grad.dtype == torch.float16)

    def chunks(self, elems: int) -> Iterator[Update]:
        """The same update in pieces of at most `elems` elements; itself where it is one."""
        if 0 < self.grad.numel() <= elems:
            yield self
            return
        for start in range(0, self.grad.numel(), elems):
            piece = self.grad[start : start + elems]
            yield Update(self.states.slice(start, piece.numel()), piece, self.coefficients, self.step)


class AdamWUpdater:
    """Runs updates; owns the CPU kernels' pool of `threads` (1: in the caller) and the compiled CUDA kernel.

    cores: bind each thread to one of these.
    """

    def __init__(self, threads: int, cores: Sequence[int] = ()) -> None:
        free = SimpleQueue[int]()
        for core in cores:
            free.put(core)
        pooled, self._threads = threads > 1 or cores, threads
        self._pool = ThreadPoolExecutor(threads, "update", _bind, (free,)) if pooled else None

    @cached_property
    def _fused(self) -> Callable[..., None]:
        """One fused CUDA kernel. Shapes and indices stay symbolic, scalars are tensors, so nothing is compiled twice.

        Made at its first use, since the compiler's own modules take most of a second to import.
        """
        return torch.compile(step, dynamic=True, fullgraph=True)

    @torch.no_grad()
    def run(self, updates: list[Update]) -> None:
        """Apply all updates; returns when they are done (CUDA: enqueued on the current stream)."""
        rows: dict[Row, list[Update]] = {}
        for update in updates:
            if update.grad.is_cuda and update.grad.numel():  # an empty shard would be a shape of its own to compile
                _apply_with_torch(update, self._fused)
            elif has_memory(update.grad):
                rows.setdefault(update.row, []).append(update)
        for row, of_row in rows.items():
            if row.fp16:
                pieces = [piece for update in of_row for piece in update.chunks(host_kernels.CHUNK_ELEMS)]
                self._each(partial(_apply_with_torch, run=step), pieces)
            else:
                self._run_kernel(row, of_row)

    def _run_kernel(self, row: Row, updates: list[Update]) -> None:
        """Update the parameters of one row of dtypes: one call of the kernel for each piece of the work."""
        kernel = host_kernels.adamw_kernel(
            grad_bf16=row.grad == torch.bfloat16,
            master=row.master,
            moments_bf16=row.noisy,
            follows=row.follows,
        )
        table, coefficients = _table(updates, noisy=row.noisy)
        chunks = _chunks(np.array([update.grad.numel() for update in updates]))
        done = np.cumsum(chunks[:, 2])
        elems = int(done[-1]) if len(done) else 0
        pieces = min(PIECES * self._threads, elems // ALONE_ELEMS) or 1
        ends = np.searchsorted(done, np.arange(1, pieces + 1) * (elems / pieces)) + 1
        ends[-1] = len(chunks)
        ranges = list(zip([0, *ends[:-1].tolist()], ends.tolist(), strict=True))
        self._each(lambda piece: kernel(table, chunks, *piece, coefficients), ranges)

    def _each(self, do: Callable[[Any], None], pieces: list[Any]) -> None:
        if self._pool is None or len(pieces) == 1:
            for piece in pieces:
                do(piece)
        else:
            list(self._pool.map(do, pieces))


class Row(NamedTuple):
    """A row of dtypes, whose parameters one kernel updates."""

    grad: torch.dtype
    master: str
    noisy: bool
    follows: bool
    fp16: bool


PIECES = 4
"""Of the work for each thread: a thread that is late then has less left to do."""

ALONE_ELEMS = 1 << 16
"""Fewer elements are not worth another thread."""


def _table(updates: Sequence[Update], *, noisy: bool) -> tuple[Array, Array]:
    """Return the kernel's table (`host_kernels.COLUMNS`), and the coefficients that its rows name."""
    numbers: dict[int, int] = {}
    found: list[rules.Coefficients] = []
    rows = []
    for update in updates:
        states, c = update.states, update.coefficients
        if (number := numbers.get(id(c))) is None:
            number = numbers[id(c)] = len(found)
            found.append(c)
        seed = rules.noise_seed(states.name, update.step) if noisy else 0
        rows.append((update.grad.data_ptr(), *states.addresses, states.first, number, seed))
    return np.array(rows, dtype=np.int64), np.array([c.floats for c in found], dtype=np.float32)


def _chunks(sizes: Array) -> Array:
    """Return int64 [chunks, 3]: each parameter's row, first element and count, in pieces of at most CHUNK_ELEMS."""
    counts = -(-sizes // host_kernels.CHUNK_ELEMS)
    rows = np.repeat(np.arange(len(sizes)), counts)
    begins = (np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)) * host_kernels.CHUNK_ELEMS
    return np.stack([rows, begins, np.minimum(sizes[rows] - begins, host_kernels.CHUNK_ELEMS)], axis=1)


def _bind(free: SimpleQueue[int]) -> None:
    """This thread takes a core for itself, while there are any."""
    with suppress(Empty):
        os.sched_setaffinity(0, {free.get_nowait()})


@torch.no_grad()
def _apply_with_torch(update: Update, run: Callable[..., None]) -> None:
    s = update.states
    coefficients = update.coefficients.as_tensors(s.work.device)
    seed = rules.noise_seed(s.name, update.step)
    run(update.grad, s.work, s.master, s.remainder, s.m, s.v, coefficients, s.first, seed, s.follows)


def step(
    grad: torch.Tensor,
    work: torch.Tensor,
    master: torch.Tensor | None,
    remainder: torch.Tensor | None,
    m: torch.Tensor,
    v: torch.Tensor,
    coefficients: rules.Coefficients,
    first: int,
    seed: int,
    follows: bool,
) -> None:
    """`ParamStates` updated in place by torch's operations: decode, `rules.adamw`, round. All tensors flat [n]."""
    state = master_of(work, master, remainder, follows=follows)
    m32, v32 = m.float(), v.float()  # the states themselves where they are fp32
    rules.adamw(grad.float(), state, m32, v32, coefficients)
    if m.dtype == torch.bfloat16:
        noise = rules.rounding_noise(first, m.numel(), seed, m.device)
        m.copy_(rules.stochastic_bf16(m32, noise & 0xFFFF))
        v.copy_(rules.stochastic_bf16(v32, noise >> 16))
    write_back(state, work, remainder)


def master_of(
    work: torch.Tensor, master: torch.Tensor | None, remainder: torch.Tensor | None, *, follows: bool
) -> torch.Tensor:
    """Return fp32 [n], to be updated in place and then given to `write_back`: the master itself, or a new one.

    follows: as in `ParamStates`.
    """
    if master is not None:
        return follow_edits(master, work) if follows else master
    assert remainder is not None, "a state without fp32 master has a remainder"
    return join(work, remainder)


def follow_edits(master: torch.Tensor, work: torch.Tensor) -> torch.Tensor:
    """Take the elements of `work` that are not `master` [same shape, fp32] rounded into it, in place; return it."""
    edited = to_working(master, work.dtype) != work
    return master.copy_(torch.where(edited, work.float(), master))


def write_back(state: torch.Tensor, work: torch.Tensor, remainder: torch.Tensor | None) -> None:
    """Round an updated fp32 `state` [n] into the working copy, and what that leaves into the remainder."""
    if remainder is not None:
        rounded, low = split(state)
        work.copy_(rounded)
        remainder.copy_(low)
    elif work.dtype != torch.float32:
        work.copy_(to_working(state, work.dtype))
