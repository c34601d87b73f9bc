"""Replica shards: the states of a shard, divided among its replicas (`zero.optimizer_shard_axes=[replicate,shard]`).

    on rank (c, s) of replicate x shard            part of a parameter's rows, as Shard(0) cuts them
    parameters, gradients before `reduce`          part s of `shard`: the shard
    gradients after it, masters, moments           part c of `replicate` of the shard: the replica shard

    once a step, per unit   elements sent, n being those of the shard   without replica shards
    reduce                  (replicate - 1) / replicate * n, in fp32    all-reduce: twice as many
    gather                  as many, in the working dtype               none

Parameters are thus gathered only within the shard axis (a node), as in MiCS (Zhang et al. 2022). MiCS's all-reduce over
replicas becomes a reduce-scatter and an all-gather here, and masters and moments are divided by `replicate`. ZeRO++'s
secondary partition (Wang et al. 2023; `zero.reshard_after_forward=<int>`) also shards states over all ranks, but
gathers across nodes in every forward.

Both steps move a unit in one collective, in which each replica shard is padded to the parameter's largest.
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
    """Return the elements of the flat shard whose states this rank has.

    `shard` and `copy` are its positions along the shard axis and the replicate axis.
    """
    _, rows = rows_of(shape.shape[0], shard)
    first, count = rows_of(rows, copy)
    return slice(first * shape.row_elems, (first + count) * shape.row_elems)


def mesh_of_replica_shards(mesh: DeviceMesh) -> DeviceMesh:
    """Return the ranks of the (replicate, shard) `mesh` as (shard, replicate), the order of cuts in replica shards."""
    groups = [mesh.get_group(axis) for axis in (SHARD, REPLICATE)]
    return DeviceMesh.from_group(
        groups, mesh.device_type, mesh=mesh.mesh.T.contiguous(), mesh_dim_names=(SHARD, REPLICATE)
    )


class ReplicaShards:
    """Reduction and gather of a unit's replica shards on this rank.

    Args:
        unit: Shapes of the unit.
        layout: Layout of the model.
        shard: Position of this rank along the shard axis.
        copy: Position of this rank along the replicate axis.
        exchange: Collectives along the replicate axis.
        ledger: Ledger of these collectives.
    """

    def __init__(
        self, unit: UnitShape, layout: Layout, shard: Cut, copy: Cut, exchange: AxisReduction, ledger: Ledger
    ) -> None:
        self._shapes = {param.name: param for param in unit.params}
        self._shard, self._copy, self._exchange = shard, copy, exchange
        self._reduce = ReduceGrads(unit.name, exchange, REPLICATE, layout.replicate_wire, ledger)
        self._working = layout.param.dtype
        self._gather = GatherUpdated(unit.name, exchange, REPLICATE, ledger)

    def span(self, name: str) -> slice:
        """Return the elements of the flat shard whose states this rank has."""
        return span_of(self._shapes[name], self._shard, self._copy)

    def rows(self, name: str) -> slice:
        """Return the rows of the shard whose states this rank has."""
        elems = self._shapes[name].row_elems
        return slice(self.span(name).start // elems, self.span(name).stop // elems)

    def reduce(self, grads: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, Named]:
        """Average gradients over the replicas.

        Args:
            grads: Flat shards by name, in the same order on all ranks.

        Returns:
            A new buffer with this rank's padded replica shards in that order, and views of it without padding by name.
        """
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
        """Count one `gather` of `names` in the ledger."""
        self._gather.book(sum(self._sizes(names).values()), self._working)

    def gather(self, shards: Mapping[str, torch.Tensor]) -> Callable[[], None]:
        """Start to gather the replica shards of all replicas.

        Args:
            shards: Flat shards by name, in the working dtype, in which this rank has updated its replica shards.

        Returns:
            A function that completes `shards`, to be called before they are read.
        """
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
        """Return the number of elements of each parameter's largest replica shard on any rank."""
        shards, replicas = self._shard[1], self._copy[1]
        return {name: self._shapes[name].shard_elems(shards, replicas) for name in names}

    def _columns(self, full: torch.Tensor, sizes: Mapping[str, int]) -> Named:
        """Return views of `full` [replicas, n] by parameter, each [replicas, its size]."""
        return dict(zip(sizes, torch.split(full, [*sizes.values()], dim=1), strict=True))

    def _pieces(self, name: str, column: torch.Tensor, shard: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return pairs of views with the same elements, of `column` [replicas, size] and of the flat `shard`."""
        shape = self._shapes[name]
        rows = shard.numel() // shape.row_elems
        share = -(-rows // self._copy[1]) * shape.row_elems
        if not share:
            return []
        whole, rest = divmod(shard.numel(), share)
        pieces = [(column[:whole, :share], shard[: whole * share].view(whole, share))]
        return pieces + ([(column[whole, :rest], shard[whole * share :])] if rest else [])
