"""Steps that make the tensors of one layout from those of another, such as fused experts from one tensor per expert.

    step          dims       makes                                                                 reverse
    merge         dim        one tensor of a list, stacked along a new dim                         split
    split         dim        a list of tensors, one for each index along dim                       merge
    concatenate   dim        one tensor of those of all sources, joined along dim                  chunk
    chunk         dim        one tensor for each target, of equal ranges along dim, or of `sizes`   concatenate
    transpose     dim, dim1  one tensor with two dims exchanged                                    transpose

Nothing is read: a step makes views (tensor_views.py), of which any box is read later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate

import msgspec

from dzero.models.tensor_views import Joined, Narrowed, Readable, Selected, Stacked, Transposed

MOST_PARTS = 2**16
Values = Mapping[str, Sequence[Readable]]
"""Tensors by the pattern of names that they belong to; a pattern with `*` has one for each index."""


class Step(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One step of a conversion; the module's docstring lists the operations."""

    operation: str
    dim: int
    dim1: int = 0
    sizes: tuple[int, ...] = ()


class Conversion(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """How tensors named like `sources` become tensors named like `targets`; without steps, one is renamed.

    In a name, `*` stands for the index in a list, and each `#` for a number that sources and targets share.
    """

    sources: tuple[str, ...]
    targets: tuple[str, ...]
    steps: tuple[Step, ...] = ()


def convert_all(conversions: Sequence[Conversion], tensors: Mapping[str, Readable]) -> dict[str, Readable]:
    """Return the tensors of the other layout by name, in order; a tensor that no conversion takes keeps its name.

    Raise ValueError if a conversion misses one of its sources, does not apply, or makes a name twice.
    """
    takes = {source: conversion for conversion in conversions for source in conversion.sources}
    found: dict[str, Readable] = {}
    done: set[str] = set()
    for name, tensor in tensors.items():
        if name in done:
            continue
        made: dict[str, Readable] = {name: tensor}
        for pattern, numbers in ((name, ()), _numbered(name)):
            if (conversion := takes.get(pattern)) is not None:
                sources = [_filled(source, numbers) for source in conversion.sources]
                targets = [_filled(target, numbers) for target in conversion.targets]
                if absent := [source for source in sources if source not in tensors]:
                    raise ValueError(f"{name} is stored together with {absent}, which are not there")
                values = convert(conversion.steps, {each: [tensors[each]] for each in sources}, sources, targets)
                made = {each: part for target in targets for each, part in _listed(target, values[target])}
                done.update(sources)
                break
        if both := found.keys() & made.keys():
            raise ValueError(f"{name} and another tensor both make {min(both)}")
        found |= made
    return found


def convert(steps: Sequence[Step], values: Values, sources: Sequence[str], targets: Sequence[str]) -> Values:
    """Apply the steps in order.

    Args:
        steps: Steps to apply.
        values: Tensors by source.
        sources: Sources, in the order in which `concatenate` joins them.
        targets: Targets, in the order in which `chunk` fills them.

    Returns:
        Tensors by target, in lists with one entry each, or with one for each index of a target with `*`.

    Raises:
        ValueError: If a step does not apply to the number or the shapes of the tensors.
    """
    for step in steps:
        if step.operation not in STEPS:
            raise ValueError(f"{step.operation!r} is no step of a conversion; known are {', '.join(STEPS)}")
        values = STEPS[step.operation](step, values, sources, targets)
    if len(values) == len(targets) == 1:
        return {targets[0]: next(iter(values.values()))}
    if set(values) != set(targets):
        raise ValueError(f"steps {[step.operation for step in steps]} make {sorted(values)}, not {sorted(targets)}")
    return values


def _numbered(name: str) -> tuple[str, tuple[str, ...]]:
    """Return a name with `#` for each number between its dots, and the numbers."""
    words = name.split(".")
    return ".".join("#" if word.isdecimal() else word for word in words), tuple(filter(str.isdecimal, words))


def _filled(pattern: str, numbers: Sequence[str]) -> str:
    """Return a pattern with the numbers in place of its `#`."""
    first, *rest = pattern.split("#")
    if len(rest) != len(numbers):
        raise ValueError(f"{pattern}: a name with {len(rest)} numbers from one with {len(numbers)}")
    return first + "".join(number + after for number, after in zip(numbers, rest, strict=True))


def _listed(target: str, parts: Sequence[Readable]) -> Iterator[tuple[str, Readable]]:
    """Yield (name, tensor) for the tensors of a target, one for each index if it has `*`."""
    if "*" not in target and len(parts) != 1:
        raise ValueError(f"{len(parts)} tensors all named {target}")
    for index, part in enumerate(parts):
        yield target.replace("*", str(index)), part


def numbered_alike(conversion: Conversion) -> Conversion | None:
    """Return a conversion with `#` for the numbers that all its names share; None if they differ."""
    names = [_numbered(name) for name in (*conversion.sources, *conversion.targets)]
    if len({numbers for _, numbers in names}) != 1:
        return None
    patterns, count = tuple(pattern for pattern, _ in names), len(conversion.sources)
    return Conversion(patterns[:count], patterns[count:], conversion.steps)


def _merge(step: Step, values: Values, sources: Sequence[str], targets: Sequence[str]) -> Values:
    return {name: [Stacked(tuple(parts), step.dim)] for name, parts in values.items()}


def _split(step: Step, values: Values, sources: Sequence[str], targets: Sequence[str]) -> Values:
    def split(name: str, parts: Sequence[Readable]) -> list[Readable]:
        part = _single(step, {name: parts})
        if (count := _length(step, part)) > MOST_PARTS:
            raise ValueError(f"{part.where}: {count} parts; at most {MOST_PARTS} are made")
        return [Selected((part,), step.dim, index) for index in range(count)]

    return {name: split(name, parts) for name, parts in values.items()}


def _concatenate(step: Step, values: Values, sources: Sequence[str], targets: Sequence[str]) -> Values:
    if len(targets) != 1 or not set(values) <= set(sources):
        raise ValueError(f"concatenate of {sorted(values)} to {[*targets]}: must make one tensor of its sources")
    return {targets[0]: [Joined(tuple(part for name in sources for part in values.get(name, ())), step.dim)]}


def _chunk(step: Step, values: Values, sources: Sequence[str], targets: Sequence[str]) -> Values:
    part = _single(step, values)
    whole, count = _length(step, part), len(targets)
    sizes = step.sizes or (whole // count,) * count
    if sum(sizes) != whole or len(sizes) != count or min(sizes) < 0:
        wanted = f"ranges of {[*sizes]}" if step.sizes else f"{count} equal ranges"
        raise ValueError(f"{part.where}: {list(part.shape)} does not consist of {wanted} along dim {step.dim}")
    firsts = [0, *accumulate(sizes)]
    return {name: [Narrowed((part,), step.dim, firsts[i], sizes[i])] for i, name in enumerate(targets)}


def _transpose(step: Step, values: Values, sources: Sequence[str], targets: Sequence[str]) -> Values:
    return {name: [Transposed((_single(step, {name: parts}),), step.dim, step.dim1)] for name, parts in values.items()}


STEPS: dict[str, Callable[[Step, Values, Sequence[str], Sequence[str]], Values]] = {
    "merge": _merge,
    "split": _split,
    "concatenate": _concatenate,
    "chunk": _chunk,
    "transpose": _transpose,
}


def _single(step: Step, values: Values) -> Readable:
    parts = [part for each in values.values() for part in each]
    if len(parts) != 1:
        raise ValueError(f"{step.operation} of {len(parts)} tensors named {sorted(values)}: must be one")
    return parts[0]


def _length(step: Step, part: Readable) -> int:
    if not 0 <= step.dim < len(part.shape):
        raise ValueError(f"{part.where}: {step.operation} along dim {step.dim} of a tensor with {len(part.shape)} dims")
    return part.shape[step.dim]
