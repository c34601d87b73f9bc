"""The fp32 master of a parameter, which a `torch.optim` class updates in its place, and the states of the class."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from dzero.offload.buffer_layout import state_of
from dzero.offload.manager import OffloadManager
from dzero.optim.flat_update import follow_edits
from dzero.optim.master_handover import OffloadedMasterStorage
from dzero.optim.state_placement import StatePlacement, read, still_of
from dzero.zero.dtensors import local_of, placed_like
from dzero.zero.offloaded_param import HostStorage, TensorStorage
from dzero.zero.rounding import to_working


@dataclass
class MasterParam:
    """A parameter and its fp32 master [local shard], a plain parameter for the `torch.optim` class.

    Attributes:
        work: Tensor for the rounded working copy if the master is off the device, otherwise None.
        mesh: Mesh of a master off the device; None if it is the parameter's.
        target: What the class updates: the master, or the stand-in of a whole parameter (optim/unsharded_class.py),
            which only its owner has.
        places: Where states of the class belong off the device [local shard], by key.
        moments: Always empty, because the states of the class stay with the master.
    """

    name: str
    param: nn.Parameter
    master: nn.Parameter
    work: torch.Tensor | None
    mesh: DeviceMesh | None
    target: nn.Parameter | None = None
    places: dict[str, torch.Tensor] = field(default_factory=dict)

    moments = ()

    def __post_init__(self) -> None:
        """Let the class update the master itself."""
        self.target = self.master

    @classmethod
    def create(
        cls, name: str, param: nn.Parameter, values: torch.Tensor, placement: StatePlacement, keys: Iterable[str]
    ) -> MasterParam:
        """Create the master and the `places` of `keys`.

        Args:
            name: Name of the parameter.
            param: The parameter.
            values: What `initial_master` returns: the master of a 16-bit parameter on the device; `fill` copies others.
            placement: Location of the states.
            keys: Keys of the class's states of the parameter's shape.
        """
        local, mesh = local_of(param), placement.mesh("master", name, param)
        if mesh is None:
            return cls(name, param, nn.Parameter(local if local.dtype == torch.float32 else values), None, None)
        view = placement.offload.view
        master = view(name, "master", local.numel())
        work = master if local.dtype == torch.float32 else view(name, "work", local.numel())
        places = {key: view(name, state_of(key), local.numel()).view(local.shape) for key in keys}
        return cls(name, param, nn.Parameter(master.view(local.shape)), work, mesh, places=places)

    def fill(self, values: torch.Tensor) -> None:
        """Set a master off the device, and its working copy, to `values`; called where updates find them."""
        if self.mesh is not None:
            self.master.data.copy_(values)
            self.write_back()

    def place(self, states: MutableMapping[str, Any]) -> None:
        """Move those of the class's `states` of this parameter to their places that are not there yet.

        A class that was made for one element (`element_states.shrunk`) has one element of each, for all.
        """
        for key, place in self.places.items():
            value = states.get(key)
            if not isinstance(value, torch.Tensor) or value is place or value.dtype != place.dtype:
                continue
            if value.shape in (place.shape, (1,)):
                states[key] = place.copy_(value)

    def shown(self, states: Mapping[str, Any], placement: StatePlacement) -> dict[str, Any]:
        """Return the master, unless it is the parameter's values, and the class's `states`, as state dicts show them.

        Those of the parameter's shard are DTensors placed like it; those on disk are read on access.
        """
        found = {} if self.param.dtype == torch.float32 else {"master": self.master.detach()}
        found |= states
        for key, value in found.items():
            if not isinstance(value, torch.Tensor) or value.shape != self.master.shape or not value.ndim:
                continue
            if self.mesh is not None and (key == "master" or value is self.places.get(key)):
                value = placement.shown("master" if key == "master" else "moments", self.name, value.view(-1))
            found[key] = placed_like(value, self.param, self.mesh)
        return found

    @property
    def local(self) -> torch.Tensor:
        """The parameter's local shard on the device, flat."""
        return local_of(self.param).view(-1)

    def made(self, *, exchanged: bool) -> torch.Tensor | None:
        """Return `work`: no update of a class runs early, so nothing is ever exchanged."""
        return self.work

    @property
    def is_param(self) -> bool:
        """Whether the master is the parameter itself."""
        return self.mesh is None and self.param.dtype == torch.float32

    def kept_master(self, unit: str, offload: OffloadManager) -> TensorStorage | None:
        """Return the master's storage for a later optimizer; None for an fp32 parameter, which has the same values."""
        if self.param.dtype == torch.float32:
            return None
        return HostStorage(self.master.detach()) if self.mesh is None else OffloadedMasterStorage(self, unit, offload)

    def values(self) -> torch.Tensor:
        """Implement `HasMaster.values`."""
        return read(self.local)

    def copy_master(self, values: torch.Tensor) -> torch.Tensor:
        """Implement `HasMaster.copy_master` for a master off the device."""
        return follow_edits(self.master.detach().view(-1).clone(), values)

    def flat(self, key: str) -> torch.Tensor:
        """Raise KeyError: the states belong to the class and stay with the master."""
        raise KeyError(key)

    def refresh_master(self, values: torch.Tensor) -> None:
        """Take `values` of a parameter that was loaded as the new master."""
        values = values.to(self.master.device)
        if not self.is_param and not torch.equal(to_working(self.master.detach().view(-1), values.dtype), values):
            self.master.data.view(-1).copy_(values)
        if self.work is not None:
            self.work.copy_(values)

    def follow_edits(self) -> None:
        """Take edits of the working copy since the last update into a master on the device."""
        if self.work is None and not self.is_param:
            follow_edits(self.master.data.view(-1), self.local)

    def take_edits(self, values: torch.Tensor) -> None:
        """Take the edited elements of a parameter's `values` into a master off the device."""
        assert self.work is not None
        values, master = values.to(self.master.device), self.master.data.view(-1)
        if values.dtype == torch.float32:
            master.copy_(values)
        else:
            follow_edits(master, values)
            self.work.copy_(values)

    def write_back(self) -> None:
        """Round the master into the working copy."""
        target = self.local if self.work is None else self.work
        if target.dtype != torch.float32:
            target.copy_(to_working(self.master.detach().view(-1), target.dtype))


def initial_master(param: nn.Parameter, origin: torch.Tensor | None) -> torch.Tensor:
    """Return the first master of a parameter: the fp32 shard itself, `origin`, or the shard converted to fp32."""
    local = read(local_of(param))
    if local.dtype == torch.float32:
        return local
    return origin.view(local.shape) if origin is not None and still_of(origin, local) else local.float()
