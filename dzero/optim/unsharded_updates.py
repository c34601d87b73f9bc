"""Updates that need whole parameters, each of which is computed by the rank that owns the parameter.

    prepare   every rank fills its shards of what the owners need, e.g. gradients
    collect   every owner (`optim/rank_assignment.py`) receives the shards of its parameters
    update    every owner computes the results of its parameters, one whole parameter after the other. Of those that
              tp cuts, the owners of its parts gather the whole, and each computes it
    return    every rank receives its shards of the results
    apply     every rank updates its masters and working copies

What is prepared, computed and applied is said by an `UnshardedRule`: Muon (`optim/muon.py`), or a class of
`torch.optim` that mixes the elements of a parameter (`optim/torch_optimizer.py`).

Rounds run one after the other. Besides the states, a rank therefore holds the shards of one round twice, and one whole
parameter. An owner computes the same bits for any sharding of a parameter. With hybrid sharding, each replica has its
own owner. Ranks with the same shard must then run on the same kind of hardware, or the bits of the replicas may differ.

Updates on the host run in a lane of the offload, one unit after the other, while the main thread may begin other
collectives. They therefore have a process group of their own.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist

from dzero.comm.collective_log import Collective
from dzero.comm.ledger import Entry, Traffic, dtype_key
from dzero.comm.messages import swap
from dzero.comm.spans import span
from dzero.mesh import REPLICATE, SHARD, TENSOR, lane_of
from dzero.offload.buffer_layout import BufferLayout
from dzero.optim.offloaded_step import updated_apart
from dzero.optim.rank_assignment import ROOM_ELEMS, Cost, Round, expected_updates, of_names, part_elems, rounds_of
from dzero.zero.sharded import Sharded
from dzero.zero.unit_shapes import ParamShape, rows_of


class UnshardedRule(Protocol):
    """The update of one step by a rule that needs whole parameters."""

    @property
    def device(self) -> torch.device:
        """Device on which the step's parameters are updated."""

    def prepare(self, name: str, inputs: Sequence[torch.Tensor]) -> None:
        """Fill this rank's shard [n] of each input of a parameter."""

    def update(self, name: str, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the result, of the shape of the parameter, from whole `inputs` of this shape; called by the owner.

        Each input has an allocation of its own, because the bits of a product or sum may depend on its alignment.
        """

    def apply(self, name: str, result: torch.Tensor) -> None:
        """Update this rank's shard of a parameter from its shard [n] of the result."""


class _Exchange(NamedTuple):
    """Exchange by name, and whether a lane of the host runs it, whose collectives are neither logged nor counted."""

    what: str
    in_lane: bool


class UnshardedUpdates:
    """Updates of the whole parameters of a sharded model, in rounds.

    Args:
        shapes: Shapes of the parameters.
        sharded: The sharded model.
        inputs: Number of tensors of a parameter's shape that its owner needs.
        payload: Dtype in which inputs and results are sent.
        cost: Work of the update of a parameter, by which owners are balanced.
        tiers: Location of the offloaded states.
        replicas_share: Whether replicas share the parameters out at stage 0, where each has whole gradients. If not,
            each owns all of them, and nothing is sent.
    """

    def __init__(
        self,
        shapes: Sequence[ParamShape],
        sharded: Sharded,
        inputs: int,
        payload: torch.dtype,
        cost: Cost,
        tiers: BufferLayout,
        *,
        replicas_share: bool = False,
    ) -> None:
        self._layout, self._payload, self._ledger = sharded.layout, payload, sharded.ledger
        self._inputs, self._shards = inputs, sharded.layout.shard
        self._axis = REPLICATE if replicas_share and self._shards == 1 else SHARD
        self._group = sharded.mesh.get_group(self._axis)
        self._rank, self._ranks = self._group.rank(), self._group.size()
        # At stage 0 every rank receives the results of all owners, so a round takes `ranks` times the memory.
        room = ROOM_ELEMS if self._shards > 1 else ROOM_ELEMS // self._ranks
        self._rounds = rounds_of(shapes, self._ranks, cost, room // inputs)
        names = {shape.name for shape in shapes}
        self._on_host = {name for name in names if tiers.updated_on_host(name)}
        apart = [names & of_unit for of_unit in updated_apart(tiers)]
        self._in_lanes = [of_unit & self._on_host for of_unit in apart]
        self._on_device = [names.difference(*apart), *(of_unit - self._on_host for of_unit in apart)]
        self._tensor = sharded.model_groups.get(TENSOR) if any(shape.is_cut_by(TENSOR) for shape in shapes) else None
        self._lane = lane_of(self._group) if self._on_host and self._ranks > 1 else None
        self._tensor_lane = lane_of(self._tensor) if self._tensor is not None and self._on_host else None

    @property
    def owned(self) -> frozenset[str]:
        """Names of the parameters that this rank owns."""
        return frozenset(shape.name for each in self._rounds for shape in each[self._rank])

    @property
    def traffic(self) -> dict[Entry, Traffic]:
        """Calls and bytes that this rank sends when a step updates all parameters."""
        return self._expected([*self._on_device, *self._in_lanes])

    def _expected(self, exchanged: Sequence[Collection[str]]) -> dict[Entry, Traffic]:
        rounds = [of_names(each, names) for names in exchanged for each in self._rounds]
        sent = [each for each in rounds if any(each)]
        expected = expected_updates(self._layout, sent, self._axis, self._rank, self._payload, self._inputs)
        cut = [shape for each in sent for shape in each[self._rank] if shape.is_cut_by(TENSOR)]
        if cut and self._tensor is not None:
            sent_bytes = sum(shape.elems for shape in cut) * self._payload.itemsize * (self._tensor.size() - 1)
            entry = Entry("update", "all_gather", TENSOR, dtype_key(self._payload))
            expected[entry] = Traffic(self._inputs * len(cut), self._inputs * sent_bytes)
        return expected

    def record_lanes(self, names: Collection[str]) -> None:
        """Count what lanes send in a step that updates the parameters of `names`; called when the step is started."""
        for entry, sent in self._expected([of_unit.intersection(names) for of_unit in self._in_lanes]).items():
            self._ledger.record("update", entry.kind, entry.axis, self._payload, sent.sent_bytes, calls=sent.calls)

    @torch.no_grad()
    def run(self, rule: UnshardedRule, names: Collection[str]) -> None:
        """Update the parameters of `names`, all on the host or all on the device; all ranks pass the same names."""
        in_lane = not self._on_host.isdisjoint(names)
        for number, every in enumerate(self._rounds):
            owned = of_names(every, names)
            if any(owned):
                self._run_round(_Exchange(f"parameters {number}", in_lane), owned, rule)

    def _run_round(self, exchange: _Exchange, owned: Round, rule: UnshardedRule) -> None:
        parts = [self._prepare(of_owner, rule) for of_owner in owned]
        collected = self._collect(exchange, parts)
        with span(f"update {exchange.what}"):
            self._update(exchange, collected, owned[self._rank], rule)
        results = [part[0] for part in parts]
        self._return(exchange, collected[:, 0], results)
        for of_owner, part in zip(owned, results, strict=True):
            for shape, slot in self._slots(of_owner, part):
                rule.apply(shape.name, slot[: self._local_elems(shape)])

    def _prepare(self, owned: Sequence[ParamShape], rule: UnshardedRule) -> torch.Tensor:
        """Return this rank's padded shards [inputs, n] of what an owner needs, in the payload dtype."""
        part = torch.zeros(self._inputs, part_elems(owned, self._shards), dtype=self._payload, device=rule.device)
        for shape, slot in self._slots(owned, part):
            rule.prepare(shape.name, [each[: self._local_elems(shape)] for each in slot])
        return part

    def _collect(self, exchange: _Exchange, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return all shards [shards, inputs, n] of this rank's parameters, gathered from `parts`, one per owner."""
        own = parts[self._rank]
        if self._shards == 1:
            return own.unsqueeze(0)
        collected = own.new_empty(self._ranks, *own.shape)
        collected[self._rank] = own
        self._swap(exchange, "all_to_all", _elems(parts), send=parts, receive=collected.unbind())
        return collected

    def _return(self, exchange: _Exchange, results: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
        """Send results [shards, n] back, so that `parts` hold this rank's shards of every owner's results."""
        if self._shards == 1:
            self._swap(exchange, "all_gather", _elems(parts), send=[results[0]] * self._ranks, receive=parts)
            return
        parts[self._rank].copy_(results[self._rank])
        self._swap(exchange, "all_to_all", _elems(parts), send=results.unbind(), receive=parts)

    def _swap(
        self,
        exchange: _Exchange,
        kind: str,
        elems: int,
        *,
        send: Sequence[torch.Tensor],
        receive: Sequence[torch.Tensor],
    ) -> None:
        """Exchange tensors with all peers; `elems`, for the collective log, is the same on all ranks."""
        if self._ranks == 1:
            return
        if exchange.in_lane:
            assert self._lane is not None
            _wait_for(swap(self._lane.group, send=send, receive=receive, lane=self._lane.number))
            return
        begun = Collective(kind, exchange.what, self._axis, elems, self._payload)
        with span(f"{kind} {exchange.what}"), self._ledger.collective_log.within(begun, self._group):
            _wait_for(swap(self._group, send=send, receive=receive))
        sent = sum(each.nbytes for peer, each in enumerate(send) if peer != self._rank)
        self._ledger.record("update", kind, self._axis, self._payload, sent)

    def _update(
        self, exchange: _Exchange, collected: torch.Tensor, owned: Sequence[ParamShape], rule: UnshardedRule
    ) -> None:
        """Replace the first input of the parameters in `collected` [shards, inputs, n] by their results."""
        for shape, slot in self._slots(owned, collected):
            parts = [_joined(slot[:, index], shape) for index in range(self._inputs)]
            made = torch.zeros_like(parts[0])
            whole = [self._along_tensor(exchange, each[: shape.shape[0]], shape) for each in parts]
            made[: shape.shape[0]] = _own_part(rule.update(shape.name, whole), shape)
            slot[:, 0].copy_(made.view(slot[:, 0].shape))

    def _along_tensor(self, exchange: _Exchange, part: torch.Tensor, shape: ParamShape) -> torch.Tensor:
        """Return the whole of a parameter that tp cuts, gathered from its ranks; any other parameter as it is."""
        if not shape.is_cut_by(TENSOR):
            return part
        lane = self._tensor_lane if exchange.in_lane else None
        group = self._tensor if lane is None else lane.group
        assert group is not None, f"{shape.name} is cut along {TENSOR}"
        assert shape.split is not None
        assert shape.split.dim is not None
        parts = [torch.empty_like(part) for _ in range(group.size())]
        parts[group.rank()] = part
        _wait_for(swap(group, send=[part] * group.size(), receive=parts, lane=None if lane is None else lane.number))
        if not exchange.in_lane:
            sent_bytes = part.nbytes * (group.size() - 1)
            self._ledger.record("update", "all_gather", TENSOR, self._payload, sent_bytes)
        return torch.cat(parts, dim=shape.split.dim)

    def _slots(self, owned: Sequence[ParamShape], part: torch.Tensor) -> list[tuple[ParamShape, torch.Tensor]]:
        """Return each parameter of an owner with its padded shards, as views of the last dim of `part`."""
        pieces = torch.split(part, [shape.shard_elems(self._shards) for shape in owned], dim=-1)
        return list(zip(owned, pieces, strict=True))

    def _local_elems(self, shape: ParamShape) -> int:
        """Return the elements of this rank's shard, without padding."""
        at = self._rank if self._shards > 1 else 0
        return rows_of(shape.shape[0], (at, self._shards))[1] * shape.row_elems


def _joined(shards: torch.Tensor, shape: ParamShape) -> torch.Tensor:
    """Return padded shards [shards, n] as one tensor [rows, ...] with an allocation of its own."""
    return torch.empty_like(shards, memory_format=torch.contiguous_format).copy_(shards).view(-1, *shape.shape[1:])


def _own_part(whole: torch.Tensor, shape: ParamShape) -> torch.Tensor:
    """Return this rank's part of the result of a parameter that tp cuts; any other result as it is."""
    if not shape.is_cut_by(TENSOR):
        return whole
    assert shape.split is not None
    assert shape.split.dim is not None
    size = shape.shape[shape.split.dim]
    return whole.narrow(shape.split.dim, shape.split.index * size, size)


def _elems(parts: Sequence[torch.Tensor]) -> int:
    return sum(part.numel() for part in parts)


def _wait_for(works: Sequence[dist.Work]) -> None:
    for work in works:
        work.wait()
