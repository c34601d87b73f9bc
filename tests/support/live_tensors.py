"""Bytes of all tensors of this process, by a search of everything that the garbage collector knows."""

from __future__ import annotations

import gc

import torch


def live_bytes() -> int:
    """Bytes of the storages of plain tensors and parameters, each storage once; those on meta have no memory."""
    plain = [each for each in gc.get_objects() if type(each) in (torch.Tensor, torch.nn.Parameter)]
    held = [each for each in plain if each.device.type != "meta"]
    return sum({s.data_ptr(): s.nbytes() for s in (each.untyped_storage() for each in held)}.values())
