"""Bytes of all tensors of this process, by a search of everything that the garbage collector knows."""

from __future__ import annotations

import gc

import torch


def live_tensors() -> list[torch.Tensor]:
    """Find the plain tensors and parameters that have memory, which the result keeps alive."""
    plain = [each for each in gc.get_objects() if type(each) in (torch.Tensor, torch.nn.Parameter)]
    return [each for each in plain if each.device.type != "meta"]


def live_bytes() -> int:
    """Bytes of the storages of all live tensors, each storage once."""
    return sum({s.data_ptr(): s.nbytes() for s in (each.untyped_storage() for each in live_tensors())}.values())
