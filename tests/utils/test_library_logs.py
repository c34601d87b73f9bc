"""Messages of other libraries that tell a user nothing are left out, and no others."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest

from dzero.utils.library_logs import leave_out

DOORS = {
    "a published model": "from dzero.models.hf import build_hf; build_hf('gpt2')",
    "moments in 8 bits": "import torch\nfrom dzero.optim.quantized_moments import blank\n"
    "blank(256, signed=True, device=torch.device('cpu'))",
    "the names of the package": "import dzero; [getattr(dzero, name) for name in dzero.__all__]",
}


@pytest.mark.parametrize("code", DOORS.values(), ids=list(DOORS))
def test_nothing_is_printed_before_the_first_useful_line(code: str) -> None:
    pytest.importorskip("torchao")
    pytest.importorskip("transformers")
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stderr == ""


def test_other_messages_of_these_loggers_are_kept(caplog: pytest.LogCaptureFixture) -> None:
    torchao, pytree = logging.getLogger("torchao"), logging.getLogger("torch.utils._pytree")
    leave_out()
    torchao.warning("Failed to load %s: %s", "/a/_C_mxfp8.so", "no such symbol")
    torchao.warning("Please upgrade to torch >= 2.11.0")
    pytree.warning("%s is an Enum subclass and is now natively supported by torch.compile as an opaque value", int)
    pytree.warning("%s is registered already", int)
    assert caplog.messages == ["Please upgrade to torch >= 2.11.0", f"{int} is registered already"]
