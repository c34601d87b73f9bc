"""Collectives that replace FSDP2's own; they move data through an `AxisReduction` and record it in the ledger.

    called by                           object            axis               phase
    FSDP2 (set_custom_all_gather)       UnshardParams     shard              unshard
    FSDP2 (set_custom_reduce_scatter)   ReduceGrads       shard              reduce
    optim/grad_accumulation.py          AverageReplicas     replicate          reduce
    zero/replica_shards.py              ReduceGrads       replicate          reduce
                                        GatherUpdated     replicate          update
    optim/, trainer/                    GatherScalars     all                control
    optim/grad_norm.py                  AllToAllScalars   replicate, shard   control

FSDP2 calls neither of the first two on an axis of one rank.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from dzero import streams
from dzero.comm.collective_log import Collective, CollectiveLog
from dzero.comm.hops import sent_bytes
from dzero.comm.ledger import Ledger
from dzero.comm.reduction import AxisReduction, all_gather_single
from dzero.comm.residuals import Residuals
from dzero.comm.spans import span
from dzero.comm.wire import Blocks, Wire, dtype_on_wire, legs_of_sum


class _Buffers:
    """FSDP2's allocation interface, with one temporary buffer per call."""

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return an uninitialized tensor of shape `size`, which FSDP2 drops after the call."""
        return torch.empty(*size, dtype=dtype, device=device)


class _Works(dist.Work):
    """Several works as one, which FSDP2 waits for before it copies out; `after` is called once they are done."""

    def __init__(
        self,
        span: str,
        works: list[dist.Work],
        collective_log: CollectiveLog,
        after: Callable[[], None] | None = None,
    ) -> None:
        super().__init__()
        self._span, self._works, self._collective_log, self._after = span, works, collective_log, after

    def wait(self, timeout: object = None) -> bool:
        """Block (CPU), or make the current stream wait (CUDA), until all works are done."""
        with span(self._span), self._collective_log.waiting():
            for work in self._works:
                work.wait()
        after, self._after = self._after, None
        if after is not None:
            after()
        return True


class UnshardParams(_Buffers):
    """Gathers one unit's shards [n] into its unsharded buffer [ranks * n], in the parameters' dtype.

    In blocks (qwZ of ZeRO++, Wang et al. 2023, section 3.1), every rank gets the same rounded values, its own included.
    A gather in a smaller group (hpZ) reads shards of gathered values, and sends them as they are.

    Args:
        unit: Name of the unit.
        exchange: Collectives along the axis.
        axis: Name of the mesh axis.
        ledger: Ledger that counts the collective.
        before: Called when FSDP2 is about to read the shards.
        blocks: Format on the wire; None: the parameters' dtype.
    """

    def __init__(
        self,
        unit: str,
        exchange: AxisReduction,
        axis: str,
        ledger: Ledger,
        before: Callable[[], None],
        blocks: Blocks | None = None,
    ) -> None:
        self._blocks = blocks
        self._span, self._unit, self._exchange, self._axis = f"all_gather {unit}", unit, exchange, axis
        self._ledger, self._before = ledger, before

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return the gather buffer, into which FSDP2 copies this rank's shards next, on the current stream."""
        self._before()
        return super().allocate(size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Gather as FSDP2 asks; return the work to wait for before reading the output, or None if already waited."""
        exchange, blocks, decode = self._exchange, self._blocks, None
        if group is not exchange.group:  # reshard_after_forward=<int>: backward gathers in a smaller group
            exchange, blocks = type(exchange)(group), None  # type: ignore[call-arg]
        begun = Collective.of("all_gather", self._unit, self._axis, input_tensor.numel(), input_tensor.dtype)
        with span(self._span), self._ledger.collective_log.within(begun, group):
            gathered, part = output_tensor, input_tensor
            if blocks is not None:
                gathered = torch.empty(exchange.ranks * blocks.nbytes, dtype=torch.uint8, device=output_tensor.device)
                part = gathered.view(exchange.ranks, -1)[group.rank()]
                blocks.encode(input_tensor, part)
                decode = partial(_decode, blocks, gathered, output_tensor)
            works = exchange.all_gather(gathered, part)
            sent = (exchange.ranks - 1) * part.nbytes
            self._ledger.record("unshard", "all_gather", self._axis, gathered.dtype, sent)
        # Unless FSDP2 asked for a work, it orders streams by an event that it records right after this call.
        pending = _Works(f"wait {self._span}", works, self._ledger.collective_log, decode)
        if async_op or not streams.exist(output_tensor.device):
            return pending
        pending.wait()
        return None


def _decode(blocks: Blocks, payloads: torch.Tensor, output: torch.Tensor) -> None:
    """Write the values of the payloads of all ranks to `output` [ranks * n]."""
    for row, part in zip(payloads.view(-1, blocks.nbytes), output.view(-1, blocks.elems), strict=True):
        blocks.decode(row, part)


class ReduceGrads(_Buffers):
    """Averages one unit's gradients [ranks * n] over an axis into this rank's part [n].

    FSDP2's divide factor is 1, because `exchange` divides.

    Args:
        unit: Name of the unit.
        exchange: Collectives along the axis.
        axis: Name of the mesh axis.
        wire: Format of the payload.
        ledger: Ledger that counts the collective.
        loans: Loans of the parts to other streams that read them, if any.
        feedback: Whether what rounding leaves of a payload is added to the next one.

    Attributes:
        residuals: What rounding left; None at first, and after they were dropped.
    """

    def __init__(
        self,
        unit: str,
        exchange: AxisReduction,
        axis: str,
        wire: Wire,
        ledger: Ledger,
        loans: streams.Loans | None = None,
        *,
        feedback: bool = False,
    ) -> None:
        self.residuals: Residuals | None = None
        self._feedback = feedback
        self._span, self._unit, self._exchange, self._axis = f"reduce_scatter {unit}", unit, exchange, axis
        self._wire, self._ledger, self._loans = wire, ledger, loans

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return the buffer of the input or of the part, for which FSDP2 calls this on the stream that reduces."""
        if self._loans is not None:
            self._loans.make()
        return super().allocate(size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: object,
        async_op: bool = False,
    ) -> None:
        """Implement FSDP2's signature: input [ranks * n], output [n], complete when this returns."""
        del group, op, async_op  # FSDP2 reduces on its own stream and never waits for a work
        wire = dtype_on_wire(self._wire)
        begun = Collective.of("reduce_scatter", self._unit, self._axis, output_tensor.numel(), wire)
        with span(self._span), self._ledger.collective_log.within(begun, self._exchange.group):
            if self._feedback and self.residuals is None:
                self.residuals = Residuals.zeros(self._exchange.hops, output_tensor.numel(), input_tensor.device)
            self._exchange.reduce_scatter(output_tensor, input_tensor, self._wire, self.residuals)
        sent = sent_bytes(legs_of_sum(self._wire, output_tensor.numel(), self._exchange.hops))
        self._ledger.record("reduce", "reduce_scatter", self._axis, wire, sent)


class AverageReplicas:
    """Averages one unit's reduced gradients [n] over the replicate axis, in place."""

    def __init__(self, unit: str, exchange: AxisReduction, axis: str, wire: torch.dtype, ledger: Ledger) -> None:
        self._span, self._unit, self._exchange, self._axis = f"all_reduce {unit}", unit, exchange, axis
        self._wire, self._ledger = wire, ledger

    def __call__(self, grads: torch.Tensor) -> None:
        """Average `grads` [n], flat and of any float dtype."""
        exchange, wire = self._exchange, self._wire
        begun = Collective.of("all_reduce", self._unit, self._axis, grads.numel(), wire)
        with span(self._span), self._ledger.collective_log.within(begun, exchange.group):
            exchange.all_reduce(grads, wire)
        owned = -(-grads.numel() // exchange.ranks)
        back = grads.dtype if exchange.exact else wire
        sent = sent_bytes(legs_of_sum(wire, owned, exchange.hops)) + (exchange.ranks - 1) * owned * back.itemsize
        self._ledger.record("reduce", "all_reduce", self._axis, wire, sent)


class GatherUpdated:
    """Gathers the updated replica shards [n] of one unit into its whole shard [ranks * n].

    `book` counts it, in the step whose update it belongs to. It may be issued later, when the next forward needs it.
    """

    def __init__(self, unit: str, exchange: AxisReduction, axis: str, ledger: Ledger) -> None:
        self._span, self._unit, self._exchange, self._axis = f"all_gather updated {unit}", unit, exchange, axis
        self._ledger = ledger

    def __call__(self, output: torch.Tensor, part: torch.Tensor) -> dist.Work:
        """Gather `part`, which may be its own slice of `output`; wait for the returned work before reading `output`."""
        begun = Collective.of("all_gather", self._unit, self._axis, part.numel(), part.dtype)
        with span(self._span), self._ledger.collective_log.within(begun, self._exchange.group):
            works = self._exchange.all_gather(output, part)
        return _Works(f"wait {self._span}", works, self._ledger.collective_log)

    def book(self, part_elems: int, dtype: torch.dtype) -> None:
        """Count one gather of parts of `part_elems` elements."""
        sent = (self._exchange.ranks - 1) * part_elems * dtype.itemsize
        self._ledger.record("update", "all_gather", self._axis, dtype, sent)


class GatherScalars:
    """Gathers a small vector [n] of every rank as [ranks, n], so that all ranks decide from the same numbers.

    Each rank sends (ranks - 1) * n * itemsize bytes, and receives as many.
    """

    def __init__(self, group: dist.ProcessGroup, axis: str, ledger: Ledger, phase: str = "control") -> None:
        self._group, self._axis, self._ledger, self._phase = group, axis, ledger, phase

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        """Return a new [ranks, n] of every rank's `values` [n], which have one length and dtype."""
        ranks = self._group.size()
        gathered = values.new_empty(ranks, values.numel())
        if ranks == 1:
            return gathered.copy_(values)
        begun = Collective.of("all_gather", "scalars", self._axis, values.numel(), values.dtype)
        with self._ledger.collective_log.within(begun, self._group):
            all_gather_single(gathered.view(-1), values.contiguous(), group=self._group)
        self._ledger.record(self._phase, "all_gather", self._axis, values.dtype, (ranks - 1) * values.nbytes)
        return gathered


class AllToAllScalars:
    """Sends row r of a small matrix [ranks, n] to rank r, so that each rank has every rank's numbers of its own slice.

    Each rank sends (ranks - 1) * n * itemsize bytes, and receives as many.
    """

    def __init__(self, group: dist.ProcessGroup, axis: str, ledger: Ledger) -> None:
        self._group, self._axis, self._ledger = group, axis, ledger

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Exchange the rows.

        Args:
            rows: [ranks, n], contiguous, row r for rank r; of one shape and dtype on every rank.

        Returns:
            A new [ranks, n], row r from rank r.
        """
        taken = rows.clone()  # gives it values if nothing arrives: in the `fake` group before torch 2.13
        ranks = self._group.size()
        if ranks == 1:
            return taken
        begun = Collective("all_to_all", "scalars", self._axis, rows[0].numel(), rows.dtype)
        with self._ledger.collective_log.within(begun, self._group):
            dist.all_to_all_single(taken.view(-1), rows.view(-1), group=self._group)
        self._ledger.record("control", "all_to_all", self._axis, rows.dtype, (ranks - 1) * rows[0].nbytes)
        return taken


def gather_json(value: Any, group: dist.ProcessGroup) -> list[Any]:
    """Return the JSON `value` of every rank, in rank order; for values that are not sent in every step."""
    mine = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    sizes = [torch.empty(1, dtype=torch.int64) for _ in range(group.size())]
    dist.all_gather(sizes, torch.tensor([mine.numel()]), group=group)
    most = max(int(size) for size in sizes)
    every = [torch.empty(most, dtype=torch.uint8) for _ in sizes]
    dist.all_gather(every, torch.nn.functional.pad(mine, (0, most - mine.numel())), group=group)
    return [json.loads(bytes(each[: int(size)].tolist())) for each, size in zip(every, sizes, strict=True)]
