"""Use of parameters in place, without FSDP2's copies, where the shard axis has one rank.

At stage 0, and wherever the shard axis has one rank, a unit's shards are its whole parameters. FSDP2 has no such case,
and fills the output of an all-gather. `use_shards` makes the shard itself that output, so that nothing is copied or
freed. A parameter that is used in another dtype, is offloaded, or shares its memory with others is still copied. This
module uses private attributes of FSDP2.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

from dzero.zero.deferred_grads import groups_of


def use_shards(module: FSDPModule) -> None:
    """Use the shards of `module` in place; call this once, after `fully_shard` over one rank."""
    for group in groups_of(module):
        for held in group.fsdp_params:
            if type(held._sharded_param_data) is torch.Tensor:  # else it is brought to the device for each use
                held.__class__ = UnshardedInPlace


class UnshardedInPlace(FSDPParam):
    """FSDP2's parameter whose shard, on an axis of one rank, is also its all-gather output."""

    _gathered: torch.Tensor | None = None
    """Shard for which the all-gather outputs were made."""

    def init_all_gather_outputs(
        self,
        all_gather_input_numels: list[int],
        all_gather_input_dtypes: list[torch.dtype],
        world_size: int,
        device: torch.device,
        **others: Any,
    ) -> None:
        """Make the shard the all-gather output; called before each use.

        The shard is replaced if the model is moved, or its state dict is assigned. `others` is one more argument in
        torch 2.11 and 2.12.
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
        """Free the parameter as FSDP2 does, unless it is the shard."""
        if self.all_gather_outputs[0] is not self._gathered:
            super().free_unsharded_param()
