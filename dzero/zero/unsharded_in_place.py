"""Parameters that one rank has alone are computed with where they lie: FSDP2 would copy them before each use.

At stage 0, and wherever else the shard axis has one rank, a unit's shards are its parameters. FSDP2 knows no such case:
it fills what an all-gather would have. `use_shards` makes the shard itself be that, so nothing is copied or freed. A
parameter that works in another dtype, lives off the device, or shares its memory with others is copied as before. This
needs what FSDP2 keeps to itself.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

from dzero.zero.deferred_grads import groups_of


def use_shards(module: FSDPModule) -> None:
    """Of a module that `fully_shard` cut over one rank; called once."""
    for group in groups_of(module):
        for held in group.fsdp_params:
            if type(held._sharded_param_data) is torch.Tensor:  # else it is brought to the device for each use
                held.__class__ = UnshardedInPlace


class UnshardedInPlace(FSDPParam):
    """FSDP2's own of one parameter, which at a shard axis of one rank has its shard for what is gathered."""

    _gathered: torch.Tensor | None = None
    """The shard that what is gathered was made for."""

    def init_all_gather_outputs(
        self,
        all_gather_input_numels: list[int],
        all_gather_input_dtypes: list[torch.dtype],
        world_size: int,
        device: torch.device,
        **others: Any,
    ) -> None:
        """Called before each use; the shard is another one where the model was moved, or its state dict assigned.

        others: torch 2.11 and 2.12 have one more.
        """
        shard = self._sharded_param_data
        if shard is self._gathered:
            return
        self._gathered, self.all_gather_outputs = shard, []
        self.__dict__.pop("_unsharded_param", None)
        if all_gather_input_dtypes == [shard.dtype] and shard.untyped_storage().nbytes() == shard.nbytes:
            self.all_gather_outputs = [shard]
        else:
            super().init_all_gather_outputs(
                all_gather_input_numels, all_gather_input_dtypes, world_size, device, **others
            )

    def free_unsharded_param(self) -> None:
        """As FSDP2 does, but for the shard."""
        if self.all_gather_outputs[0] is not self._gathered:
            super().free_unsharded_param()
