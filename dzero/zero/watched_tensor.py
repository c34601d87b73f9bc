"""Tensors that report every use to their owner: gradients, and parameters on the device.

torch's version counters miss some writes: foreach operators on DTensors increment none, nor does `.data`. A watched
tensor reports them, and costs nothing while it is not used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch.distributed.tensor import DTensor

from dzero.utils.torch_internals import (
    NO_TORCH_FUNCTION,
    make_subclass,
    schema_of,
    set_local_tensor,
    tree_leaves,
    tree_map_only,
)
from dzero.zero.dtensors import local_of, written


class Watcher(Protocol):
    """Owner of watched tensors."""

    def before_read(self) -> None:
        """Prepare for a read of a watched tensor."""

    def before_write(self) -> None:
        """Prepare for a write into a watched tensor."""

    def before_address(self) -> None:
        """Prepare for a request of a watched tensor's address, where the caller may write."""


def watch(tensor: DTensor, use: Callable[[], Watcher | None]) -> None:
    """Report uses of a DTensor's local tensor to the owner that `use` returns; skip a simulated local tensor."""
    set_local_tensor(tensor, _watched(local_of(tensor), use))


def _watched(plain: torch.Tensor, use: Callable[[], Watcher | None]) -> torch.Tensor:
    return WatchedTensor(plain, use) if type(plain) is torch.Tensor else plain


class WatchedTensor(torch.Tensor):
    """Tensor in the memory of `plain`, which calls its owner, returned by `use`, before each read or write."""

    plain: torch.Tensor
    use: Callable[[], Watcher | None]
    __torch_function__ = NO_TORCH_FUNCTION

    @staticmethod
    def __new__(cls, plain: torch.Tensor, use: Callable[[], Watcher | None]) -> WatchedTensor:
        """Share the memory of `plain`."""
        made: WatchedTensor = make_subclass(cls, plain)
        made.plain, made.use = plain, use
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run `func` on the plain tensors; views of a WatchedTensor are WatchedTensors."""
        kwargs = dict(kwargs or {})
        changed = [tensor for tensor in written(func, args, kwargs) if isinstance(tensor, cls)]
        if func.namespace == "c10d":  # writes into its arguments, which its schema does not declare
            changed = [tensor for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, cls)]
        for tensor in changed:
            tensor.open()
        for tensor in tree_leaves((args, kwargs)):  # for views too, which a later write would invalidate
            if isinstance(tensor, cls):
                tensor.seen()
        if any(argument.is_out for argument in schema_of(func).arguments):
            return _write_out(func, tree_map_only(cls, _plain, args), kwargs)
        out = func(*tree_map_only(cls, _plain, args), **tree_map_only(cls, _plain, kwargs))
        if func.is_view and isinstance(first := args[0], cls):
            return tree_map_only(torch.Tensor, lambda view: _watched(view, first.use), out)
        return changed[0] if len(changed) == 1 and func.namespace != "c10d" and schema_of(func).returns else out

    def seen(self) -> torch.Tensor:
        """Report a read to the owner, if it still exists, and return the plain tensor."""
        if (use := self.use()) is not None:
            use.before_read()
        return self.plain

    def open(self) -> None:
        """Report a write to the owner, if it still exists."""
        if (use := self.use()) is not None:
            use.before_write()

    def __repr__(self) -> str:  # type: ignore[override]
        return repr(self.seen())

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as an ordinary tensor."""
        return self.seen().clone().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """Return an ordinary tensor."""
        return self.seen().clone()

    def tolist(self) -> Any:
        """Return the elements as nested lists."""
        return self.seen().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """Return an array of the same memory, which counts as a write, because the caller may write into it."""
        self.open()
        return self.plain.numpy(force=force)

    def data_ptr(self) -> int:
        """Return the address, after `Watcher.before_address`, because the caller may write there."""
        self._lend()
        return self.plain.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        """Return the storage, after `Watcher.before_address`, because the caller may write into it."""
        self._lend()
        return self.plain.untyped_storage()

    def _lend(self) -> None:
        if (use := self.use()) is not None:
            use.before_address()

    def __dlpack__(self, **options: Any) -> Any:
        """Return a capsule of the same memory, which counts as a write, because the caller may write into it."""
        self.open()
        return self.plain.__dlpack__(**options)


def _write_out(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator that may resize its `out=`, on a scratch tensor, because watched memory cannot be resized."""
    own = {name: value for name, value in kwargs.items() if isinstance(value, WatchedTensor)}
    given = tree_map_only(WatchedTensor, _plain, kwargs)
    scratch = {
        argument.name: torch.empty_like(own[argument.name].plain)
        for argument in schema_of(func).arguments
        if argument.is_out and argument.name in own
    }
    func(*args, **{**given, **scratch})
    for name, written_to in scratch.items():
        if written_to.shape != own[name].shape:
            raise RuntimeError(
                f"{func} makes a tensor of shape {tuple(written_to.shape)}, but this rank's part is "
                f"{tuple(own[name].shape)}: fill parameters before shard(), or copy_() a whole one into them"
            )
        own[name].plain.copy_(written_to)
    outs = [own.get(argument.name, given[argument.name]) for argument in schema_of(func).arguments if argument.is_out]
    return outs[0] if len(outs) == 1 else tuple(outs)


def _plain(tensor: WatchedTensor) -> torch.Tensor:
    return tensor.plain
