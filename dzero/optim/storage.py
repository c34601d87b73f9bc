"""What the optimizer stores for one parameter, and how it appears in a state dict.

    key                    local tensor                      when
    step                   fp32 scalar on the CPU            always
    master                 fp32 [shard]                      16-bit parameter, precision.master=fp32
    remainder              int16 [shard]                     precision.master=remainder (zero/working.py)
    exp_avg, exp_avg_sq    fp32 or bf16 [shard]              precision.moments=fp32, bf16
    exp_avg_codes, ...     uint8, fp32 [padded blocks]       precision.moments=int8 (optim/eight_bit.py)

All but `step` are DTensors over the parameter's mesh with its placement, so DCP reshards them exactly; 8-bit ones
load into the same number of ranks only.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from dzero.optim.eight_bit import EightBit
from dzero.optim.update import ParamStates
from dzero.zero.layout import Layout, ParamShape
from dzero.zero.working import to_working

MOMENTS = ("exp_avg", "exp_avg_sq")


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """A DTensor's local shard; any other tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def sharded_like(local: torch.Tensor, param: nn.Parameter) -> torch.Tensor:
    """`local` [param's local shard] as a DTensor placed as `param` is; the one place where states are wrapped."""
    assert isinstance(param, DTensor)
    return DTensor.from_local(
        local.view(local_of(param).shape),
        param.device_mesh,
        param.placements,
        run_check=False,
        shape=param.shape,
        stride=param.stride(),
    )


def sharded_flat(local: torch.Tensor, param: nn.Parameter) -> torch.Tensor:
    """A flat `local` of equal length on every rank as a DTensor [ranks, elems], one row per rank.

    Its blocks follow the shards, so it means nothing to another number of ranks: there the shape differs, and loading
    is an error instead of shifted elements.
    """
    assert isinstance(param, DTensor)
    return DTensor.from_local(local.view(1, -1), param.device_mesh, [Shard(0)], run_check=False)


@dataclass
class Stored:
    """One parameter's states: `tensors` by key as above; `moments8` wraps the 8-bit ones for decoding."""

    name: str
    param: nn.Parameter
    first: int
    dtype: torch.dtype
    tensors: dict[str, torch.Tensor]
    moments8: dict[str, EightBit] = field(default_factory=dict)

    @classmethod
    def create(cls, shape: ParamShape, param: nn.Parameter, origin: torch.Tensor | None, layout: Layout) -> Stored:
        """Zero moments; the master from `origin` [local shard, fp32], or from the parameter where there is none."""
        local = local_of(param.detach())
        if origin is not None and not torch.equal(to_working(origin, local.dtype), local):
            origin = None  # the model was given other values after shard()
        rank = param.device_mesh.get_local_rank() if isinstance(param, DTensor) else 0
        first = rank * shape.shard_elems(layout.shard)
        stored = cls(shape.name, param, first, local.dtype, {"step": torch.tensor(0.0)})
        if local.dtype != torch.float32:
            master = local.detach().float() if origin is None else origin
            if layout.remainder:
                low = master.contiguous().view(torch.int32).to(torch.int16)
                stored.tensors["remainder"] = sharded_like(low, param)
            else:
                stored.tensors["master"] = sharded_like(master, param)
        for index, key in enumerate(MOMENTS):
            if layout.moments.dtype == torch.uint8:
                padded = shape.shard_elems(layout.shard)
                eight = EightBit.zeros(local.numel(), padded, signed=index == 0, device=local.device)
                stored.moments8[key] = eight
                for part, tensor in eight.tensors.items():
                    stored.tensors[f"{key}_{part}"] = sharded_flat(tensor, param)
            else:
                zeros = torch.zeros_like(local, dtype=layout.moments.dtype)
                stored.tensors[key] = sharded_like(zeros, param)
        return stored

    def states(self) -> ParamStates:
        """Flat views for the update; 8-bit moments are decoded (`keep` encodes them again)."""
        work = local_of(self.param.detach()).view(-1)
        if work.dtype != self.dtype:
            raise RuntimeError(
                f"{self.name} is {work.dtype} now, but its states were made for {self.dtype}: do not call .to() or "
                ".half() after shard(); choose PrecisionConfig(param=...) instead"
            )
        own = work if work.dtype == torch.float32 else None
        m, v = (self.moments8[k].load() if self.moments8 else self._flat(k) for k in MOMENTS)
        master = own if own is not None else self._flat("master") if "master" in self.tensors else None
        remainder = self._flat("remainder") if "remainder" in self.tensors else None
        return ParamStates(self.name, self.first, work, master, remainder, m, v)

    def keep(self, states: ParamStates) -> None:
        """After the update: encode moments that are not stored as they are computed."""
        for key, value in zip(MOMENTS, (states.m, states.v), strict=True):
            if self.moments8:
                self.moments8[key].store(value)

    def follow(self) -> None:
        """Take a parameter that was loaded with other values as the new master.

        A remainder is kept: it lies within the rounding of whatever parameter stands above it.
        """
        if "master" in self.tensors:
            work, master = local_of(self.param.detach()), local_of(self.tensors["master"])
            if not torch.equal(to_working(master, work.dtype), work):
                master.copy_(work)

    def _flat(self, key: str) -> torch.Tensor:
        return local_of(self.tensors[key]).view(-1)

    def bytes_by_kind(self) -> dict[str, int]:
        """Bytes of this rank's storages by the table's kinds."""
        kinds = {"param": _bytes(self.param), "master": 0, "moments": 0}
        for key, tensor in self.tensors.items():
            if key != "step":
                kinds["master" if key in ("master", "remainder") else "moments"] += _bytes(tensor)
        return kinds


def _bytes(tensor: torch.Tensor) -> int:
    return local_of(tensor.detach()).untyped_storage().nbytes()
