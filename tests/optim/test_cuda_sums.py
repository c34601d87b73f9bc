"""Sums of squares on CUDA, as far as a CPU can tell: their bits, their machine code, their copies and launches.

    claim                                              proof here
    the order is that of the CPU kernel                Triton's interpreter on CPU tensors, bit for bit
    nothing is contracted, flushed or approximated     PTX and machine code for real GPUs: instructions, counted
    loads run ahead of the additions                   the same machine code: their order, and no spilled register
    one copy and two launches per call                 torch's dispatcher and the launches, counted
    tables are kept, and not for ever                  the cache, asked for more lengths than it keeps

tests/gpu/test_sums_kernel.py compares bits on a GPU. Pinned buffers are those of test_cuda_kernels.py.
"""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from adamw_cases import interpret
from sums_cases import DTYPES, LONG, SIZES, by_numpy, gradient, gradients, same_bits
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dzero.optim import cpu_kernels, cuda_sums
from dzero.optim.cpu_kernels import CHUNK_ELEMS, LANES
from dzero.optim.cuda_sums import BLOCK_CHUNKS, GROUP, KEPT, ROWS, TOTAL_ROWS, CudaSums, SumsTable
from dzero.optim.grad_sums import SquareSums, sum_squares
from dzero.utils.triton_modules import triton_module

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def interpreted() -> Iterator[Callable[..., Any]]:
    """Call a function in a process in which Triton interprets kernels."""
    triton = pytest.importorskip("triton")
    if triton.__version__ < "3.7" and np.lib.NumpyVersion(np.__version__) >= "2.4.0":
        pytest.skip("Triton's interpreter before 3.7 makes numbers of arrays, which NumPy 2.4 refuses")
    with ProcessPoolExecutor(1, get_context("spawn"), initializer=interpret) as process:
        yield lambda function, *args: process.submit(function, *args).result()


def addresses(grads: Sequence[Tensor]) -> np.ndarray:
    return np.array([grad.data_ptr() for grad in grads], np.int64)


def by_kernels(grads: Sequence[Tensor], chunk_elems: int = CHUNK_ELEMS, **constants: int) -> Tensor:
    """Interpret the kernels on CPU tensors, with other constants of cuda_sums.py."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in constants.items():
            patch.setattr(cuda_sums, name, value)
        table = SumsTable([grad.numel() for grad in grads], grads[0].dtype, CPU, chunk_elems)
        return table.sum_squares(addresses(grads))


@pytest.mark.product(keep=1)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_kernels_have_the_bits_of_the_cpu_kernel(dtype: torch.dtype, interpreted: Callable[..., Any]) -> None:
    grads = gradients(dtype)
    want = cpu_kernels.sum_squares(grads)
    assert same_bits(want, torch.tensor([by_numpy(grad) for grad in grads], dtype=torch.float64))
    assert want[-3:].tolist()[:2] == [float("inf")] * 2
    assert want[-1].isnan()
    assert same_bits(interpreted(by_kernels, grads), want)


@pytest.mark.parametrize(
    "size",
    [CHUNK_ELEMS + 300, *(pytest.param(size, marks=pytest.mark.slow) for size in (CHUNK_ELEMS - 1, CHUNK_ELEMS))],
)
def test_whole_chunks_have_the_bits_of_the_cpu_kernel(size: int, interpreted: Callable[..., Any]) -> None:
    """Programs sum all lanes here, which the interpreter does 8 times as fast."""
    grads = [gradient(size, torch.bfloat16)]
    assert same_bits(interpreted(with_constants, grads, CHUNK_ELEMS, {"GROUP": LANES}), cpu_kernels.sum_squares(grads))


def with_constants(grads: Sequence[Tensor], chunk_elems: int, constants: dict[str, int]) -> Tensor:
    return by_kernels(grads, chunk_elems, **constants)


@pytest.mark.full
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_many_chunks_are_added_in_order(dtype: torch.dtype, interpreted: Callable[..., Any]) -> None:
    """Chunks of 2 reads of 4 rows and a bit, and gradients of up to 20 chunks, of which 8 are added at once."""
    grads, chunk = gradients(dtype, (*SIZES, 2099, 2100, 2101, 20 * 2100 - 7)), 2100
    want = torch.tensor([by_numpy(grad, chunk) for grad in grads], dtype=torch.float64)
    few = {"ROWS": 4, "TOTAL_ROWS": 4, "BLOCK_CHUNKS": 8}
    assert same_bits(interpreted(with_constants, grads, chunk, few), want)


@pytest.mark.full
def test_elements_beyond_2_to_the_31_are_reached(interpreted: Callable[..., Any]) -> None:
    assert interpreted(far_elements_differ) == []


def far_elements_differ() -> list[str]:
    """The kernels are told that gradients begin 2^33 elements before what there is of them."""
    before_elems, found = 2**33, []
    for dtype in DTYPES:
        grads = [gradient(size, dtype) for size in (300, 5000)]
        table = SumsTable([300, 5000], dtype, CPU, 4096)
        sizes, firsts, chunks = table._columns
        table._columns = (sizes + before_elems, firsts, chunks + np.array([0, before_elems // 4096], np.int32))
        ours = table.sum_squares(addresses(grads) - before_elems * grads[0].element_size())
        if not same_bits(ours, torch.tensor([by_numpy(grad, 4096) for grad in grads], dtype=torch.float64)):
            found.append(str(dtype))
    return found


def compile_for(kernel: str, dtype: str = "fp32", architecture: int = 90, **options: Any) -> Any:
    """Compile a kernel for an NVIDIA GPU of compute capability `architecture` / 10, which need not be there."""
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    if triton.knobs.runtime.interpret:
        pytest.skip("TRITON_INTERPRET is set: nothing is compiled")
    source = triton_module(cuda_sums.SUMS)
    signature = {"table": "*i64", "partials": "*fp64"}
    if kernel == "lane_sums_kernel":
        constants = {"DTYPE": dtype, "CHUNK": CHUNK_ELEMS, "LANES": LANES, "GROUP": GROUP, "ROWS": ROWS}
    else:
        constants = {"LANES": LANES, "BLOCK": BLOCK_CHUNKS, "ROWS": TOTAL_ROWS}
        signature |= {"sums": "*fp64"}
    signature |= {"grads": "i32", "chunks": "i32"} | dict.fromkeys(constants, "constexpr")
    ast = ASTSource(getattr(source, kernel), signature, constexprs=constants)
    warps = {"num_warps": 1 if kernel == "lane_sums_kernel" else 4}
    return triton.compile(ast, target=GPUTarget("cuda", architecture, 32), options=source.OPTIONS | warps | options).asm


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Any]]:
    """`compile_for`, with a cache of this module's own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        yield compile_for


def floating_point(ptx: str) -> Counter[str]:
    """Count what is computed in floating point, by full names."""
    found = re.findall(r"^\s*(?:@!?%p\d+\s+)?([a-z][\w.]*\.(?:f64|b?f16|f32)(?:x2)?)\s", ptx, re.MULTILINE)
    return Counter(name for name in found if not name.startswith(("mov.", "cvt.", "setp.", "selp.")))


SQUARES = {"mul.rn.f64": ROWS, "add.rn.f64": ROWS}
"""Of the elements that a thread reads at once, widened, squared and added. `.rn` also forbids ptxas to contract."""


@pytest.mark.full
@pytest.mark.parametrize(
    ("dtype", "architecture"), [("fp32", 90), ("bf16", 90), ("fp16", 90), ("bf16", 80), ("bf16", 120)]
)
def test_every_square_is_added_in_fp64_and_none_is_contracted(
    dtype: str, architecture: int, compiled: Callable[..., Any]
) -> None:
    ptx = compiled("lane_sums_kernel", dtype, architecture)["ptx"]
    assert floating_point(ptx) == SQUARES
    assert "fma." not in ptx
    assert ".ftz" not in ptx


@pytest.mark.parametrize("architecture", [80, 90, 120])
def test_lanes_and_chunks_are_added_one_by_one(architecture: int, compiled: Callable[..., Any]) -> None:
    ptx = compiled("totals_kernel", architecture=architecture)["ptx"]
    assert floating_point(ptx) == {"add.rn.f64": 2 * TOTAL_ROWS}  # of lanes, and of chunks
    assert "shfl." not in ptx  # no two threads share a sum


@pytest.mark.full
def test_without_the_launch_options_the_compiler_contracts(compiled: Callable[..., Any]) -> None:
    """What the tests above would see if the option were lost."""
    assert "fma.rn.f64" in compiled("lane_sums_kernel", enable_fp_fusion=True)["ptx"]


def instructions(cubin: bytes, folder: Path) -> list[str]:
    """Return the names of the machine's instructions in their order."""
    (folder / "kernel.cubin").write_bytes(cubin)
    nvdisasm = pytest.importorskip("triton").knobs.nvidia.nvdisasm.path
    shown = subprocess.run([nvdisasm, "-c", folder / "kernel.cubin"], capture_output=True, text=True, check=True)
    return re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\d+\s+)?([A-Z0-9]+)", shown.stdout, re.MULTILINE)


@pytest.mark.full
@pytest.mark.parametrize("architecture", [80, 90])
@pytest.mark.parametrize(
    ("kernel", "dtype", "ahead", "additions"),
    [
        ("lane_sums_kernel", "fp32", ROWS, ROWS),
        ("lane_sums_kernel", "bf16", ROWS, ROWS),
        ("lane_sums_kernel", "fp16", ROWS, ROWS),
        ("totals_kernel", "", TOTAL_ROWS, 2 * TOTAL_ROWS),
    ],
)
def test_the_assembler_contracts_nothing_and_lets_loads_run_ahead(
    kernel: str,
    dtype: str,
    ahead: int,
    additions: int,
    architecture: int,
    compiled: Callable[..., Any],
    tmp_path: Path,
) -> None:
    """Of a loop that adds what it has just read ptxas makes load, add, load, add: a wait for memory each time."""
    found = instructions(compiled(kernel, dtype, architecture)["cubin"], tmp_path)
    counts = Counter(found)
    assert counts["DFMA"] == 0
    assert counts["DADD"] == additions
    assert counts["DMUL"] == (ROWS if kernel == "lane_sums_kernel" else 0)
    assert counts["LDL"] == counts["STL"] == 0  # nothing is spilled
    assert Counter(found[: found.index("DADD")])["LDG"] >= ahead


class Ops(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what torch dispatches, by name."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func.name()] += 1
        return func(*args, **(kwargs or {}))


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
        with Ops() as ops:
            sums.sum_squares(grads)
        # sums and partial sums are empty; two slices: the part in use of both buffers
        assert ops.calls == {"aten::empty.memory_format": 2, "aten::copy_": 1, "aten::slice.Tensor": 2}
        chunks = 0 + 1 + 1 + 1 + 1 + 1 + 1 + 1 + 2
        assert recorder.launched == [("lane_sums_kernel", chunks * 8), ("totals_kernel", len(grads))]


def test_gradients_without_elements_sum_to_zero_without_a_launch(recorder: Recorder) -> None:
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
    sums.sum_squares([torch.empty(4 * KEPT - 1)])
    assert made.count((4 * KEPT - 1,)) == 1
    sums.sum_squares([torch.empty(1)])
    assert made.count((1,)) == 2
    sums.sum_squares([torch.empty(100, dtype=torch.bfloat16), torch.empty(200, dtype=torch.bfloat16)])
    assert made.count((100, 200)) == 2


def test_dtypes_without_a_kernel_are_refused(recorder: Recorder) -> None:
    with pytest.raises(ValueError, match=r"torch\.float64: have them in torch\.float32"):
        CudaSums().sum_squares([torch.empty(3, dtype=torch.float64)])


def test_sums_are_found_by_name() -> None:
    grads = {"a": gradient(300, torch.float32), "b": gradient(5000, torch.float32)}
    sums = SquareSums(["b", "other", "a"], CPU)
    sums.find(grads)
    a, b = sum_squares([*grads.values()]).tolist()
    assert sums.values[0].tolist() == [b, 0.0, a]
    assert sums.found == {"a", "b"}
