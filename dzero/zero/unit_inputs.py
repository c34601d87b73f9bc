"""Casts of a unit's inputs, and ownership of its outputs.

Models that add or normalize in fp32 pass fp32 to the next block. FSDP2 would cast all floating-point arguments of every
unit, including tables that are fp32 on purpose (sines of positions). Here, only the first one is cast, which the block
transforms. Of the whole model all arguments are cast but those without dimensions: such a number widens no tensor that
it meets, and may be one that 16 bits cannot hold, such as the count of tokens that Trainer divides its loss by.

A unit may return a parameter of its own, or a view of one, such as the first rows of a table of positions. FSDP2 frees
that memory after the unit's forward, and a read of it would end the process. The unit returns a copy. Tensors that a
transform of torch.func wraps, such as those of `vmap`, do not tell their memory, so they are copied in any case.
"""

from __future__ import annotations

import copy
from collections.abc import Collection
from dataclasses import is_dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from dzero.utils.forward_hooks import after_forward, before_forward
from dzero.utils.torch_internals import base_of, storage_key, tree_leaves, tree_map_only
from dzero.zero.dtensors import local_of


def cast_all_inputs(module: nn.Module, dtype: torch.dtype) -> None:
    """Cast all floating-point arguments of `module` that have dimensions to `dtype`; call this once."""
    before_forward(module, partial(_cast_all, dtype), with_kwargs=True)


def cast_first_input(module: nn.Module, dtype: torch.dtype) -> None:
    """Cast the first floating-point argument of `module` to `dtype`; call this once."""
    before_forward(module, partial(_cast, dtype), with_kwargs=True)


def own_outputs(module: nn.Module) -> None:
    """Make a unit return copies of its own parameters; call this once, before `fully_shard`."""
    after_forward(module, _copy_params)


def _copy_params(module: nn.Module, _: object, output: Any) -> Any:
    """Replace tensors of `output` in the memory of parameters; only those that no operation made can be there."""
    leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor) and base_of(leaf).is_leaf]
    params = {_storage_of(param) for param in module.parameters()} if leaves else set()
    if not any(_may_be_in(leaf, params) for leaf in leaves):
        return None

    def own(leaf: Any) -> Any:
        return leaf.clone() if base_of(leaf).is_leaf and _may_be_in(leaf, params) else leaf

    return tree_map_only(torch.Tensor, own, output)


def _may_be_in(tensor: torch.Tensor, storages: Collection[int]) -> bool:
    """Return whether a tensor is in one of `storages`; True where torch.func wraps it, which hides its storage."""
    try:
        return _storage_of(tensor) in storages
    except NotImplementedError:
        return True


def _storage_of(tensor: torch.Tensor) -> int:
    """Return the key of the storage that holds a tensor, or this rank's part of it."""
    return storage_key(local_of(tensor).untyped_storage())


def _cast_all(
    dtype: torch.dtype, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    def other(value: Any) -> bool:
        if _is_record(value):
            return any(map(other, tree_leaves(vars(value))))
        return isinstance(value, torch.Tensor) and value.is_floating_point() and value.ndim > 0 and value.dtype != dtype

    def cast(value: Any) -> Any:
        if not other(value):
            return value
        if isinstance(value, torch.Tensor):
            return value.to(dtype)
        found = copy.copy(value)
        vars(found).update(tree_map_only(object, cast, vars(value)))
        return found

    if not any(map(other, tree_leaves((args, kwargs)))):
        return None  # the containers stay the caller's own, such as a cache of keys and values
    found: tuple[tuple[Any, ...], dict[str, Any]] = tree_map_only(object, cast, (args, kwargs))
    return found


def _is_record(value: Any) -> bool:
    return is_dataclass(value) and not isinstance(value, type) and hasattr(value, "__dict__")


def _cast(
    dtype: torch.dtype, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    for index, value in enumerate(args):
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            return None if value.dtype == dtype else ((*args[:index], value.to(dtype), *args[index + 1 :]), kwargs)
    for key, value in kwargs.items():
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            return None if value.dtype == dtype else (args, {**kwargs, key: value.to(dtype)})
    return None
