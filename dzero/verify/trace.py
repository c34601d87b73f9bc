"""Trace of a run: marks of all values that can differ, in the order in which a fault would appear.

    mark     value                                                     recorded
    read     unsharded parameters of each unit, as forward reads them  in every forward
    loss     this rank's loss                                          after the last microbatch
    mean     mean loss of all ranks                                    at the end of a step
    grad     reduced gradients of each unit, unscaled and unclipped    after the last microbatch
    norm     norm of all gradients                                     at the end of a step
    scale    loss scale, and number of skipped steps                   at the end of a step
    master   masters of each unit                                      after the last step
    param    shard of each unit                                        after the last step

The sum of squares of each unit's reduced gradients is also recorded, to compare runs that need not have the same bits.

The first mark that differs shows where a fault is. A unit that was not updated, or is stale, is the only one that
forward reads differently; a unit that is reduced wrongly is the only one whose gradients differ. No mark waits for
updates that training itself does not wait for, so updates that come too late are detected. A mark has 64 bits. For a
unit it is a hash of this rank's rows (`verify/rows.py`), which are the same in every run of one mesh, whether the rank
holds only these rows or all of them. Units inside a block are marked as the block, since its parts are units in only
one of the runs (`zero.unit_bytes`).
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from struct import pack
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import xxhash

from dzero.comm.collectives import gather_json
from dzero.config import RunConfig
from dzero.mesh_config import MeshConfig
from dzero.monitor.sinks import Monitor
from dzero.optim.grad_sums import sum_squares
from dzero.optim.state_placement import read
from dzero.trainer.trainer import Trainer
from dzero.utils.forward_hooks import before_forward
from dzero.verify.rows import AnsweredParams, AnsweredRows
from dzero.zero.dtensors import local_of
from dzero.zero.fsdp_internals import is_in_backward
from dzero.zero.layout import Layout
from dzero.zero.unit import Unit, as_module
from dzero.zero.units import ROOT, nested

READ, LOSS, MEAN, GRAD, NORM, SCALE, MASTER, PARAM = "read", "loss", "mean", "grad", "norm", "scale", "master", "param"
ORDER = (READ, LOSS, MEAN, GRAD, NORM, SCALE, MASTER, PARAM)


class Mark(NamedTuple):
    """Identity of a value that was recorded: step, kind of value, and unit (empty for values of no unit)."""

    step: int
    what: str
    unit: str = ""


@dataclass
class Trace:
    """Record of one run on this rank.

    Attributes:
        mesh: Mesh of the run, without replicas.
        tiles: Number of tiles of blocks, of the loss and of the embedding.
        rows: Rows that this rank is responsible for.
        marks: Hashes of 64 bits.
        losses: This rank's loss, by step.
        means: Mean loss of all ranks, by step.
        norms: Global gradient norm, by step.
        squares: Weighted sum of squares of each unit's reduced gradients over `rows`, by step; unscaled, unclipped,
            fp64.
        masters: Masters of `rows` after the last step, by parameter; flat fp32 tensors in host memory.
        moved: Weighted squared distance of the masters from their initial values, by parameter.
        kept: Tensors behind one mark, by parameter.
    """

    mesh: MeshConfig
    tiles: tuple[int, int, int]
    rows: AnsweredParams
    marks: dict[Mark, int] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    means: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    squares: list[dict[str, float]] = field(default_factory=list)
    masters: dict[str, torch.Tensor] = field(default_factory=dict)
    moved: dict[str, float] = field(default_factory=dict)
    kept: dict[str, torch.Tensor] = field(default_factory=dict)

    def ordered(self) -> list[Mark]:
        """Return the marks of all ranks by step, kind and unit, in the same order on every rank. Collective."""
        every = dict.fromkeys(Mark(*mark) for of_rank in of_all_ranks([*self.marks]) for mark in of_rank)
        return sorted(every, key=lambda mark: (mark.step, ORDER.index(mark.what)))


class Silent(Monitor):
    """Monitor without sinks."""

    def __init__(self) -> None:
        self.sinks = []


class Followed(Trainer):
    """Trainer that records a trace of what it does.

    The layout of the configuration determines the rows of each rank. Tensors behind the mark `keep` are kept.
    """

    def __init__(
        self, config: RunConfig, folder: Path, device: torch.device, layout: Layout, keep: Mark | None
    ) -> None:
        super().__init__(config, folder, device)
        self._rows, self._keep, self._at = AnsweredRows(self.sharded, layout), keep, 0
        mesh, block = replace(config.mesh, dp=None, replicate=1), config.block
        tiles = block.tiles, block.loss_tiles or 1, block.embedding_tiles
        self.trace = Trace(mesh, tiles, self._rows.placed)
        self._slots = {
            param: (module, attribute)
            for module in self.sharded.model.modules()
            for attribute, param in module.named_parameters(recurse=False)
        }
        self._params = self._names_by_block()
        self._hooks = [
            # Registered, and so called, after FSDP2's own hook: the parameters are unsharded.
            before_forward(as_module(unit.modules[0]), partial(self._before_forward, unit))
            for unit in self.sharded.units
            if unit.params
        ]
        self._reads: defaultdict[str, xxhash.xxh3_64] = defaultdict(xxhash.xxh3_64)

    def _names_by_block(self) -> dict[str, list[str]]:
        """Return the names of parameters, in the model's order, by unit; those of units inside a block by the block."""
        units = self.sharded.units
        inside = nested([unit.shape.name for unit in units])
        at = {param: index for index, param in enumerate(self._slots)}
        order = {name: at[param] for unit in units for name, param in unit.params.items()}
        found: dict[str, list[str]] = {}
        for unit in units:
            found.setdefault(inside.get(unit.shape.name, unit.shape.name), []).extend(unit.params)
        return {block: sorted(names, key=order.__getitem__) for block, names in found.items()}

    def follow(self, steps: int) -> Trace:
        """Train for `steps` steps; return the trace of all of them, and of the states after the last."""
        begin, nobody = self._masters(), Silent()
        for self._at in range(1, steps + 1):
            self._reads.clear()
            shared = self.step(self._at, nobody)
            for unit, names in self._params.items():
                digests = b"".join(self._reads[name].digest() for name in names)
                self._mark(READ, unit, xxhash.xxh3_64_intdigest(digests))
            decision = self.optim.last_decision
            assert decision is not None
            self._mark(MEAN, "", _bits(shared.loss))
            self._mark(NORM, "", _bits(decision.norm))
            self._mark(SCALE, "", _bits(self.optim.scaler.scale, self.optim.skipped_steps))
            self.trace.means.append(shared.loss)
            self.trace.norms.append(decision.norm)
        for hook in self._hooks:
            hook.remove()
        self.optim.synchronize()
        self.trace.masters = end = self._masters()
        self.trace.moved = {name: self._rows.placed.weight[name] * squared(end[name] - begin[name]) for name in end}
        params = {name: param for unit in self.sharded.units for name, param in unit.params.items()}
        for unit, names in self._params.items():
            self._mark_all(MASTER, unit, {name: end[name] for name in names if name in end})
            shards = {name: read(local_of(params[name])).view(-1) for name in names}
            self._mark_all(PARAM, unit, {name: self._rows.mine(name, shard) for name, shard in shards.items()})
        return self.trace

    def _microbatches(self) -> torch.Tensor:
        loss = super()._microbatches()
        self.trace.losses.append(float(loss))
        self._mark(LOSS, "", _bits(float(loss)))
        self.optim.gradients.complete()
        grads = self.optim.gradients.named()
        squares: defaultdict[str, float] = defaultdict(float)
        for unit, names in self._params.items():
            mine = {name: self._rows.mine(name, grads[name]) for name in names if name in grads}
            self._mark_all(GRAD, unit, mine)
            weight = self._rows.placed.weight
            scaled = sum(weight[name] * sum_squares([grad]).item() for name, grad in mine.items())
            root, _, number = unit.rpartition(".")  # every pipeline stage has a root unit, as the model has
            name = ROOT if (root, number.isdigit()) == (ROOT, True) else unit
            squares[name] += scaled / self.optim.scaler.scale**2
        self.trace.squares.append(squares)
        return loss

    @torch.no_grad()
    def _before_forward(self, unit: Unit, *_: object) -> None:
        if is_in_backward(unit.modules[0]):  # a part of a block that is computed again, unlike the block itself
            return
        for name, param in unit.params.items():
            owner, attribute = self._slots[param]
            whole = local_of(getattr(owner, attribute))
            self._reads[name].update(_bytes_of(whole))
            if self._keep is not None and self._keep[:2] == (self._at, READ) and name in self._params[self._keep.unit]:
                before = [self.trace.kept[name]] if name in self.trace.kept else []
                self.trace.kept[name] = torch.cat([*before, whole.detach().cpu().view(-1)])

    @torch.no_grad()
    def _masters(self) -> dict[str, torch.Tensor]:
        masters: dict[str, torch.Tensor] = {}

        def put(name: str, key: str, tensor: torch.Tensor) -> None:
            if key == "master":
                masters[name] = self._rows.mine(name, tensor).to("cpu", torch.float32, copy=True)

        for unit in self.sharded.units:
            self.optim.export_state(unit, put)
        return masters

    def _mark_all(self, what: str, unit: str, tensors: dict[str, torch.Tensor]) -> None:
        digest = xxhash.xxh3_64()
        for tensor in tensors.values():
            digest.update(_bytes_of(tensor))
        mark = self._mark(what, unit, digest.intdigest())
        if mark == self._keep:
            self.trace.kept = {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}

    def _mark(self, what: str, unit: str, bits: int) -> Mark:
        mark = Mark(self._at, what, unit)
        self.trace.marks[mark] = bits
        return mark


def of_all_ranks(value: Any) -> list[Any]:
    """Gather a JSON value of every rank. Collective."""
    everyone = dist.group.WORLD
    assert everyone is not None
    return gather_json(value, everyone)


def squared(apart: torch.Tensor) -> float:
    """Return the sum of squares, in fp64."""
    return float(apart.double().square().sum())


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a copy of `tensor`; FSDP2 could not free memory that NumPy refers to."""
    copy = tensor.detach().to("cpu", copy=True).contiguous()
    return copy.view(-1).view(torch.uint8).numpy().data


def _bits(value: float, other: float = 0.0) -> int:
    """Hash floats; equal only for equal floats, and for NaNs of one bit pattern."""
    return xxhash.xxh3_64_intdigest(pack("<dd", value, other))
