"""Fitting of the states in a folder to a model: its names, its layout, and which tensors are its parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from dzero.integrations.deepspeed.states import DeepSpeedStates, InModel
from dzero.models.hf import HFDecoder
from dzero.models.hf_conversions import as_loaded
from dzero.models.llama import Llama
from dzero.models.published import MODELS, published_name
from dzero.models.tensor_views import Readable
from dzero.utils.torch_internals import is_persistent


def fitted(states: DeepSpeedStates, model: nn.Module) -> DeepSpeedStates:
    """Return the states by the names of `model`, in its layout.

    Raises:
        ValueError: If a state is missing, has another shape, or belongs to no parameter of the model.
    """
    where = states.where
    params = dict(model.named_parameters())
    buffers = {
        f"{prefix}.{name}".lstrip("."): buffer
        for prefix, module in model.named_modules()
        for name, buffer in module.named_buffers(recurse=False)
        if is_persistent(module, name)
    }
    all_of_it = {**states.masters, **states.others}
    converts = not _has_all_names(model, all_of_it)
    found, used = _by_own_names(model, all_of_it, converts)
    if states.moments:  # weights alone are those of all parameters
        frozen = {name: param for name, param in params.items() if not (param.requires_grad or param.is_meta)}
        found |= {name: InModel(name, param) for name, param in frozen.items() if name not in found}
    if missing := sorted((params.keys() | buffers.keys()) - found.keys()):
        raise ValueError(f"{where}: {missing[0]} of the model is not in it, with {len(missing) - 1} others")
    for name, tensor in {**params, **buffers}.items():
        if tuple(found[name].shape) != tuple(tensor.shape):
            at, theirs, ours = found[name].where, [*found[name].shape], [*tensor.shape]
            raise ValueError(f"{at} is {theirs}, {name} of the model is {ours}: it is of another model")
    if unused := sorted(states.masters.keys() - used):
        raise ValueError(f"{where}: the model has no place for {unused[0]}, and {len(unused) - 1} others")
    trained = {name for name in params if states.masters.keys() >= {*found[name].stored}}
    if thawed := sorted(name for name, param in params.items() if param.requires_grad and name not in trained):
        raise ValueError(
            f"{where}: {thawed[0]} was frozen, so it has no moments, and this model trains it: import it in a loop of "
            "your own, for a model in which it is frozen"
        )
    new_name = {stored: name for name in trained for stored in found[name].stored}
    return replace(
        states,
        masters={name: found[name] for name in params if name in trained},
        moments={
            key: {name: tensor for name, tensor in _by_own_names(model, of_key, converts)[0].items() if name in trained}
            for key, of_key in states.moments.items()
        },
        others={name: found[name] for name in (*params, *buffers) if name not in trained},
        buffers=frozenset(buffers),
        dtypes={name: (params | buffers)[name].dtype for name in (*params, *buffers)},
        groups=[
            {**group, "params": [*dict.fromkeys(new_name[name] for name in group["params"])]} for group in states.groups
        ],
    )


def _names(model: nn.Module) -> list[dict[str, str]]:
    """Return the names of each parameter and persistent buffer, and by each the name in a published folder."""
    kind = "hf" if isinstance(model, HFDecoder) else "llama" if isinstance(model, Llama) else "bare"
    names: dict[int, dict[str, str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        names.setdefault(id(tensor), {})[name] = published_name(kind, name)
    return [*names.values()]


def _has_all_names(model: nn.Module, stored: Mapping[str, Readable]) -> bool:
    return all(any(published in stored for published in names.values()) for names in _names(model))


def _by_own_names(
    model: nn.Module, stored: Mapping[str, Readable], converts: bool
) -> tuple[dict[str, Readable], set[str]]:
    """Return tensors by the first name that `model` has for each, and the names of those `stored` that it takes.

    With `converts`, they may be in another layout of a model of transformers.
    """
    inner: Any = model.model if isinstance(model, HFDecoder) else model
    converts = converts and any(each.__module__.startswith(MODELS) for each in type(inner).__mro__)
    here = as_loaded(inner, stored) if converts else stored
    found, used = dict[str, Readable](), set[str]()
    for names in _names(model):
        if known := [here[published] for published in names.values() if published in here]:
            found[next(iter(names))] = known[0]
            used.update(name for tensor in known for name in tensor.stored)
    return found, used
