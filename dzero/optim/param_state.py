"""The states that the optimizer stores for one parameter, as they appear in a state dict.

    key                    local tensor                      stored for
    step                   fp32 scalar on the CPU            every parameter
    master                 fp32 [shard]                      16-bit parameters, precision.master=fp32
    remainder              int16 [shard]                     precision.master=remainder (zero/rounding.py)
    exp_avg, exp_avg_sq    fp32 or bf16 [shard]              precision.moments=fp32, bf16 (muon has only the first)
    exp_avg_codes, ...     uint8, fp32 [padded blocks]       precision.moments=int8 (optim/quantized_moments.py)

All but `step` are DTensors with the parameter's mesh and placements, so that DCP reshards them exactly. If replicas
divide the states of a shard (zero/replica_shards.py), the mesh is (shard, replicate), and [shard] stands for the
replica shard. 8-bit moments load only into the same number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import nn

from dzero.offload.manager import OffloadManager
from dzero.optim.flat_update import ParamStates, follow_edits
from dzero.optim.master_handover import OffloadedMasterStorage
from dzero.optim.quantized_moments import KnownBlocks, QuantizedMoment, blocks_of
from dzero.optim.state_placement import StatePlacement, read, still_of
from dzero.zero.dtensors import local_of
from dzero.zero.layout import Layout
from dzero.zero.offloaded_param import TensorStorage
from dzero.zero.rounding import join, to_working
from dzero.zero.unit_shapes import ParamShape

MOMENTS = ("exp_avg", "exp_avg_sq")


class InitialValues(NamedTuple):
    """Values of a parameter's shard in the working dtype, and of its master in fp32; both flat."""

    param: torch.Tensor
    master: torch.Tensor


@dataclass
class MasterStorage:
    """Storage (`zero.offloaded_param.TensorStorage`) of the master of `shard`, for the optimizer after this one."""

    shard: torch.Tensor
    master: torch.Tensor | None
    remainder: torch.Tensor | None

    def get(self) -> torch.Tensor:
        """Return the master, fp32 [elems], with edits of the shard since the last update."""
        if self.master is not None:
            return follow_edits(self.master, self.shard)
        assert self.remainder is not None
        return join(self.shard, self.remainder)

    def put(self, flat: torch.Tensor) -> None:
        """Raise NotImplementedError: only the optimizer may write its master."""
        raise NotImplementedError("the master belongs to its optimizer")


@dataclass
class ParamState:
    """States of one parameter.

    Attributes:
        span: Elements of the parameter's flat shard that these states belong to.
        first: Flat index of the first of them in the whole parameter.
        dtype: Dtype of the working copy.
        tensors: States by key, as in the table above.
        moments8: 8-bit moments by key, which decode and encode the codes and scales in `tensors`.
        work: Tensor for the working copy if the update runs on the host, otherwise None.
        views: Tensors where updates find the states on disk, by key.
        off_device: Keys of the states that are stored off the device, in `offload`.
        kept: Keys of the moments that the parameter's rule uses.
        number: Index of the parameter in its optimizer.
        undo: The other place of states (`offload/undo.py`) that have one, by key, or "work".
        undo_moments8: The other place of 8-bit moments, by key.
    """

    name: str
    param: nn.Parameter
    span: slice
    first: int
    dtype: torch.dtype
    tensors: dict[str, torch.Tensor]
    moments8: dict[str, QuantizedMoment] = field(default_factory=dict)
    work: torch.Tensor | None = None
    views: dict[str, torch.Tensor] = field(default_factory=dict)
    off_device: set[str] = field(default_factory=set)
    offload: OffloadManager | None = None
    kept: tuple[str, ...] = MOMENTS
    number: int = 0
    undo: dict[str, torch.Tensor] = field(default_factory=dict)
    undo_moments8: dict[str, QuantizedMoment] = field(default_factory=dict)
    _kept: dict[bool, tuple[torch.Tensor, ParamStates]] = field(default_factory=dict)

    @classmethod
    def create(
        cls,
        shape: ParamShape,
        param: nn.Parameter,
        layout: Layout,
        placement: StatePlacement,
        kept: tuple[str, ...] = MOMENTS,
    ) -> ParamState:
        """Create the states without values, which `fill` sets."""
        first, span = placement.span(shape, param, layout.shard)
        stored = cls(shape.name, param, span, first, local_of(param).dtype, {"step": torch.tensor(0.0)}, kept=kept)
        stored.offload = placement.offload
        stored._create_master(layout, placement)
        for key in kept:
            elems = shape.shard_elems(layout.shard, layout.replica_shards)
            stored._create_moment(key, key == MOMENTS[0], elems, layout, placement)
        others = {key: placement.undo(stored.name, key, state) for key, state in stored.overwritten().items()}
        stored.undo = {key: tensor for key, tensor in others.items() if tensor is not None}
        for key, eight in stored.moments8.items():
            if f"{key}_codes" in stored.undo:
                stored.undo_moments8[key] = eight.like(stored.undo[f"{key}_codes"], stored.undo[f"{key}_scale"])
        return stored

    def _create_master(self, layout: Layout, placement: StatePlacement) -> None:
        local, mesh = self.local, placement.mesh("master", self.name, self.param)
        if mesh is None and self.dtype == torch.float32:
            return  # the parameter is its own master
        key = "remainder" if layout.remainder else "master"
        master = placement.blank("master", self.name, key, local, layout.master.dtype)
        if mesh is not None and self.dtype == torch.float32:
            self.work = master  # equals the parameter between steps, so it is not a state of its own
            return
        self._show("master", key, master, placement)
        if mesh is not None:
            self.work = placement.offload.view(self.name, "work", local.numel())

    def _create_moment(
        self, key: str, signed: bool, padded_elems: int, layout: Layout, placement: StatePlacement
    ) -> None:
        local, mesh = self.local, placement.mesh("moments", self.name, self.param)
        if layout.moments.dtype != torch.uint8:
            self._show(
                "moments", key, placement.blank("moments", self.name, key, local, layout.moments.dtype), placement
            )
            return
        device = local.device if mesh is None else torch.device("cpu")
        self.moments8[key] = eight = QuantizedMoment.zeros(local.numel(), padded_elems, signed=signed, device=device)
        if mesh is not None:
            eight.place(*(placement.offload.view(self.name, f"{key}_{part}") for part in ("codes", "scale")))
        for part, tensor in eight.tensors.items():
            self._show("moments", f"{key}_{part}", tensor, placement, by_row=True)

    def _show(
        self, kind: str, key: str, flat: torch.Tensor, placement: StatePlacement, *, by_row: bool = False
    ) -> None:
        mesh = placement.mesh(kind, self.name, self.param)
        shown = placement.shown(kind, self.name, flat)
        self.tensors[key] = placement.placed(kind, shown, self.name, self.param, by_row=by_row)
        if mesh is not None:
            self.off_device.add(key)
        if shown is not flat:
            self.views[key] = flat

    def initial(self, origin: torch.Tensor | None) -> InitialValues:
        """Return the parameter's values, with `origin` [local shard, fp32] as master if they are its rounding."""
        local = self.values()
        return InitialValues(
            local, local.float() if not still_of(origin, local) or origin is None else origin.reshape(-1)
        )

    def fill(self, initial: InitialValues) -> None:
        """Set all states to their initial values, moments to zeros."""
        self._fill_master(initial)
        for key in self.moments:
            self.flat(key).zero_()
        for eight in self.moments8.values():
            eight.clear()

    def _fill_master(self, initial: InitialValues) -> None:
        if self.work is not None:
            self.work.copy_(initial.param)
        if "master" in self.tensors:
            self.flat("master").copy_(initial.master)
        if "remainder" in self.tensors:
            self.flat("remainder").copy_(initial.master.contiguous().view(torch.int32).to(torch.int16))

    def kept_master(self) -> TensorStorage | None:
        """Return the master's storage for a later optimizer, or None for an fp32 parameter."""
        if self.dtype == torch.float32:
            return None
        if self.work is not None:
            assert self.offload is not None
            return OffloadedMasterStorage(self, self.offload.unit_of(self.name), self.offload)
        master, remainder = (self.flat(key) if key in self.tensors else None for key in ("master", "remainder"))
        return MasterStorage(self.local, master, remainder)

    def copy_master(self, values: torch.Tensor) -> torch.Tensor:
        """Implement `HasMaster.copy_master` for a master off the device."""
        if "remainder" in self.tensors:
            return join(values, self.flat("remainder"))
        return follow_edits(self.flat("master").clone(), values)

    def states(self, moved: Mapping[str, torch.Tensor] | None = None, *, exchanged: bool = False) -> ParamStates:
        """Return flat views for the update, with 8-bit moments decoded; `keep` encodes them again.

        Args:
            moved: Moments by key, in the memory where the update runs.
            exchanged: Whether states that have another place are there, and this one is the target.
        """
        if moved or self.moments8:
            return self._states(moved or {}, exchanged)
        shard = local_of(self.param)
        if (kept := self._kept.get(exchanged)) is None or kept[0] is not shard:  # first call, or the model was moved
            kept = self._kept[exchanged] = shard, self._states({}, exchanged)
        return kept[1]

    def _states(self, moved: Mapping[str, torch.Tensor], exchanged: bool) -> ParamStates:
        if self.param.dtype != self.dtype:
            raise RuntimeError(
                f"{self.name} is {self.param.dtype} now, but its states were made for {self.dtype}: do not call .to() "
                "or .half() after shard(); choose PrecisionConfig(param=...) instead"
            )
        found, targets = self.overwritten(), self.undo
        if exchanged:
            found, targets = found | self.undo, {key: found[key] for key in self.undo}
        made = self.made(exchanged=exchanged)
        work = self.local if made is None else made
        m, *others = (
            self._moment8(k, exchanged).load() if self.moments8 else moved[k] if k in moved else found[k]
            for k in self.kept
        )
        v = others[0] if others else m.new_empty(0)
        master = work if work.dtype == torch.float32 else found.get("master")
        follows = self.work is None and "master" in self.tensors
        passing = bool(moved or self.moments8)
        return ParamStates(
            self.name,
            self.first,
            work,
            master,
            found.get("remainder"),
            m,
            v,
            follows,
            passing,
            tuple(map(targets.get, ("work", "master", "remainder", *MOMENTS))),
            exchanged,
        )

    def made(self, *, exchanged: bool) -> torch.Tensor | None:
        """Return the working copy that an update on the host made; of states in the unit's undo slot if `exchanged`."""
        key = "master" if self.dtype == torch.float32 else "work"
        return self.undo.get(key, self.work) if exchanged else self.work

    def _moment8(self, key: str, exchanged: bool) -> QuantizedMoment:
        return self.undo_moments8.get(key, self.moments8[key]) if exchanged else self.moments8[key]

    def overwritten(self) -> dict[str, torch.Tensor]:
        """Return the states that an update overwrites, by key, where it finds them."""
        found = {key: self.flat(key) for key in self.tensors if key != "step"}
        if self.work is not None:
            found["master" if self.dtype == torch.float32 else "work"] = self.work
        return found

    def put_moment(self, key: str, values: torch.Tensor) -> None:
        """Store `values` [shard, flat] as a moment, rounded or encoded."""
        if key in self.moments8:
            self.moments8[key].store(values.float())
        else:
            self.flat(key).copy_(values)

    def keep(self, states: ParamStates, *, exchanged: bool = False) -> None:
        """Encode the 8-bit moments after an update, into their other place if `exchanged`."""
        for key, value in zip(MOMENTS, (states.m, states.v), strict=True):
            if key in self.moments8:
                self._moment8(key, exchanged).store(value)

    def portable_states(self) -> dict[str, tuple[torch.dtype, int]]:
        """Return dtype and number of elements of each state that `export_state` yields, by key.

        States are in a form that any layout can load:

            master                  fp32 [shard], from any kind of master
            exp_avg, exp_avg_sq     stored dtype [shard]
            exp_avg_codes, _scale   8-bit moments: uint8 [shard], and one fp32 scale per 256 elements
        """
        elems = self.local.numel()
        portable_states = {"master": (torch.float32, elems)}
        for key in self.kept:
            if self.moments8:
                portable_states |= {
                    f"{key}_codes": (torch.uint8, elems),
                    f"{key}_scale": (torch.float32, blocks_of(elems)),
                }
            else:
                portable_states[key] = (self.flat(key).dtype, elems)
        return portable_states

    def export_state(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the states one by one, flat and uncopied where possible; called where updates find them."""
        yield "master", self._carried_master()
        for key in self.kept:
            if self.moments8:
                for part, tensor in self.moments8[key].export_state().items():
                    yield f"{key}_{part}", tensor
            else:
                yield key, self.flat(key)

    def _carried_master(self) -> torch.Tensor:
        if "master" in self.tensors:
            return self.flat("master") if self.work is not None else follow_edits(self.flat("master"), self.local)
        work = self.local if self.work is None else self.work
        return join(work, self.flat("remainder")) if "remainder" in self.tensors else work

    def import_state(
        self, initial: InitialValues, moments: Mapping[str, torch.Tensor], blocks: Mapping[str, KnownBlocks]
    ) -> None:
        """Load exported states, except the parameter itself, which the caller writes.

        Args:
            initial: Working copy and master.
            moments: Moments by key, flat [shard].
            blocks: Blocks of 8-bit moments whose codes are known, by key.
        """
        self._fill_master(initial)
        for key in self.kept:
            if self.moments8:
                self.moments8[key].import_state(moments[key], blocks.get(key))
            else:
                self.flat(key).copy_(moments[key])

    def refresh_master(self, local: torch.Tensor) -> None:
        """Take `values` of a parameter that was loaded as the new master.

        A remainder is kept, because it stays within the rounding of any new parameter.
        """
        if "master" in self.tensors:
            master = self.flat("master")
            local = local.to(master.device)
            if not torch.equal(to_working(master, local.dtype), local):
                master.copy_(local)
        if self.work is not None:
            self.work.copy_(local)

    def follow_edits(self, local: torch.Tensor) -> None:
        """Take the edited elements of a parameter's `values` into a master that is updated on the host."""
        assert self.work is not None
        local = local.to(self.work.device)
        if "master" in self.tensors:
            follow_edits(self.flat("master"), local)
        self.work.copy_(local)

    def values(self) -> torch.Tensor:
        """Return the elements of `local`, read from their storage."""
        return read(self.local)

    @property
    def local(self) -> torch.Tensor:
        """Elements of the parameter's local shard that these states belong to, flat, as FSDP2 stores them."""
        flat = local_of(self.param).view(-1)
        return flat if self.span == slice(0, flat.numel()) else flat[self.span]

    @property
    def moments(self) -> tuple[str, ...]:
        """Keys of the moments that are stored as they are computed, i.e. not in 8 bits."""
        return () if self.moments8 else self.kept

    def flat(self, key: str) -> torch.Tensor:
        """Return this rank's part of a state, flat; for one on disk, the tensor where an update finds it."""
        view = self.views.get(key)
        return local_of(self.tensors[key]).view(-1) if view is None else view

    def device_tensors(self) -> Iterator[torch.Tensor]:
        """Yield the local tensors of master and moments on the device."""
        yield from (tensor for _, tensor in self._on_device())

    def device_bytes(self) -> dict[str, int]:
        """Return the bytes of the storages that master and moments have on the device, by kind."""
        kinds = {"master": 0, "moments": 0}
        for key, tensor in self._on_device():
            kinds["master" if key in ("master", "remainder") else "moments"] += tensor.untyped_storage().nbytes()
        return kinds

    def _on_device(self) -> Iterator[tuple[str, torch.Tensor]]:
        for key, tensor in self.tensors.items():
            if key != "step" and key not in self.off_device:
                yield key, local_of(tensor)
