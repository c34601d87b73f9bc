"""Conversions that transformers makes when it loads or saves a model, as views of the stored tensors.

transformers keeps some parameters in another layout than published folders do: the experts of a layer as one tensor,
for instance. A list of transforms on the model says how, each with regular expressions of names: renamings, all of
which apply in turn, and converters with operations, of which the first that fits applies. Matching a name is left to
the transforms themselves. The operations are translated to steps of ours (conversions.py), and those that have no step
are refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch

from dzero.errors import import_optional
from dzero.models.conversions import Conversion, Step, convert, numbered_alike
from dzero.models.tensor_views import Readable

STEPS = {
    "MergeModulelist": "merge",
    "SplitModulelist": "split",
    "Concatenate": "concatenate",
    "Chunk": "chunk",
    "Transpose": "transpose",
}
"""Operations of transformers, and the steps that they are."""
INDEX = "7919"
"""Number in place of `*` while a name with it is renamed; renamings may look for numbers."""


@dataclass
class _Group:
    """Tensors that one converter takes together, by the pattern that each name fits."""

    converter: Any
    members: dict[str, list[str]] = field(default_factory=dict)

    @property
    def sources(self) -> list[str]:
        """Patterns that have members, in the converter's order."""
        return [pattern for pattern in self.converter.source_patterns if pattern in self.members]

    def targets(self, name: str) -> dict[str, str]:
        """Return the name of each target by its pattern; `name` is that of the first one."""
        first, *_ = patterns = [*self.converter.target_patterns]
        before, found, after = name.partition(first)
        if not found:
            raise ValueError(f"{name}: transformers converts it by {self.converter}, which dzero does not follow")
        return {pattern: before + pattern + after for pattern in patterns}


class _Transforms:
    """Transforms of a model's names, to load or to save it."""

    def __init__(self, transforms: Sequence[Any]) -> None:
        self._renamings = [each for each in transforms if not hasattr(each, "operations")]
        self._converters = [each for each in transforms if hasattr(each, "operations")]

    def renamed(self, name: str) -> str:
        """Return the name after all renamings."""
        for renaming in self._renamings:
            name, _ = renaming.rename_source_key(name)
        return name

    def converted(self, name: str) -> tuple[str, str | None, Any]:
        """Return the name that a converter makes of `name`, with the pattern that fits; None if no converter does."""
        for converter in self._converters:
            target, pattern = converter.rename_source_key(name)
            if pattern is not None:
                return target, pattern, converter
        return name, None, None


def as_loaded(model: Any, stored: Mapping[str, Readable]) -> dict[str, Readable]:
    """Return the tensors of a model of transformers, by name, made of those in a published folder.

    Args:
        model: Model as built, on any device.
        stored: Tensors of the folder, by name.

    Returns:
        Tensors by name. Those that the model has no place for are left out.

    Raises:
        ValueError: If transformers uses an operation that dzero does not know, or tensors do not fit together.
    """
    mapping = import_optional("transformers.conversion_mapping", "model.kind=hf", "hf")
    transforms = _Transforms(mapping.get_model_conversion_mapping(model))
    needed, base = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}, model.base_model_prefix
    found: dict[str, Readable] = {}
    groups: dict[str, _Group] = {}
    for key in sorted(stored, key=_in_order):
        name, pattern, converter = transforms.converted(transforms.renamed(key))
        name = _with_base(name, base, needed)
        if name not in needed and _with_base(key, base, needed) in needed:
            name, pattern = _with_base(key, base, needed), None
        if name not in needed:
            continue
        if pattern is not None:
            group = groups.setdefault(name, _Group(converter))
            if group.converter is not converter:
                raise ValueError(f"{stored[key].where}: {name} of the model is stored in another layout too")
            group.members.setdefault(pattern, []).append(key)
        elif name in found:
            raise ValueError(f"{stored[key].where}: {key} and {found[name].stored[0]} are both {name} of the model")
        else:
            found[name] = stored[key]
    for name, group in groups.items():
        made = _converted(name, group, stored, needed)
        if both := found.keys() & made.keys():
            raise ValueError(f"{made[min(both)].where}: stored as {min(both)} too, as which it would be loaded")
        found |= made
    return found


def _converted(
    name: str, group: _Group, stored: Mapping[str, Readable], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Readable]:
    """Return the parameters, by name, that a converter makes of a group of tensors.

    `shapes` has those of all parameters, which some converters look up.
    """
    targets = group.targets(name)
    steps = _steps(group.converter, [shapes.get(target, ()) for target in targets.values()])
    where = stored[group.members[group.sources[0]][0]].where
    for step in steps:
        if step.operation not in STEPS.values():
            raise ValueError(
                f"{where}: transformers converts it by {step.operation}, which dzero does not know; save the model "
                "with save_pretrained(FOLDER, save_original_format=False) of transformers, and take that folder"
            )
    for names in group.members.values():
        _check_numbers(names, where)
    values = {pattern: [stored[key] for key in group.members[pattern]] for pattern in group.sources}
    made = convert(steps, values, group.sources, [*targets])
    return {targets[pattern]: part for pattern, parts in made.items() for part in parts}


def as_saved(published: Any, config: Any) -> tuple[Conversion, ...]:
    """Return the conversions from a model's own layout to that in which transformers saves it.

    Operations that dzero does not know become steps of their name, which `convert` refuses.

    Args:
        published: Class of transformers.
        config: Configuration of the model.

    Returns:
        Conversions; parameters that none of them takes keep their names.
    """
    return _as_saved(published, _Config(config.to_json_string(), config))


@dataclass(frozen=True)
class _Config:
    """A configuration that equals others with the same text."""

    text: str
    value: Any = field(compare=False)


@lru_cache(maxsize=8)
def _as_saved(published: Any, config: _Config) -> tuple[Conversion, ...]:
    mapping = import_optional("transformers.conversion_mapping", "the published layout", "hf")
    with torch.device("meta"):
        # The model at hand may be cut or wrapped, which changes its names and classes.
        model = published(deepcopy(config.value))
    transforms = mapping.get_model_conversion_mapping(model, add_legacy=False)
    # Whether a folder had the prefix that such a transform removes is unknown, so transformers adds none either.
    kept = [each for each in transforms if type(each).__name__ != "PrefixChange"]
    saving = _Transforms([each.reverse_transform() for each in kept[::-1]])
    groups: dict[str, _Group] = {}
    exact: list[Conversion] = []
    for name in model.state_dict():
        target, pattern, converter = saving.converted(name)
        if pattern is not None:
            groups.setdefault(target, _Group(converter)).members.setdefault(pattern, []).append(name)
        else:
            exact.append(Conversion((name,), (saving.renamed(name),)))
    for name, group in groups.items():
        sources = tuple(each for pattern in group.sources for each in group.members[pattern])
        targets = tuple(_renamed_list(saving, target) for target in group.targets(name).values())
        exact.append(Conversion(sources, targets, _steps(group.converter)))
    return _in_short(exact)


def _renamed_list(transforms: _Transforms, name: str) -> str:
    """Return the name after all renamings, where it may have `*` for the index in a list."""
    return transforms.renamed(name.replace("*", INDEX)).replace(INDEX, "*")


def _in_short(exact: Sequence[Conversion]) -> tuple[Conversion, ...]:
    """Return one conversion for all layers that have the same; those that differ between layers stay as they are."""
    short: dict[str, set[Conversion]] = {}
    alike = [numbered_alike(each) for each in exact]
    for each in filter(None, alike):
        for source in each.sources:
            short.setdefault(source, set()).add(each)
    taken = [
        each if pattern is None or any(len(short[source]) > 1 for source in pattern.sources) else pattern
        for each, pattern in zip(exact, alike, strict=True)
    ]
    return tuple(dict.fromkeys(each for each in taken if each.steps or each.sources != each.targets))


def _steps(converter: Any, shapes: Sequence[tuple[int, ...]] = ()) -> tuple[Step, ...]:
    """Return the operations of a converter as steps; an unknown one keeps its name.

    `shapes` are those of the targets, if known.
    """
    found = []
    for operation in converter.operations:
        kind = type(operation).__name__
        conditional = getattr(operation, "check_dims", False) or getattr(operation, "num_shards_attribute", None)
        if kind == "Split" and shapes and all(len(shape) > operation.dim for shape in shapes):
            found.append(Step("chunk", operation.dim, sizes=tuple(shape[operation.dim] for shape in shapes)))
        elif kind not in STEPS or conditional:
            found.append(Step(kind, 0))
        elif kind == "Transpose":
            found.append(Step("transpose", operation.dim0, operation.dim1))
        else:
            found.append(Step(STEPS[kind], operation.dim))
    return tuple(found)


def _with_base(name: str, base: str, needed: Any) -> str:
    """Return the name with or without the prefix of the model without head, whichever the model has."""
    bare, full = name.removeprefix(f"{base}."), f"{base}.{name}"
    return bare if bare in needed else full if full in needed else name


def _check_numbers(names: Sequence[str], where: str) -> None:
    """Raise ValueError unless the names of a list differ in one number only, which counts from 0."""
    if len(names) < 2:
        return
    differ = [words for words in zip(*(name.split(".") for name in names), strict=False) if len({*words}) > 1]
    if len(differ) != 1 or differ[0] != tuple(str(index) for index in range(len(names))):
        raise ValueError(f"{where}: {names[0]} to {names[-1]}, {len(names)} tensors, are not numbered from 0 on")


def _in_order(name: str) -> list[tuple[int, int, str]]:
    """Return a key that sorts numbers in names by their value."""
    return [(0, int(word), "") if word.isdecimal() else (1, 0, word) for word in re.split(r"(\d+)", name)]
