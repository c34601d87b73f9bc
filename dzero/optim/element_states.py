"""States of a parameter's shape that an element-wise class of `torch.optim` keeps, such as the momentum of SGD.

Off the device they lie beside the masters, where AdamW has its moments, so that those on disk take host memory for a
few units at a time. Which ones there will be is found by trying the class on small parameters. The class makes them
itself in its first update of a parameter, and `MasterParam.place` then moves them to their places.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from dzero.zero.layout import RuleStates

TRIED_SHAPES = ((5,), (3, 5))
TRIED_VALUES = (0.0, 1.0)
Make = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]


def tried_states(
    make: Make,
    groups: Sequence[Mapping[str, Any]],
    shape: tuple[int, ...],
    closure: Callable[[], float] | None = None,
) -> list[dict[str, Any]]:
    """Return the states after one step of a parameter of a shape in each group.

    Args:
        make: Makes the optimizer of parameter groups.
        groups: Settings of the groups.
        shape: Shape of the parameters.
        closure: Passed to `step`, for classes that need one.
    """
    with torch.random.fork_rng(devices=[]):
        params = [nn.Parameter(torch.zeros(shape)) for _ in groups]
        optimizer = _made(make, groups, params)
        for param in params:
            param.grad = torch.ones(shape)
        optimizer.step() if closure is None else optimizer.step(closure)
    return [dict(optimizer.state[param]) for param in params]


def element_states(tried: Callable[[tuple[int, ...]], Iterable[Mapping[str, Any]]]) -> RuleStates:
    """Return key and dtype of each state of a parameter's shape that a class keeps.

    Args:
        tried: Returns the states of some parameters of a shape after a step.
    """
    return tuple(
        {
            key: (key, value.dtype)
            for shape in TRIED_SHAPES
            for states in tried(shape)
            for key, value in states.items()
            if isinstance(value, torch.Tensor) and value.shape == shape
        }.values()
    )


def check_initial(make: Make, groups: Sequence[Mapping[str, Any]]) -> None:
    """Raise ValueError if a class makes states out of the values of a parameter when it is made.

    Parameters on disk have no values then: a class sees one element of each (`shrunk`), which stands for all of them.
    """
    zeros, ones = (_first_states(make, groups, value) for value in TRIED_VALUES)
    for one, other in zip(zeros, ones, strict=True):
        for key, state in one.items():
            if not torch.equal(state, other[key]) or bool((state != state[0]).any()):
                raise ValueError(
                    f"offload.master=disk: the class makes its state {key!r} out of the parameters' values when it is "
                    "made, and they are on disk then; take offload.master=host, or make the state in the first step"
                )


def _first_states(make: Make, groups: Sequence[Mapping[str, Any]], value: float) -> list[dict[str, torch.Tensor]]:
    """Return the states of a parameter's shape that a class makes for parameters of equal elements before any step."""
    shape = TRIED_SHAPES[0]
    params = [nn.Parameter(torch.full(shape, value)) for _ in groups]
    with torch.random.fork_rng(devices=[]):
        state = _made(make, groups, params).state
    return [
        {k: v for k, v in state.get(param, {}).items() if isinstance(v, torch.Tensor) and v.shape == shape}
        for param in params
    ]


@contextmanager
def shrunk(params: Sequence[nn.Parameter]) -> Iterator[None]:
    """Let parameters have one element, so that states that are made now take no memory."""
    values = [param.data for param in params]
    for param in params:
        param.data = torch.zeros(1)
    try:
        yield
    finally:
        for param, value in zip(params, values, strict=True):
            param.data = value


def _made(make: Make, groups: Sequence[Mapping[str, Any]], params: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    tried = copy.deepcopy([*groups])  # a class may write into tensors and lists of its settings
    return make([{**settings, "params": [param]} for settings, param in zip(tried, params, strict=True)])
