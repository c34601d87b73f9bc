"""Gradients between their reduction and the update: taken from FSDP2, accumulated, decided upon once for all ranks.

For every unit and microbatch FSDP2 first delivers the flat reduced buffer (`Unit.deliver`), then calls the
post-accumulate hook of each parameter that lies in it, in the buffer's order and padded as FSDP2 pads shards. We keep
slices of that buffer, in the table's gradient dtype, and drop FSDP2's own `.grad` (which is rounded to the parameter's
dtype). The first microbatch's buffers are kept, later ones are added to them; on the last one the buffers are averaged
over the replicate axis, and the sums of squares are taken while the data is still in cache.

Norm: sqrt of sums of squares in fp64 per (parameter, chunk), where chunk c of n is rank c's rows under Shard(0) — also
at stage 0, where rank c sums only its own chunk. Every rank receives all sums and adds them in the same order. Beside
the sums travels a checksum of the order in which the rank reduced its units: where ranks disagree, a branch in the
model has mixed gradients of different units, and the step is refused.
"""

from __future__ import annotations

import math
import weakref
import zlib
from collections.abc import Collection
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from dzero.comm.collectives import GatherScalars
from dzero.mesh import REPLICATE, SHARD
from dzero.optim import host_kernels
from dzero.optim.storage import local_of
from dzero.zero.layout import ParamShape
from dzero.zero.shard import Sharded, Unit


@dataclass(frozen=True)
class Decision:
    """What all ranks do with this step's gradients. `norm`: of the averaged, unscaled gradients, before clipping."""

    norm: float
    finite: bool
    factor: float
    """Multiplies every gradient in fp32: 1 / loss scale and the clipping coefficient."""
    culprits: tuple[str, ...]
    """Parameters with a non-finite averaged gradient, as `name (rank r)`: r holds the rows, whoever overflowed."""


class Gradients:
    """The reduced gradients of every unit of a sharded model. Only those of `owned` (names) count and are shown."""

    def __init__(self, sharded: Sharded, owned: Collection[str]) -> None:
        layout = sharded.layout
        axis = SHARD if layout.shard > 1 else REPLICATE
        group = sharded.mesh.get_group(axis)
        self._gather = GatherScalars(group, axis, sharded.ledger)
        self._device = torch.device(sharded.mesh.device_type)
        # Stage 0 holds whole gradients, of which this rank sums its own chunk; else the shard is the chunk.
        cut = (group.rank(), group.size()) if layout.shard == 1 else (0, 1)
        self._order = _Order()
        self._units = [_UnitGrads(unit, sharded, cut, self._order) for unit in sharded.units]
        self._owned = [name for name, _ in sharded.model.named_parameters() if name in owned]

    def named(self) -> dict[str, torch.Tensor]:
        """This rank's reduced gradients [local shard, flat] by parameter name; still scaled and unclipped."""
        views = {name: grad for unit in self._units for name, grad in unit.views.items()}
        return {name: views[name] for name in self._owned if name in views}

    def decide(self, *, scale: float, max_norm: float | None) -> Decision:
        """Global norm, finite check and clipping coefficient; the same on every rank. One small collective.

        Raises RuntimeError on every rank where ranks reduced their units in different orders.
        """
        for unit in self._units:
            unit.check_used_up()
            unit.finish()
        sums = {name: value for unit in self._units for name, value in unit.sums.items()}
        values = [self._order.checksum, *(sums.get(name, 0.0) for name in self._owned)]
        local = torch.stack([torch.as_tensor(v, dtype=torch.float64, device=self._device) for v in values])
        gathered = self._gather(local).cpu()
        self._check_order(gathered[:, 0])
        chunks = gathered[:, 1:]
        per_param = chunks[0].clone()
        for chunk in chunks[1:]:
            per_param += chunk
        norm = math.sqrt(sum(per_param.tolist())) / scale
        finite = bool(torch.isfinite(per_param).all())
        clip = 1.0 if max_norm is None or not finite else min(1.0, max_norm / (norm + 1e-6))
        bad = () if finite else self._culprits(chunks)
        return Decision(norm, finite, clip / scale, bad)

    def _check_order(self, checksums: torch.Tensor) -> None:
        differing = (checksums != checksums[0]).nonzero().flatten().tolist()
        if differing:
            raise RuntimeError(
                f"ranks {differing} ran the model's units in another order than rank 0, so gradients of different "
                "units were added up: every rank must run the same modules in the same order in every microbatch "
                "(no branches on the data of one rank)"
            )

    def _culprits(self, chunks: torch.Tensor) -> tuple[str, ...]:
        where = (~torch.isfinite(chunks)).nonzero().tolist()
        return tuple(f"{self._owned[param]} (rank {rank})" for rank, param in where)

    def clear(self) -> None:
        """Free the gradients."""
        for unit in self._units:
            unit.clear()
        self._order.checksum = 0


class _Order:
    """A checksum (32 bits, exact in fp64) of the order in which this rank reduced its units."""

    checksum = 0

    def note(self, unit: str) -> None:
        self.checksum = zlib.crc32(unit.encode(), self.checksum)


class _UnitGrads:
    """One unit's gradients: `views` slices of `buffers`; `sums` once the last microbatch's are in."""

    def __init__(self, unit: Unit, sharded: Sharded, cut: tuple[int, int], order: _Order) -> None:
        self._unit, self._sharded, self._cut, self._order = unit, sharded, cut, order
        self._shapes: dict[str, ParamShape] = {p.name: p for p in unit.shape.params}
        self.clear()
        unit.attach(self._receive)
        for shape in unit.shape.params:
            if unit.params[shape.name].requires_grad != shape.trainable:
                raise ValueError(
                    f"{shape.name}: requires_grad was changed after shard(); freeze and unfreeze before, so that units "
                    "and reductions hold what is trained"
                )
            if shape.trainable:
                hook = partial(_take_if_alive, weakref.ref(self), shape.name)
                unit.params[shape.name].register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def clear(self) -> None:
        self.views: dict[str, torch.Tensor] = {}
        self.sums: dict[str, float | torch.Tensor] = {}
        self._buffers: list[torch.Tensor] = []
        self._incoming, self._offset = torch.empty(0), 0
        self._finished = False

    def _receive(self, reduced: torch.Tensor) -> None:
        if self._finished:
            raise RuntimeError(
                f"unit {self._unit.shape.name}: gradients after those of the step's last microbatch. Run all but the "
                "last one under microbatch(is_last=False), and call step() before the next. Where the model runs this "
                "unit twice per forward, take zero.stage=2 or 3: with several microbatches FSDP2 reduces it twice"
            )
        self._order.note(self._unit.shape.name)
        self._incoming, self._offset = reduced, 0

    def _take(self, name: str, param: nn.Parameter) -> None:
        """Cut `name`'s slice out of the incoming buffer; after the last slice the buffer is used up."""
        param.grad = None
        local, shape = local_of(param), self._shapes[name]
        piece = self._incoming[self._offset : self._offset + local.numel()]
        self._offset += shape.shard_elems(self._sharded.layout.shard)
        if name in self.views:
            self._add(name, piece)
        else:
            self.views[name] = piece
            if not self._buffers or self._buffers[-1] is not self._incoming:
                self._buffers.append(self._incoming)
        if self._offset == self._incoming.numel():
            self._incoming = torch.empty(0)
            if self._sharded.is_last:
                self.finish()

    def check_used_up(self) -> None:
        """Raises RuntimeError where the reduced buffer held more than the parameters that are trained."""
        if self._offset < self._incoming.numel():
            raise RuntimeError(
                f"unit {self._unit.shape.name}: gradients arrived for parameters that were frozen when the model was "
                "sharded; set requires_grad before shard()"
            )

    def _add(self, name: str, piece: torch.Tensor) -> None:
        acc = self.views[name]
        if not acc.is_cuda:
            squares = host_kernels.accumulate(acc, piece)
            if self._sharded.is_last and self._unit.average is None:
                self.sums[name] = squares
            return
        acc.add_(piece)
        # Freed here, `piece` would return to the stream that allocated it (FSDP2's reduce-scatter stream), which may
        # overwrite it before this stream has read it.
        piece.record_stream(torch.cuda.current_stream())

    def finish(self) -> None:
        """Average over the copies and sum squares; also for a unit that the last microbatch did not reach."""
        if self._finished or not self.views:
            return
        self._finished = True
        if self._unit.average is not None:
            for buffer in self._buffers:
                self._unit.average(buffer)
        for name, grad in self.views.items():
            if name not in self.sums:
                self.sums[name] = sum_squares(self._chunk(name, grad))

    def _chunk(self, name: str, grad: torch.Tensor) -> torch.Tensor:
        rank, ranks = self._cut
        length = self._shapes[name].shard_elems(ranks)
        return grad[rank * length : (rank + 1) * length] if ranks > 1 else grad


def _take_if_alive(owner: weakref.ref[_UnitGrads], name: str, param: nn.Parameter) -> None:
    """Hooks live in the tensor's C++ half, where the garbage collector sees no cycle: a strong reference from there
    would keep model, states and process groups alive for ever."""
    unit = owner()
    if unit is not None:
        unit._take(name, param)


def sum_squares(grad: torch.Tensor) -> float | torch.Tensor:
    """Sum of squares in fp64: a float on the CPU, a 0-dim tensor on CUDA (no synchronisation)."""
    if not grad.is_cuda:
        return host_kernels.sum_squares(grad)
    norm: torch.Tensor = torch.linalg.vector_norm(grad, dtype=torch.float64)
    return norm.square()
