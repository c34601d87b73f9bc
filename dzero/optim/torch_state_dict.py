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


def refuse_other_rules(group: Mapping[str, Any], where: str) -> None:
    """Raise ValueError if a group sets what AdamW of torch.optim knows, and AdamW here does not; `where` it is."""
    for key in OTHER_RULES:
        if group.get(key):
            raise ValueError(
                f"{where} has {key}=True, which dzero.AdamW does not know: take dzero.TorchOptimizer(sharded, "
                f"torch.optim.AdamW, {key}=True)"
            )


def is_torchs(state_dict: Mapping[str, Any]) -> bool:
    """Return whether a state dict holds plain tensors, as torch.optim saves them, instead of DTensors."""
    states = state_dict["state"].values()
    if any(isinstance(value, DTensor) for each in states for value in each.values()):
        return False
    return not states or any(isinstance(each.get(key), torch.Tensor) for each in states for key in MOMENTS)


def check_torchs(group: Mapping[str, Any], stored: ParamState, saved: Mapping[str, Any]) -> None:
    """Raise ValueError for states of another rule or parameter, or a parameter that other mesh axes also cut."""
    refuse_other_rules(group, "the state dict of torch.optim")
    if group.get("decoupled_weight_decay") is False and group.get("weight_decay"):
        raise ValueError(
            f"the state dict is of torch.optim.Adam with weight_decay={group['weight_decay']}, which adds it to "
            "gradients, and dzero.AdamW decays the parameters: take dzero.TorchOptimizer(sharded, torch.optim.Adam)"
        )
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
