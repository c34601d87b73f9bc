"""Payloads in blocks on a GPU: the bits of the CPU kernels. Run with `pytest -m gpu`."""

from __future__ import annotations

import pytest
import torch
from block_cases import DTYPES, kernels_differ

from dzero.comm.wire import FORMATS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: `pytest -m gpu` asks for one"),
]


@pytest.mark.parametrize("code", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_gpu_has_the_bits_of_the_cpu_kernels(code: str, dtype: torch.dtype) -> None:
    assert kernels_differ("cuda", code, dtype) == []
