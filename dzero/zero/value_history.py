"""Values of tensors as the calls of operators that made them, so that they can be dropped and made again.

A history belongs to a storage, not to a tensor, so views need no calls of their own: an operand of a call is a storage
with the history that it had then, and the geometry of the tensor. Calls repeat to the bit, since each keeps the state
of the random generator that it began with.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dzero.utils.torch_internals import tree_leaves, tree_map_only

Operator = Callable[..., Any]
GeneratorState = tuple[torch.device, torch.Tensor]


@dataclass(frozen=True)
class History:
    """Calls that gave a storage its values, in order: each writes to it, or made it as its output of that index.

    Attributes:
        calls: Pairs of a call and an index of its outputs, None for a call that writes.
        cost: Number of calls that a replay makes, including those for operands.
    """

    calls: tuple[tuple[Call, int | None], ...] = ()
    cost: int = 0

    def then(self, call: Call, output: int | None = None) -> History:
        """Return this history with one more call."""
        return History((*self.calls, (call, output)), self.cost + call.cost)


class Source:
    """Size and device of a storage; its identity tells the operands of a call that lie in the storage it writes to."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.nbytes, self.device = nbytes, device

    def replay(self, history: History, into: torch.UntypedStorage | None = None) -> torch.UntypedStorage:
        """Return a new storage, or `into`, with the values of a history."""
        storage = into
        if storage is None:
            storage = torch.UntypedStorage(self.nbytes, device=self.device)  # type: ignore[no-untyped-call]
        for call, output in history.calls:
            made = call.repeat(self, storage)
            if output is not None:
                _as_bytes(storage).copy_(_as_bytes(made[output].untyped_storage()))
        return storage


@dataclass(frozen=True)
class Operand:
    """A tensor by its storage, the history that this had, and where the tensor lies in it, in elements."""

    source: Source
    history: History
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: torch.Tensor, source: Source, history: History) -> Operand:
        """Describe a tensor."""
        geometry = tuple(tensor.size()), tensor.stride(), int(tensor.storage_offset())
        return cls(source, history, tensor.dtype, *geometry)

    def replay(self) -> torch.Tensor:
        """Return a new tensor with these values."""
        return self.within(self.source.replay(self.history))

    def within(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """Return the tensor in a storage that has its values already."""
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        return empty.set_(storage, self.offset, self.size, self.stride)


@dataclass(frozen=True, eq=False)
class Call:
    """A call of an operator: tensors among its arguments are operands, or copies of small ones.

    Attributes:
        operator: Operator.
        args, kwargs: Arguments; a generator is None among them.
        random: State of the generator before the call, by the device of the generator. None: it uses none.
        own_generator: Whether the operator was given a generator, and not the default one.
    """

    operator: Operator
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    random: GeneratorState | None = None
    own_generator: bool = False

    @property
    def cost(self) -> int:
        """Number of calls that this one needs, including itself."""
        operands = {each for each in tree_leaves((self.args, self.kwargs)) if isinstance(each, Operand)}
        return 1 + sum(history.cost for history in {each.source: each.history for each in operands}.values())

    def repeat(self, source: Source, storage: torch.UntypedStorage) -> list[Any]:
        """Make the call again, with `storage` in the place of `source`, and return its outputs."""
        others: dict[Source, torch.UntypedStorage] = {source: storage}

        def rebuilt(each: Operand) -> torch.Tensor:
            if each.source not in others:
                others[each.source] = each.source.replay(each.history)
            return each.within(others[each.source])

        given = tree_map_only(torch.Tensor, torch.clone, (tuple(self.args), dict(self.kwargs)))
        args, kwargs = tree_map_only(Operand, rebuilt, given)
        if self.random is None:
            return tree_leaves(self.operator(*args, **kwargs))
        device, state = self.random
        if self.own_generator:
            generator = torch.Generator(device)
            generator.set_state(state)
            return tree_leaves(self.operator(*args, **kwargs, generator=generator))
        generator = default_generator(device)
        before = generator.get_state()
        generator.set_state(state)
        try:
            return tree_leaves(self.operator(*args, **kwargs))
        finally:
            generator.set_state(before)


def default_generator(device: torch.device) -> torch.Generator:
    """Return the generator that operators on a device use if they are given none."""
    if device.type != "cuda":
        return torch.default_generator
    return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]


def _as_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
