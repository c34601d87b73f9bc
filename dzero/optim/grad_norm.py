"""Sums of squares of gradients, added over all ranks in one order, so that every rank has the same bits.

    axis                what each rank sends                                total of a parameter
    replicate, shard    its sums to all (all-gather); between many ranks    chunks of all ranks, in rank order
                        slice r of them to rank r (all-to-all), then
                        the totals of its own slice to all (all-gather)
    tp                  its totals to all (all-gather)                      all ranks if the axis cuts it, else one
    pp                  its totals to all (all-gather)                      the pipeline stages that count it

Shards are added in order, and for each shard its replicas in order. Adding the sums of one axis along the other would
round differently, so all single values travel to the rank that adds them: first along the replicate axis, then along
the shard axis, where each rank already has its slice from all replicas of its shard.

A gather of everything is one collective along each axis, of ranks * (parameters + 1) * 8 bytes: 95 MB for 724
parameters on 16,384 ranks. Slices take two collectives along each axis, of O(parameters + ranks) bytes. With
w = ceil(parameters / ranks) and fp64 they send:

    replicate   all-to-all  (replicate - 1) * shard * (w + 1) * 8       all-gather  (replicate - 1) * shard * w * 8
    shard       all-to-all  (shard - 1) * replicate * (w + 1) * 8       all-gather  (shard - 1) * w * 8

`zero.cost_model.sums_are_sliced` chooses between them; the bits are the same. The additional element is a checksum of
the rank's collectives (comm/collective_log.py). It is sent with every slice, so that every rank has all checksums. The
sign of a sum, which a sum of squares does not need, says whether its rank reached the parameter in backward (negative,
also -0.0). The total is negative if any of its parts is. The ranks of non-finite gradients are gathered only in steps
that are skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh

from dzero.comm.collectives import AllToAllScalars, GatherScalars
from dzero.comm.ledger import EXCEPTIONAL, Ledger
from dzero.errors import in_short
from dzero.mesh import REPLICATE, SHARD
from dzero.zero.cost_model import sums_are_sliced

ALIKE = 1e-2
"""Relative tolerance between sums of squares of one gradient: above rounding, below the effect of part of a batch."""


EDITED = 1 << 32
"""Added to the 32-bit checksum if gradients were edited; fp64 represents the sum exactly."""


class DataParallelSums:
    """Adds a vector of sums over the ranks of a (replicate, shard) mesh, in the same order on every rank.

    Args:
        mesh: The (replicate, shard) mesh.
        ledger: Ledger that counts the collectives.
        is_sliced: Called with the numbers of parameters and ranks; returns whether sums travel in slices.
    """

    def __init__(
        self, mesh: DeviceMesh, ledger: Ledger, is_sliced: Callable[[int, int], bool] = sums_are_sliced
    ) -> None:
        self._mesh, self._ledger, self._collective_log, self._is_sliced = mesh, ledger, ledger.collective_log, is_sliced
        self._groups = {axis: mesh.get_group(axis) for axis in (REPLICATE, SHARD)}
        self._copies, self._shards = (group.size() for group in self._groups.values())
        self._ranks = self._copies * self._shards
        self._swap = {axis: AllToAllScalars(group, axis, ledger) for axis, group in self._groups.items()}
        self._gather = {axis: GatherScalars(group, axis, ledger) for axis, group in self._groups.items()}
        self._gather_flags = [GatherScalars(group, axis, ledger, EXCEPTIONAL) for axis, group in self._groups.items()]

    def add(self, sums: torch.Tensor, checksum: int, *, is_edited: bool = False) -> tuple[torch.Tensor, bool]:
        """Add the sums of all ranks in rank order.

        Args:
            sums: Sums of this rank, fp64 [parameters] on the device; the same length on every rank. Signs are flags.
            checksum: 32-bit checksum of this rank's collectives.
            is_edited: Whether `.grad` was edited on this rank.

        Returns:
            The totals, fp64 [parameters] on the CPU, the same bits on every rank, with the sign of any part that is
            negative; and whether any rank edited `.grad`.

        Raises:
            RuntimeError: On every rank, if checksums differ, so that ranks ran units in different orders.
        """
        if self._ranks == 1:
            return sums.cpu(), is_edited
        header = checksum + EDITED * is_edited
        if not self._is_sliced(sums.numel(), self._ranks):
            found = torch.cat([sums.new_full((1,), header), sums])  # filled by a kernel: a copy would block the host
            for axis in (REPLICATE, SHARD):
                found = self._gather[axis](found).flatten()
            found = found.view(self._ranks, -1).cpu()
            self._check_order(found[:, 0] % EDITED)
            return in_rank_order(found[:, 1:]), self._any_edited(found[:, 0])
        found = self._exchange(self._slices(sums, header)).cpu()
        self._check_order(found[:, 0] % EDITED)
        totals = in_rank_order(found[:, 1:]).to(sums.device)
        for axis in (SHARD, REPLICATE):
            totals = self._gather[axis](totals).flatten()
        return totals[: sums.numel()].cpu(), self._any_edited(found[:, 0])

    def _any_edited(self, headers: torch.Tensor) -> bool:
        return bool((headers >= EDITED).any())

    def check_copies(self, whole: Mapping[DeviceMesh, torch.Tensor], names: Mapping[DeviceMesh, Sequence[str]]) -> None:
        """Check that the replicas of each shard have the same gradients, as they must to stay equal.

        Args:
            whole: Sums of squares of whole shards, fp64 on the device, by the data-parallel mesh of their units.
            names: Names of the parameters, by the same meshes.

        Raises:
            RuntimeError: On every rank, if any replicas differ in a bit.
        """
        differing = []
        for mesh, sums in whole.items():
            replicas = GatherScalars(mesh.get_group(REPLICATE), REPLICATE, self._ledger, EXCEPTIONAL)(sums).cpu()
            same = (replicas == replicas[0]) | (replicas.isnan() & replicas[0].isnan())
            differing += [names[mesh][at] for at in (~same.all(0)).nonzero().flatten().tolist()]
        flags = next(iter(whole.values())).new_tensor([len(differing)])
        for gather in self._gather_flags:
            flags = gather(flags).flatten()
        if flags.any():
            who = f"of {differing[0]} " if differing else ""
            raise RuntimeError(
                f"ranks that have replicas of a shard ended with different gradients {who}after .grad was edited, or a "
                "loss on the weights that depends on a rank's data went backward after the model's: replicas would "
                "drift apart. Edit alike on all ranks, and run that backward before the model's, or add both losses"
            )

    def nonfinite(self, sums: torch.Tensor, names: Sequence[str]) -> list[str]:
        """Return the ranks that have non-finite sums, by a gather of one byte for each rank and parameter.

        Args:
            sums: Sums of this rank, as in `add`.
            names: Names of the parameters.

        Returns:
            `name (rank r)` for each non-finite sum, in the order of addition, on every rank.
        """
        flags = (~sums.isfinite()).to(torch.uint8)
        for gather in self._gather_flags:
            flags = gather(flags).flatten()
        return _named(flags.view(self._ranks, -1).cpu(), names, "rank", self._rank)

    def _slices(self, sums: torch.Tensor, checksum: int) -> torch.Tensor:
        """Cut sums [parameters] into zero-padded slices [ranks, 1 + w], each behind the checksum.

        Slices are numbered along the shard axis first, so that the totals are gathered in the order of the parameters.
        """
        width = max(1, -(-sums.numel() // self._ranks))
        slices = sums.new_zeros(self._ranks, 1 + width)
        slices[:, 0] = checksum
        slices[:, 1:] = torch.nn.functional.pad(sums, (0, self._ranks * width - sums.numel())).view(-1, width)
        return slices

    def _exchange(self, slices: torch.Tensor) -> torch.Tensor:
        """Send every rank its slice of [ranks, n]; return its own slice from each [ranks, n], in order of addition."""
        of_copies = self._swap[REPLICATE](slices.view(self._copies, -1)).view(self._copies, self._shards, -1)
        of_shards = self._swap[SHARD](of_copies.transpose(0, 1).reshape(self._shards, -1))
        return of_shards.view(self._ranks, -1)

    def _rank(self, at: int) -> int:
        """Return the global rank at position `at` of that order."""
        return int(self._mesh.mesh.T.flatten()[at])

    def _check_order(self, checksums: torch.Tensor) -> None:
        """Raise RuntimeError with the first differing collective if the checksums [ranks] differ."""
        if others := (checksums != checksums[0]).nonzero().flatten().tolist():
            differing = [self._rank(at) for at in others]
            shards = checksums.view(-1, self._copies)
            group = self._groups[SHARD if bool((shards != shards[0]).any()) else REPLICATE]
            try:
                where = self._collective_log.divergence(group)
            except RuntimeError as error:  # a rank has gone on to another collective, or left
                where = f"where they part is unknown, since the ranks do not meet any more ({in_short(error)})"
            raise RuntimeError(
                f"ranks {sorted(differing)} ran the model's units in another order than rank {self._rank(0)}, or other "
                f"modules of them: {where}\nEvery rank must run the same modules in "
                "the same order in every microbatch (no branches on the data of one rank); where only some parameters "
                "of a unit differ, zero.unused=union counts zeros for ranks that did not reach them"
            )


@dataclass(frozen=True)
class AxisSums:
    """Sums that the ranks of one axis found.

    Attributes:
        axis: Name of the mesh axis.
        names: Names of the parameters.
        sums: fp64 [ranks, names] on the CPU.
    """

    axis: str
    names: Sequence[str]
    sums: torch.Tensor

    def nonfinite(self) -> list[str]:
        """Return `name (axis rank r)` for each non-finite sum."""
        return _named(~self.sums.isfinite(), self.names, f"{self.axis} rank", int)


def in_rank_order(sums: torch.Tensor) -> torch.Tensor:
    """Return the totals [n] of sums [ranks, n], fp64 on the CPU, in rank order, which `sum` does not guarantee.

    Absolute values are added. A total is negative if any of its sums is, -0.0 included.
    """
    return _with_any_sign(sums.abs().cumsum(0)[-1], sums)


def _with_any_sign(totals: torch.Tensor, sums: torch.Tensor) -> torch.Tensor:
    return torch.where(sums.signbit().any(0), -totals, totals)


def add_where_cut(sums: torch.Tensor, cut: Sequence[bool]) -> torch.Tensor:
    """Add the sums of the ranks of an axis that cuts the model, in rank order.

    Args:
        sums: fp64 [ranks, parameters], on the CPU.
        cut: [parameters], whether the axis cuts them. Every rank has the whole of the others, and the first one counts.

    Returns:
        The totals [parameters], non-finite if any rank's sum is.
    """
    counts_once = ~torch.tensor(cut) & sums.isfinite().all(0)
    return torch.where(counts_once, _with_any_sign(sums[0].abs(), sums), in_rank_order(sums))


def check_alike(sums: torch.Tensor, names: Sequence[str], axis: str, cut: Sequence[bool]) -> None:
    """Check that ranks found the same gradient, up to rounding, of each parameter that all of them have.

    Args:
        sums: fp64 [ranks, parameters], on the CPU.
        names: Names of the parameters.
        axis: Mesh axis of the ranks.
        cut: [parameters], whether the axis cuts them, so that sums may differ.

    Raises:
        RuntimeError: The gradients differ.
    """
    alike = [number for number, is_cut in enumerate(cut) if not is_cut]
    sums = sums[:, alike].abs()
    apart = ((sums - sums[0]).abs().amax(0) > ALIKE * sums[0]) & sums.isfinite().all(0)
    if found := apart.nonzero().flatten().tolist():
        raise RuntimeError(
            f"ranks of {axis} found different gradients of {names[alike[found[0]]]}, of which each has a copy: its "
            "module sees a part of its input, or parts of a sum. Give it a style in the plan that says so"
        )


def _named(flags: torch.Tensor, names: Sequence[str], who: str, number: Callable[[int], int]) -> list[str]:
    """Return `name (who n)` for each flag that is set in [ranks, names]; `number` returns the n of a row."""
    return [f"{names[param]} ({who} {number(row)})" for row, param in flags.nonzero().tolist()]
