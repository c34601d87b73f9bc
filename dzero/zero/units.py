"""Which modules are sharded and gathered together.

A *unit* is a list of modules that share one collective. By default these are the transformer blocks, of which those
that share weights are one, and a large input embedding and output head. What no unit holds (final norm, small or tied
ends) belongs to the last unit, the root. Tiles (parallel/tiling/tile.py) and experts that ranks share
(parallel/expert/dispatch.py) are units inside units: gathered for their own forward and backward alone, and listed
before the unit around them.

Note: ends. A weight that somebody reads outside of its module's own forward, as a loss made from `head.weight` does,
cannot be a unit of its own: it is a shard there. Whether a model does that cannot be seen from outside, so an end is a
unit only where the model vouches for it, by the methods that models of transformers have:

    get_input_embeddings()     the module that looks up the tokens, used by calling it and in no other way
    get_output_embeddings()    the one that makes the output, likewise; None where there is none

A class vouches if its `forward` comes from the package that these two come from: whoever replaces the forward alone (a
subclass, a patch that fuses head and loss) may read weights that the methods know nothing of. Modules between the
model and the end must vouch as well, or come from that package too. An end must have one parameter, of OWN_UNIT_ELEMS,
that no other module has, since the other use of a tied weight lies outside; a bias would make a head's output a view,
by which FSDP2 may miss the backward.

The answer depends on the model alone, not on the mesh, stage or rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from torch import nn
from torch.distributed.tensor import DTensor, Shard

from dzero.parallel.blocks import find_blocks
from dzero.parallel.pipeline.split import ModelStages
from dzero.parallel.tensor.conv1d import FusedProjection, RowsProjection
from dzero.parallel.tiling.tile import find_tiles
from dzero.zero.dtensors import local_of
from dzero.zero.unit_shapes import ParamShape, Split, UnitShape

ROOT = "root"
INPUT, OUTPUT = "get_input_embeddings", "get_output_embeddings"
OWN_UNIT_ELEMS = 1 << 23
"""Elements from which on an embedding or a head is a unit: 16 MiB in 16 bits, which links of 50 to 200 GB/s carry in
0.1 to 0.3 ms. Two collectives of its own take about that together with up to 1 ms of the host's time, so that a smaller
one would cost more than it hides."""


def find_units(
    model: nn.Module,
    class_names: Sequence[str] | None = None,
    is_unit: Callable[[nn.Module], bool] | None = None,
    experts: Mapping[str, nn.Module] | None = None,
) -> list[tuple[str, list[nn.Module]]]:
    """(name, modules) of every unit but the root: all tiles and those of `experts`, by name, that ranks share and the
    model has; then the others, in the order of the model's modules.

    `class_names` picks modules by class, `is_unit` by a predicate; by default units are the elements of the outermost
    ModuleLists and Sequentials (the model itself may be a Sequential), before them the input embedding and behind them
    the output head where the note above allows it. Of modules inside each other the outer one is the unit. A unit that
    shares parameters with what is left for the root is left to the root too; units that share parameters become one.
    Raises ValueError for a class name that no unit has, and for a tied parameter that was tiled.
    """
    if class_names and is_unit:
        raise ValueError(f"zero.units={class_names} and a predicate: only one can choose the units")
    if class_names:
        named = _by_class(model, class_names)
    else:
        named = _blocks_and_ends(model) if is_unit is None else _outermost(model, is_unit)
    here = {*model.modules()}
    inner = [*find_tiles(model), *((name, module) for name, module in (experts or {}).items() if module in here)]
    held = {param for _, each in inner for param in each.parameters()}
    named = [(name, module) for name, module in named if {*module.parameters()} - held]
    return [(name, [each]) for name, each in inner] + _joined_by_tied_weights(model, named, held)


def unit_around(name: str, others: Sequence[str]) -> str:
    """Of `others`, the root last, the unit that the one called `name` is inside of."""
    return next((each for each in others if any(name.startswith(f"{one}.") for one in each.split("+"))), others[-1])


def _by_class(model: nn.Module, class_names: Sequence[str]) -> list[tuple[str, nn.Module]]:
    found = _outermost(model, lambda module: type(module).__name__ in class_names)
    missing = set(class_names) - {type(m).__name__ for _, m in found}
    if missing:
        present = sorted({type(m).__name__ for m in model.modules() if m is not model})
        raise ValueError(
            f"zero.units={sorted(missing)}: no such modules outside the other units; the model has {present}"
        )
    return found


def _blocks_and_ends(model: nn.Module) -> list[tuple[str, nn.Module]]:
    blocks = find_blocks(model)
    taken = {module for _, block in blocks for module in block.modules()}
    users = Counter(param for module in model.modules() for param in module._parameters.values())

    def own(method: str) -> list[tuple[str, nn.Module]]:
        end = _vouched_end(model, method) if blocks else None
        if end is None or end[1] in taken:
            return []
        params = [*end[1].parameters()]
        alone = len(params) == 1 and params[0] in end[1]._parameters.values() and users[params[0]] == 1
        large = alone and params[0].is_floating_point() and params[0].numel() >= OWN_UNIT_ELEMS
        return [end] if large else []

    first, last = own(INPUT), own(OUTPUT)
    return [*first, *blocks, *(end for end in last if end not in first)]


def _vouched_end(model: nn.Module, method: str) -> tuple[str, nn.Module] | None:
    """Return the end of a model that `method` gives, by its name; None where it or a module above does not vouch."""
    package = _vouches(model)
    if package is None:
        return None
    try:
        end = getattr(model, method)()
    except (AttributeError, NotImplementedError):  # so transformers say that a model has none
        return None
    name = next((name for name, module in model.named_modules() if module is end), "")
    if not name:
        return None
    above = [*accumulate(name.split(".")[:-1], "{}.{}".format)]
    for module in map(model.get_submodule, above):
        package = _vouches(module) or package
        if _package_of(module, "forward") != package:
            return None
    return name, end


def _vouches(module: nn.Module) -> str | None:
    """Return the package of a module whose class has both methods and its forward from there; else None."""
    packages = {_package_of(module, name) for name in (INPUT, OUTPUT, "forward")}
    return packages.pop() if len(packages) == 1 and None not in packages else None


def _package_of(module: nn.Module, method: str) -> str | None:
    """Return the top-level package that a method of a module's class comes from; None if it has none or its own."""
    function = getattr(type(module), method, None)
    if function is None or method in vars(module):
        return None
    return str(function.__module__).partition(".")[0]


def _outermost(model: nn.Module, wanted: Callable[[nn.Module], bool]) -> list[tuple[str, nn.Module]]:
    found: list[tuple[str, nn.Module]] = []
    inside: set[nn.Module] = {model}
    for name, module in model.named_modules():
        if module not in inside and wanted(module):
            found.append((name, module))
            inside.update(module.modules())
    return found


def _joined_by_tied_weights(
    model: nn.Module, named: list[tuple[str, nn.Module]], inner: set[nn.Parameter]
) -> list[tuple[str, list[nn.Module]]]:
    inside = {p for _, module in named for p in module.parameters()}
    owned = {m for _, module in named for m in module.modules()}
    outside = {p for m in model.modules() if m not in owned for p in m.parameters(recurse=False)}
    units: list[tuple[str, list[nn.Module], set[nn.Parameter]]] = []
    for name, module in named:
        params = set(module.parameters()) - inner
        if params & outside & inside:
            outside |= params
            continue
        if any(module in modules for _, modules, _ in units):
            continue
        tied = [unit for unit in units if unit[2] & params]
        merged = ("+".join([*(u[0] for u in tied), name]), [m for u in tied for m in u[1]] + [module], params)
        for unit in tied:
            merged[2].update(unit[2])
            units.remove(unit)
        units.append(merged)
    return [(name, modules) for name, modules, params in units if not params & outside]


Units = list[tuple[str, list[nn.Module]]]


def roots_of(model: nn.Module, parts: ModelStages | None) -> list[nn.Module]:
    """The modules whose forward is called: the model's, or of a pipeline those of this rank's parts."""
    return [model] if parts is None else [part.module for part in parts.own]


def units_of_roots(
    model: nn.Module,
    parts: ModelStages | None,
    class_names: Sequence[str] | None,
    is_unit: Callable[[nn.Module], bool] | None,
    experts: Mapping[str, nn.Module] | None,
) -> Units:
    """Of every root its units, and itself the last of them."""
    roots = roots_of(model, parts)
    units: Units = []
    for number, root in enumerate(roots):
        name = ROOT if len(roots) == 1 else f"{ROOT}.{number}"
        units += [*find_units(root, class_names, is_unit, experts), (name, [root])]
    return units


@dataclass(frozen=True)
class ParamSlot:
    """Where a parameter lives: FSDP2 replaces the object, so the place is its identity."""

    name: str
    owner: nn.Module
    attribute: str

    @property
    def param(self) -> nn.Parameter:
        """What lives there now."""
        param = getattr(self.owner, self.attribute)
        assert isinstance(param, nn.Parameter)
        return param


def swap(modules: Iterable[nn.Module], params: Mapping[nn.Parameter, nn.Parameter]) -> None:
    """Put others in the place of parameters, wherever `modules` and those inside have them."""
    for module in {each for of in modules for each in of.modules()} if params else ():
        for attribute, param in [*module.named_parameters(recurse=False, remove_duplicate=False)]:
            if param in params:
                setattr(module, attribute, params[param])


def slots_by_unit(
    model: nn.Module, units: list[tuple[str, list[nn.Module]]], aliases: Mapping[str, str] | None = None
) -> dict[str, list[ParamSlot]]:
    """Each floating-point parameter once, trained or frozen, under the first unit that holds it.

    aliases: other names for parameters. Raises ValueError for a complex parameter, and a model without parameters.
    """
    unit_of = {m: name for name, modules in reversed(units) for module in modules for m in module.modules()}
    seen: set[nn.Parameter] = set()
    slots: dict[str, list[ParamSlot]] = {name: [] for name, _ in units}
    for prefix, module in model.named_modules():
        for attribute, param in module.named_parameters(recurse=False):
            if param.is_complex():
                raise ValueError(
                    f"parameter {prefix}.{attribute} is complex; keep its real and imaginary parts instead"
                )
            if param in seen or not param.is_floating_point():
                continue
            seen.add(param)
            name = f"{prefix}.{attribute}" if prefix else attribute
            name = (aliases or {}).get(name, name)
            slots[unit_of[module]].append(ParamSlot(name, module, attribute))
    if not seen:
        raise ValueError(f"{type(model).__name__} has no floating-point parameters to shard")
    return slots


def shapes_of(slots: Mapping[str, Sequence[ParamSlot]], units: Units, roots: Sequence[nn.Module]) -> list[UnitShape]:
    """The units' unsharded shapes. roots: those of `roots_of`, which are among the units."""
    last = {*roots, *(end[1] for root in roots if (end := _vouched_end(root, OUTPUT)) is not None)}
    closing = {name for name, modules in units if not last.isdisjoint(modules)}
    return [UnitShape(name, tuple(map(shape_of, of_unit)), name in closing) for name, of_unit in slots.items()]


def shape_of(slot: ParamSlot) -> ParamShape:
    """Of one parameter, as the ranks of a data-parallel group hold it.

    Raises ValueError for a DTensor over several axes, or one that its axis does not cut into equal parts.
    """
    param = slot.param
    if not isinstance(param, DTensor):
        return ParamShape(slot.name, tuple(param.shape) or (1,), param.requires_grad)
    mesh, placement = param.device_mesh, param.placements[0]
    axis = (mesh.mesh_dim_names or ("tp",))[0]
    dim = placement.dim % param.ndim if isinstance(placement, Shard) else None
    if mesh.ndim > 1 or not (placement.is_replicate() or dim is not None):
        raise ValueError(
            f"parameter {slot.name} is placed as {param.placements} over {mesh}: one axis cuts or copies it"
        )
    if dim is not None and param.shape[dim] % mesh.size():
        raise ValueError(
            f"parameter {slot.name} is {list(param.shape)}: the {mesh.size()} ranks of axis {axis} do not divide its "
            f"dim {dim}"
        )
    summed = not isinstance(slot.owner, RowsProjection)
    split = Split(axis, dim, mesh.get_local_rank(), mesh.size(), summed)
    fused = isinstance(slot.owner, FusedProjection)
    return ParamShape(slot.name, tuple(local_of(param).shape), param.requires_grad, split, fused)
