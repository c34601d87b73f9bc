"""What every operator of torch reads and writes, told to a simulation by a dispatch mode."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, ValuesView
from functools import cache
from typing import Any

import torch
from memory import Space
from simulation import Simulation
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
WAITS = {"aten::_local_scalar_dense", "aten::equal", "aten::nonzero", "aten::is_nonzero"}
"""Operators whose results the host needs: it waits for the stream."""
NO_WORK = {"aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty", "aten::new_empty_strided"}
"""They only make memory."""
GATHER_COPY_IN = "fsdp::all_gather_copy_in"
"""Writes into the part of its output that it returns first, which its schema does not say."""


class Operators(TorchDispatchMode):
    """The mode of one thread; threads of one simulation have one each."""

    def __init__(self, simulation: Simulation) -> None:
        super().__init__()
        self.simulation = simulation

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(each not in PLAIN and each is not FakeTensor for each in types):
            return NotImplemented  # a wrapper: its own operators on what it holds come here again
        out = func(*args, **kwargs)
        unreal = any(type(each) is FakeTensor or each.is_meta for each in _tensors((args, kwargs.values(), out)))
        if not unreal and func.namespace not in ("c10d", "profiler"):  # kernels.py notes collectives as they are called
            self._note(func, args, kwargs, out)
        return out

    def _note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        simulation, name = self.simulation, func._schema.name
        reads, writes = [*_read(func, args, kwargs)], [*_written(func, args, kwargs)]
        if name == GATHER_COPY_IN:
            reads, writes = list(args[0]), [out[0]]
        known = {tensor.untyped_storage().data_ptr() for tensor in (*reads, *writes)}
        results = [each for each in _tensors(out) if type(each) in PLAIN]
        fresh = [each for each in results if each.untyped_storage().data_ptr() not in known]
        if func.namespace == "_c10d_functional":
            self._collective(name, args, reads, writes, fresh)
            return
        if results and not fresh and not writes:
            return  # a view
        for each in fresh:
            simulation.made(each.untyped_storage(), self._space(reads + writes), name)
        if name in NO_WORK:
            return
        crosses = name in ("aten::copy_", "aten::_to_copy") and not _is_asynchronous(func, args, kwargs)
        simulation.run(name, reads, writes + fresh, blocks=name in WAITS or (crosses and self._crosses(reads + writes)))

    def _space(self, operands: list[torch.Tensor]) -> Space:
        """Return where an operator's result lies: beside its operands; what a pool's thread makes is the host's."""
        spaces = {self.simulation.space_of(each) for each in operands} - {None}
        if spaces:
            return Space.DEVICE if Space.DEVICE in spaces else Space.HOST
        return Space.HOST if self.simulation.of_thread.in_pool else Space.DEVICE

    def _crosses(self, operands: list[torch.Tensor]) -> bool:
        spaces = {self.simulation.space_of(each) for each in operands} - {None}
        return Space.DEVICE in spaces and len(spaces) > 1

    def _collective(
        self,
        name: str,
        args: tuple[Any, ...],
        reads: list[torch.Tensor],
        writes: list[torch.Tensor],
        fresh: list[torch.Tensor],
    ) -> None:
        """A functional collective: on its group's stream, until somebody waits for its result."""
        simulation = self.simulation
        if name.endswith("wait_tensor"):
            simulation.wait_for_result(args[0])
            return
        if name.endswith("_autograd"):
            return  # wraps what another one made
        group = next((each for each in reversed(args) if isinstance(each, str)), "?")
        for each in fresh:
            simulation.made(each.untyped_storage(), Space.DEVICE, name)
        simulation.start_result(name, group, reads, writes, fresh)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple | ValuesView):
        for each in value:
            yield from _tensors(each)


@cache
def _arguments(func: Any) -> tuple[tuple[str, bool], ...]:
    """Return (name, whether it is written) of an operator's arguments."""
    return tuple(
        (each.name, each.alias_info is not None and each.alias_info.is_write) for each in func._schema.arguments
    )


def _given(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[Any, bool]]:
    for index, (name, is_written) in enumerate(_arguments(func)):
        if index < len(args):
            yield args[index], is_written
        elif name in kwargs:
            yield kwargs[name], is_written


def _read(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    return (tensor for value, is_written in _given(func, args, kwargs) if not is_written for tensor in _tensors(value))


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    return (tensor for value, is_written in _given(func, args, kwargs) if is_written for tensor in _tensors(value))


def _is_asynchronous(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    names = [name for name, _ in _arguments(func)]
    at = names.index("non_blocking")
    return bool(args[at] if at < len(args) else kwargs.get("non_blocking", False))


def tensors_of(values: Iterable[Any]) -> list[torch.Tensor]:
    return [*_tensors([*values])]
