"""Parameter values before sharding: equal on all ranks, on the device, and rounded to the working dtype."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from dzero.zero.dtensors import local_of, placed_like
from dzero.zero.layout import Layout
from dzero.zero.rounding import to_working
from dzero.zero.unit_shapes import rows_of
from dzero.zero.units import ParamSlot, swap

Materialise = Callable[[nn.Module], None]
Groups = Mapping[str, dist.ProcessGroup]


class ParamInit:
    """Initialization of units; if the device is meta, parameters get no values.

    In its methods, `groups` are the process groups of the axes along which values must agree.

    Args:
        layout: Layout of the model.
        device: Device of the values.
        materialise: Function that initializes a module. None: its parameters have values.
        from_rank_0: Whether rank 0's values are broadcast; else, those of `materialise` are the same on all ranks.
        ends: The group of the pipeline, and the names of parameters that both its first and its last rank have.
    """

    def __init__(
        self,
        layout: Layout,
        device: torch.device,
        materialise: Materialise | None,
        from_rank_0: bool,
        ends: tuple[dist.ProcessGroup, Collection[str]] | None = None,
    ) -> None:
        self._layout, self._device, self._materialise, self._ends = layout, device, materialise, ends
        self._from_rank_0 = from_rank_0
        self._blank = device.type == "meta"

    def equalise_buffers(self, model: nn.Module, groups: Groups) -> None:
        """Broadcast rank 0's buffers, if its values count; as bytes, which every backend supports."""
        if not self._from_rank_0:
            return
        for buffer in model.buffers():
            if not buffer.is_meta and buffer.numel():
                buffer.data = buffer.data.to(self._device).contiguous()
                _broadcast(buffer.data.view(-1).view(torch.uint8), groups)

    def fill(self, modules: list[nn.Module], slots: list[ParamSlot], groups: Groups) -> None:
        """Initialize parameters by `materialise`, from rank 0, or both; raise ValueError for one that stays on meta."""
        for module in modules:
            if self._materialise is not None:
                self._materialise(module)
        for slot in slots:
            param = slot.param
            if param.is_meta and not self._blank:
                raise ValueError(
                    f"parameter {slot.name} is on meta: pass init=, which is what dzero.empty_init() gave, or a "
                    "function that fills a module"
                )
            if not isinstance(param, DTensor):
                param.data = param.data.to(self._device).contiguous()
            if self._from_rank_0 and not self._blank:
                _broadcast(local_of(param), groups)
                if self._ends is not None and slot.name in self._ends[1]:
                    _broadcast_to_last(local_of(param), self._ends[0])

    @torch.no_grad()
    def round(
        self, modules: list[nn.Module], slots: list[ParamSlot], cuts: Sequence[tuple[int, int]]
    ) -> dict[str, torch.Tensor]:
        """Round parameters to the working dtype, and return the rows of this rank's masters before rounding.

        Args:
            modules: Modules of the unit.
            slots: Locations of its parameters.
            cuts: Cuts of the masters, as (rank, ranks) pairs for `unit_shapes.rows_of`.

        Returns:
            fp32 rows by name of the trained parameters that had another dtype.
        """
        rows: dict[str, torch.Tensor] = {}
        placed: dict[nn.Parameter, nn.Parameter] = {}
        working = self._layout.param.dtype
        for slot in slots:
            param = slot.param
            if param.dtype == working:
                continue
            unsharded = local_of(param).detach().float()  # a separate object, so setting `param.data` keeps it
            rounded = to_working(unsharded, working)
            if isinstance(param, DTensor):  # setting `data` cannot change the dtype of a DTensor
                placed[param] = nn.Parameter(placed_like(rounded, param), param.requires_grad)
            else:
                param.data = rounded
            if param.requires_grad:
                first, count = rows_of(unsharded.shape[0], *cuts)
                rows[slot.name] = unsharded[first : first + count].clone()
        swap(modules, placed)
        return rows


def _broadcast(tensor: torch.Tensor, groups: Groups) -> None:
    for group in groups.values():
        dist.broadcast(tensor, group=group, group_src=0)


def _broadcast_to_last(tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Send from the group's first rank to its last; only these two call this."""
    last = group.size() - 1
    if group.rank() == 0:
        dist.send(tensor, dist.get_global_rank(group, last), group=group)
    else:
        dist.recv(tensor, dist.get_global_rank(group, 0), group=group)
