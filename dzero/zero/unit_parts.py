"""Parts of a unit that is larger than `zero.unit_bytes`: modules of it that become units inside it.

A unit is gathered into one buffer, reduced from one buffer, and moved to and from the host as one. The largest unit
thus decides how large these buffers are, and the slots on the host for states on disk. Parts bound them by a constant
(the constant-size buffers of ZeRO, section 6.2), and let the update of one part overlap with the transfers of the next.
Values do not change by a bit, since no operation combines elements of two parameters; but a module that a block calls
twice may have its gradients added use by use, hence in another order.

The largest modules become parts, until the rest of the unit is small enough. A module that is itself too large is
replaced by its submodules. Some modules are not divided, and some are not parts, so that a unit may stay larger:

    modules of torch.nn with submodules   neither: some read weights of these without calling them, or compare their
                                          arguments, of which FSDP2 gives a part copies (MultiheadAttention)
    modules with a ModuleList             not divided: which of its elements run may depend on the data (experts), hence
                                          differ between ranks, which must gather the same units in one order
    modules that are not alone            no parts: others have their parameters too
    modules without a forward             no parts: nothing calls a ParameterList
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence

from torch import nn

from dzero.hardware import format_bytes
from dzero.parallel.blocks import is_called
from dzero.utils.torch_internals import registered
from dzero.zero.dtensors import local_of
from dzero.zero.unit_shapes import UnitShape

LISTS = (nn.ModuleList, nn.ModuleDict)
Unit = tuple[str, list[nn.Module]]
Modules = frozenset[nn.Module]


def with_parts(unit: Unit, most_elems: int, inner: Collection[nn.Parameter], model: nn.Module) -> list[Unit]:
    """Return the parts of a unit in the order of its modules, and the unit itself last.

    Args:
        unit: Name and modules of the unit. If there are several, which share parameters, it has no parts.
        most_elems: Elements that a unit should have at most.
        inner: Parameters in tiles and shared experts, which are units already.
        model: The model, in which parameters may have further users.
    """
    name, (module, *others) = unit
    if others:
        return [unit]
    inner = {*inner}
    elems = {each: _elems(each, inner) for each in module.modules()}
    if elems[module] <= most_elems or _is_of_torch(module):
        return [unit]
    ways = defaultdict[nn.Parameter, list[Modules]](list)
    for param, way in _ways(model):
        ways[param].append(way)
    rest, parts = elems[module], dict[str, nn.Module]()
    waiting = {path: each for path, each in module.named_children() if not isinstance(each, LISTS)}
    while rest > most_elems and waiting:
        path = max(waiting, key=lambda path: elems[waiting[path]])
        part = waiting.pop(path)
        inside = {f"{path}.{below}": each for below, each in _divided(part).items()}
        alone = all(param not in inner and all(part in way for way in ways[param]) for param in part.parameters())
        called = is_called(part) and not (_is_of_torch(part) and any(part.children()))
        if inside and not (alone and called and elems[part] <= most_elems):
            waiting |= inside
        elif alone and called and 0 < elems[part] < rest:  # without the last, the unit would have no parameters
            parts[path] = part
            rest -= elems[part]
    found = [(f"{name}.{path}", [each]) for path, each in module.named_modules() if path in parts]
    return [*found, unit]


def warn_of_larger(units: Sequence[UnitShape], unit_bytes: int, itemsize: int) -> None:
    """Warn of units that stay larger than `unit_bytes` in a dtype of `itemsize` bytes, because they are not divided."""
    sizes = [(unit.shard_elems(1) * itemsize, unit.name) for unit in units]
    larger = [each for each in sizes if each[0] > unit_bytes]
    if larger:
        size, name = max(larger)
        warnings.warn(
            f"zero.unit_bytes={unit_bytes} ({format_bytes(unit_bytes)}): {len(larger)} of {len(units)} units stay "
            f"larger, most of all {name} with {format_bytes(size)}. A single layer, a module of torch.nn, one with a "
            "list of modules, and the root are not divided; block.tiles, block.loss_tiles and block.embedding_tiles "
            "cut MLPs, the head and the embedding",
            stacklevel=3,
        )


def _divided(module: nn.Module) -> dict[str, nn.Module]:
    """Return the submodules that may be parts by name, or nothing if the module is never divided."""
    children = dict(module.named_children())
    return {} if _is_of_torch(module) or any(isinstance(each, LISTS) for each in children.values()) else children


def _is_of_torch(module: nn.Module) -> bool:
    classes = (each for each in type(module).__mro__ if each not in (nn.Module, nn.Sequential))
    return any(each.__module__.startswith("torch.nn.") for each in classes)


def _elems(module: nn.Module, inner: Collection[nn.Parameter]) -> int:
    """Return the elements that this rank's data-parallel group has of a module's own unit."""
    found = (param for param in module.parameters() if param.is_floating_point() and param not in inner)
    return sum(local_of(param).numel() for param in found)


def _ways(module: nn.Module, above: Modules = frozenset()) -> Iterator[tuple[nn.Parameter, Modules]]:
    """Yield each parameter with the modules that it is in, once for each way to it: modules may be shared too."""
    here = above | {module}
    for param in registered(module).values():
        if param is not None:
            yield param, here
    for child in module.children():
        yield from _ways(child, here)
