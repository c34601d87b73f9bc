"""Work of the first rank, in which the others take part, with the same outcome on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch.distributed as dist

from dzero.checkpoint.errors import CheckpointError
from dzero.comm.collectives import gather_json
from dzero.mesh import AXES
from dzero.zero.sharded import Sharded


def on_first_rank(sharded: Sharded, work: Callable[[], None], rest: Callable[[], None] = lambda: None) -> None:
    """Call `work` on rank 0, and raise its error on all ranks. All ranks call this.

    Args:
        sharded: Sharded model, whose ranks along all axes call this.
        work: Work of rank 0.
        rest: Called on all ranks afterwards, for instance to take part in gathers that `work` left out.

    Raises:
        Exception: The error of `work` on rank 0, and `CheckpointError` with its message on the others.
    """
    failed = None
    if dist.get_rank() == 0:
        try:
            work()
        except Exception as error:  # raised below, once no rank waits for this one
            failed = error
    rest()
    failure = "" if failed is None else str(failed) or type(failed).__name__
    for group in groups_on_host(sharded):  # from rank 0 along all axes, so that every rank knows
        failure = next(filter(None, gather_json(failure, group)), "")
    if failure:
        raise failed or CheckpointError("", failure)


def groups_on_host(sharded: Sharded) -> Iterator[dist.ProcessGroup]:
    """Yield this rank's groups along all axes of the mesh, through which values in host memory can be gathered."""
    yield from (sharded.host_mesh.get_group(axis) for axis in AXES)
    yield from sharded.model_groups.values()
