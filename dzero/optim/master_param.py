"""The fp32 master of a parameter, which a `torch.optim` class updates in its place."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from dzero.offload.manager import OffloadManager
from dzero.optim.flat_update import follow_edits
from dzero.optim.master_handover import OffloadedMasterStorage
from dzero.optim.state_placement import StatePlacement, read, still_of
from dzero.zero.dtensors import local_of
from dzero.zero.offloaded_param import HostStorage, TensorStorage
from dzero.zero.rounding import to_working


@dataclass
class MasterParam:
    """A parameter and its fp32 master [local shard], a plain parameter for the `torch.optim` class.

    Attributes:
        work: Tensor for the rounded working copy if the master is on the host, otherwise None.
        mesh: Mesh of a master on the host; None if it is the parameter's.
        target: What the class updates: the master, or the stand-in of a whole parameter (optim/unsharded_class.py),
            which only its owner has.
        moments: Always empty, because the class stores its states beside the master.
    """

    name: str
    param: nn.Parameter
    master: nn.Parameter
    work: torch.Tensor | None
    mesh: DeviceMesh | None
    target: nn.Parameter | None = None

    moments = ()

    def __post_init__(self) -> None:
        """Let the class update the master itself."""
        self.target = self.master

    @classmethod
    def create(
        cls, name: str, param: nn.Parameter, origin: torch.Tensor | None, placement: StatePlacement
    ) -> MasterParam:
        """Create the master: the fp32 parameter itself, `origin`, or the parameter converted to fp32."""
        local, mesh = local_of(param), placement.mesh("master", name, param)
        origin = origin if still_of(origin, local) else None
        value = local if local.dtype == torch.float32 else local.float() if origin is None else origin.view(local.shape)
        if mesh is None:
            return cls(name, param, nn.Parameter(value), None, None)
        master = placement.offload.view(name, "master", local.numel()).copy_(value.view(-1))
        own = local.dtype == torch.float32
        work = master if own else placement.offload.view(name, "work", local.numel())
        return cls(name, param, nn.Parameter(master.view(local.shape)), work, mesh)

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
        """Implement `HasMaster.copy_master` for a master on the host."""
        return follow_edits(self.master.detach().view(-1).clone(), values)

    def flat(self, key: str) -> torch.Tensor:
        """Raise KeyError: the states belong to the class and stay with the master."""
        raise KeyError(key)

    def refresh_master(self) -> None:
        """Take a parameter that was loaded with other values as the new master."""
        local = self.local.to(self.master.device)
        if not self.is_param and not torch.equal(to_working(self.master.detach().view(-1), local.dtype), local):
            self.master.data.view(-1).copy_(local)

    def follow_edits(self) -> None:
        """Take edits of the working copy since the last update into a master on the device."""
        if self.work is None and not self.is_param:
            follow_edits(self.master.data.view(-1), self.local)

    def take_edits(self) -> None:
        """Take edits of the working copy since the last update into a master on the host."""
        local, master = read(self.local).to(self.master.device), self.master.data.view(-1)
        if local.dtype == torch.float32:
            master.copy_(local)
        else:
            follow_edits(master, local)

    def write_back(self) -> None:
        """Round the master into the working copy."""
        target = self.local if self.work is None else self.work
        if target.dtype != torch.float32:
            target.copy_(to_working(self.master.detach().view(-1), target.dtype))
