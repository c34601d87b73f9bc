"""Tensors that tell their owner of every use: gradients, and working copies whose masters live off the device.

torch's version counters do not see every edit (foreach operations on DTensors bump none, nor does `.data`). A tensor
that watches itself does, and costs nothing while nobody touches it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map_only

from dzero.zero.dtensors import local_of, written


class Watcher(Protocol):
    """The owner of watched tensors."""

    def look(self) -> None:
        """Somebody is about to read one of them."""

    def write(self) -> None:
        """Somebody is about to write into one of them."""

    def lend(self) -> None:
        """Somebody asks where one lies, and may write there."""


def watch(tensor: DTensor, use: Callable[[], Watcher | None]) -> None:
    """Let `use` know of what is done with the local tensor of a DTensor; a simulated one stays."""
    local = local_of(tensor)
    if type(local) is torch.Tensor:
        tensor._local_tensor = WatchedTensor(local, use)


class WatchedTensor(torch.Tensor):
    """A tensor over the memory of `plain`, whose owner `use` is told before anything reads or writes it."""

    plain: torch.Tensor
    use: Callable[[], Watcher | None]
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, plain: torch.Tensor, use: Callable[[], Watcher | None]) -> WatchedTensor:
        """Share the memory of `plain`."""
        made: WatchedTensor = torch.Tensor._make_subclass(cls, plain)
        made.plain, made.use = plain, use
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run `func` on the plain tensors; views of a WatchedTensor are WatchedTensors."""
        kwargs = dict(kwargs or {})
        changed = [tensor for tensor in written(func, args, kwargs) if isinstance(tensor, cls)]
        if func.namespace == "c10d":  # writes into what it is given without saying so
            changed = [tensor for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, cls)]
        for tensor in changed:
            tensor.open()
        for tensor in tree_leaves((args, kwargs)):  # also before views: a later write would invalidate them
            if isinstance(tensor, cls):
                tensor.seen()
        if any(argument.is_out for argument in func._schema.arguments):
            return _write_out(func, tree_map_only(cls, _plain, args), kwargs)
        out = func(*tree_map_only(cls, _plain, args), **tree_map_only(cls, _plain, kwargs))
        if func.is_view and isinstance(first := args[0], cls):
            return tree_map_only(torch.Tensor, lambda view: cls(view, first.use), out)
        return changed[0] if len(changed) == 1 and func.namespace != "c10d" and func._schema.returns else out

    def seen(self) -> torch.Tensor:
        """Tell the owner, while there is one, that somebody is about to read; return the plain tensor."""
        if (use := self.use()) is not None:
            use.look()
        return self.plain

    def open(self) -> None:
        """Tell the owner, while there is one, that somebody is about to write."""
        if (use := self.use()) is not None:
            use.write()

    def __repr__(self) -> str:  # type: ignore[override]
        return repr(self.seen())

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Saved as an ordinary tensor."""
        return self.seen().clone().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """Return an ordinary tensor."""
        return self.seen().clone()

    def tolist(self) -> Any:
        """As of any tensor."""
        return self.seen().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """As of any tensor; whoever has the array may write into it."""
        self.open()
        return self.plain.numpy(force=force)

    def data_ptr(self) -> int:
        """As of any tensor; whoever has the address may write there."""
        self._lend()
        return self.plain.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        """As of any tensor; whoever has the storage may write into it."""
        self._lend()
        return self.plain.untyped_storage()

    def _lend(self) -> None:
        if (use := self.use()) is not None:
            use.lend()

    def __dlpack__(self, **options: Any) -> Any:
        """As of any tensor; whoever has the capsule may write into it."""
        self.open()
        return self.plain.__dlpack__(**options)


def _write_out(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator that may give its `out=` another size, which memory that others refer to does not take."""
    own = {name: value for name, value in kwargs.items() if isinstance(value, WatchedTensor)}
    given = tree_map_only(WatchedTensor, _plain, kwargs)
    scratch = {
        argument.name: torch.empty_like(own[argument.name].plain)
        for argument in func._schema.arguments
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
    outs = [own.get(argument.name, given[argument.name]) for argument in func._schema.arguments if argument.is_out]
    return outs[0] if len(outs) == 1 else tuple(outs)


def _plain(tensor: WatchedTensor) -> torch.Tensor:
    return tensor.plain
