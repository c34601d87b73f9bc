"""Values before the cut: equal on every rank, on the device, rounded to the working dtype."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

from dzero.zero.layout import Layout
from dzero.zero.units import Slot
from dzero.zero.working import to_working

Materialise = Callable[[nn.Module], None]


class Values:
    """Gives a unit its values; on meta none. `groups`: those of the axes over which they must agree."""

    def __init__(
        self, layout: Layout, device: torch.device, groups: list[dist.ProcessGroup], materialise: Materialise | None
    ) -> None:
        self._layout, self._device, self._groups, self._materialise = layout, device, groups, materialise
        self._blank = device.type == "meta"

    def equalise_buffers(self, model: nn.Module) -> None:
        """Rank 0's buffers for all, unless they are drawn; as bytes, since not every backend moves every dtype."""
        if self._materialise is not None:
            return
        for buffer in model.buffers():
            if not buffer.is_meta and buffer.numel():
                buffer.data = buffer.data.to(self._device).contiguous()
                self._broadcast(buffer.data.view(-1).view(torch.uint8))

    def fill(self, modules: list[nn.Module], slots: list[Slot]) -> None:
        """Parameters drawn by `materialise`, or rank 0's. Raises ValueError for one that stays on meta."""
        for module in modules:
            if self._materialise is not None:
                self._materialise(module)
        for slot in slots:
            param = slot.param
            if param.is_meta and not self._blank:
                raise ValueError(f"parameter {slot.name} is on meta: pass materialise= to give it values")
            param.data = param.data.to(self._device).contiguous()
            if self._materialise is None and not self._blank:
                self._broadcast(param.data)

    def _broadcast(self, tensor: torch.Tensor) -> None:
        for group in self._groups:
            dist.broadcast(tensor, group=group, group_src=0)

    @torch.no_grad()
    def round(self, param: nn.Parameter, rank: int) -> torch.Tensor | None:
        """Round `param` to the working dtype; return the fp32 rows that are `rank`'s shard if they lost anything."""
        working = self._layout.param.dtype
        if param.dtype == working:
            return None
        whole = param.data.float()
        param.data = to_working(whole, working)
        if not param.requires_grad:
            return None
        rows = -(-whole.shape[0] // self._layout.shard)
        return whole[rank * rows : (rank + 1) * rows].clone()
