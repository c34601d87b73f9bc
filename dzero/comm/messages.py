"""Pairwise messages between the ranks of a group."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
import torch.distributed as dist


def swap(
    group: dist.ProcessGroup,
    *,
    send: Sequence[torch.Tensor],
    receive: Sequence[torch.Tensor],
    ranks: Iterable[int] | None = None,
    lane: int | None = None,
) -> list[dist.Work]:
    """Start sending `send[r]` to each peer r and receiving `receive[r]` from it; wait for the returned works.

    Empty tensors are not sent, as both sides know the sizes. The tensors at this rank's own index are not touched.

    Args:
        group: Process group.
        send: Tensors by rank.
        receive: Tensors by rank, overwritten.
        ranks: Ranks that exchange; None: all of the group.
        lane: Number of the lane (`mesh.lane_of`), in a group of lanes; None in any other group.
    """
    rank = group.rank()
    peers = [peer for peer in (range(group.size()) if ranks is None else ranks) if peer != rank]
    if not send[rank].is_cuda:  # `batch_isend_irecv` does the same on gloo, but its wrappers cost more than the calls
        works = []
        for peer in peers:
            if (tensor := receive[peer]).numel():
                works.append(group.recv([tensor], peer, _tag(tensor, lane)))
            if (tensor := send[peer]).numel():
                works.append(group.send([tensor], peer, _tag(tensor, lane)))
        return works
    ops = [
        dist.P2POp(op, tensor.view(torch.uint8), group=group, group_peer=peer, tag=_tag(tensor, lane))
        for peer in peers
        for op, tensor in ((dist.irecv, receive[peer]), (dist.isend, send[peer]))
        if tensor.numel()
    ]
    return list(dist.batch_isend_irecv(ops)) if ops else []


def _tag(tensor: torch.Tensor, lane: int | None) -> int:
    """Return a tag by size, so that messages of different sizes never match, and by lane.

    On a mismatch gloo would end one rank's process and give the other rank a part of the message.
    """
    if lane is None:
        return tensor.nbytes & 0x7FFFFFFF
    return (lane & 0xFF) << 23 | tensor.nbytes & 0x7FFFFF


class Chained(dist.Work):
    """Works, and the works that `then` starts once they are done, which is when they are waited for."""

    def __init__(self, works: Sequence[dist.Work], then: Callable[[], Sequence[dist.Work]]) -> None:
        super().__init__()
        self._works = _in_turn(works, then)

    def wait(self, timeout: object = None) -> bool:
        """Wait for all works that were not waited for yet."""
        for work in self._works:
            work.wait()
        return True


def _in_turn(works: Sequence[dist.Work], then: Callable[[], Sequence[dist.Work]]) -> Iterator[dist.Work]:
    """Give `works`, and the works that `then` starts once they are done."""
    yield from works
    yield from then()
