"""Reductions along one mesh axis: `ExactReduction`, a function of its inputs alone, or the backend's `NativeReduction`.

Exact (the default on gloo):
    reduce       every rank sends each peer the peer's part in the *wire* format; the owner sums in fp32 in rank order,
                 multiplies by 1/ranks and rounds once to the output's dtype. The result is the same for any stage,
                 unit size, block size or algorithm. Over many ranks, or with quantized payloads, see comm/hop_sum.py.
    gather       every rank sends its part directly to its place at each peer, without staging.
    all-to-all   the same, with a different part for each peer.
Native: the backend's own reduce_scatter / all_gather / all_reduce in the wire dtype, then times 1/ranks. fp16 is
    multiplied before, in its original dtype, because sums over more ranks would overflow sooner than their mean.

Reductions average over the axis. Exact ones move blocks whose staging stays below `STAGING_BYTES`, and block k + 1
travels while block k is summed.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from typing import Protocol

import torch
import torch.distributed as dist

from dzero.comm import host_sum
from dzero.comm.hop_sum import HopSum, Piece, pieces_of, staged_bytes
from dzero.comm.hops import Hops
from dzero.comm.messages import Chained, swap
from dzero.comm.residuals import Residuals
from dzero.comm.wire import Blocks, Wire
from dzero.utils.torch_internals import gather_method, reduce_scatter_method

all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # torch 2.13 renamed it
# Methods of the group, which are called for every unit: the functions of torch.distributed around them would make a
# small collective cost half as much again.
_all_gather, _reduce_scatter = gather_method(), reduce_scatter_method()

STAGING_BYTES = 32 << 20
# Blocks stay in a core's cache between arrival and sum; on GPUs fewer, larger messages are faster.
BLOCK_BYTES = {"cpu": 4 << 20, "cuda": STAGING_BYTES}


class AxisReduction(Protocol):
    """Averaging reductions and gathers along one axis, over flat contiguous tensors.

    Attributes:
        group: Process group of the axis.
        ranks: Number of ranks.
        hops: Route of sums.
        exact: Whether sums are fp32, so that an all-reduce returns full precision instead of the wire dtype's.
    """

    group: dist.ProcessGroup
    ranks: int
    hops: Hops
    exact: bool

    def reduce_scatter(
        self, output: torch.Tensor, full: torch.Tensor, wire: Wire, residuals: Residuals | None = None
    ) -> None:
        """Average `full` [ranks * n] over the axis and write this rank's part to `output` [n], of any float dtype.

        With `residuals`, payloads in blocks have error feedback.
        """

    def all_reduce(self, full: torch.Tensor, wire: torch.dtype) -> None:
        """Average `full` [n] over the axis in place."""

    def all_gather(self, output: torch.Tensor, part: torch.Tensor) -> list[dist.Work]:
        """Start gathering `part` [n] of every rank into `output` [ranks * n]; wait for the returned works."""

    def all_to_all(self, output: torch.Tensor, full: torch.Tensor) -> list[dist.Work]:
        """Start sending part r of `full` [ranks * n] to rank r, and receiving part r of `output` from rank r."""


class ExactReduction:
    """Pairwise exchange and fp32 sums in rank order; see the module's note.

    Args:
        group: Process group of the axis.
        hops: Route of sums and gathers. None: that of `Hops.of` for this number of ranks.
    """

    exact = True

    def __init__(self, group: dist.ProcessGroup, hops: Hops | None = None) -> None:
        self.group, self.ranks, self.rank = group, group.size(), group.rank()
        self.hops = hops or Hops.of(self.ranks)
        self._staging = torch.empty(0, dtype=torch.uint8)

    def reduce_scatter(
        self, output: torch.Tensor, full: torch.Tensor, wire: Wire, residuals: Residuals | None = None
    ) -> None:
        """Average `full` exactly, in blocks."""
        self._average(output, full.view(self.ranks, -1).unbind(), wire, residuals)

    def all_reduce(self, full: torch.Tensor, wire: torch.dtype) -> None:
        """Average this rank's chunk, then gather all chunks; the last ones may be short or empty."""
        length = -(-full.numel() // self.ranks)
        chunks = [full[r * length : (r + 1) * length] for r in range(self.ranks)]
        self._average(chunks[self.rank], chunks, wire)
        for work in self._gather(full, chunks):
            work.wait()

    def all_gather(self, output: torch.Tensor, part: torch.Tensor) -> list[dist.Work]:
        """Start to exchange the parts directly with all peers."""
        parts = list(output.view(self.ranks, -1).unbind())
        if not _same_memory(parts[self.rank], part):  # FSDP2 passes the view itself
            parts[self.rank].copy_(part)
        return self._gather(output, parts)

    def _gather(self, full: torch.Tensor, parts: Sequence[torch.Tensor]) -> list[dist.Work]:
        """Start to gather `parts`, which are the consecutive parts of `full`, the last of which may be shorter.

        The second of two hops starts when the first is waited for.
        """
        hops = self.hops
        inside, across, mine = hops.inside(self.rank), hops.across(self.rank), [parts[self.rank]] * self.ranks
        if hops.outer == 1:
            return swap(self.group, send=mine, receive=parts)

        def from_nodes() -> list[dist.Work]:
            """Send what this rank has of each node to the other ranks of its own."""
            works: list[dist.Work] = []
            for owner in across:
                of_node = [*parts]
                for peer in inside:
                    of_node[peer] = parts[owner - self.rank + peer]
                works += swap(self.group, send=[parts[owner]] * self.ranks, receive=of_node, ranks=inside)
            return works

        def of_groups() -> list[dist.Work]:
            """Exchange the parts of whole groups, which are neighbors."""
            width = hops.inner * parts[0].numel()
            groups = [full[r // hops.inner * width :][:width] for r in range(self.ranks)]
            return swap(self.group, send=[groups[self.rank]] * self.ranks, receive=groups, ranks=across)

        works = swap(self.group, send=mine, receive=parts, ranks=across if hops.nodes else inside)
        return [Chained(works, from_nodes if hops.nodes else of_groups)]

    def all_to_all(self, output: torch.Tensor, full: torch.Tensor) -> list[dist.Work]:
        """Start to exchange the parts directly with all peers."""
        send, receive = ([*each.view(self.ranks, -1).unbind()] for each in (full, output))
        receive[self.rank].copy_(send[self.rank])
        return swap(self.group, send=send, receive=receive)

    def _average(
        self, output: torch.Tensor, parts: Sequence[torch.Tensor], wire: Wire, residuals: Residuals | None = None
    ) -> None:
        """Compute output [n] = round(sum over ranks r, in order, of the payload of r for this rank / ranks)."""
        length = max(part.numel() for part in parts)
        if isinstance(wire, Blocks) or self.hops.outer > 1:
            if length:
                pieces = _pieces(wire, length, self.hops, output.device.type)
                staging = self._staged(staged_bytes(pieces, self.hops), output.device)
                HopSum(self.group, self.hops, pieces, staging, residuals).average(output, parts)
            return
        block = _block_elems(self.ranks, length, wire, parts[0].dtype, parts[0].device.type)
        buffers = cycle(self._stage(block, wire, parts[0]))

        def post(start: int) -> tuple[list[dist.Work], torch.Tensor, torch.Tensor]:
            """Send the block that begins at element `start`, in the other of the two buffers."""
            pieces = parts if length <= block else [part[start : start + block] for part in parts]
            return self._post(pieces, next(buffers), wire)

        arriving = post(0)
        for start in range(0, length, block):
            works, mine, incoming = arriving
            if start + block < length:
                arriving = post(start + block)
            for work in works:
                work.wait()
            self._sum(output[start : start + block], mine, incoming)

    def _post(
        self, pieces: Sequence[torch.Tensor], buffer: torch.Tensor, wire: torch.dtype
    ) -> tuple[list[dist.Work], torch.Tensor, torch.Tensor]:
        """Exchange one block; return the works, this rank's own payload, and the peers' [ranks, block] in `wire`."""
        mine, incoming = pieces[self.rank], buffer[: self.ranks]
        outgoing = pieces
        if mine.dtype != wire:
            outgoing = [
                slot[: piece.numel()].copy_(piece) for slot, piece in zip(buffer[self.ranks :], pieces, strict=True)
            ]
        receive = [slot[: mine.numel()] for slot in incoming]
        works = swap(self.group, send=outgoing, receive=receive)
        return works, outgoing[self.rank], incoming

    def _sum(self, output: torch.Tensor, mine: torch.Tensor, incoming: torch.Tensor) -> None:
        """Average with separate IEEE operations (no fused multiply-add), so that slices of data give the same bits."""
        if not output.is_cuda and mine.dtype in host_sum.DTYPES and output.dtype in host_sum.DTYPES:
            host_sum.average(output, mine, incoming, self.rank)
            return
        payloads = [mine if r == self.rank else slot[: mine.numel()] for r, slot in enumerate(incoming)]
        total = payloads[0].to(torch.float32, copy=True)
        for payload in payloads[1:]:
            total.add_(payload.to(torch.float32))
        output.copy_(total.mul_(1.0 / self.ranks))

    def _stage(self, block: int, wire: torch.dtype, like: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return two buffers of [slots, block]; fresh pages would cost more than the sum."""
        slots = self.ranks * (1 if like.dtype == wire else 2)
        staging = self._staged(2 * slots * block * wire.itemsize, like.device)
        return staging.view(wire).view(2, slots, block).unbind()

    def _staged(self, nbytes: int, device: torch.device) -> torch.Tensor:
        """Return memory, uint8 [nbytes], kept between calls."""
        if self._staging.numel() < nbytes or self._staging.device != device:
            self._staging = torch.empty(nbytes, dtype=torch.uint8, device=device)
        return self._staging[:nbytes]


def staged(wire: Wire, length: int, hops: Hops, dtype: torch.dtype, device_type: str) -> int:
    """Return the bytes that `ExactReduction` keeps once it has reduced parts of `length` elements of `dtype`."""
    if isinstance(wire, Blocks) or hops.outer > 1:
        return staged_bytes(_pieces(wire, length, hops, device_type), hops)
    slots = 2 * hops.inner * (1 if dtype == wire else 2)
    return slots * _block_elems(hops.inner, length, wire, dtype, device_type) * wire.itemsize


def _pieces(wire: Wire, length: int, hops: Hops, device_type: str) -> tuple[Piece, ...]:
    return pieces_of(wire, length, hops, BLOCK_BYTES.get(device_type, STAGING_BYTES))


def _block_elems(ranks: int, length: int, wire: torch.dtype, dtype: torch.dtype, device_type: str) -> int:
    """Return the elements of a block whose payloads, two of each rank and once more if they are cast, fit."""
    slots = 2 * ranks * (1 if dtype == wire else 2)
    return max(1, min(length, BLOCK_BYTES.get(device_type, STAGING_BYTES) // (slots * wire.itemsize)))


def _same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.untyped_storage() is b.untyped_storage() and bool(a.storage_offset() == b.storage_offset())


class NativeReduction:
    """Collectives of the backend, for backends that reduce well by themselves (the default on nccl)."""

    exact = False

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.ranks = group, group.size()
        self.hops = Hops(self.ranks)
        self._now = dist.ReduceScatterOptions()
        self._now.asyncOp = False  # for nccl: on the current stream

    def reduce_scatter(
        self, output: torch.Tensor, full: torch.Tensor, wire: Wire, residuals: Residuals | None = None
    ) -> None:
        """Average in the wire dtype, in the backend's order."""
        if isinstance(wire, Blocks) or residuals is not None:
            raise TypeError("the backend sums elements of a dtype, not blocks")
        target = output if output.dtype == wire else torch.empty_like(output, dtype=wire)
        work = _reduce_scatter(self.group, target, self._payload(full, wire), self._now)
        if work is not None:  # on gloo; nccl is ordered on its stream
            work.wait()
        if target is not output:
            output.copy_(target)
        if wire != torch.float16:
            output.mul_(1.0 / self.ranks)

    def all_reduce(self, full: torch.Tensor, wire: torch.dtype) -> None:
        """Average in the wire dtype, in the backend's order."""
        payload = self._payload(full, wire)
        dist.all_reduce(payload, group=self.group)
        if payload is not full:
            full.copy_(payload)
        if wire != torch.float16:
            full.mul_(1.0 / self.ranks)

    def _payload(self, full: torch.Tensor, wire: torch.dtype) -> torch.Tensor:
        return full.to(wire) if wire != torch.float16 else full.mul(1.0 / self.ranks).to(wire)

    def all_gather(self, output: torch.Tensor, part: torch.Tensor) -> list[dist.Work]:
        """Start the backend's all-gather."""
        return [_all_gather(self.group, output, part)]

    def all_to_all(self, output: torch.Tensor, full: torch.Tensor) -> list[dist.Work]:
        """Start the backend's all-to-all."""
        work = dist.all_to_all_single(output, full, group=self.group, async_op=True)
        return [] if work is None else [work]
