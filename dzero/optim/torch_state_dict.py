"""Import of state dicts of `torch.optim.AdamW` from a run in one process, where each rank copies its own shards.

torch numbers parameters in the order of its groups, which for `model.parameters()` is the order of this package too. A
parameter that was never updated has no states in such a state dict, and its moments become zeros. Masters keep the
values of the model, because torch has no separate masters.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from dzero.optim.param_state import MOMENTS, ParamState

OTHER_RULES = ("amsgrad", "maximize")


def is_torchs(state_dict: Mapping[str, Any]) -> bool:
    """Return whether a state dict holds plain tensors, as torch.optim saves them, instead of DTensors."""
    states = state_dict["state"].values()
    return any(isinstance(each.get(key), torch.Tensor) for each in states for key in MOMENTS) and not any(
        isinstance(value, DTensor) for each in states for value in each.values()
    )


def check_torchs(group: Mapping[str, Any], stored: ParamState, saved: Mapping[str, Any]) -> None:
    """Raise ValueError for states of another rule or parameter, or a parameter that other mesh axes also cut."""
    if on := [key for key in OTHER_RULES if group.get(key)]:
        raise ValueError(f"the state dict of torch.optim has {on[0]}=True, which AdamW here does not know")
    shape = tuple(stored.param.shape)
    found = {key: tuple(value.shape) or (1,) for key, value in saved.items() if key != "step"}
    if found and found != dict.fromkeys(MOMENTS, shape):
        raise ValueError(
            f"{stored.name}: the state dict of torch.optim has {found}, not {MOMENTS} of {shape}: its groups must hold "
            "the same parameters in the same order"
        )
    if isinstance(stored.param, DTensor) and stored.param.device_mesh.ndim > 1:
        raise ValueError(f"{stored.name} is cut along other axes too: load a state dict of torch.optim without them")


def take_torchs(stored: ParamState, saved: Mapping[str, Any]) -> None:
    """Copy this rank's shard of a parameter's states from whole tensors; called inside `OffloadManager.visit`."""
    stored.tensors["step"].fill_(float(saved.get("step", 0)))
    elems = stored.local.numel()
    for key in MOMENTS:
        whole = saved[key].detach().reshape(-1) if key in saved else torch.zeros(stored.first + elems)
        stored.put_moment(key, whole[stored.first : stored.first + elems].to(stored.local.device))
