"""The `.grad` of one unit's parameters: set to the reduced gradients, and compared with what is there later."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator, Mapping

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from dzero.mesh import SHARD
from dzero.optim.grad_views import GradMaker, GradUse, flat_of
from dzero.utils.torch_internals import hooked_param
from dzero.zero.dtensors import local_of
from dzero.zero.unit import Unit

Named = dict[str, torch.Tensor]

HOOKED = (
    "{} has a hook of its own (register_hook or register_post_accumulate_grad_hook), which would see the gradients of "
    "single microbatches, or none: read or change .grad between backward() and step() instead"
)


class ShownGrads:
    """Sets, removes and compares the `.grad` of one unit's parameters.

    Args:
        unit: The unit.
        params: Trained parameters of the unit, by name.
        makers: Makers of `.grad`, by name.
        use: Owner of the gradients, which is notified of every read and write through `.grad`.

    Attributes:
        names: The `.grad` that are set at present, by name.

    Raises:
        ValueError: A parameter has a hook of its own.
    """

    def __init__(
        self,
        unit: Unit,
        params: Mapping[str, nn.Parameter],
        makers: Mapping[str, GradMaker],
        use: weakref.ref[GradUse],
    ) -> None:
        self._unit, self._params, self._makers, self._use = unit, params, makers, use
        self.names: dict[str, torch.Tensor] = {}
        self._storages: dict[str, object] = {}
        if (name := hooked_param(params)) is not None:
            raise ValueError(HOOKED.format(name))

    def over(self, name: str, piece: torch.Tensor) -> DTensor:
        """Return a view over `piece`, a gradient on the device, which the caller sets as `.grad`."""
        self.names[name] = grad = self._makers[name].of(piece, self._use)
        self._storages[name] = grad.untyped_storage()
        return grad

    def show(self, name: str, grad: torch.Tensor, *, off_device: bool) -> None:
        """Set `.grad` to a view of the flat `grad`, on or off the device."""
        param, maker = self._params[name], self._makers[name]
        param.grad_dtype = None  # allows the layout's, whatever the parameter's is
        param.grad = maker.elsewhere(grad, self._use) if off_device else maker.of(grad, self._use)
        self.names[name], self._storages[name] = param.grad, param.grad.untyped_storage()

    def hide(self) -> dict[str, torch.Tensor]:
        """Set every `.grad` to None; return those that autograd left, by name."""
        left = {}
        for name, param in self._params.items():
            if (grad := param.grad) is not None:
                if name not in self.names:
                    left[name] = grad
                param.grad = None
        self.names.clear()
        return left

    def drop(self, names: Collection[str]) -> None:
        """Set the `.grad` of `names`, some or all of the unit's, to None."""
        if len(names) == len(self._params):
            for param in self._params.values():
                param.grad = None
            self.names.clear()
            return
        for name in names:
            self._params[name].grad = None
            self.names.pop(name, None)

    def changes(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        """Yield the parameters whose `.grad` is not the one that was set, with their new `.grad` or None.

        Raises:
            RuntimeError: A parameter got a hook of its own, or its `.grad.data` was replaced.
        """
        if (hooked := hooked_param(self._params)) is not None:
            raise RuntimeError(HOOKED.format(hooked))
        shown = self.names.get
        for name, param in self._params.items():
            if (grad := param.grad) is not shown(name):
                yield name, grad
            elif grad is not None and grad.untyped_storage() is not self._storages[name]:
                raise RuntimeError(
                    f"{name}.grad.data was set to another tensor, which a DTensor ignores: set {name}.grad itself, or "
                    "write .grad.copy_(tensor)"
                )

    def flat(self, name: str, grad: torch.Tensor, *, shared_out: bool) -> torch.Tensor:
        """Return this rank's part of a `.grad` that was set from outside, flat; if `shared_out`, its replica shard."""
        replica_shards = self._unit.replica_shards if shared_out else None
        if replica_shards is not None and isinstance(grad, DTensor) and grad.device_mesh != self._unit.mesh[SHARD]:
            return local_of(grad).reshape(-1)  # computed from a `.grad` of replica shards, so it is one already
        flat = flat_of(grad, self._params[name])
        return flat if replica_shards is None else flat[replica_shards.span(name)]
