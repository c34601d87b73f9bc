"""Between microbatches a model's parameters are its shards, also where a unit stays gathered for the next one.

FSDP2 leaves the gathered parameters on the modules then (stages 1 and 2, all but the last microbatch). A loss on the
weights that reads them keeps their memory for its backward, and the last microbatch's reshard frees that memory before
the backward runs. So the shards are put back after each microbatch, and the gathered ones before the next forward. This
needs what FSDP2 keeps to itself.
"""

from __future__ import annotations

from functools import partial

from torch.distributed.fsdp import FSDPModule

from dzero.zero.late import groups_of
from dzero.zero.unit import Unit, as_module


def put_gathered_back(units: list[Unit]) -> None:
    """Give every unit a hook that puts its gathered parameters back before FSDP2 looks; called once."""
    for unit in units:
        for module in unit.modules:
            as_module(module).register_forward_pre_hook(partial(_hook, unit.modules[0]), prepend=True)


def put_shards(units: list[Unit]) -> None:
    """Register the shards of every unit that is gathered."""
    for unit in units:
        for group in groups_of(unit.modules[0]):
            if group.is_unsharded:
                for held in group.fsdp_params:
                    held._setattr_on_modules(held.sharded_param)


def _hook(module: FSDPModule, *_: object) -> None:
    for group in groups_of(module):
        if group.is_unsharded:
            for held in group.fsdp_params:
                held._setattr_on_modules(held.unsharded_param)
