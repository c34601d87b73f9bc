"""Parameters in every way of storing, their update by the kernel of a GPU, and the same by two references on the CPU.

by the kernel     `CudaUpdateTable`: on a GPU, or on CPU tensors under Triton's interpreter
by operations     `adamw_math.adamw` on whole tensors; no fp16 or bf16 but through `zero/rounding.py`
by numba          `host_kernels.adamw_kernel`, which has no fp16
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dzero.optim import adamw_math
from dzero.optim.adamw_math import Coefficients
from dzero.optim.cuda_kernels import CudaUpdateTable
from dzero.optim.flat_update import CpuUpdateTable, Workers
from dzero.optim.update_table import NoiseSeeds
from dzero.zero.rounding import join, split, to_working

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
KINDS = ["fp32", "bf16 + fp32", "bf16 + remainder", "fp16 + fp32"]
ELEMS = (0, 1, 255, 1024, 5000)
FIRSTS = (0, 1000, 2**32 - 100, 2**32 + 7, 2**41 + 3)


def interpret() -> None:
    """Let Triton interpret kernels in this process. It reads the setting at its import, which only a launch causes."""
    if "triton" in sys.modules:
        raise RuntimeError("importing dzero has imported triton: CPU users have none, and others wait for it")
    os.environ["TRITON_INTERPRET"] = "1"


@dataclass
class Param:
    """One parameter's states as `cuda_kernels.States` asks for them, its gradient, and the row of its coefficients."""

    name: str
    first: int
    work: Tensor
    master: Tensor | None
    remainder: Tensor | None
    m: Tensor
    v: Tensor
    follows: bool
    grad: Tensor
    row: int

    def states(self) -> dict[str, Tensor]:
        """What an update writes."""
        named = {"work": self.work, "master": self.master, "remainder": self.remainder, "m": self.m, "v": self.v}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    def to(self, device: torch.device) -> Param:
        """Return a copy on a device; an fp32 parameter stays its own master."""
        copies = {name: tensor.to(device, copy=True) for name, tensor in self.states().items()}
        if self.master is self.work:
            copies["master"] = copies["work"]
        return replace(self, **copies, grad=self.grad.to(device, copy=True))


def params(kind: str, *, seed: int = 0, follows: Sequence[bool] = (False, True)) -> Iterator[Param]:
    """Every gradient's and moment's dtype, with and without edits, in every length."""
    generator = torch.Generator().manual_seed(seed)
    options = itertools.product((FP32, BF16, FP16), (FP32, BF16), follows if kind.endswith("+ fp32") else (False,))
    for (grad, moments, follow), (elems, first) in itertools.product(options, zip(ELEMS, FIRSTS, strict=True)):
        name = f"{kind}.{grad}.{moments}.{follow}.{elems}"
        yield param(kind, name, (first, elems), (grad, moments), follow, generator)


def param(
    kind: str, name: str, at: tuple[int, int], dtypes: tuple[torch.dtype, torch.dtype], follows: bool, generator: Any
) -> Param:
    """Values over many binades, with ties of bf16, zeros of both signs and subnormal numbers among them."""
    (first, elems), (grad, moments), row = at, dtypes, len(name) % 3

    def normal() -> Tensor:
        return torch.randn(elems, generator=generator)

    master, m, v = normal() * normal().exp(), normal() * 0.1, normal().square() * (10 * normal()).exp()
    bits = master.view(torch.int32)
    bits[::5] = (bits[::5] & ~0xFFFF) | 0x8000
    for value, (at, each) in itertools.product((master, m, v), ((3, 0.0), (50, 1e-40), (51, 3e-45))):
        value[at::101] = each
    m[4::101] = -0.0
    given = (normal() * (5 * normal()).exp()).clamp(-6e4, 6e4).to(grad)  # finite in fp16: other steps are skipped
    given[::97] = 0
    if kind == "bf16 + remainder":
        work, remainder = split(master)
        return Param(name, first, work, None, remainder, m.to(moments), v.to(moments), follows, given, row)
    work = master if kind == "fp32" else to_working(master, BF16 if "bf16" in kind else FP16)
    if follows:
        work[::7] = (master[::7] * 1.5 + 0.25).to(work.dtype)
    return Param(name, first, work, master, None, m.to(moments), v.to(moments), follows, given, row)


def coefficients(step: int) -> list[Coefficients]:
    """Three rows, as of three parameter groups."""
    return [
        Coefficients.of(step=step, lr=lr, betas=betas, eps=eps, weight_decay=decay, scale=scale)
        for lr, betas, eps, decay, scale in (
            (1e-2, (0.9, 0.95), 1e-8, 0.1, 0.37),
            (3e-4, (0.8, 0.999), 1e-15, 0.0, 1.0),
            (1.0, (0.0, 0.99), 1e-3, 0.3, 2.0**-16),
        )
    ]


def columns(chosen: Sequence[Param], step: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """The arguments of `CudaUpdateTable.update`."""
    grads = np.array([each.grad.data_ptr() for each in chosen], np.int64)
    seeds = NoiseSeeds([each.name for each in chosen]).at(np.full(len(chosen), step))
    rows = np.array([each.row for each in chosen], np.int64)
    return grads, seeds, rows, np.array([each.floats for each in coefficients(step)], np.float32)


def table_of(chosen: Sequence[Param]) -> CudaUpdateTable:
    return CudaUpdateTable(chosen, [each.grad.dtype for each in chosen])


def by_operations(p: Param, step: int) -> None:
    """The update by torch's operations on the CPU, in place."""
    if p.remainder is not None:
        master = join(p.work, p.remainder)
    else:
        assert p.master is not None
        master = p.master
        if p.follows:
            edited = to_working(master, p.work.dtype) != p.work
            master.copy_(torch.where(edited, p.work.float(), master))
    m, v = p.m.float(), p.v.float()
    adamw_math.adamw(p.grad.float(), master, m, v, coefficients(step)[p.row])
    if p.m.dtype == BF16:
        noise = adamw_math.rounding_noise(p.first, m.numel(), adamw_math.noise_seed(p.name, step), m.device)
        m, v = adamw_math.stochastic_bf16(m, noise & 0xFFFF), adamw_math.stochastic_bf16(v, noise >> 16)
    p.m.copy_(m)
    p.v.copy_(v)
    if p.remainder is not None:
        p.work.copy_(split(master)[0])
        p.remainder.copy_(split(master)[1])
    elif p.master is not p.work:
        p.work.copy_(to_working(master, p.work.dtype))


def by_numba(p: Param, step: int) -> None:
    """The update by the CPU's kernel, in place; not for fp16."""
    CpuUpdateTable([p], [p.grad.dtype], Workers(1, ())).update(*columns([p], step))


def differences(ours: Sequence[Param], want: Sequence[Param]) -> list[str]:
    """Return the states that differ in any bit."""
    found = []
    for a, b in zip(ours, want, strict=True):
        for name, state in b.states().items():
            bits = torch.int32 if state.dtype == FP32 else torch.int16
            differing = a.states()[name].cpu().view(bits) != state.cpu().view(bits)
            if differing.any():
                at = int(differing.nonzero()[0])
                found.append(f"{a.name}: {int(differing.sum())} of {name}, first at {at}")
    return found


def kernel_differs(kind: str, device_type: str = "cpu") -> list[str]:
    """Two updates of all parameters of a kind: where the kernel's bits are not those of both references."""
    before = list(params(kind))
    ours = [each.to(torch.device(device_type)) for each in before]
    operations = [each.to(torch.device("cpu")) for each in before]
    numba = [each.to(torch.device("cpu")) for each in before if FP16 not in (each.work.dtype, each.grad.dtype)]
    table = table_of(ours)
    for step in (1, 1000):
        table.update(*columns(ours, step))
        for each in operations:
            by_operations(each, step)
        for each in numba:
            by_numba(each, step)
    named = {each.name: each for each in ours}
    return differences(ours, operations) + differences([named[each.name] for each in numba], numba)
