"""Whole matrices out of shards and back: each is orthogonalised by the one rank that owns it
(optim/rank_assignment.py).

    mix       every rank updates the momentum of its shards; what is to be orthogonalised is padded and rounded
    collect   the shards of each owner's matrices travel to it
    work      every owner orthogonalises what it has, one whole matrix after the other
    return    every rank's shards of the result travel back to it
    apply     every rank updates its masters and working copies

One round after the other, so besides the states a rank holds the round's shards twice, and the matrix at work. An owner
makes the same of the same matrix, whatever it is cut into. At stage 0 all copies get it from one owner; with hybrid
sharding each copy has an owner of its own, so the ranks of one place in it are to be of one kind of hardware.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from dzero.comm.collective_log import Collective
from dzero.comm.ledger import Entry, Traffic
from dzero.comm.reduction import swap
from dzero.comm.spans import span
from dzero.mesh import REPLICATE, SHARD
from dzero.optim import newton_schulz
from dzero.optim.flat_update import ParamStates
from dzero.optim.newton_schulz import MatrixCoefficients
from dzero.optim.offloaded_step import PendingUpdate
from dzero.optim.param_state import ParamState
from dzero.optim.rank_assignment import ROOM_ELEMS, Round, expected_updates, of_names, part_elems, rounds_of
from dzero.zero.shard import Sharded
from dzero.zero.unit_shapes import ParamShape

How = Mapping[str, tuple[int, MatrixCoefficients]]
"""The number of each matrix's update, and its coefficients."""


class MatrixUpdates:
    """Updates `matrices`, trained parameters of `sharded`; they travel and are orthogonalised in dtype `payload`."""

    def __init__(self, matrices: Sequence[ParamShape], sharded: Sharded, payload: torch.dtype) -> None:
        self._layout, self._payload, self._ledger = sharded.layout, payload, sharded.ledger
        self._shards = sharded.layout.shard
        self._axis = SHARD if self._shards > 1 else REPLICATE
        self._group = sharded.mesh.get_group(self._axis)
        self._rank, self._ranks = self._group.rank(), self._group.size()
        # Whole parameters come back from all owners to every rank, so a round of them takes as many times the room.
        room = ROOM_ELEMS if self._shards > 1 else ROOM_ELEMS // self._ranks
        self._rounds = rounds_of(matrices, self._ranks, room)

    @property
    def traffic(self) -> dict[Entry, Traffic]:
        """What a step of all matrices moves from this rank."""
        return expected_updates(self._layout, self._rounds, self._axis, self._rank, self._payload)

    @torch.no_grad()
    def run(self, pending: Mapping[str, PendingUpdate[ParamState]], how: How) -> None:
        """Update these matrices, by name; every rank has the same names."""
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
        """This rank's shards of what an owner has, padded, one after the other: payload dtype, flat."""
        device = next(iter(states.values())).work.device
        part = torch.zeros(part_elems(owned, self._shards), dtype=self._payload, device=device)
        for matrix, slot in _slots(owned, part, self._shards):
            each, own, (step, coefficients) = pending[matrix.name], states[matrix.name], how[matrix.name]
            slot[: each.grad.numel()].copy_(newton_schulz.mixed(each.grad, own, coefficients, step))
            each.stored.keep(own)
        return part

    def _collect(self, what: str, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """[shards, n] of what this rank owns, from the parts that are for its owners."""
        own = parts[self._rank]
        if self._shards == 1:
            return own.view(1, -1)
        collected = own.new_empty(self._ranks, own.numel())
        collected[self._rank] = own
        self._swap(what, "all_to_all", _elems(parts), send=parts, receive=collected.unbind())
        return collected

    def _return(self, what: str, collected: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
        """The way back: `parts` become this rank's shards of every owner's result."""
        if self._shards == 1:
            self._swap(what, "all_gather", _elems(parts), send=[collected.view(-1)] * self._ranks, receive=parts)
            return
        parts[self._rank].copy_(collected[self._rank])
        self._swap(what, "all_to_all", _elems(parts), send=collected.unbind(), receive=parts)

    def _swap(
        self, what: str, kind: str, elems: int, *, send: Sequence[torch.Tensor], receive: Sequence[torch.Tensor]
    ) -> None:
        """`elems`: of all owners' parts, which every rank says alike."""
        if self._ranks == 1:
            return
        begun = Collective(kind, what, self._axis, elems, self._payload)
        with span(f"{kind} {what}"), self._ledger.collective_log.within(begun, self._group):
            for work in swap(self._group, send=send, receive=receive):
                work.wait()
        sent = sum(each.nbytes for peer, each in enumerate(send) if peer != self._rank)
        self._ledger.record("update", kind, self._axis, self._payload, sent)

    def _orthogonalise(self, collected: torch.Tensor, owned: Sequence[ParamShape], how: How) -> None:
        """[shards, n], in place."""
        for matrix, slot in _slots(owned, collected, self._shards):
            rows, cols = matrix.shape
            # A copy in memory of its own: a product's bits may depend on how its factors are aligned.
            whole = slot.reshape(-1, cols)[:rows].clone()
            made = slot.new_zeros(slot.numel() // cols, cols)
            made[:rows] = newton_schulz.orthogonalise(whole, how[matrix.name][1].iterations)
            slot.copy_(made.view(slot.shape))


def _elems(parts: Sequence[torch.Tensor]) -> int:
    return sum(part.numel() for part in parts)


def _slots(owned: Sequence[ParamShape], part: torch.Tensor, shards: int) -> list[tuple[ParamShape, torch.Tensor]]:
    """Each matrix of an owner with its padded shards, in the last dim of `part`."""
    pieces = torch.split(part, [matrix.shard_elems(shards) for matrix in owned], dim=-1)
    return list(zip(owned, pieces, strict=True))
