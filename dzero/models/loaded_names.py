"""Check of a folder before it is written: the model that transformers makes of it has every tensor that was there.

The loader is followed by its own rules: a model is built on meta from config.json, and the conversions that
transformers makes on loading (hf_conversions.py) say which of its tensors the written names become.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from torch import Tensor

from dzero.errors import import_optional
from dzero.models.conversions import Conversion, convert_all
from dzero.models.hf import decoder_from
from dzero.models.hf_conversions import as_loaded
from dzero.models.tensor_views import Readable

TIED = "tie_word_embeddings"


@dataclass(frozen=True)
class Shape:
    """A tensor of which only name and shape are known; see `tensor_views.Readable`."""

    where: str
    shape: tuple[int, ...]

    @property
    def stored(self) -> tuple[str, ...]:
        """Its name."""
        return (self.where,)

    def read(self, offset: Sequence[int], size: Sequence[int]) -> Tensor:
        """Raise TypeError: it has no values."""
        raise TypeError(f"{self.where} has no values")

    def __call__(self) -> Tensor:
        """Raise TypeError: it has no values."""
        raise TypeError(f"{self.where} has no values")


def as_loader_expects(
    config: str, layout: Sequence[Conversion], named: Mapping[str, Readable]
) -> tuple[dict[str, Readable], str]:
    """Return the tensors to write, by name in the folder, and the text of config.json.

    Tensors that transformers ties are written once if they are one tensor. If they are not, since they were trained
    apart, config.json says so.

    Args:
        config: Text of config.json.
        layout: Conversions of what is published in another layout.
        named: Tensors of the model, by published name.

    Raises:
        ValueError: If a tensor of the model that will be loaded is missing, or has another shape.
    """
    try:
        import_optional("transformers", "checking names", "hf")
    except ModuleNotFoundError:  # without it, folders are written as the description says
        return convert_all(layout, named), config
    groups, is_tied = _tensors(config), json.loads(config).get(TIED)
    left_out: set[str] = set()
    for names in groups:
        there = [name for name in names if name in named]
        if len({named[name].stored for name in there}) > 1:
            if is_tied is False:
                raise ValueError(f"{there} were trained apart, and transformers would tie them on loading")
            untied = json.dumps(json.loads(config) | {TIED: False})
            if _tensors(untied) == groups:
                raise ValueError(f"{there} were trained apart, and {TIED}=false does not keep them apart on loading")
            return as_loader_expects(untied, layout, named)
        left_out |= {*there[1:]}
    tensors = convert_all(layout, {name: value for name, value in named.items() if name not in left_out})
    shapes = tuple((name, tuple(tensor.shape)) for name, tensor in tensors.items())
    unused = _check_loads(config, shapes)
    if unused:
        warnings.warn(f"the model of config.json has no place for {unused}, which are written too", stacklevel=2)
    return tensors, config


@lru_cache(maxsize=4)
def _tensors(config: str) -> tuple[tuple[str, ...], ...]:
    """Return the names of the tensors that the model of a config.json has; tied ones in one tuple."""
    groups: dict[int, list[str]] = {}
    for name, tensor in decoder_from(json.loads(config)).model.state_dict(keep_vars=True).items():
        groups.setdefault(id(tensor), []).append(name)
    return tuple(tuple(names) for names in groups.values())


@lru_cache(maxsize=4)  # weights() of every step of a trainer asks for the same one
def _check_loads(config: str, shapes: tuple[tuple[str, tuple[int, ...]], ...]) -> tuple[str, ...]:
    """Check that the model of a config.json finds all its tensors among those written; return those without a place."""
    model = decoder_from(json.loads(config)).model
    found = as_loaded(model, {name: Shape(name, shape) for name, shape in shapes})
    needed = model.state_dict()
    for names in _tensors(config):
        there = [name for name in names if name in found]
        if not there:
            raise ValueError(f"{names[0]}: {type(model).__name__} has this tensor, and it would not be written")
        shape, expected = tuple(found[there[0]].shape), tuple(needed[there[0]].shape)
        if shape != expected:
            raise ValueError(f"{there[0]} has shape {[*shape]}, {type(model).__name__} expects {[*expected]}")
    used = {name for tensor in found.values() for name in tensor.stored}
    return tuple(sorted({name for name, _ in shapes} - used))
