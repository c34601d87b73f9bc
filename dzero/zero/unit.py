"""One unit of a sharded model, and whom it calls: each is an object with a protocol, held weakly and set once.

    protocol     is                                    called when
    Consumer     the unit's gradients (optim/)         FSDP2 has reduced the unit
    Carrier      brings parameters (offload/)          FSDP2 is about to read parameters that live in host memory
    Owner        the optimizer                         somebody writes into parameters

and `pending`, a call that waits for the update that is on its way, whatever became of the optimizer that began it.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from dzero.comm.collectives import AverageCopies
from dzero.zero.layout import Layout
from dzero.zero.offloaded_param import OffDeviceTensor, TensorStorage, memory_of
from dzero.zero.replica_shards import ReplicaShards
from dzero.zero.unit_shapes import UnitShape
from dzero.zero.watched_tensor import watch


class GradConsumer(Protocol):
    """Whom a unit's gradients go to: for each reduction `receive`, `shown` of every parameter, and `returned`."""

    def receive(self, reduced: torch.Tensor, missing: frozenset[str]) -> None:
        """Take FSDP2's buffer of reduced gradients, on the stream that it was made on.

        Args:
            reduced: The padded shards of all trained parameters, in the order of `Unit.buffered`, in the table's
                gradient dtype.
            missing: Names of those that got no gradient on this rank, for which zeros were reduced.
        """

    def shown(self, name: str, piece: torch.Tensor) -> DTensor | None:
        """Return what FSDP2 sets as `.grad` of a parameter; None to decide that in `returned`.

        Args:
            name: The parameter's name in the model.
            piece: Its part of the reduced buffer, of its local shard's shape.
        """

    def returned(self) -> None:
        """Set those `.grad` for which `shown` returned None: FSDP2 has left views of the buffer there."""

    def drain(self) -> None:
        """Wait for queued work, which holds the optimizer that queued it."""


class ParamCarrier(Protocol):
    """Who brings a unit's parameters from host memory to the device, ahead of use where it can."""

    def bring(self, unit: Unit) -> dict[str, torch.Tensor]:
        """Return the unit's padded shards [elems] on the device, by name."""

    def forget(self, unit: str) -> None:
        """Drop what was brought of a unit (its name) ahead of use: its values may change."""


class MasterOwner(Protocol):
    """The optimizer, whose masters follow what is written into parameters."""

    def synchronize(self) -> None:
        """Return when no update is on its way any more."""


@dataclass
class Unit:
    """Modules that are gathered and reduced together, and where their reduced gradients go.

    `layout`, `mesh`: the table and the data-parallel axes of this unit; experts that ranks share have their own.
    `params`: sharded parameters by name in the model, each a DTensor over the shard axis. `origin`: fp32 values
    [local shard, or this rank's part of it] of parameters that came in fp32 and work in 16 bits, for the optimizer
    to take as masters; later its masters, for an optimizer after it. `buffered`: names of the trained ones, in the
    order of FSDP2's buffers. `is_edited`: somebody wrote into parameters since the last update; `is_stale`: or since
    they were gathered. `reductions`: how many there were. `version`: counts steps and writes that changed parameters.
    `hosted`: parameters that live in host memory. `shares`: of states that copies share out. The others: see above.
    """

    shape: UnitShape
    layout: Layout
    mesh: DeviceMesh
    modules: list[FSDPModule]
    params: dict[str, nn.Parameter]
    average: AverageCopies | None
    origin: dict[str, TensorStorage] = field(default_factory=dict)
    buffered: tuple[str, ...] = ()
    consumer: weakref.ref[GradConsumer] | None = None
    carrier: weakref.ref[ParamCarrier] | None = None
    owner: weakref.ref[MasterOwner] | None = None
    pending: Callable[[], None] | None = None
    is_edited: bool = False
    is_stale: bool = False
    reductions: int = 0
    version: int = 0
    hosted: dict[str, OffDeviceTensor] = field(default_factory=dict)
    shares: ReplicaShards | None = None
    _brought: dict[str, torch.Tensor] = field(default_factory=dict)
    _taken: set[str] = field(default_factory=set)
    _missing: frozenset[str] = frozenset()
    _delivered: bool = False

    def __post_init__(self) -> None:
        for name, param in self.params.items():
            if (memory := memory_of(param)) is not None:
                self.hosted[name], memory.hooks = memory, weakref.ref(self)

    def take_origin(self, name: str) -> torch.Tensor | None:
        """Return a parameter's origin, which is forgotten; None where it has none."""
        home = self.origin.pop(name, None)
        if home is None and name in self._taken and self.layout.param.dtype != torch.float32:
            warnings.warn(
                f"the masters of {self.shape.name or 'the root'} begin from parameters in {self.layout.param.dtype}: "
                "an optimizer before took them and hands none on; load its state_dict() to keep them",
                stacklevel=2,
            )
        self._taken.add(name)
        return None if home is None else home.get()

    def attach(self, consumer: GradConsumer) -> None:
        """Deliver to `consumer` from now on."""
        self.consumer = weakref.ref(consumer)

    @property
    def attached(self) -> GradConsumer | None:
        """The optimizer's, that takes the gradients; None without one."""
        return None if self.consumer is None else self.consumer()

    def arrive(self) -> None:
        """Called when FSDP2 is about to read this unit's shards: an update may still be on its way to them."""
        wait, self.pending = self.pending, None
        if wait is not None:
            wait()

    def bring(self, memory: OffDeviceTensor) -> torch.Tensor:
        """A parameter's shard on the device; all of the unit come with the first that FSDP2 asks for."""
        self._hold(memory)
        if memory.name not in self._brought:
            carrier = self.carrier() if self.carrier is not None else None
            if carrier is None:
                self.arrive()
                self._brought = {name: held.flat.to(held.device, copy=True) for name, held in self.hosted.items()}
            else:
                self._brought = carrier.bring(self)
        return self._brought.pop(memory.name)

    def await_update(self) -> None:
        """Before host memory is read or written past FSDP2: wait for updates, forget what was brought."""
        self.arrive()
        self._brought = {}
        if self.carrier is not None and (carrier := self.carrier()) is not None:
            carrier.forget(self.shape.name)

    def watch(self, owner: MasterOwner | None = None) -> None:
        """Notice from now on what is written into parameters, once `owner`, if there is one, has been synchronized."""
        self.owner = None if owner is None else weakref.ref(owner)
        for name, param in self.params.items():
            if name not in self.hosted and isinstance(param, DTensor):
                watch(param, weakref.ref(self))

    def look(self) -> None:
        """As `Watcher.look`: an update may be on its way."""
        self.arrive()

    def lend(self) -> None:
        """As `Watcher.lend`: FSDP2 asks, before the first forward, whether its memory is still there."""

    def write(self) -> None:
        """As `Watcher.write`: wait for updates on their way, and let masters follow what is written."""
        self.is_stale = True
        self.version += 1
        if self.owner is not None and (owner := self.owner()) is not None:
            owner.synchronize()
            self.is_edited = True

    def hold(self) -> None:
        """Take over memory that FSDP2 made to pad shards anew, as it does when a state dict was loaded."""
        for name in self.hosted:
            if (memory := memory_of(self.params[name])) is not None:
                self._hold(memory)

    def _hold(self, memory: OffDeviceTensor) -> None:
        held = self.hosted[memory.name]
        if memory is not held:
            self.await_update()
            memory.move_to(held.home)
            self.hosted[memory.name] = memory

    def expect(self, missing: frozenset[str]) -> None:
        """Called when FSDP2 is about to reduce; `missing`: see `GradConsumer.receive`."""
        self._missing, self._delivered = missing, False

    def deliver(self, reduced: torch.Tensor) -> None:
        """FSDP2's all-reduce hook: `reduced` [padded shards of the trained parameters, grad dtype]."""
        self._delivered = True
        self.reductions += 1
        if (consumer := self.attached) is not None:
            consumer.receive(reduced, self._missing)
        elif self.average is not None:
            self.average(reduced)

    def delivered(self) -> None:
        """Called when FSDP2 has set `.grad`, or had nothing to reduce."""
        was, self._delivered = self._delivered, False
        if was and (consumer := self.attached) is not None:
            consumer.returned()


def as_module(module: FSDPModule) -> nn.Module:
    """What `fully_shard` made of a module is still one."""
    assert isinstance(module, nn.Module)
    return module
