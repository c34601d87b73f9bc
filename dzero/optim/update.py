"""AdamW applied to one rank's states, flat and in place, in chunks so that no temporary has a parameter's size.

CPU                    host_kernels.adamw_kernel in a thread pool    the bits of rules.adamw
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
from functools import cached_property
from queue import Empty, SimpleQueue

import numpy as np
import torch

from dzero.host import Array, as_array, has_memory
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
    def arrays(self) -> tuple[Array, ...]:
        """work, master, remainder, m, v as the kernels take them: empty where there is none, or no separate one."""
        none, own = np.empty(0, np.uint16), self.work.dtype == torch.float32
        return (
            none if own else as_array(self.work),
            np.empty(0, np.float32) if self.master is None else as_array(self.master),
            np.empty(0, np.int16) if self.remainder is None else as_array(self.remainder),
            as_array(self.m),
            as_array(self.v),
        )

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
        pooled = threads > 1 or cores
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
        for update in updates:
            if update.grad.is_cuda and update.grad.numel():  # an empty shard would be a shape of its own to compile
                _apply_with_torch(update, self._fused)
        here = [update for update in updates if not update.grad.is_cuda and has_memory(update.grad)]
        pieces = [piece for update in here for piece in update.chunks(host_kernels.CHUNK_ELEMS)]
        if self._pool is None:
            for piece in pieces:
                apply(piece)
        else:
            list(self._pool.map(apply, pieces))


def _bind(free: SimpleQueue[int]) -> None:
    """This thread takes a core for itself, while there are any."""
    with suppress(Empty):
        os.sched_setaffinity(0, {free.get_nowait()})


def apply(update: Update) -> None:
    """One chunk on the CPU: by the kernel, or for fp16 by torch's operations."""
    if torch.float16 in (update.states.work.dtype, update.grad.dtype):
        _apply_with_torch(update, step)
    else:
        _apply_with_kernel(update)


def _apply_with_kernel(update: Update) -> None:
    s = update.states
    own, noisy = s.work.dtype == torch.float32, s.m.dtype == torch.bfloat16
    kernel = host_kernels.adamw_kernel(
        grad_bf16=update.grad.dtype == torch.bfloat16,
        master="param" if own else "fp32" if s.remainder is None else "remainder",
        moments_bf16=noisy,
        follows=s.follows,
    )
    kernel(
        as_array(update.grad),
        *s.arrays,
        update.coefficients.floats,
        np.uint32(rules.noise_seed(s.name, update.step) if noisy else 0),
        np.int64(s.first),
    )


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
