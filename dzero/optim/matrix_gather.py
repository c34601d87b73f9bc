"""Muon updates of sharded matrices, each of which is orthogonalized whole by the rank that owns it.

    mix             every rank updates the momentum of its shards, and pads and rounds the input of Newton-Schulz
    collect         every owner (`optim/rank_assignment.py`) receives the shards of its matrices
    orthogonalize   every owner processes its matrices, one whole matrix after the other
    return          every rank receives its shards of the results
    apply           every rank updates its masters and working copies

Rounds run one after the other. Besides the states, a rank therefore holds the shards of one round twice, and one whole
matrix. An owner computes the same bits for any sharding of a matrix. At stage 0, all replicas receive a matrix from one
owner. With hybrid sharding, each replica has its own owner. Ranks with the same shard must then run on the same kind
of hardware, or the bits of the replicas may differ.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from dzero.comm.collective_log import Collective
from dzero.comm.ledger import Entry, Traffic
from dzero.comm.messages import swap
from dzero.comm.spans import span
from dzero.mesh import REPLICATE, SHARD
from dzero.optim import newton_schulz
from dzero.optim.flat_update import ParamStates
from dzero.optim.newton_schulz import MatrixCoefficients
from dzero.optim.offloaded_step import PendingUpdate
from dzero.optim.param_state import ParamState
from dzero.optim.rank_assignment import ROOM_ELEMS, Round, expected_updates, of_names, part_elems, rounds_of
from dzero.zero.sharded import Sharded
from dzero.zero.unit_shapes import ParamShape

How = Mapping[str, tuple[int, MatrixCoefficients]]
"""Number of the update and coefficients of each matrix, by parameter name."""


class MatrixUpdates:
    """Muon updates of the matrices of a sharded model, in rounds.

    Args:
        matrices: Shapes of the trained parameters that Muon updates.
        sharded: The sharded model.
        payload: Dtype in which matrices are sent and orthogonalized.
    """

    def __init__(self, matrices: Sequence[ParamShape], sharded: Sharded, payload: torch.dtype) -> None:
        self._layout, self._payload, self._ledger = sharded.layout, payload, sharded.ledger
        self._shards = sharded.layout.shard
        self._axis = SHARD if self._shards > 1 else REPLICATE
        self._group = sharded.mesh.get_group(self._axis)
        self._rank, self._ranks = self._group.rank(), self._group.size()
        # At stage 0 every rank receives the results of all owners, so a round takes `ranks` times the memory.
        room = ROOM_ELEMS if self._shards > 1 else ROOM_ELEMS // self._ranks
        self._rounds = rounds_of(matrices, self._ranks, room)

    @property
    def traffic(self) -> dict[Entry, Traffic]:
        """Calls and bytes that this rank sends when a step updates all matrices."""
        return expected_updates(self._layout, self._rounds, self._axis, self._rank, self._payload)

    @torch.no_grad()
    def run(self, pending: Mapping[str, PendingUpdate[ParamState]], how: How) -> None:
        """Update the matrices of `pending`, by parameter name; all ranks pass the same names."""
        for number, every in enumerate(self._rounds):
            owned = of_names(every, pending)
            if any(owned):
                self._run_round(f"matrices {number}", owned, pending, how)

    def _run_round(self, what: str, owned: Round, pending: Mapping[str, PendingUpdate[ParamState]], how: How) -> None:
        states = {matrix.name: pending[matrix.name].stored.states() for of_owner in owned for matrix in of_owner}
        parts = [self._mix(of_owner, states, pending, how) for of_owner in owned]
        collected = self._collect(what, parts)
        with span(f"orthogonalise {what}"):
            self._orthogonalise(collected, owned[self._rank], how)
        self._return(what, collected, parts)
        for of_owner, part in zip(owned, parts, strict=True):
            for matrix, slot in _slots(of_owner, part, self._shards):
                own = states[matrix.name]
                newton_schulz.apply(slot[: own.work.numel()], own, how[matrix.name][1])

    def _mix(
        self,
        owned: Sequence[ParamShape],
        states: Mapping[str, ParamStates],
        pending: Mapping[str, PendingUpdate[ParamState]],
        how: How,
    ) -> torch.Tensor:
        """Update momenta, and return this rank's padded shards of an owner's matrices, flat, in the payload dtype."""
        device = next(iter(states.values())).work.device
        part = torch.zeros(part_elems(owned, self._shards), dtype=self._payload, device=device)
        for matrix, slot in _slots(owned, part, self._shards):
            each, own, (step, coefficients) = pending[matrix.name], states[matrix.name], how[matrix.name]
            slot[: each.grad.numel()].copy_(newton_schulz.mixed(each.grad, own, coefficients, step))
            each.stored.keep(own)
        return part

    def _collect(self, what: str, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return all shards [shards, n] of this rank's matrices, gathered from `parts`, one part per owner."""
        own = parts[self._rank]
        if self._shards == 1:
            return own.view(1, -1)
        collected = own.new_empty(self._ranks, own.numel())
        collected[self._rank] = own
        self._swap(what, "all_to_all", _elems(parts), send=parts, receive=collected.unbind())
        return collected

    def _return(self, what: str, collected: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
        """Send the results back, so that `parts` hold this rank's shards of every owner's results."""
        if self._shards == 1:
            self._swap(what, "all_gather", _elems(parts), send=[collected.view(-1)] * self._ranks, receive=parts)
            return
        parts[self._rank].copy_(collected[self._rank])
        self._swap(what, "all_to_all", _elems(parts), send=collected.unbind(), receive=parts)

    def _swap(
        self, what: str, kind: str, elems: int, *, send: Sequence[torch.Tensor], receive: Sequence[torch.Tensor]
    ) -> None:
        """Exchange tensors with all peers; `elems`, for the collective log, is the same on all ranks."""
        if self._ranks == 1:
            return
        begun = Collective(kind, what, self._axis, elems, self._payload)
        with span(f"{kind} {what}"), self._ledger.collective_log.within(begun, self._group):
            for work in swap(self._group, send=send, receive=receive):
                work.wait()
        sent = sum(each.nbytes for peer, each in enumerate(send) if peer != self._rank)
        self._ledger.record("update", kind, self._axis, self._payload, sent)

    def _orthogonalise(self, collected: torch.Tensor, owned: Sequence[ParamShape], how: How) -> None:
        """Orthogonalize the matrices in `collected` [shards, n] in place."""
        for matrix, slot in _slots(owned, collected, self._shards):
            rows, cols = matrix.shape
            # Cloned into its own allocation, because the bits of a product may depend on the alignment of its factors.
            whole = slot.reshape(-1, cols)[:rows].clone()
            made = slot.new_zeros(slot.numel() // cols, cols)
            made[:rows] = newton_schulz.orthogonalise(whole, how[matrix.name][1].iterations)
            slot.copy_(made.view(slot.shape))


def _elems(parts: Sequence[torch.Tensor]) -> int:
    return sum(part.numel() for part in parts)


def _slots(owned: Sequence[ParamShape], part: torch.Tensor, shards: int) -> list[tuple[ParamShape, torch.Tensor]]:
    """Return each matrix of an owner with its padded shards, as views of the last dim of `part`."""
    pieces = torch.split(part, [matrix.shard_elems(shards) for matrix in owned], dim=-1)
    return list(zip(owned, pieces, strict=True))
