"""The update on CUDA, as far as a CPU can tell: its bits, its machine code, its copies and launches.

    claim                                              proof here
    the arithmetic is that of the CPU kernels          Triton's interpreter on CPU tensors, bit for bit
    nothing is contracted, flushed or approximated     PTX and machine code for real GPUs: instructions, counted
    16 bytes per access of whole, aligned chunks       the same PTX
    one copy per step, one launch per variant          torch's dispatcher and the launches, counted
    a pinned buffer is not rewritten too early         copies that are put off as far as their events allow

The interpreter calls NumPy once per operation, so it could not show a contraction; that is what the compiled code is
for. Only a GPU can show that its division and square root round as NVIDIA says, and that the launch itself works:
tests/gpu/test_adamw_kernel.py compares bits there. Kernels are interpreted in a process of their own, because Triton
decides at its import whether it interprets.
"""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from adamw_cases import (
    BF16,
    FP16,
    FP32,
    KINDS,
    Param,
    by_operations,
    columns,
    differences,
    interpret,
    kernel_differs,
    params,
    table_of,
)
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dzero.optim import adamw_math, column_upload, cuda_kernels
from dzero.optim.column_upload import RING
from dzero.optim.cuda_kernels import BLOCK_ELEMS, CudaUpdateTable
from dzero.optim.update_table import NoiseSeeds, Variant, chunks_of
from dzero.utils.triton_modules import triton_module

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def interpreted() -> Iterator[Callable[..., Any]]:
    """Call a function in a process in which Triton interprets kernels."""
    pytest.importorskip("triton")
    with ProcessPoolExecutor(1, get_context("spawn"), initializer=interpret) as process:
        yield lambda function, *args: process.submit(function, *args).result()


@pytest.mark.product(keep=1)
@pytest.mark.parametrize("kind", KINDS)
def test_the_kernel_has_the_bits_of_the_cpu_kernels(kind: str, interpreted: Callable[..., Any]) -> None:
    assert interpreted(kernel_differs, kind) == []


def test_all_ways_of_storing_are_updated_by_one_table(interpreted: Callable[..., Any]) -> None:
    assert interpreted(mixed_table_differs) == []


def mixed_table_differs() -> list[str]:
    """Parameters of all kinds in one table, in an order that mixes them; every third has no gradient in this step."""
    before = [each for group in zip(*(params(kind, follows=[True]) for kind in KINDS), strict=False) for each in group]
    ours, want = ([each.to(CPU) for each in before] for _ in range(2))
    table = table_of(ours)
    grads, seeds, rows, coefficients = columns(ours, 7)
    grads[::3] = 0
    table.update(grads, seeds, rows, coefficients)
    for index, each in enumerate(want):
        if index % 3:
            by_operations(each, 7)
    return differences(ours, want)


@pytest.mark.full
def test_unaligned_arrays_are_updated_to_the_same_bits(interpreted: Callable[..., Any]) -> None:
    assert interpreted(unaligned_differs) == []


def unaligned_differs() -> list[str]:
    """Each of a parameter's arrays in turn lies 1 element behind a multiple of 16 bytes.

    A GPU traps where the kernel calls such an address aligned; the interpreter takes no notice, so it is watched.
    """
    from triton.runtime.interpreter import TensorHandle

    found, hints = [], Counter[str]()

    def check(handle: Any, key: str, values: list[int]) -> None:
        hints[key] += 1
        if key == "tt.divisibility" and (handle.data % np.uint64(values[0])).any():
            found.append(f"{handle.data} is called a multiple of {values[0]}")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TensorHandle, "set_attr", check)
        for kind in KINDS:
            before = [each for each in params(kind) if each.work.numel() == 5000][::3]
            for name in ("grad", *before[0].states()):
                ours, want = ([each.to(CPU) for each in before] for _ in range(2))
                for each in ours:
                    shift(each, name)
                table_of(ours).update(*columns(ours, 3))
                for each in want:
                    by_operations(each, 3)
                found += [f"{name} of {each}" for each in differences(ours, want)]
        if hints:
            found.append("a program with an unaligned array gave hints")
        table_of(before).update(*columns(before, 3))
    return found if hints else ["no program with aligned arrays gave a hint: nothing was watched"]


def shift(p: Param, name: str) -> None:
    """Move one of the arrays by one element from an aligned address."""
    was = getattr(p, name)
    moved = torch.empty(was.numel() + 1, dtype=was.dtype)[1:].copy_(was)
    assert moved.data_ptr() % 16 != 0
    for each in [field for field in ("grad", *p.states()) if getattr(p, field) is was]:
        setattr(p, each, moved)


def test_elements_beyond_2_to_the_31_are_reached(interpreted: Callable[..., Any]) -> None:
    assert interpreted(far_elements_differ) == []


def far_elements_differ() -> list[str]:
    """The kernel is told that a parameter's arrays begin 2^31 + 2^33 elements before what there is of them."""
    before_elems = 2**31 + 2**33
    before = [each for each in params("bf16 + fp32") if each.work.numel() == 5000]
    ours, want = ([each.to(CPU) for each in before] for _ in range(2))
    table = table_of(ours)
    grads, seeds, rows, coefficients = columns(ours, 3)
    sizes = torch.tensor([[t.element_size() for t in (p.work, p.master, p.work, p.m, p.v)] for p in ours])
    table._table[:, :5] -= before_elems * sizes
    table._table[:, 5] += before_elems
    table._table[:, 6] -= before_elems
    for chunks in table._chunks.values():
        chunks[:, 1] += before_elems // BLOCK_ELEMS
    grads -= before_elems * np.array([p.grad.element_size() for p in ours])
    table.update(grads, seeds, rows, coefficients)
    for each in want:
        by_operations(each, 3)
    return differences(ours, want)


VARIANTS = [
    Variant(grad, work, master, moments_bf16, follows)
    for grad, ((work, master, follows), moments_bf16) in zip(
        itertools.cycle((FP32, BF16, FP16)),
        itertools.product(
            (
                (FP32, "param", False),
                (BF16, "fp32", False),
                (BF16, "fp32", True),
                (BF16, "remainder", False),
                (FP16, "fp32", False),
                (FP16, "fp32", True),
            ),
            (False, True),
        ),
        strict=False,
    )
]
PER_THREAD = BLOCK_ELEMS // (4 * 32)
"""Elements per thread: a program has 4 warps."""
BRANCHES = 2
"""The kernel's body is there for whole, aligned chunks, and for others."""


def compile_for(variant: Variant, architecture: int = 90, **options: bool) -> Any:
    """Compile the kernel for an NVIDIA GPU of compute capability `architecture` / 10, which need not be there.

    options: of the compiler, other than those of a launch.
    """
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    if triton.knobs.runtime.interpret:
        pytest.skip("TRITON_INTERPRET is set: nothing is compiled")
    source = triton_module(cuda_kernels.ADAMW)
    constants = {
        "GRAD": cuda_kernels.NAMES[variant.grad],
        "WORK": cuda_kernels.NAMES[variant.work],
        "MASTER": variant.master,
        "MOMENTS_BF16": variant.moments_bf16,
        "FOLLOWS": variant.follows,
        "BLOCK": BLOCK_ELEMS,
    }
    signature = {"states": "*i64", "chunks": "*i32", "dynamic": "*i64", "param_count": "i32"}
    signature |= dict.fromkeys(constants, "constexpr")
    kernel = ASTSource(source.adamw_kernel, signature, constexprs=constants)
    target = GPUTarget("cuda", architecture, 32)
    return triton.compile(kernel, target=target, options=source.OPTIONS | options).asm


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Any]]:
    """`compile_for`, with a cache of this module's own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        yield compile_for


def floating_point(ptx: str) -> Counter[str]:
    """Count what is computed in floating point by full names; an instruction on a pair (`x2`) counts twice."""
    found: Counter[str] = Counter()
    for name in re.findall(r"^\s*(?:@!?%p\d+\s+)?([a-z][\w.]*\.(?:f64|b?f16|f32)(?:x2)?)\s", ptx, re.MULTILINE):
        if not name.startswith(("mov.", "cvt.", "setp.", "selp.")):
            found[name.removesuffix("x2")] += 2 if name.endswith("x2") else 1
    return found


OPERATIONS = {
    name: count * PER_THREAD * BRANCHES
    for name, count in {"mul.rn.f32": 9, "add.rn.f32": 3, "sub.rn.f32": 1, "div.rn.f32": 1, "sqrt.rn.f32": 1}.items()
}
"""The 15 operations of `adamw_math.adamw` on one element, each rounded to nearest. `.rn` on products, sums and
differences also forbids ptxas to contract them; `.ftz`, which none has, would flush subnormal numbers."""


@pytest.mark.product(keep=4)
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_every_operation_is_rounded_once_and_none_is_contracted(variant: Variant, compiled: Callable[..., Any]) -> None:
    ptx = compiled(variant)["ptx"]
    assert floating_point(ptx) == OPERATIONS
    assert "fma." not in ptx
    assert ".ftz" not in ptx


@pytest.mark.parametrize("architecture", [75, 80, 100, 120])
def test_other_gpus_compute_the_same_operations(architecture: int, compiled: Callable[..., Any]) -> None:
    ptx = compiled(Variant(BF16, BF16, "remainder", True, False), architecture)["ptx"]
    assert floating_point(ptx) == OPERATIONS
    assert "fma." not in ptx


@pytest.mark.parametrize("architecture", [80, 90])
def test_the_assembler_contracts_nothing_either(
    architecture: int, compiled: Callable[..., Any], tmp_path: Path
) -> None:
    """All products and sums of the PTX are there in the machine code: a contraction would take one of each.

    ptxas makes division and square root of FFMAs and products, so it may add some of its own.
    """
    asm, nvdisasm = compiled(VARIANTS[0], architecture), Path(pytest.importorskip("triton").knobs.nvidia.nvdisasm.path)
    (tmp_path / "kernel.cubin").write_bytes(asm["cubin"])
    shown = subprocess.run([nvdisasm, "-c", tmp_path / "kernel.cubin"], capture_output=True, text=True, check=True)
    found = Counter(re.findall(r"\b(FMUL|FADD)(?![.\w])", shown.stdout))
    sums = OPERATIONS["add.rn.f32"] + OPERATIONS["sub.rn.f32"]
    assert found["FADD"] == sums
    assert found["FMUL"] >= OPERATIONS["mul.rn.f32"]


def test_without_the_launch_options_the_compiler_contracts(compiled: Callable[..., Any]) -> None:
    """What the tests above would see if the option were lost."""
    ptx = compiled(VARIANTS[0], enable_fp_fusion=True)["ptx"]
    assert "fma.rn.f32" in ptx
    assert floating_point(ptx) != OPERATIONS


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_whole_aligned_chunks_move_16_bytes_at_a_time(variant: Variant, compiled: Callable[..., Any]) -> None:
    ptx = compiled(variant)["ptx"]
    per_16_bits = PER_THREAD * 2 // 16
    of_moments = 2 * per_16_bits * (1 if variant.moments_bf16 else 2)
    of_grad = per_16_bits * (2 if variant.grad == FP32 else 1)
    of_masters = per_16_bits * (1 if variant.master == "remainder" else 2)
    of_work = per_16_bits * (0 if variant.master == "param" else 1)
    reads_work = of_work if variant.follows or variant.master == "remainder" else 0
    assert len(re.findall(r"ld\.global\.v4\.b32", ptx)) == of_grad + of_moments + of_masters + reads_work
    assert len(re.findall(r"st\.global\.v4\.b32", ptx)) == of_moments + of_masters + of_work


class Ops(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what torch dispatches, by name."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func.name()] += 1
        return func(*args, **(kwargs or {}))


def test_a_step_is_one_copy_and_one_launch_per_variant(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[tuple[Variant, int]] = []
    monkeypatch.setattr(
        cuda_kernels, "_launch", lambda variant, _, chunks, *__: launched.append((variant, len(chunks)))
    )
    chosen = [each for kind in KINDS for each in params(kind)]
    table, arguments = table_of(chosen), columns(chosen, 1)
    for _ in range(2):
        launched.clear()
        with Ops() as ops:
            table.update(*arguments)
        assert ops.calls == {"aten::copy_": 1, "aten::slice.Tensor": 2}  # two slices: the part in use of both buffers
        # 3 gradient dtypes * 2 moment dtypes * (param, bf16, bf16 edited, remainder, fp16, fp16 edited)
        assert len({variant for variant, _ in launched}) == len(launched) == table.launches == 3 * 2 * 6
        # sizes 0, 1, 255, 1024, 5000 in chunks of 1024 elements
        assert {chunks for _, chunks in launched} == {0 + 1 + 1 + 1 + 5}


def test_chunks_cover_every_element_once() -> None:
    elems = np.array([0, 1, 1024, 2**33 + 1, 1025], np.int64)
    chunks = chunks_of(elems, [0, 1, 3, 4], BLOCK_ELEMS)
    counts = [0, 1, 2**23 + 1, 2]
    assert chunks.dtype == np.int32
    assert np.array_equal(chunks[:, 0], np.repeat([0, 1, 3, 4], counts))
    assert np.array_equal(chunks[:, 1], np.concatenate([np.arange(count) for count in counts]))


class LateCopies:
    """A device that carries out a copy only when the host waits for it: as late as the events allow."""

    def __init__(self) -> None:
        self.waiting: list[tuple[int, Tensor, Tensor]] = []
        self.carried_out: dict[int, Tensor] = {}
        self.enqueued = self.waits = 0

    def enqueue(self, target: Tensor, source: Tensor) -> Event:
        self.waiting.append((self.enqueued, target, source))
        self.enqueued += 1
        return Event(self, self.enqueued - 1)

    def run(self, until: int) -> None:
        while self.waiting and self.waiting[0][0] <= until:
            number, target, source = self.waiting.pop(0)
            target.copy_(source)
            self.carried_out[number] = target.clone()


class Event:
    def __init__(self, device: LateCopies, number: int) -> None:
        self.device, self.number = device, number

    def synchronize(self) -> None:
        self.device.waits += 1
        self.device.run(self.number)


def test_a_pinned_buffer_is_not_rewritten_before_its_copy_has_run(monkeypatch: pytest.MonkeyPatch) -> None:
    device = LateCopies()
    monkeypatch.setattr(column_upload, "_enqueue_copy", device.enqueue)
    monkeypatch.setattr(cuda_kernels, "_launch", lambda *_: None)
    chosen = [each for each in params("fp32") if each.work.numel()][:4]
    table, steps = table_of(chosen), 5 * RING
    for step in range(steps):
        grads, seeds, rows, coefficients = columns(chosen, step + 1)
        table.update(grads + step, seeds, rows, coefficients)
        assert device.waits == max(0, step + 1 - RING)  # the host is RING steps ahead, and no more
    device.run(steps)
    for step in range(steps):
        grads, seeds, rows, coefficients = columns(chosen, step + 1)
        sent = device.carried_out[step].numpy()
        assert np.array_equal(sent[:12], np.concatenate([grads + step, seeds, rows]))
        assert np.array_equal(sent[12:].view(np.float32)[:27], coefficients.reshape(-1))


def test_more_rows_of_coefficients_than_parameters_are_told_by_those_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Tensor] = []
    monkeypatch.setattr(cuda_kernels, "_launch", lambda _, __, ___, dynamic, params: sent.append(dynamic.clone()))
    [chosen] = [each for each in params("fp32", follows=[False]) if each.work.numel() == 1][:1]
    grads, seeds, _, coefficients = columns([chosen], 1)
    table_of([chosen]).update(grads, seeds, np.array([2]), coefficients)
    assert sent[0][2] == 0
    assert np.array_equal(sent[0].numpy()[3:].view(np.float32)[:9], coefficients[2])


def test_seeds_of_all_parameters_are_those_of_each() -> None:
    names = ["", "w", "layers.0.attention.wq.weight", "layers.10.attention.wq.weight", "größe"]
    for steps in ([1] * 5, [9, 10, 123_456, 10, 2**31]):
        want = [adamw_math.noise_seed(name, step) for name, step in zip(names, steps, strict=True)]
        assert NoiseSeeds(names).at(np.array(steps)).tolist() == want


def first_of(kind: str) -> Param:
    return next(each for each in params(kind) if each.work.numel() == 255)


def test_states_without_a_kernel_are_refused() -> None:
    for kind, wrong in (
        ("fp32", {"v": torch.zeros(0)}),
        ("fp32", {"m": torch.zeros(255, dtype=BF16)}),
        ("fp32", {"master": torch.zeros(255)}),
        ("bf16 + fp32", {"work": torch.zeros(255, dtype=torch.float64)}),
        ("bf16 + fp32", {"master": torch.zeros(255, dtype=BF16)}),
        ("bf16 + remainder", {"work": torch.zeros(255, dtype=FP16)}),
        ("bf16 + remainder", {"remainder": None}),
        ("bf16 + remainder", {"v": torch.zeros(510)[::2]}),
    ):
        with pytest.raises(ValueError, match=r"no kernel|flat, contiguous"):
            table_of([replace(first_of(kind), **wrong)])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="one table for each device"):
        table_of([replace(first_of("fp32"), m=torch.zeros(255, device="meta"))])


def test_columns_of_another_length_and_rows_that_are_not_there_are_refused() -> None:
    chosen = [first_of("fp32"), first_of("bf16 + fp32")]
    table, (grads, seeds, rows, coefficients) = table_of(chosen), columns(chosen, 1)
    with pytest.raises(ValueError, match="2 values"):
        table.update(grads[:1], seeds, rows, coefficients)
    with pytest.raises(ValueError, match="indices of theirs"):
        table.update(grads, seeds, rows + 3, coefficients)
    with pytest.raises(ValueError, match="rows of 9 values"):
        table.update(grads, seeds, rows, coefficients[:, :8])


def test_a_table_without_elements_does_nothing() -> None:
    none = np.empty(0, np.int64)
    CudaUpdateTable([], []).update(none, none, none, np.empty((0, 9), np.float32))
    empty = next(each for each in params("fp32") if not each.work.numel())
    table = table_of([empty])
    table.update(*columns([empty], 1))
    assert table.launches == 0


@pytest.mark.parametrize("module", ["optim.adamw_triton", "optim.sums_triton", "comm.block_triton"])
def test_no_argument_of_a_kernel_has_a_name_that_tritons_binder_uses(module: str) -> None:
    """The function that triton generates for a launch, which only a GPU calls, has these as its own names."""
    source = vars(triton_module(f"dzero.{module}"))
    arguments = {name: set(value.arg_names) for name, value in source.items() if hasattr(value, "arg_names")}
    assert arguments
    taken = {"params", "specialization", "options", "backend", "specialize_impl", "JITCallable"}
    assert {name: names & taken for name, names in arguments.items() if names & taken} == {}


def test_what_to_install_is_said_where_triton_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "dzero.optim.adamw_triton", raising=False)
    with pytest.raises(ModuleNotFoundError, match="pip install triton"):
        triton_module.__wrapped__(cuda_kernels.ADAMW)
