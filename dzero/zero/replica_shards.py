"""The states of a shard in shares, one on each of its copies (`zero.states_over=all`).

    rank (c, s) of replicate x shard has           of a parameter's rows, as Shard(0) cuts them
    parameters, gradients before the second hop    the s-th of `shard`: its shard
    gradients after it, masters, moments           the c-th of `replicate` of that: its share

    once a step, per unit   sends, of n elements of the shard           instead of, with whole shards of states
    reduce                  (replicate - 1) / replicate * n, fp32       all-reduce: twice that
    gather                  as many, in the working dtype

So parameters are gathered inside the shard axis (a node) alone, as in MiCS (Zhang et al. 2022), whose second hop this
cuts in two and whose masters and moments it divides by `replicate`. ZeRO++'s secondary partition (Wang et al. 2023;
`zero.reshard_after_forward=<int>`) also has states over all ranks, but gathers across nodes in every forward.

Both move a unit in one collective, with each parameter's share padded to the largest there is.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from dzero.comm.collectives import GatherUpdated, ReduceGrads
from dzero.comm.ledger import Ledger
from dzero.comm.reduction import AxisReduction
from dzero.mesh import REPLICATE, SHARD
from dzero.zero.layout import Layout
from dzero.zero.unit_shapes import ParamShape, UnitShape, rows_of

Named = dict[str, torch.Tensor]
Cut = tuple[int, int]
"""(rank, ranks) along an axis."""


def span_of(shape: ParamShape, shard: Cut, copy: Cut) -> slice:
    """The elements of the flat shard whose states this rank has."""
    _, rows = rows_of(shape.shape[0], shard)
    first, count = rows_of(rows, copy)
    return slice(first * shape.row_elems, (first + count) * shape.row_elems)


def mesh_of_shares(mesh: DeviceMesh) -> DeviceMesh:
    """The ranks of the (replicate, shard) `mesh` as (shard, replicate), the order in which shares are cut."""
    groups = [mesh.get_group(axis) for axis in (SHARD, REPLICATE)]
    return DeviceMesh.from_group(
        groups, mesh.device_type, mesh=mesh.mesh.T.contiguous(), mesh_dim_names=(SHARD, REPLICATE)
    )


class ReplicaShards:
    """Of one unit, on this rank: `shard` and `copy` say which."""

    def __init__(
        self, unit: UnitShape, layout: Layout, shard: Cut, copy: Cut, exchange: AxisReduction, ledger: Ledger
    ) -> None:
        self._shapes = {param.name: param for param in unit.params}
        self._shard, self._copy, self._exchange = shard, copy, exchange
        self._reduce = ReduceGrads(unit.name, exchange, REPLICATE, layout.replicate_wire, ledger)
        self._working = layout.param.dtype
        self._gather = GatherUpdated(unit.name, exchange, REPLICATE, ledger)

    def span(self, name: str) -> slice:
        """See `span_of`."""
        return span_of(self._shapes[name], self._shard, self._copy)

    def rows(self, name: str) -> slice:
        """The same in rows of the shard."""
        elems = self._shapes[name].row_elems
        return slice(self.span(name).start // elems, self.span(name).stop // elems)

    def reduce(self, grads: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, Named]:
        """`grads` [shard, flat] by name, in one order on all ranks, averaged over the copies: a new buffer with this
        rank's shares in that order, padded; and they themselves."""
        sizes = self._sizes(grads)
        full = next(iter(grads.values())).new_zeros(self._exchange.ranks, sum(sizes.values()))
        for name, column in self._columns(full, sizes).items():
            for there, here in self._pieces(name, column, grads[name]):
                there.copy_(here)
        reduced = full.new_empty(full.shape[1])
        self._reduce(reduced, full.view(-1), self._exchange.group, dist.ReduceOp.SUM)
        lengths = {name: self.span(name).stop - self.span(name).start for name in sizes}
        slots = dict(zip(sizes, torch.split(reduced, [*sizes.values()]), strict=True))
        return reduced, {name: slot[: lengths[name]] for name, slot in slots.items()}

    def book(self, names: Collection[str]) -> None:
        """Count one `gather` of them."""
        self._gather.book(sum(self._sizes(names).values()), self._working)

    def gather(self, shards: Mapping[str, torch.Tensor]) -> Callable[[], None]:
        """Start bringing every copy's share of `shards` [shard, flat, working dtype] into all of them; call what is
        returned before they are read."""
        sizes, own = self._sizes(shards), self._copy[0]
        full = next(iter(shards.values())).new_zeros(self._exchange.ranks, sum(sizes.values()))
        for (name, column), shard in zip(self._columns(full, sizes).items(), shards.values(), strict=True):
            share = shard[self.span(name)]
            column[own, : share.numel()].copy_(share)
        return partial(self._spread, self._gather(full.view(-1), full[own]), full, dict(shards))

    def _spread(self, coming: dist.Work, full: torch.Tensor, shards: Named) -> None:
        coming.wait()
        for name, column in self._columns(full, self._sizes(shards)).items():
            for there, here in self._pieces(name, column, shards[name]):
                here.copy_(there)

    def _sizes(self, names: Collection[str]) -> dict[str, int]:
        """Elements of the largest share that any rank has of each parameter."""
        shards, copies = self._shard[1], self._copy[1]
        return {name: self._shapes[name].shard_elems(shards, copies) for name in names}

    def _columns(self, full: torch.Tensor, sizes: Mapping[str, int]) -> Named:
        """By name, where the shares of a parameter lie in `full` [copies, n]: [copies, its size]."""
        return dict(zip(sizes, torch.split(full, [*sizes.values()], dim=1), strict=True))

    def _pieces(self, name: str, column: torch.Tensor, shard: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Views of `column` [copies, size] and of the flat `shard` that hold the same: whole shares, a short one."""
        shape = self._shapes[name]
        rows = shard.numel() // shape.row_elems
        share = -(-rows // self._copy[1]) * shape.row_elems
        if not share:
            return []
        whole, rest = divmod(shard.numel(), share)
        pieces = [(column[:whole, :share], shard[: whole * share].view(whole, share))]
        return pieces + ([(column[whole, :rest], shard[whole * share :])] if rest else [])
