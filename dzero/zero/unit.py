"""Unit of a sharded model, and the protocols of the objects that it calls.

    protocol        implemented by                      called when
    GradConsumer    the unit's gradients (optim/)       FSDP2 has reduced the unit
    ParamCarrier    the prefetcher (offload/)           FSDP2 is about to read parameters that are stored off the device
    MasterOwner     the optimizer                       code writes into parameters

A unit references each of them weakly. `Unit.pending` waits for the update in flight, even if the optimizer that started
it no longer exists.
"""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import nn
from torch.autograd.graph import Node
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from dzero.comm.collectives import AverageReplicas, ReduceGrads
from dzero.comm.wire import Blocks
from dzero.zero.dtensor_operators import place_grads
from dzero.zero.layout import Layout
from dzero.zero.offloaded_param import OffDeviceTensor, TensorStorage, memory_of
from dzero.zero.replica_shards import ReplicaShards
from dzero.zero.unit_shapes import UnitShape
from dzero.zero.watched_tensor import watch


class GradConsumer(Protocol):
    """Consumer of a unit's gradients: `receive` per reduction, `shown` for every parameter, then `returned`."""

    def receive(self, reduced: torch.Tensor, missing: frozenset[str]) -> None:
        """Take FSDP2's buffer of reduced gradients, on the stream that produced it.

        Args:
            reduced: Padded shards of all trained parameters, in the order of `Unit.buffered` and in the layout's
                gradient dtype.
            missing: Names of the parameters without a gradient on this rank, for which zeros were reduced.
        """

    def shown(self, name: str, piece: torch.Tensor) -> DTensor | None:
        """Return the `.grad` that FSDP2 sets for a parameter, or None if `returned` sets it.

        Args:
            name: Name of the parameter in the model.
            piece: Its part of the reduced buffer, in the shape of its local shard.
        """

    def returned(self) -> None:
        """Set each `.grad` for which `shown` returned None; FSDP2 has set it to a view of the buffer."""

    def drain(self) -> None:
        """Wait for queued work, which references the optimizer that queued it."""


WITHOUT_OPTIMIZER = (
    "gradients arrived, but no optimizer of dzero was made for this model: one of torch.optim would update the 16-bit "
    "parameters themselves, without fp32 masters and without offload. Take dzero.AdamW(sharded), or "
    "dzero.TorchOptimizer(sharded, torch.optim.SGD) for a class of torch.optim"
)


PARKED = "the model's states are parked, off the device: call sharded.unpark() first"


class ParamCarrier(Protocol):
    """Loader of a unit's parameters from their storage to the device, which prefetches them if possible."""

    def fetch(self, unit: Unit) -> dict[str, torch.Tensor]:
        """Return the unit's padded shards [elems] on the device, by name."""

    def forget(self, unit: str) -> None:
        """Drop the prefetched shards of the unit with this name, because its values may change."""


class MasterOwner(Protocol):
    """Optimizer, whose masters follow what is written into parameters."""

    def synchronize(self) -> None:
        """Wait until no update is in flight."""


@dataclass
class Unit:
    """Modules that are gathered and reduced together, and the destination of their reduced gradients.

    Attributes:
        shape: Unsharded shapes.
        layout: Layout of the unit, which for shared experts differs from the model's.
        mesh: Data-parallel mesh of the unit, which also differs for shared experts.
        modules: Modules of the unit.
        params: Sharded parameters by name in the model, each a DTensor over the shard axis.
        average: Average over the replicas; None for one replica.
        reduce: Average over the shard axis.
        origin: fp32 values [local shard, or this rank's replica shard] of parameters that were in fp32 and are used
            in 16 bits. The optimizer takes them as masters, and leaves its masters there for the next optimizer.
        buffered: Names of the trained parameters, in the order of FSDP2's buffers.
        consumer: Consumer of the reduced gradients.
        carrier: Loader of offloaded parameters.
        owner: Optimizer that is synchronized before a write.
        pending: Function that waits for the update in flight.
        is_edited: Whether parameters were written since the last update.
        is_stale: Whether parameters were written since they were gathered.
        is_parked: Whether the unit's states are parked (parking.py), so that nothing can be read.
        reductions: Number of reductions so far.
        version: Number of steps and writes that changed parameters.
        offloaded: Parameters that are stored off the device, or quantized.
        replica_shards: Reduction and gather of replica shards; None if states are sharded over shards only.
        grad_factor: Factor of reduced gradients, which are means over the data-parallel ranks.
        placed_grads: Nodes of autograd that place the gradients of expressions on parameters like these.
    """

    shape: UnitShape
    layout: Layout
    mesh: DeviceMesh
    modules: list[FSDPModule]
    params: dict[str, nn.Parameter]
    average: AverageReplicas | None
    reduce: ReduceGrads | None = None
    origin: dict[str, TensorStorage] = field(default_factory=dict)
    buffered: tuple[str, ...] = ()
    consumer: weakref.ref[GradConsumer] | None = None
    carrier: weakref.ref[ParamCarrier] | None = None
    owner: weakref.ref[MasterOwner] | None = None
    pending: Callable[[], None] | None = None
    is_edited: bool = False
    is_stale: bool = False
    is_parked: bool = False
    reductions: int = 0
    version: int = 0
    offloaded: dict[str, OffDeviceTensor] = field(default_factory=dict)
    replica_shards: ReplicaShards | None = None
    grad_factor: float = 1.0
    placed_grads: list[Node] = field(default_factory=list)
    _fetched: dict[str, torch.Tensor] = field(default_factory=dict)
    _taken: set[str] = field(default_factory=set)
    _missing: frozenset[str] = frozenset()
    _delivered: bool = False

    def __post_init__(self) -> None:
        for name, param in self.params.items():
            if (memory := memory_of(param)) is not None:
                self.offloaded[name], memory.hooks = memory, weakref.ref(self)

    @property
    def carried(self) -> dict[str, OffDeviceTensor]:
        """Parameters that are brought to the device for each use."""
        return {name: memory for name, memory in self.offloaded.items() if not memory.is_on_device}

    def take_origin(self, name: str) -> torch.Tensor | None:
        """Remove and return the origin of a parameter, or None; warn if an earlier optimizer took it."""
        storage = self.origin.pop(name, None)
        if storage is None and name in self._taken and self.layout.param.dtype != torch.float32:
            warnings.warn(
                f"the masters of {self.shape.name or 'the root'} begin from parameters in {self.layout.param.dtype}: "
                "an optimizer before took them and hands none on; load its state_dict() to keep them",
                stacklevel=2,
            )
        self._taken.add(name)
        return None if storage is None else storage.get()

    def attach(self, consumer: GradConsumer) -> None:
        """Deliver gradients to `consumer` from now on."""
        self.consumer = weakref.ref(consumer)

    @property
    def attached(self) -> GradConsumer | None:
        """Consumer of the gradients, if it still exists."""
        return None if self.consumer is None else self.consumer()

    def wait_for_update(self) -> None:
        """Wait for the update in flight; called when FSDP2 is about to read this unit's shards.

        Raises:
            RuntimeError: The unit is parked.
        """
        if self.is_parked:
            raise RuntimeError(PARKED)
        wait, self.pending = self.pending, None
        if wait is not None:
            wait()

    def fetch(self, memory: OffDeviceTensor) -> torch.Tensor:
        """Return a parameter's shard on the device; the first request of a gather fetches the whole unit."""
        self._hold(memory)
        if memory.is_on_device:
            return memory.flat
        if memory.name not in self._fetched:
            carrier = self.carrier() if self.carrier is not None else None
            if carrier is None:
                self.wait_for_update()
                self._fetched = {name: self._copied(name, held) for name, held in self.carried.items()}
            else:
                self._fetched = carrier.fetch(self)
        return self._fetched.pop(memory.name)

    def _copied(self, name: str, held: OffDeviceTensor) -> torch.Tensor:
        """Return a copy of a shard on the device, rounded as with a carrier (`precision.fetch`)."""
        copy = held.flat.to(held.device, copy=True)
        if self.layout.fetch_code is not None and held.codec is None:
            blocks = Blocks(((held.elems, len(self.params[name].shape) < 2),), self.layout.fetch_code)
            row = torch.empty(blocks.nbytes, dtype=torch.uint8, device=held.device)
            blocks.encode(copy, row)
            blocks.decode(row, copy)
        return copy

    def await_update(self) -> None:
        """Wait for updates and drop fetched shards, before host memory is accessed other than by FSDP2's gathers."""
        self.wait_for_update()
        self._fetched = {}
        if self.carrier is not None and (carrier := self.carrier()) is not None:
            carrier.forget(self.shape.name)

    def watch(self, owner: MasterOwner | None = None) -> None:
        """Watch reads and writes of parameters from now on; before a write, `owner`, if given, is synchronized."""
        self.owner = None if owner is None else weakref.ref(owner)
        self.placed_grads = self.placed_grads or place_grads(self.params.values())
        for name, param in self.params.items():
            if name not in self.offloaded and isinstance(param, DTensor):
                watch(param, weakref.ref(self))

    def before_read(self) -> None:
        """Wait for the update in flight, before a read."""
        self.wait_for_update()

    def before_address(self) -> None:
        """Ignore requests for an address: before the first forward, FSDP2 checks whether the memory still exists."""

    def before_write(self) -> None:
        """Wait for updates in flight, before a write, and mark that masters must follow it."""
        if self.is_parked:
            raise RuntimeError(PARKED)
        self.is_stale = True
        self.version += 1
        if self.owner is not None and (owner := self.owner()) is not None:
            owner.synchronize()
            self.is_edited = True

    def adopt_padded(self) -> None:
        """Adopt memory that FSDP2 allocated to pad shards again, as it does after a state dict was loaded."""
        for name in self.offloaded:
            if (memory := memory_of(self.params[name])) is not None:
                self._hold(memory)

    def _hold(self, memory: OffDeviceTensor) -> None:
        held = self.offloaded[memory.name]
        if memory is not held:
            self.await_update()
            memory.replace(held)
            self.offloaded[memory.name] = memory

    def note_missing(self, missing: frozenset[str]) -> None:
        """Record the names without a gradient in the reduction that FSDP2 is about to start."""
        self._missing, self._delivered = missing, False

    def divide_gradients_by(self, ranks: int, factor: float | None) -> None:
        """Implement FSDP2's `set_gradient_divide_factor`: divide the sum over all data-parallel ranks by `factor`.

        Args:
            ranks: Number of data-parallel ranks of the model.
            factor: The divisor; None for `ranks`, which makes the mean.

        Raises:
            ValueError: The divisor is not a number above 0.
        """
        if factor is not None and not (isinstance(factor, (int, float)) and 0 < factor < math.inf):
            raise ValueError(
                f"set_gradient_divide_factor({factor!r}): gradients are the sum over {ranks} ranks, divided by a "
                "number above 0: 1.0 for the sum, None for the mean"
            )
        self.grad_factor = 1.0 if factor is None else ranks / factor

    def deliver(self, reduced: torch.Tensor) -> None:
        """Pass `reduced` [padded shards of trained parameters, grad dtype] on, as FSDP2's all-reduce hook."""
        self._delivered = True
        self.reductions += 1
        if self.grad_factor != 1.0:
            reduced.mul_(self.grad_factor)
        if (consumer := self.attached) is not None:
            consumer.receive(reduced, self._missing)
            return
        if self.origin:
            warnings.warn(WITHOUT_OPTIMIZER, stacklevel=2)
        if self.average is not None:
            self.average(reduced)

    def delivered(self) -> None:
        """Notify the consumer that FSDP2 has set `.grad`; also called if there was nothing to reduce."""
        was, self._delivered = self._delivered, False
        if was and (consumer := self.attached) is not None:
            consumer.returned()


def as_module(module: FSDPModule) -> nn.Module:
    """Return a module that `fully_shard` was applied to, typed as `nn.Module`."""
    assert isinstance(module, nn.Module)
    return module


def as_fsdp(module: nn.Module) -> FSDPModule:
    """Return a module typed as FSDP2's `FSDPModule`, which it is after `fully_shard`."""
    assert isinstance(module, FSDPModule)
    return module
