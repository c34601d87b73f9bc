"""Context parallelism of a model that is sharded: its ledger counts what attention moves."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh

from dzero.mesh import context_group
from dzero.parallel.context.parallelize import ContextParallel
from dzero.zero.shard import Sharded


def parallelize_context(
    sharded: Sharded, mesh: DeviceMesh, cp: int, *, attention: str = "all_gather"
) -> ContextParallel:
    """Cut every sequence over `cp` data-parallel neighbours of `mesh`, all axes of it. After `shard`; all ranks call.

    Raises ValueError as `ContextParallel`, and where cp does not divide the data-parallel ranks.
    """
    group, exact = context_group(mesh, cp), sharded.layout.exact
    return ContextParallel(sharded.model, group, sharded.ledger, attention=attention, exact=exact)
