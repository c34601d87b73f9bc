"""State dicts of a model with offloaded parameters: DTensors over the host's mesh, for saving and loading."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from dzero.mesh import SHARD, host_mesh
from dzero.zero.dtensors import placed_like, refuse_other_ranks_shard
from dzero.zero.offloaded_param import HostStorage, OffDeviceShard, OffDeviceTensor, memory_of
from dzero.zero.unit import Unit, as_module


def hook_state_dicts(unit: Unit, mesh: DeviceMesh) -> None:
    """Register the hooks of a unit with offloaded parameters; collective unless the mesh is a CPU mesh."""
    on_host = host_mesh(mesh)[SHARD]

    def show(module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: object) -> None:
        """Show offloaded shards as host tensors, after `state_dict()`.

        Shards in host memory are not copied. Shards on disk are read when they are used, tensor by tensor.
        """
        unit.await_update()
        for key, value in state_dict.items():
            if key.startswith(prefix) and isinstance(value, DTensor):
                with torch.no_grad():
                    local = value.to_local()
                if isinstance(local, OffDeviceShard):
                    state_dict[key] = placed_like(_as_on_host(local), value, on_host)

    def take(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: object) -> None:
        """Wrap values before `load_state_dict()` copies them: FSDP2's parameters accept only their own mesh."""
        for name, param in module.named_parameters(remove_duplicate=False):
            value, memory = state_dict.get(prefix + name), memory_of(param)
            if memory is not None and isinstance(value, DTensor) and isinstance(param, DTensor):
                refuse_other_ranks_shard(prefix + name, value, param)
                local = value.to_local()
                if not isinstance(local, OffDeviceShard):  # otherwise the root's hook has already wrapped it
                    flat = local.contiguous().view(-1)
                    local = OffDeviceShard.of(OffDeviceTensor.of(name, flat, memory.device), local.shape)
                    state_dict[prefix + name] = placed_like(local, value, param.device_mesh)

    for module in (as_module(each) for each in unit.modules):
        module.register_state_dict_post_hook(show)  # type: ignore[no-untyped-call]
        module.register_load_state_dict_pre_hook(take)  # type: ignore[no-untyped-call]


def _as_on_host(local: OffDeviceShard) -> torch.Tensor:
    memory = local.memory
    if memory.codec is None and isinstance(memory.storage, HostStorage):
        return local.within(memory.storage.flat)
    return OffDeviceShard(replace(memory, device=torch.device("cpu")), local.outline)
