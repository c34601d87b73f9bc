"""What a checkpoint holds of a sharded model and its optimizer, both ways, a unit at a time.

    tensor                              dtype          of
    master.<parameter>                  fp32           every trained parameter
    exp_avg.<parameter>, exp_avg_sq…    fp32 or bf16   the moments, as they are kept
    exp_avg_codes… and exp_avg_scale…   uint8, fp32    8-bit ones; a rank's scales are its own
    param.<parameter>                   working dtype  of what has no master; with overlap=delayed what forward uses
    buffer.<name>                       its own        persistent buffers, which every rank has alike

The master says it all: a working copy is the master rounded (zero/working.py), a remainder what that leaves. So any
stage, tier, kind of master, mesh and tiling reads what any other wrote.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from dzero.checkpoint.boxes import Box
from dzero.checkpoint.contents import Checkpoint
from dzero.checkpoint.format import NAMES, Part
from dzero.checkpoint.moments import SCALE, read_moment
from dzero.checkpoint.places import Place, Places
from dzero.optim.eight_bit import Blocks
from dzero.optim.master import Carried, MasterOptimizer
from dzero.optim.storage import local_of, read
from dzero.zero.shard import Sharded
from dzero.zero.unit import Unit
from dzero.zero.working import to_working

MASTER, PARAM, BUFFER = "master", "param", "buffer"
Put = Callable[[str, torch.Tensor], None]


class States:
    """The states of `optim` over `sharded`: what this rank saves of them, and what it takes of a checkpoint."""

    def __init__(self, sharded: Sharded, optim: MasterOptimizer) -> None:
        self._sharded, self._optim = sharded, optim
        self._places = Places(sharded)
        self._delayed = sharded.layout.offload.mode == "delayed"

    def parts(self) -> dict[str, Part]:
        """What `write` gives, by entry and in that order. Between steps, after `optim.await_updates()`."""
        parts: dict[str, Part] = {}
        for unit in self._sharded.units:
            saved = self._saved(unit)
            for state in self._optim.carried(unit):
                if state.name in saved:
                    parts[f"{state.key}.{state.name}"] = _part(saved[state.name], state.key, state.dtype, state.elems)
            for place in self._without_master(unit, saved):
                parts[f"{PARAM}.{place.own_name}"] = _part(place, PARAM, place.param.dtype, place.box.elems)
        for name, buffer in self._buffers():
            whole, shape = Box.whole(tuple(buffer.shape)), tuple(buffer.shape)
            entry = f"{BUFFER}.{name}"
            parts[entry] = Part(entry, NAMES[buffer.dtype], shape, whole.offset, whole.size, 0, 0)
        return parts

    def write(self, put: Put) -> None:
        """Give every part to `put`, as it is now. Between steps, after `optim.await_updates()`."""
        failed: list[BaseException] = []  # in the host's lane, where an exception would be told as one of offload

        def put_state(name: str, key: str, tensor: torch.Tensor) -> None:
            if name in saved and not failed:
                try:
                    put(f"{key}.{name}", tensor)
                except BaseException as error:
                    failed.append(error)

        for unit in self._sharded.units:
            saved = self._saved(unit)
            self._optim.carry(unit, put_state)
            if failed:
                raise failed[0]
            for place in self._without_master(unit, saved):
                put(f"{PARAM}.{place.own_name}", read(local_of(place.param.detach())))
        for name, buffer in self._buffers():
            put(f"{BUFFER}.{name}", buffer)

    def scalars(self) -> dict[str, Any]:
        """What is no tensor, by the model's own names; the same on every rank."""
        scalars = self._optim.scalars()
        scalars["states"] = {self._places.whole[name]: values for name, values in scalars["states"].items()}
        return scalars

    def take(self, checkpoint: Checkpoint, scalars: dict[str, Any]) -> None:
        """Become what `checkpoint` holds. Raises CheckpointError, and ValueError for another optimizer's states."""
        self._optim.take_scalars(scalars)
        for unit in self._sharded.units:
            owned = {state.name for state in self._optim.carried(unit)}
            carried: dict[str, Carried] = {}
            for place in self._places.of(unit):
                if place.own_name in owned:
                    carried[place.own_name] = self._carried(checkpoint, place, scalars["states"].get(place.name, {}))
                else:
                    local_of(place.param.detach()).copy_(self._values(checkpoint, place, place.param.dtype))
            self._optim.take(unit, carried)
        for name, buffer in self._buffers(everywhere=True):
            checkpoint.check_shape(f"{BUFFER}.{name}", tuple(buffer.shape))
            buffer.copy_(checkpoint.read(f"{BUFFER}.{name}", Box.whole(tuple(buffer.shape))))

    def _carried(self, checkpoint: Checkpoint, place: Place, scalars: dict[str, float]) -> Carried:
        tensors = {MASTER: self._values(checkpoint, place, torch.float32).view(-1)}
        blocks: dict[str, Blocks] = {}
        for key in checkpoint.moments(place.name):
            tensors[key], stored = read_moment(checkpoint, key, place)
            blocks |= {} if stored is None else {key: stored}
        if (
            self._delayed
            and f"{MASTER}.{place.name}" in checkpoint.names
            and f"{PARAM}.{place.name}" in checkpoint.names
        ):
            checkpoint.check_shape(f"{PARAM}.{place.name}", place.shape)
            tensors[PARAM] = checkpoint.read(f"{PARAM}.{place.name}", place.box).view(-1)
        return Carried(tensors, blocks, scalars)

    def _values(self, checkpoint: Checkpoint, place: Place, dtype: torch.dtype) -> torch.Tensor:
        """The parameter's, from its master if there is one."""
        kind = MASTER if f"{MASTER}.{place.name}" in checkpoint.names else PARAM
        checkpoint.check_shape(f"{kind}.{place.name}", place.shape)
        values = checkpoint.read(f"{kind}.{place.name}", place.box)
        return to_working(values.float(), dtype) if dtype != values.dtype else values

    def _saved(self, unit: Unit) -> dict[str, Place]:
        """What this rank saves of a unit, by its own names."""
        return {place.own_name: place for place in self._places.of(unit) if place.saves and place.box.elems}

    def _without_master(self, unit: Unit, saved: dict[str, Place]) -> list[Place]:
        owned = {state.name for state in self._optim.carried(unit)}
        return [place for name, place in saved.items() if name not in owned]

    def _buffers(self, *, everywhere: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
        """Persistent ones; the first rank saves them."""
        if dist.get_rank() and not everywhere:
            return
        for prefix, module in self._sharded.model.named_modules():
            for name, buffer in module.named_buffers(recurse=False):
                if name not in module._non_persistent_buffers_set:
                    yield f"{prefix}.{name}".lstrip("."), buffer


def values_of(checkpoint: Checkpoint) -> dict[str, str]:
    """The tensors that hold the values of parameters (masters, if there are) and of buffers, by the model's names."""
    found = {}
    for stored in checkpoint.names:
        kind, _, own = stored.partition(".")
        if kind in (MASTER, BUFFER) or (kind == PARAM and f"{MASTER}.{own}" not in checkpoint.names):
            found[own] = stored
    return found


def _part(place: Place, key: str, dtype: torch.dtype, elems: int) -> Part:
    """Not laid out yet."""
    if f"{key}.".endswith(SCALE):  # of this shard's blocks, wherever they begin
        return Part(None, NAMES[dtype], (elems,), (0,), (elems,), 0, 0)
    of, box = f"{key}.{place.name}", place.box
    return Part(of, NAMES[dtype], place.shape, box.offset, box.size, 0, 0)
