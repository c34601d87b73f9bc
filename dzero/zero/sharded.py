"""The sharded model: what a loop calls around microbatches and steps."""

from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NoReturn, Protocol
from weakref import WeakKeyDictionary, WeakMethod, WeakSet

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from dzero.comm.ledger import Ledger
from dzero.mesh import host_mesh
from dzero.parallel.context.parallelize import ContextParallel
from dzero.parallel.pipeline.split import ModelStages
from dzero.streams import Loans
from dzero.utils.terminal import plain
from dzero.zero.describe import kinds_table, units_table
from dzero.zero.float8_layers import Float8Layers
from dzero.zero.fsdp_internals import (
    groups_of,
    has_failed,
    recover,
    reduce_deferred_grads,
    unreduced_in,
    unsharded_params,
)
from dzero.zero.layout import Layout
from dzero.zero.microbatch_count import MicrobatchCount
from dzero.zero.parking import WHERE, Parking, StateHolder
from dzero.zero.registered_params import drop_waiting, follow_shards
from dzero.zero.unit import PARKED, Unit, as_fsdp, as_module
from dzero.zero.unit_shapes import UnitShape
from dzero.zero.units import roots_of


class GradClaimant(Protocol):
    """Object that takes the gradients of a sharded model for an optimizer."""

    def drop(self) -> None:
        """Drop the gradients of the step, reduced or not."""

    def complete(self) -> None:
        """Complete the gradients of the step, so that `.grad` has all of them; all ranks call this."""


class Sharded:
    """Handle of a sharded model, which `shard` returns.

    Attributes:
        model: The model, sharded in place.
        layout: Layout of its states.
        mesh: Mesh of the data-parallel ranks.
        model_groups: Process groups along the axes that cut the model itself, by axis.
        units: Units, each root behind the units in it.
        ledger: Ledger of the collectives.
        loans: Reduced buffers that other streams still read.
        stages: Pipeline stages on this rank, each a root of FSDP2; None without a pipeline.
        names: Names of the parameters of all pipeline stages.
        scalars: Names of the parameters without dimensions, whose shards have one.
        float8: Linear layers that multiply in 8 bits; None with `precision.compute=param`.
        claims: Names of the parameters that each optimizer updates, by its claimant, for the optimizer's lifetime.
        holders: Optimizers of the model, once they are made, for their lifetime.
        is_last: Whether the current microbatch is the last of its step.
    """

    def __init__(
        self,
        model: nn.Module,
        layout: Layout,
        mesh: DeviceMesh,
        model_groups: dict[str, dist.ProcessGroup],
        units: list[Unit],
        ledger: Ledger,
        loans: Loans,
        stages: ModelStages | None,
    ) -> None:
        self.model, self.layout, self.mesh, self.units, self.ledger = model, layout, mesh, units, ledger
        self.loans = loans
        self.model_groups, self.stages = model_groups, stages
        self.names = tuple(name for name, _ in model.named_parameters()) if stages is None else stages.names
        self.scalars: frozenset[str] = frozenset()
        self.float8: Float8Layers | None = None
        self.context: ContextParallel | None = None
        self.claims: WeakKeyDictionary[GradClaimant, frozenset[str]] = WeakKeyDictionary()
        self.holders: WeakSet[StateHolder] = WeakSet()
        self.is_last = True
        self._parking: Parking | None = None
        self._reductions = 0
        self._reduced = [0] * len(units)  # reductions of each unit before this step
        self._frozen = [(unit, each.name) for unit in units for each in unit.shape.params if not each.trainable]
        self._roots = [as_fsdp(root) for root in roots_of(model, stages)]
        self._microbatches = [MicrobatchCount(layout) for _ in self._roots]
        follow_shards(units, [model] if stages is None else [], layout)
        drop = WeakMethod(self._drop_gradients)
        model.zero_grad = partial(_zero_grad, model.zero_grad, drop)  # type: ignore[method-assign]

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        """Raise TypeError: the model is called as it was before, not its handle."""
        raise TypeError("Sharded is the handle of the model: call sharded.model(...)")

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            """Raise AttributeError, with a hint for attributes that the model has."""
            hint = f"; the model has it: sharded.model.{name}" if hasattr(vars(self).get("model"), name) else ""
            raise AttributeError(f"'Sharded' has no attribute {name!r}{hint}")

    @contextmanager
    def microbatch(self, is_last: bool = True, pipeline_stage: int = 0) -> Iterator[None]:
        """Run the forward and backward of one microbatch in this context.

        A loop with one microbatch per step does not need it. The caller divides the loss by the number of microbatches.
        A backward outside of the context, after others inside, counts as the last one.

        Args:
            is_last: Whether the microbatch is the last of its step.
            pipeline_stage: Index of the pipeline stage on this rank. Only its backward must run in the context.
        """
        self.check_unparked()
        self._microbatches[pipeline_stage].begin(is_last)
        self._set(is_last, self._roots[pipeline_stage])
        try:
            yield
        finally:
            self._set(True, self._roots[pipeline_stage])
            self._reductions = self._count_reductions()

    @contextmanager
    def input_gradients(self, pipeline_stage: int) -> Iterator[None]:
        """Leave the parameter gradients of a stage to `weight_gradients`, in a backward within this context."""
        root = self._roots[pipeline_stage]
        self._set(False, root)
        root.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self._set(True, root)

    @contextmanager
    def weight_gradients(self, is_last: bool, pipeline_stage: int) -> Iterator[None]:
        """Compute the parameter gradients of a stage in this context, which then reduces or accumulates them."""
        with self.microbatch(is_last, pipeline_stage):
            yield
            reduce_deferred_grads(self._roots[pipeline_stage])

    def unsharded_params(self, pipeline_stage: int) -> list[nn.Parameter]:
        """Return the parameters of a stage, as its forward used them, that `weight_gradients` needs gradients of."""
        return unsharded_params(self._roots[pipeline_stage])

    def abandon_step(self, names: Container[str]) -> None:
        """Discard the step's gradients of `names`, even if their backward raised; called by `zero_grad`."""
        for root in self._roots:
            if has_failed(root):
                recover(root)
        drop_waiting(self.units, names)
        for of_stage in self._microbatches:
            of_stage.abandon()

    def _drop_gradients(self) -> None:
        for claimant in [*self.claims]:
            claimant.drop()
        self.abandon_step(self.names)
        self.ledger.collective_log.end_step()  # even on ranks whose optimizers no longer exist

    def end_step(self) -> None:
        """End the step's microbatches; called by the optimizer's step.

        Raises:
            RuntimeError: If states are parked, if a backward raised, if a parameter is trained that was frozen in
                `shard`, or if `MicrobatchCount.end` finds wrong microbatches.
        """
        self.check_unparked()
        for unit, name in self._frozen:
            if unit.params[name].requires_grad:
                raise RuntimeError(
                    f"{name} was frozen in shard() and requires gradients now, which no optimizer would use: let all "
                    "that is ever trained require them before shard(), and freeze it afterwards. Of several adapters "
                    "of peft, unfreeze all before shard(), then call set_adapter()"
                )
        if any(map(has_failed, self._roots)):
            raise RuntimeError(
                "the step's backward raised: call zero_grad(), and repeat the step from its first forward"
            )
        if self._had_last_outside():
            self._microbatches[0].add_last()
        for of_stage in self._microbatches:
            of_stage.end()
        for unit, before in zip(self.units, self._reduced, strict=True):
            if unit.reductions == before and any(map(unreduced_in, groups_of(unit.modules[0]))):
                raise RuntimeError(
                    f"unit {unit.shape.name or 'root'} got gradients that were never reduced: its backward was not "
                    "noticed, because nothing that its forward returned shows the tensors that were used. Return them "
                    "in tensors, lists, dicts or plain objects"
                )
        self._reduced = [unit.reductions for unit in self.units]

    @property
    def is_accumulating(self) -> bool:
        """Whether microbatches of a step have run, of which none was the last, so that there is no `.grad` yet."""
        return any(of_stage.is_open for of_stage in self._microbatches) and not self._had_last_outside()

    def _had_last_outside(self) -> bool:
        """Return whether a backward ran outside of `microbatch`, after those inside."""
        return len(self._roots) == 1 and self._count_reductions() > self._reductions

    def _count_reductions(self) -> int:
        """Count the reductions of all units; one since the end of `microbatch` is of a backward outside of it."""
        return sum(unit.reductions for unit in self.units)

    def _set(self, is_last: bool, root: FSDPModule) -> None:
        policy = self.layout.grad_sync_policy(is_last)
        self.is_last = is_last
        root.set_requires_gradient_sync(policy.reduce)
        root.set_reshard_after_backward(policy.reshard)
        for unit in self.units:
            if (own := unit.layout.grad_sync_policy(is_last).reshard) is not policy.reshard:
                unit.modules[0].set_reshard_after_backward(own, recurse=False)

    def train(self, mode: bool = True) -> None:
        """Set the training mode of the model and of its pipeline stages."""
        for root in [self.model, *map(as_module, self._roots)]:
            root.train(mode)

    def forget_masters(self) -> None:
        """Release the masters kept for another optimizer, and their memory and scratch folders.

        Call this if no other optimizer will be created.
        """
        for unit in self.units:
            unit.origin.clear()

    def reshard(self) -> None:
        """Free all unsharded parameters, such as those that a forward without backward left gathered."""
        for unit in self.units:
            for module in unit.modules:
                module.reshard()

    def drop_residuals(self) -> None:
        """Forget what rounding to blocks left of gradients (`precision.feedback`).

        `dzero.Checkpointer` does so at every save, so that a run that resumes has the bits of the one that went on.
        """
        for unit in self.units:
            if unit.reduce is not None:
                unit.reduce.residuals = None

    def park(self, where: str = "host", path: str | None = None) -> int:
        """Move all states off the device, between steps, until `unpark`; all ranks call this.

            sharded.park()      # the device is free, for instance for an inference engine
            sharded.unpark()    # training goes on, with the same bits

        Parameters, masters and moments of all optimizers leave the device, and other processes can have its memory.
        Until `unpark`, whatever would read them raises RuntimeError. States on the host or on disk stay there.

        Args:
            where: "host", in page-locked memory beside a GPU, or "disk", in an unnamed file.
            path: Directory of the file; None for one of `OffloadConfig.disk.paths`, by default the current directory.

        Returns:
            Bytes that were freed on this rank's device.

        Raises:
            ValueError: `where` is neither, or a path is given for the host.
            RuntimeError: States are parked already, there are gradients of a step that has not ended, or gradients
                leave residuals (`precision.feedback`).
            MemoryError: The host has too little memory. Nothing has changed.
            DiskError: The disk is too small or fails. Nothing has changed.
        """
        if where not in WHERE:
            raise ValueError(f"park(where={where!r}): choose one of {[*WHERE]}")
        if path is not None and where != "disk":
            raise ValueError(f"park(path={path!r}): only where='disk' writes a file; leave the path away")
        self.check_unparked()
        if self._has_gradients():
            raise RuntimeError("park() with gradients of a step that has not ended: call step() or zero_grad() first")
        if self.layout.feedback:
            raise RuntimeError("park() leaves the residuals of precision.feedback=true behind: take feedback=false")
        self.reshard()
        paths, device = self.layout.offload.disk.paths, torch.device(self.mesh.device_type)
        path = paths[dist.get_rank() % len(paths)] if path is None else path
        parking = Parking(self.units, self.holders, device, where, path)
        self._parking = parking  # before anything leaves the device: an interrupt from here on is undone by `unpark`
        parking.free()
        return parking.freed_bytes

    def unpark(self) -> None:
        """Bring all states back to the device after `park`; if that fails, they stay parked.

        Raises:
            RuntimeError: Nothing is parked.
            MemoryError: The device has too little memory now.
            DiskError: The file of parked states cannot be read.
        """
        if self._parking is None:
            raise RuntimeError("unpark(): nothing is parked")
        self._parking.restore()
        self._parking = None

    def check_unparked(self) -> None:
        """Raise RuntimeError if the states are parked."""
        if self._parking is not None:
            raise RuntimeError(PARKED)

    def _has_gradients(self) -> bool:
        """Return whether a step has begun: with microbatches, or with gradients, reduced or not."""
        begun = any(of_stage.has_begun for of_stage in self._microbatches)
        return (
            begun
            or any(map(has_failed, self._roots))
            or any(param.grad is not None for unit in self.units for param in unit.params.values())
        )

    @cached_property
    def host_mesh(self) -> DeviceMesh:
        """Mesh of the data-parallel ranks for tensors in host memory; the first use is collective."""
        return host_mesh(self.mesh)

    @property
    def shapes(self) -> list[UnitShape]:
        """Unsharded shapes of the units."""
        return [unit.shape for unit in self.units]

    def __repr__(self) -> str:
        of = f"{type(self.model).__name__}, {len(self.units)} units, on {self.mesh.device_type}"
        tables = [kinds_table(self.layout, self.shapes), units_table(self.layout, self.shapes)]
        tables += [] if self.float8 is None else [self.float8.table()]
        return f"Sharded({of})\n{plain(tables)}"

    def named_params(self) -> dict[str, nn.Parameter]:
        """Return every parameter once, by its first name in the model, in the order of the units."""
        return {name: param for unit in self.units for name, param in unit.params.items()}


def _zero_grad(
    zero_grad: Callable[[bool], None], drop: WeakMethod[Callable[[], None]], set_to_none: bool = True
) -> None:
    """Drop all gradients, including those that no `.grad` shows yet, and run the model's own `zero_grad`."""
    if (dropping := drop()) is not None:
        dropping()
    zero_grad(set_to_none)


def check_sharded(given: object, call: str, usage: str = "") -> None:
    """Raise TypeError if the argument of `call` that must be what `shard` returned is something else."""
    if not isinstance(given, Sharded):
        raise TypeError(
            f"{call} of {type(given).__name__}: in this place it takes what dzero.shard(model) returned, e.g. "
            f"{usage or f'{call}(sharded, ...)'}"
        )
