"""Private parts of torch that a simulation needs, in one place and behind a version check."""

from __future__ import annotations

import torch
from torch._subclasses import FakeTensorMode
from torch.distributed.distributed_c10d import _resolve_process_group as group_called  # type: ignore[attr-defined]
from torch.distributed.tensor.debug import _clear_sharding_prop_cache as forget_meshes
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["FakeStore", "FakeTensorMode", "TorchDispatchMode", "check_version", "forget_meshes", "group_called"]

TRIED = ("2.11", "2.12", "2.13")


def check_version() -> None:
    """Raise RuntimeError for a torch version in which these parts were not tested."""
    if ".".join(torch.__version__.split(".")[:2]) not in TRIED:
        raise RuntimeError(f"torch {torch.__version__}: simulation uses private parts of torch {', '.join(TRIED)}")
