"""Context parallelism of a sharded model, whose ledger counts the traffic of attention."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh

from dzero.mesh import context_group
from dzero.parallel.context.parallelize import ContextParallel
from dzero.zero.shard import Sharded


def parallelize_context(
    sharded: Sharded, mesh: DeviceMesh, cp: int, *, attention: str = "all_gather"
) -> ContextParallel:
    """Shard every sequence over `cp` neighbouring data-parallel ranks; call this on all ranks, after `shard`.

    Args:
        sharded: The sharded model.
        mesh: Mesh with all its axes.
        cp: Number of ranks that share a sequence.
        attention: "all_gather", "ulysses" or "ring".

    Raises:
        ValueError: If `ContextParallel` does not support the model, or cp does not divide the data-parallel ranks.
    """
    group, exact = context_group(mesh, cp), sharded.layout.exact
    return ContextParallel(sharded.model, group, sharded.ledger, attention=attention, exact=exact)
