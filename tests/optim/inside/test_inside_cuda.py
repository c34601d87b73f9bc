"""Kernels for CUDA, the update and sums of squares, as far as a CPU can tell: bits, machine code, copies and launches.

    claim                                              proof here
    the bits are those of the CPU kernels              Triton's interpreter on CPU tensors, bit for bit
    nothing is contracted, flushed or approximated     PTX and machine code for real GPUs: instructions, counted
    16 bytes per access of whole, aligned chunks       the same PTX
    loads run ahead of the additions of sums           the same machine code: their order, and no spilled register
    one copy per step, one launch per variant          torch's dispatcher and the launches, counted
    tables of sums are kept, and not for ever          the cache, asked for more lengths than it keeps

The interpreter calls NumPy once per operation, so it could not show a contraction; that is what the compiled code is
for. Only a GPU can show that its division and square root round as NVIDIA says, and that the launch itself works:
tests/gpu/inside/test_inside_gpu_kernels.py compares bits there. Kernels are interpreted in a process of their
own, because Triton decides at its import whether it interprets.
"""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
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
    kernel_differs,
    params,
    table_of,
)
from operator_calls import Calls
from sums_cases import DTYPES, LONG, SIZES, by_numpy, gradient, gradients, same_bits
from torch import Tensor

from dzero.optim import cuda_kernels, cuda_sums
from dzero.optim.cpu_kernels import CHUNK_ELEMS, LANES
from dzero.optim.cuda_kernels import BLOCK_ELEMS
from dzero.optim.cuda_sums import BLOCK_CHUNKS, GROUP, KEPT, ROWS, TOTAL_ROWS, CudaSums, SumsTable
from dzero.optim.update_table import Variant
from dzero.utils.triton_modules import triton_module

CPU = torch.device("cpu")
FILE = "tests/optim/inside/test_inside_cuda.py"


@pytest.fixture(scope="module", autouse=True)
def cache_of_this_module(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        yield


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


@pytest.mark.parametrize("differs", [mixed_table_differs, far_elements_differ])
def test_interpreted_updates_have_the_bits_of_torchs_operations(
    differs: Callable[[], list[str]], interpreted: Callable[..., Any]
) -> None:
    assert interpreted(differs) == []


@pytest.mark.full(f"{FILE}::test_interpreted_updates_have_the_bits_of_torchs_operations")
def test_unaligned_arrays_are_updated_to_the_same_bits(interpreted: Callable[..., Any]) -> None:
    assert interpreted(unaligned_differs) == []


@pytest.mark.full(f"{FILE}::test_interpreted_updates_have_the_bits_of_torchs_operations")
@pytest.mark.parametrize("kind", KINDS)
def test_every_length_and_dtype_has_the_bits_of_the_cpu_kernels(kind: str, interpreted: Callable[..., Any]) -> None:
    assert interpreted(kernel_differs, kind) == []


STORED = [(FP32, "param", False), (BF16, "remainder", False)]
STORED += [(work, "fp32", follows) for work in (BF16, FP16) for follows in (False, True)]
VARIANTS = [
    Variant(grad, work, master, moments_bf16, follows)
    for (work, master, follows), moments_bf16 in itertools.product(STORED, (False, True))
    for grad in ([FP32, BF16, FP16] if (master, moments_bf16) == ("param", False) else [BF16])
]
PER_THREAD = BLOCK_ELEMS // (4 * 32)
"""Elements per thread: a program has 4 warps."""
BRANCHES = 2
"""The kernel's body is there for whole, aligned chunks, and for others."""


def compiled(module: str, kernel: str, signature: str, constants: dict[str, Any], on: int, **more: Any) -> Any:
    """A kernel for an NVIDIA GPU of compute capability `on` / 10, which need not be there.

    signature: names and types of its arguments, without those in `constants`. more: options of the compiler.
    """
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    if triton.knobs.runtime.interpret:
        pytest.skip("TRITON_INTERPRET is set: nothing is compiled")
    source, arguments = triton_module(module), dict(each.split(":") for each in signature.split())
    ast = ASTSource(getattr(source, kernel), arguments | dict.fromkeys(constants, "constexpr"), constexprs=constants)
    return triton.compile(ast, target=GPUTarget("cuda", on, 32), options=source.OPTIONS | more).asm


def compiled_update(variant: Variant, architecture: int = 90) -> Any:
    constants = {
        "GRAD": cuda_kernels.NAMES[variant.grad],
        "WORK": cuda_kernels.NAMES[variant.work],
        "MASTER": variant.master,
        "MOMENTS_BF16": variant.moments_bf16,
        "FOLLOWS": variant.follows,
        "BLOCK": BLOCK_ELEMS,
    }
    signature = "states:*i64 chunks:*i32 dynamic:*i64 param_count:i32"
    return compiled(cuda_kernels.ADAMW, "adamw_kernel", signature, constants, architecture)


def compiled_sums(kernel: str, dtype: str, architecture: int) -> Any:
    if kernel == "lane_sums_kernel":
        constants = {"DTYPE": dtype, "CHUNK": CHUNK_ELEMS, "LANES": LANES, "GROUP": GROUP, "ROWS": ROWS}
        signature = "table:*i64 partials:*fp64 grads:i32 chunks:i32"
        return compiled(cuda_sums.SUMS, kernel, signature, constants, architecture, num_warps=1)
    totals = {"LANES": LANES, "BLOCK": BLOCK_CHUNKS, "ROWS": TOTAL_ROWS}
    signature = "table:*i64 partials:*fp64 sums:*fp64 grads:i32 chunks:i32"
    return compiled(cuda_sums.SUMS, kernel, signature, totals, architecture, num_warps=4)


def instructions(cubin: bytes, folder: Path) -> list[str]:
    """Return the names of the machine's instructions, with their modifiers, in their order."""
    (folder / "kernel.cubin").write_bytes(cubin)
    nvdisasm = pytest.importorskip("triton").knobs.nvidia.nvdisasm.path
    shown = subprocess.run([nvdisasm, "-c", folder / "kernel.cubin"], capture_output=True, text=True, check=True)
    return re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\d+\s+)?([A-Z][\w.]*)", shown.stdout, re.MULTILINE)


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


@pytest.mark.product(keep=3)
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_every_operation_is_rounded_once_and_whole_aligned_chunks_move_16_bytes_at_a_time(variant: Variant) -> None:
    ptx = compiled_update(variant)["ptx"]
    assert floating_point(ptx) == OPERATIONS
    assert not re.search(r"fma\.|\.ftz", ptx)
    per_16_bits = PER_THREAD * 2 // 16
    of_moments = 2 * per_16_bits * (1 if variant.moments_bf16 else 2)
    of_grad = per_16_bits * (2 if variant.grad == FP32 else 1)
    of_masters = per_16_bits * (1 if variant.master == "remainder" else 2)
    of_work = per_16_bits * (0 if variant.master == "param" else 1)
    reads_work = of_work if variant.follows or variant.master == "remainder" else 0
    assert len(re.findall(r"ld\.global\.v4\.b32", ptx)) == of_grad + of_moments + of_masters + reads_work
    assert len(re.findall(r"st\.global\.v4\.b32", ptx)) == of_moments + of_masters + of_work


@pytest.mark.product(keep=1)
@pytest.mark.parametrize("architecture", [90, 75, 80, 100, 120])
def test_other_gpus_compute_the_same_and_the_assembler_contracts_nothing(architecture: int, tmp_path: Path) -> None:
    """All products and sums of the PTX are there in the machine code: a contraction would take one of each.

    ptxas makes division and square root of FFMAs and products, so it may add some of its own. FADD2 and FMUL2 are two
    operations each.
    """
    compiled = compiled_update(VARIANTS[0], architecture)
    assert floating_point(compiled["ptx"]) == OPERATIONS
    found = Counter(instructions(compiled["cubin"], tmp_path))
    assert found["FADD"] + 2 * found["FADD2"] == OPERATIONS["add.rn.f32"] + OPERATIONS["sub.rn.f32"]
    assert found["FMUL"] + 2 * found["FMUL2"] >= OPERATIONS["mul.rn.f32"]


def test_a_step_is_one_copy_and_one_launch_per_variant(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[tuple[Variant, int]] = []
    monkeypatch.setattr(
        cuda_kernels, "_launch", lambda variant, _, chunks, *__: launched.append((variant, len(chunks)))
    )
    chosen = [each for kind in KINDS for each in params(kind)]
    table, arguments = table_of(chosen), columns(chosen, 1)
    for _ in range(2):
        launched.clear()
        with Calls() as counted:
            table.update(*arguments)
        assert counted.calls == {"copy_": 1, "slice": 2}  # two slices: the part in use of both buffers
        # 3 gradient dtypes * 2 moment dtypes * (param, bf16, bf16 edited, remainder, fp16, fp16 edited)
        assert len({variant for variant, _ in launched}) == len(launched) == table.launches == 3 * 2 * 6
        # sizes 0, 1, 255, 1024, 5000 in chunks of 1024 elements
        assert {chunks for _, chunks in launched} == {0 + 1 + 1 + 1 + 5}


def test_more_rows_of_coefficients_than_parameters_are_told_by_those_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Tensor] = []
    monkeypatch.setattr(cuda_kernels, "_launch", lambda _, __, ___, dynamic, params: sent.append(dynamic.clone()))
    [chosen] = [each for each in params("fp32", follows=[False]) if each.work.numel() == 1][:1]
    grads, seeds, _, coefficients = columns([chosen], 1)
    table_of([chosen]).update(grads, seeds, np.array([2]), coefficients)
    assert sent[0][2] == 0
    assert np.array_equal(sent[0].numpy()[3:].view(np.float32)[:9], coefficients[2])


def test_states_and_columns_without_a_kernel_are_refused() -> None:
    chosen = [next(each for each in params(kind) if each.work.numel() == 255) for kind in KINDS[:3]]
    fp32, bf16, remainder = chosen
    for param, wrong in (
        (fp32, {"v": torch.zeros(0)}),
        (fp32, {"m": torch.zeros(255, dtype=BF16)}),
        (fp32, {"master": torch.zeros(255)}),
        (bf16, {"work": torch.zeros(255, dtype=torch.float64)}),
        (bf16, {"master": torch.zeros(255, dtype=BF16)}),
        (remainder, {"work": torch.zeros(255, dtype=FP16)}),
        (remainder, {"remainder": None}),
        (remainder, {"v": torch.zeros(510)[::2]}),
    ):
        with pytest.raises(ValueError, match=r"no kernel|flat, contiguous"):
            table_of([replace(param, **wrong)])
    with pytest.raises(ValueError, match="one table for each device"):
        table_of([replace(fp32, m=torch.zeros(255, device="meta"))])
    table, (grads, seeds, rows, coefficients) = table_of(chosen), columns(chosen, 1)
    with pytest.raises(ValueError, match="3 values"):
        table.update(grads[:1], seeds, rows, coefficients)
    with pytest.raises(ValueError, match="indices of theirs"):
        table.update(grads, seeds, rows + 3, coefficients)
    with pytest.raises(ValueError, match="rows of 9 values"):
        table.update(grads, seeds, rows, coefficients[:, :8])
    with pytest.raises(ValueError, match=r"torch\.float64: have them in torch\.float32"):
        CudaSums().sum_squares([torch.empty(3, dtype=torch.float64)])


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


def sums_by_kernels(grads: Sequence[Tensor], chunk_elems: int, before_elems: int, constants: dict[str, int]) -> Tensor:
    """Interpret the kernels on CPU tensors, with other constants of cuda_sums.py.

    They are told that gradients begin `before_elems`, some chunks, before what there is of them.
    """
    with pytest.MonkeyPatch.context() as patch:
        for name, value in constants.items():
            patch.setattr(cuda_sums, name, value)
        table = SumsTable([grad.numel() for grad in grads], grads[0].dtype, CPU, chunk_elems)
        sizes, firsts, chunks = table._columns
        table._columns = (sizes + before_elems, firsts, chunks + np.array([0, before_elems // chunk_elems], np.int32))
        addresses = np.array([grad.data_ptr() for grad in grads], np.int64)
        return table.sum_squares(addresses - before_elems * grads[0].element_size())


FEW = {"ROWS": 4, "TOTAL_ROWS": 4, "BLOCK_CHUNKS": 8}
AT_ONCE = {"GROUP": LANES}  # programs sum all lanes, which the interpreter does 8 times as fast
SUMMED: dict[str, tuple[Sequence[int], int, int, dict[str, int]]] = {
    "few": (SIZES, CHUNK_ELEMS, 0, {}),
    "chunks of 2 reads of 4 rows, of which 8 are added at once": ((2099, 2100, 20 * 2100 - 7), 2100, 0, FEW),
    "far": ((300, 5000), 4096, 2**33, {}),
    "whole chunks": (LONG, CHUNK_ELEMS, 0, AT_ONCE),
}


@pytest.mark.product(keep=1)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", SUMMED)
def test_interpreted_sums_have_the_bits_of_the_order_of_the_contract(
    name: str, dtype: torch.dtype, interpreted: Callable[..., Any]
) -> None:
    """With infinities and a NaN where nothing is far."""
    sizes, chunk, before, constants = SUMMED[name]
    grads = gradients(dtype, sizes) if name != "far" else [gradient(size, dtype) for size in sizes]
    want = torch.tensor([by_numpy(grad, chunk) for grad in grads], dtype=torch.float64)
    assert same_bits(interpreted(sums_by_kernels, grads, chunk, before, constants), want)


SUMS = {
    "squares, bf16": ("lane_sums_kernel", "bf16", ROWS, {"mul.rn.f64": ROWS, "add.rn.f64": ROWS}),
    "squares, fp32": ("lane_sums_kernel", "fp32", ROWS, {"mul.rn.f64": ROWS, "add.rn.f64": ROWS}),
    "squares, fp16": ("lane_sums_kernel", "fp16", ROWS, {"mul.rn.f64": ROWS, "add.rn.f64": ROWS}),
    "lanes and chunks": ("totals_kernel", "", TOTAL_ROWS, {"add.rn.f64": 2 * TOTAL_ROWS}),
}
"""Kernels, dtypes, what a thread reads at once, and what it then computes. `.rn` also forbids ptxas to contract."""


@pytest.mark.product(keep=1)
@pytest.mark.parametrize("architecture", [90, 80, 120])
@pytest.mark.parametrize("name", SUMS)
def test_sums_are_added_in_fp64_one_by_one_behind_loads_that_run_ahead(
    name: str, architecture: int, tmp_path: Path
) -> None:
    """Of a loop that adds what it has just read ptxas makes load, add, load, add: a wait for memory each time."""
    kernel, dtype, ahead, operations = SUMS[name]
    sums = compiled_sums(kernel, dtype, architecture)
    assert floating_point(sums["ptx"]) == operations
    assert not re.search(r"fma\.|\.ftz", sums["ptx"])
    assert kernel == "lane_sums_kernel" or "shfl." not in sums["ptx"]  # no two threads share a sum
    found = [each.split(".")[0] for each in instructions(sums["cubin"], tmp_path)]
    counts = Counter(found)
    assert (counts["DMUL"], counts["DADD"]) == (operations.get("mul.rn.f64", 0), operations["add.rn.f64"])
    assert counts["DFMA"] == counts["LDL"] == counts["STL"] == 0  # nothing is contracted, nothing spilled
    assert Counter(found[: found.index("DADD")])["LDG"] >= ahead


class Recorder:
    """A source of kernels that are only noted, with their grids."""

    OPTIONS: dict[str, Any] = {}  # noqa: RUF012

    def __init__(self) -> None:
        self.launched: list[tuple[str, int]] = []

    def __getattr__(self, kernel: str) -> Any:
        launch = self.launched
        return type("Kernel", (), {"__getitem__": lambda _, grid: lambda *_, **__: launch.append((kernel, *grid))})()


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    made = Recorder()
    monkeypatch.setattr(cuda_sums, "triton_module", lambda _: made)
    return made


def test_a_call_is_one_copy_and_two_launches(recorder: Recorder) -> None:
    grads, sums = [torch.empty(size, dtype=torch.bfloat16) for size in (*SIZES, *LONG)], CudaSums()
    for _ in range(2):
        recorder.launched.clear()
        sums.sum_squares(grads)  # makes the table in the first turn
        recorder.launched.clear()
        with Calls() as counted:
            sums.sum_squares(grads)
        # sums and partial sums are empty; two slices: the part in use of both buffers
        assert counted.calls == {"empty": 2, "copy_": 1, "slice": 2}
        chunks = 0 + 1 + 1 + 1 + 1 + 1 + 1 + 1 + 2
        assert recorder.launched == [("lane_sums_kernel", chunks * 8), ("totals_kernel", len(grads))]
    recorder.launched.clear()
    assert CudaSums().sum_squares([torch.empty(0), torch.empty(0)]).tolist() == [0.0, 0.0]
    assert recorder.launched == []


def test_tables_of_the_lengths_used_last_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[int, ...]] = []

    class Table:
        def __init__(self, sizes: tuple[int, ...], *_: object) -> None:
            made.append(sizes)

        def sum_squares(self, addresses: np.ndarray) -> Tensor:
            return torch.zeros(len(addresses), dtype=torch.float64)

    monkeypatch.setattr(cuda_sums, "SumsTable", Table)
    sums = CudaSums()
    for size in range(1, 4 * KEPT):  # the unit's own lengths in between, as in every step
        sums.sum_squares([torch.empty(100), torch.empty(200)])
        sums.sum_squares([torch.empty(size)])
    assert made.count((100, 200)) == 1
    assert len(sums._tables) == KEPT
    sums.sum_squares([torch.empty(1)])
    sums.sum_squares([torch.empty(100, dtype=torch.bfloat16), torch.empty(200, dtype=torch.bfloat16)])
    assert made[-2:] == [(1,), (100, 200)]
