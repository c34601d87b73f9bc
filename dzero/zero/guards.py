"""Errors and warnings for uses that a sharded model does not support, raised where they happen.

The checks are:

    shard() of a model that is already sharded          error
    an embedding with sparse gradients                  error
    parameters tied by .data, modules added later       error
    another dtype: model.to(dtype), half(), float()     error
    load_state_dict(assign=True)                        copies, with a warning; error for parameters on meta
    load_state_dict of what another rank saved          error
    save_pretrained of the model itself                 error, unless whole values are given as state_dict=
    resize_token_embeddings to another size             error
    a module of the root called outside its forward     error, unless a forward left its parameters gathered
    a parameter used outside of its unit's forward      torch's error, with its place and what to do
    a unit that writes into a dict or list argument     error if FSDP2 gave it a copy that it does not return
    torch.func.grad, vjp, jacrev or hessian             error
"""

from __future__ import annotations

import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from inspect import signature
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from dzero.utils.forward_hooks import after_forward, before_forward
from dzero.utils.numba_views import has_memory
from dzero.utils.torch_internals import Convert, check_conversions, is_in_func_gradient, registered
from dzero.zero.dtensors import local_of, refuse_other_ranks_shard
from dzero.zero.registered_params import put_gathered, put_shards
from dzero.zero.unit import Unit, as_module

TORCH = torch.__path__[0]
MIXED = "mixed torch.Tensor and DTensor"
"""Part of torch's error where a parameter is a shard and other operands are not."""


def refuse_cut(model: nn.Module) -> None:
    """Raise ValueError if `model` or a module of it is sharded, or if its parameters are tied only by their memory."""
    cut = next((name for name, module in model.named_modules() if isinstance(module, FSDPModule)), None)
    if cut is not None:
        raise ValueError(
            f"{'module ' + cut if cut else 'the model'} is already cut by fully_shard() or shard(): call shard() once, "
            "on a whole model"
        )
    by_storage: dict[int, list[tuple[int, int, str]]] = {}
    for name, param in model.named_parameters():
        local = local_of(param)
        if has_memory(local) and local.numel():
            begin = local.data_ptr()
            where = by_storage.setdefault(local.untyped_storage().data_ptr(), [])
            where.append((begin, begin + local.nbytes, name))
    for where in by_storage.values():
        for (_, end, first), (begin, _, second) in pairwise(sorted(where)):
            if begin < end:
                raise ValueError(
                    f"{first} and {second} lie in the same memory (tied by .data), which shards of their own would "
                    "untie: let both modules have one parameter (second.weight = first.weight)"
                )


def refuse_sparse(model: nn.Module) -> None:
    """Raise ValueError if the gradient of a parameter would be sparse, which FSDP2's reductions do not take.

    The gradient is dense, and thus taken, if another module has the parameter too, such as a tied head.
    """
    dense: set[nn.Parameter | None] = set()
    sparse: dict[nn.Parameter, str] = {}
    for name, module in model.named_modules():
        weight = registered(module).get("weight")
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse and weight is not None:
            sparse.setdefault(weight, name)
        else:
            dense.update(registered(module).values())
    for param, name in sparse.items():
        if param.requires_grad and param not in dense:
            raise ValueError(
                f"{name or 'the model'} is made with sparse=True, but sparse gradients cannot be reduced over ranks: "
                "take sparse=False (or set its attribute sparse to False before shard()), which has the same gradients"
            )


def refuse_unknown(model: nn.Module, known: Iterable[nn.Parameter]) -> None:
    """Raise RuntimeError if the model has trained parameters other than the units' parameters `known`."""
    units = set(known)
    for name, param in model.named_parameters():
        if param.requires_grad and param not in units:
            raise RuntimeError(
                f"{name} is not one of the parameters that were sharded: a module was added or replaced after shard(), "
                "and would be neither reduced nor updated. Do that before shard()"
            )


def check_loads(model: nn.Module) -> None:
    """Make `load_state_dict` refuse shards of another rank, and copy into the shards even with `assign=True`."""
    for module in model.modules():
        if registered(module):
            module.register_load_state_dict_pre_hook(_refuse_other_ranks)  # type: ignore[no-untyped-call]
            module.register_load_state_dict_pre_hook(_copy)  # type: ignore[no-untyped-call]


def _refuse_other_ranks(module: nn.Module, state_dict: Any, prefix: str, *_: object) -> None:
    for name, param in registered(module).items():
        if param is not None and (value := state_dict.get(prefix + name)) is not None:
            refuse_other_ranks_shard(prefix + name, value, param)


def _copy(module: nn.Module, state_dict: Any, prefix: str, local_metadata: dict[str, Any], *_: object) -> None:
    if not local_metadata.get("assign_to_params_buffers"):
        return
    if any(param.is_meta for param in module.parameters(recurse=False)):
        raise RuntimeError(
            f"load_state_dict(assign=True) of {prefix or 'parameters'} on meta: call "
            "sharded.model.to_empty(device=...) first, and load without assign"
        )
    local_metadata["assign_to_params_buffers"] = False
    warnings.warn(
        "load_state_dict(assign=True) of a sharded model copies the values: its shards belong to the optimizer as well",
        stacklevel=2,
    )


def refuse_other_dtypes(model: nn.Module) -> None:
    """Make `to(dtype)`, `half()` and the like of the model and of modules in it raise before they change anything."""
    for module in model.modules():
        if any(True for _ in module.parameters()):
            check_conversions(module, _refuse_dtype)


def _refuse_dtype(module: nn.Module, convert: Convert) -> None:
    param = next((param for param in module.parameters() if param.is_floating_point()), None)
    if param is None:
        return
    dtype = convert(torch.empty(0, dtype=param.dtype, device=param.device)).dtype
    if dtype != param.dtype:
        raise RuntimeError(
            f"{type(module).__name__}: to({dtype}) of a sharded model, whose parameters are {param.dtype} and belong "
            "to its optimizer as well: choose the dtype before, by precision.param=fp32, bf16 or fp16, as in "
            "shard(model, precision='bf16')"
        )


def refuse_own_save(model: nn.Module) -> None:
    """Make `save_pretrained` of the model and of the models in it, which would write shards, raise.

    With `state_dict=`, whole values by name, it works as before.
    """
    for module in model.modules():
        if hasattr(type(module), "save_pretrained"):
            module.save_pretrained = partial(_save_whole, module)  # type: ignore[assignment]


def _save_whole(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    kind: Any = type(module)
    own = kind.save_pretrained
    values = signature(own).bind(module, *args, **kwargs).arguments
    values = values.get("state_dict", values.get("kwargs", {}).get("state_dict"))
    if values is None:
        raise RuntimeError(
            "save_pretrained of a sharded model has only this rank's shards: call dzero.save_pretrained(sharded, "
            "folder), or DzeroTrainer's save_model(folder), on all ranks; or give whole values as state_dict="
        )
    shapes = {name: param.shape for name, param in module.named_parameters(remove_duplicate=False)}
    for name, value in values.items():
        if isinstance(value, torch.distributed.tensor.DTensor):
            raise ValueError(f"save_pretrained(state_dict=): {name} is a shard; give value.full_tensor() in its place")
        if value.shape != shapes.get(name, value.shape):
            raise ValueError(
                f"save_pretrained(state_dict=): {name} has shape {[*value.shape]}, the whole parameter "
                f"{[*shapes[name]]}; give whole values"
            )
    return own(module, *args, **kwargs)


def refuse_resizing(model: nn.Module) -> None:
    """Make `resize_token_embeddings` of the model and of the models in it raise if the size would change."""
    for module in model.modules():
        if hasattr(type(module), "resize_token_embeddings"):
            module.resize_token_embeddings = partial(_refuse_size, module)  # type: ignore[assignment]


def _refuse_size(
    module: Any, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, mean_resizing: bool = True
) -> Any:
    embedding = module.get_input_embeddings()
    rows = embedding.weight.shape[0]
    wanted = rows if new_num_tokens is None else new_num_tokens
    if pad_to_multiple_of is not None:
        wanted = -(-wanted // pad_to_multiple_of) * pad_to_multiple_of
    if wanted != rows:
        raise RuntimeError(
            f"resize_token_embeddings({wanted}) of a sharded model with {rows} rows, which belong to its optimizer as "
            "well: resize before shard()"
        )
    return embedding


def let_accelerate_return(model: nn.Module) -> None:
    """Make `Accelerator.prepare(model)` return the sharded model as it is, and not wrap it in DDP or autocast."""
    model._is_accelerate_prepared = True  # type: ignore[assignment]


def keep_class_name(module: nn.Module) -> None:
    """Give the class that `fully_shard` made the name of the module's own, by which libraries choose what to do."""
    cls = type(module)
    own = cls.__bases__[-1]  # after FSDPModule
    cls.__name__, cls.__qualname__ = own.__name__, own.__qualname__


def refuse_outside_forward(root: Unit, others: list[Unit]) -> None:
    """Make calls of modules that have parameters of the root fail while these are not gathered.

    If a forward left them gathered, for its backward or the next forward, the call uses them. Compiled code is not
    checked: what calls shards there gets torch's error.
    """
    inside = {module for unit in others for each in unit.modules for module in as_module(each).modules()}
    cut = set(root.params.values())
    for top in root.modules:
        for name, module in as_module(top).named_modules():
            if module not in inside and name and any(param in cut for param in module.parameters(recurse=False)):
                module.register_forward_pre_hook(_check_gathered(name, root, cut), prepend=True)


def _check_gathered(name: str, root: Unit, cut: set[nn.Parameter]) -> Callable[[nn.Module, tuple[Any, ...]], None]:
    def check(module: nn.Module, args: tuple[Any, ...]) -> None:
        if torch.compiler.is_compiling():
            return
        param = next((param for param in registered(module).values() if param is not None), None)
        if param not in cut or any(isinstance(each, torch.distributed.tensor.DTensor) for each in args):
            return
        if not put_gathered(root):
            raise RuntimeError(
                f"{name} is called outside of the model's forward, where its parameters are shards: call it in the "
                "model's forward, or make it a unit of its own (zero.units)"
            )

        def put_back(*_: object) -> None:
            once.remove()
            put_shards([root])

        once = module.register_forward_hook(put_back, always_call=True)

    return check


def refuse_func_gradients(module: nn.Module) -> None:
    """Make a unit fail where torch.func takes gradients, before FSDP2 keeps tensors that are wrapped for them."""
    before_forward(module, _refuse_func_gradient, prepend=True)


def _refuse_func_gradient(*_: object) -> None:
    if is_in_func_gradient():
        raise RuntimeError(
            "torch.func.grad, vjp, jacrev or hessian of a sharded model: FSDP2 would keep the weights that it gathers "
            "inside of the transform. Take torch.autograd.grad or torch.autograd.functional.jacobian, or jvp, jacfwd "
            "(neither before torch 2.13) or vmap of torch.func"
        )


def explain_shards(root: nn.Module) -> None:
    """Let torch's error about a shard among plain tensors say where a parameter was used outside of its unit."""
    after_forward(root, _explain, always_call=True)


def _explain(*_: object) -> None:
    error = sys.exc_info()[1]
    if isinstance(error, RuntimeError) and MIXED in str(error):
        frames = traceback.extract_tb(error.__traceback__)
        place = next((each for each in reversed(frames) if not each.filename.startswith(TORCH)), frames[-1])
        error.args = (
            f"{place.filename}:{place.lineno} uses a parameter outside of the forward of its unit, where it is a "
            "shard: register it in the module that uses it too (self.weight = other.weight), which makes one unit of "
            f"both, or choose larger units (zero.units, zero.unit_bytes). torch: {error}",
        )


def refuse_lost_writes(name: str, module: nn.Module) -> None:
    """Make a unit fail if it writes into a dict or list among its arguments and does not return it.

    FSDP2 gives a unit copies of these, so the caller would not see what was written. Call this after `fully_shard`.
    """
    given = _Given(name)
    before_forward(module, given.before, with_kwargs=True, prepend=True)
    before_forward(module, given.inside, with_kwargs=True)
    after_forward(module, given.after, with_kwargs=True, prepend=True)


class _Given:
    """Containers among the arguments of a unit's call: the caller's, and FSDP2's copies with their items."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._callers: list[Any] = []
        self._own: list[tuple[Any, list[Any]]] = []

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._callers, self._own = [*_containers(args), *_containers(kwargs.values())], []

    def inside(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._callers:
            theirs = {id(each) for each in self._callers}
            own = [*_containers(args), *_containers(kwargs.values())]
            self._own = [(each, [*_items(each)]) for each in own if id(each) not in theirs]

    def after(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        own, self._own, self._callers = self._own, [], []
        if not own:
            return
        returned = {id(each) for each in _containers((output,))}
        for container, before in own:
            kept = {id(item) for item in before}
            if id(container) not in returned and any(id(item) not in kept for item in _items(container)):
                raise RuntimeError(
                    f"unit {self._name} writes into a {type(container).__name__} among its arguments and does not "
                    "return it. FSDP2 hands it a copy, so what is written would be lost: let it return the "
                    f"{type(container).__name__}, and its caller go on with that"
                )


def _containers(values: Iterable[Any]) -> Iterator[Any]:
    """Yield the dicts and lists among `values`, including nested ones."""
    for value in values:
        if isinstance(value, (dict, list, tuple)):
            if not isinstance(value, tuple):
                yield value
            yield from _containers(_items(value))


def _items(container: Any) -> Iterable[Any]:
    return container.values() if isinstance(container, dict) else container
