"""States of a sharded model and its optimizer in a checkpoint; they are saved and loaded unit by unit.

    tensor                              dtype          contents
    master.<parameter>                  fp32           every trained parameter
    exp_avg.<parameter>, exp_avg_sq…    fp32 or bf16   moments, in the dtype in which they are kept
    exp_avg_codes… and exp_avg_scale…   uint8, fp32    8-bit moments; scales are separate on every rank
    param.<parameter>                   working dtype  parameters without a master, unless the run that goes on has them
                                                       from elsewhere (frozen); overlap=delayed: those of forward
    row_var.<parameter>, …              their own      states of a rule that needs whole parameters, of any shape
    buffer.<name>                       its own        persistent buffers (saved_buffers.py)

The master determines its other forms: the working copy is the rounded master (zero/rounding.py), and a remainder is the
difference. A checkpoint can therefore be loaded with any stage, tier, kind of master, mesh and tiling.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from typing import Any

import torch
import torch.distributed as dist

from dzero.checkpoint.errors import CheckpointError
from dzero.checkpoint.format import BUFFER, MANIFEST, MASTER, PARAM, StoredBox
from dzero.checkpoint.load_unit import SCALE, UnitLoader
from dzero.checkpoint.reader import Checkpoint
from dzero.checkpoint.saved_buffers import Agree, SavedBuffers
from dzero.checkpoint.shard_boxes import ShardBox, ShardBoxes
from dzero.comm.collectives import gather_json
from dzero.mesh import PIPELINE
from dzero.optim.base import MasterOptimizer
from dzero.optim.group_settings import UnfitSettings
from dzero.optim.state_placement import read
from dzero.utils.torch_internals import without_wrappers
from dzero.zero.dtensors import local_of
from dzero.zero.sharded import Sharded
from dzero.zero.unit import Unit

Put = Callable[[str, torch.Tensor], None]


class CheckpointStates:
    """States of `optim` over `sharded` that this rank saves to a checkpoint and loads from it.

    Those of the frozen parameters in `left_out`, by name in the sharded model, are neither saved nor loaded.
    """

    def __init__(self, sharded: Sharded, optim: MasterOptimizer, left_out: Collection[str] = ()) -> None:
        self._sharded, self._optim, self._left_out = sharded, optim, frozenset(left_out)
        self._buffers = SavedBuffers(sharded)
        self._owned = frozenset(optim.scalars()["states"])
        self._shard_boxes = ShardBoxes(sharded, self._owned)
        self._delayed = sharded.layout.offload.mode == "delayed"

    def parts(self, agree: Agree) -> dict[str, StoredBox]:
        """Return the parts that `write` saves, by entry and in order; like `write`, call it between steps. Collective.

        `agree` calls a function on every rank, and returns the results of all.

        Raise ValueError if another optimizer has the states of a parameter.
        """
        self._check_optimizers()
        parts: dict[str, StoredBox] = {}
        for unit in self._sharded.units:
            saved, owned = self._saved(unit), self._saved_whole(unit)
            for state in self._optim.portable_states(unit):
                if state.shape is None and state.name in saved:
                    parts |= _parts(saved[state.name], state.key, state.dtype, state.elems)
                elif state.shape is not None and state.name in owned:
                    name = f"{state.key}.{owned[state.name].name}"
                    parts[name] = StoredBox.unplaced(name, state.dtype, state.shape)
            for place in self._without_master(saved):
                parts |= _parts(place, PARAM, place.param.dtype, place.elems)
        return parts | self._buffers.parts(agree)

    def write(self, put: Put) -> None:
        """Pass every part to `put` as it is now; call it between steps, after `optim.await_updates()`."""
        unsharded = self._optim.unsharded_states
        failed: list[BaseException] = []  # raised in the host's lane, an exception would be reported as one of offload

        def put_all(place: ShardBox, key: str, tensor: torch.Tensor) -> None:
            for entry, of_box in zip(_entries(place, key), place.apart(tensor), strict=True):
                put(entry, of_box)

        def put_state(name: str, key: str, tensor: torch.Tensor) -> None:
            if not failed:
                try:
                    if name in unsharded and key not in (MASTER, PARAM):
                        if name in owned:
                            put(f"{key}.{owned[name].name}", tensor)
                    elif name in saved:
                        put_all(saved[name], key, tensor)
                except BaseException as error:
                    failed.append(error)

        for unit in self._sharded.units:
            saved, owned = self._saved(unit), self._saved_whole(unit)
            self._optim.export_state(unit, put_state)
            if failed:
                raise failed[0]
            for place in self._without_master(saved):
                put_all(place, PARAM, read(local_of(place.param)))
        self._buffers.write(put)

    def _check_optimizers(self) -> None:
        elsewhere = frozenset[str]().union(*self._sharded.claims.values()) - self._owned
        if elsewhere:
            raise ValueError(
                f"{min(elsewhere)}: another optimizer updates it, and a checkpoint would not hold its states: save the "
                "state dicts of the model and of each optimizer by torch.distributed.checkpoint instead"
            )

    def scalars(self) -> dict[str, Any]:
        """Return the state that is not tensors, by names of the model as built; equal on every rank. Collective."""
        scalars = {**self._optim.scalars(), "axes": self._buffers.axes}
        whole = self._shard_boxes.whole
        scalars["states"] = {whole[name]: values for name, values in scalars["states"].items()}
        for group in scalars["groups"]:
            group["params"] = [*dict.fromkeys(whole[name] for name in group["params"])]
        return scalars if self._sharded.stages is None else _together(scalars, self._sharded.model_groups[PIPELINE])

    def take(self, checkpoint: Checkpoint, scalars: dict[str, Any], keep: Collection[str] = ()) -> list[str]:
        """Load the states of `checkpoint`, whose manifest holds `scalars`; groups keep their settings in `keep`.

        Return messages for the user.

        Raise `CheckpointError` if a tensor is missing, damaged, or of another shape, and ValueError if states belong to
        another optimizer.
        """
        self._check_optimizers()
        try:
            self._optim.take_scalars({**scalars, "groups": self._by_own_names(scalars["groups"])}, keep)
        except UnfitSettings as error:
            raise CheckpointError(str(checkpoint.path / MANIFEST), f"state.optim.{error}") from error
        states = {without_wrappers(name): values for name, values in scalars["states"].items()}
        taking = UnitLoader(checkpoint, self._owned, states, self._delayed, self._optim.unsharded_states)
        shard_boxes = [self._boxes(unit) for unit in self._sharded.units]
        for unit, (portable_states, without_master) in zip(self._sharded.units, taking.units(shard_boxes), strict=True):
            for place, values in without_master:
                local_of(place.param).view(-1).copy_(values.view(-1))
            self._optim.import_state(unit, portable_states)
        return self._buffers.take(checkpoint, scalars.get("axes"))

    def _by_own_names(self, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return saved groups with the names of parameters in the sharded model, which may be tiles of theirs."""
        own_names: dict[str, list[str]] = {}
        for own, whole in self._shard_boxes.whole.items():
            own_names.setdefault(whole, []).append(own)
        return [
            {**group, "params": [own for name in names for own in own_names.get(name, [name])]}
            for group in groups
            for names in [map(without_wrappers, group["params"])]
        ]

    def abandon(self) -> None:
        """Drop the pending work of a `take` that failed on some rank, so that all ranks can load another checkpoint."""
        for unit in self._sharded.units:
            unit.pending = None

    def _saved(self, unit: Unit) -> dict[str, ShardBox]:
        """Return the shard boxes of a unit that this rank saves, by name in the sharded model."""
        return {place.own_name: place for place in self._boxes(unit) if place.saves and place.elems}

    def _saved_whole(self, unit: Unit) -> dict[str, ShardBox]:
        """Return the shard boxes of a unit's parameters of which this rank saves unsharded states.

        Where tp cuts a parameter, each part has an owner with the states of the whole; that of the first saves them.
        """
        owned = self._optim.unsharded_states
        saved = [place for place in self._boxes(unit) if place.saves and place.leads]
        return {place.own_name: place for place in saved if owned.get(place.own_name)}

    def _boxes(self, unit: Unit) -> list[ShardBox]:
        """Return the shard boxes of a unit's parameters that a checkpoint holds."""
        return [place for place in self._shard_boxes.of(unit) if place.own_name not in self._left_out]

    def _without_master(self, saved: dict[str, ShardBox]) -> list[ShardBox]:
        return [place for name, place in saved.items() if name not in self._owned]


def _together(scalars: dict[str, Any], group: dist.ProcessGroup) -> dict[str, Any]:
    """Merge the scalars of all pipeline stages: groups with equal settings become one, and states are united."""
    every = gather_json(scalars, group)
    for of_stage in every[::-1]:
        scalars["states"] = of_stage["states"] | scalars["states"]
    groups: dict[str, dict[str, Any]] = {}
    for own in (own for of_stage in every for own in of_stage["groups"]):
        settings = json.dumps({key: value for key, value in own.items() if key != "params"}, sort_keys=True)
        params = groups.setdefault(settings, {**own, "params": []})["params"]
        params += [name for name in own["params"] if name not in params]
    scalars["groups"] = [*groups.values()]
    return scalars


def values_of(checkpoint: Checkpoint) -> dict[str, str]:
    """Return the tensors that hold the values of parameters (masters, if any) and buffers, by the model's names."""
    found = {}
    for stored in checkpoint.names:
        kind, _, own = stored.partition(".")
        if kind in (MASTER, BUFFER) or (kind == PARAM and f"{MASTER}.{own}" not in checkpoint.names):
            found[own] = stored
    return found


def _parts(place: ShardBox, key: str, dtype: torch.dtype, elems: int) -> dict[str, StoredBox]:
    """Return the parts of a state by entry, without positions in the file."""
    if f"{key}.".endswith(SCALE):  # scales of this shard's blocks, which begin anywhere in the tensor
        return {f"{key}.{place.own_name}": StoredBox.unplaced(None, dtype, (elems,))}
    parts = [StoredBox.unplaced(f"{key}.{place.name}", dtype, place.shape, box) for box in place.boxes]
    return dict(zip(_entries(place, key), parts, strict=True))


def _entries(place: ShardBox, key: str) -> list[str]:
    """Return the names of a state's boxes in this rank's file."""
    entry = f"{key}.{place.own_name}"
    return [f"{entry}#{index}" for index in range(len(place.boxes))] if place.is_fused else [entry]
