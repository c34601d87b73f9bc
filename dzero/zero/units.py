"""Selection of the modules that are sharded and gathered together.

A *unit* is a list of modules that share one collective. By default, units are the transformer blocks (those that share
weights are one unit), and a large input embedding and output head. All else (final norm, small or tied embeddings and
heads) belongs to the last unit, the root. A unit is gathered when it is called, so a module without a forward is none.
Units inside units are gathered only for their own forward and backward, and precede the unit around them: tiles
(parallel/tiling/tile.py), shared experts (parallel/expert/dispatch.py), and the parts of a block that is larger than
`zero.unit_bytes` (zero/unit_parts.py).

Note: embeddings and heads. A weight that is read outside of its module's forward, for instance by a loss made from
`head.weight`, cannot be in a unit of its own, because it is a shard there. Whether a model does so cannot be detected
from outside. An embedding or head is a unit only if the model declares it by the methods of transformers models:

    get_input_embeddings()     the module that looks up the tokens, which is used only by calling it
    get_output_embeddings()    the module that computes the output, likewise; None if there is none

A declaration counts if the class's `forward` and these methods come from one of the packages in VOUCHING. A class that
replaces only the forward (a subclass, a patch that fuses head and loss) may read weights that the methods do not cover.
Modules between the model and the embedding or head must have declarations that count, or come from that package. The
embedding or head must have a single parameter, of at least OWN_UNIT_ELEMS elements, that no other module has: another
use of a tied weight would be outside of the module. A bias would make a head's output a view, with which FSDP2 may miss
the backward.

The selection depends on the model alone, not on the mesh, stage or rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import accumulate

from torch import nn
from torch.distributed.tensor import DTensor, Shard

from dzero.hardware import dtype_of
from dzero.parallel.blocks import find_blocks, is_called
from dzero.parallel.pipeline.split import ModelStages
from dzero.parallel.tensor.conv1d import FusedProjection, RowsProjection
from dzero.parallel.tiling.tile import find_tiles
from dzero.utils.torch_internals import registered
from dzero.zero.config import PrecisionConfig, ZeroConfig
from dzero.zero.dtensors import local_of
from dzero.zero.quantized_weights import BLOCK_ELEMS, WeightCodec
from dzero.zero.unit_parts import with_parts
from dzero.zero.unit_shapes import ParamShape, Split, UnitShape

ROOT = "root"
INPUT, OUTPUT = "get_input_embeddings", "get_output_embeddings"
VOUCHING = {"dzero", "transformers"}
"""Packages whose models were seen to use their ends by calling them. A model of one's own may read the head's weight in
its forward, for a fused loss, and meet a shard: its ends stay in the root unless `zero.units` names their classes."""
OWN_UNIT_ELEMS = 1 << 23
"""Least elements of an embedding or a head that is a unit: 16 MiB in 16 bits, which links of 50 to 200 GB/s transfer in
0.1 to 0.3 ms. Its two collectives cost about as much, and up to 1 ms of host time, so that a smaller unit would cost
more than it hides."""


@dataclass(frozen=True)
class UnitChoice:
    """Choice of the units.

    Attributes:
        class_names: Classes whose modules are units; empty for blocks and ends.
        is_unit: Predicate of modules that are units, in place of classes. Modules without a forward are passed over.
        most_elems: Elements beyond which a unit is split into parts. None: no unit is.
    """

    class_names: Sequence[str] = ()
    is_unit: Callable[[nn.Module], bool] | None = None
    most_elems: int | None = None

    @classmethod
    def of(cls, zero: ZeroConfig, precision: PrecisionConfig) -> UnitChoice:
        """Return the choice that `zero` makes for parameters in their working dtype."""
        most = None if zero.unit_bytes is None else zero.unit_bytes // dtype_of(precision.param).itemsize
        return cls((), zero.units, most) if callable(zero.units) else cls(tuple(zero.units or ()), None, most)


BLOCKS_AND_ENDS = UnitChoice()


def find_units(
    model: nn.Module, choice: UnitChoice = BLOCKS_AND_ENDS, experts: Mapping[str, nn.Module] | None = None
) -> list[tuple[str, list[nn.Module]]]:
    """Return (name, modules) of every unit but the root.

    Tiles and shared experts come first, then the others in the order of the model's modules, each after its parts. By
    default these are the elements of the outermost ModuleLists and Sequentials (the model itself may be a Sequential),
    after the input embedding and before the output head where the module's note allows these. Elements without a
    forward are replaced by the modules in them that have one. Of nested modules, the outer one is the unit. Units that
    share parameters are joined, or belong to the root if they share parameters with it.

    Args:
        model: The model, or one pipeline stage.
        choice: Which modules are units.
        experts: Shared experts by name; those outside of `model` are ignored.

    Raises:
        ValueError: If no unit has one of the chosen classes, if a module of a chosen class has no forward, or if a tied
            parameter was tiled.
    """
    if choice.class_names:
        named = _by_class(model, choice.class_names)
    else:
        named = _blocks_and_ends(model) if choice.is_unit is None else _by_predicate(model, choice.is_unit)
    here = {*model.modules()}
    inner = [*find_tiles(model), *((name, module) for name, module in (experts or {}).items() if module in here)]
    held = {param for _, each in inner for param in each.parameters()}
    named = [(name, module) for name, module in named if {*module.parameters()} - held]
    units = _joined_by_tied_weights(model, named, held)
    if choice.most_elems is not None:
        units = [part for unit in units for part in with_parts(unit, choice.most_elems, held, model)]
    return [(name, [each]) for name, each in inner] + units


def unit_around(name: str, others: Sequence[str]) -> str:
    """Return the name in `others`, the root last, of the unit around the unit `name`."""
    return next((each for each in others if any(name.startswith(f"{one}.") for one in each.split("+"))), others[-1])


def nested(names: Sequence[str]) -> dict[str, str]:
    """Return the unit around each unit that is inside one other than the root; of all `names`, the root is last."""
    around = {name: unit_around(name, names) for name in names}
    return {name: outer for name, outer in around.items() if outer != names[-1]}


def _by_class(model: nn.Module, class_names: Sequence[str]) -> list[tuple[str, nn.Module]]:
    found = _outermost(model, lambda module: type(module).__name__ in class_names)
    missing = set(class_names) - {type(m).__name__ for _, m in found}
    if missing:
        present = sorted({type(m).__name__ for m in model.modules() if m is not model})
        raise ValueError(
            f"zero.units={sorted(missing)}: no such modules outside the other units; the model has {present}"
        )
    for name, module in found:
        if not is_called(module):
            inside = sorted({type(m).__name__ for m in module.modules() if is_called(m) and [*m.parameters()]})
            raise ValueError(
                f"zero.units=[{type(module).__name__}]: {name} has no forward, so that nothing would gather its "
                f"parameters; name classes of modules in it that are called, of {inside}, or leave zero.units unset"
            )
    return found


def _by_predicate(model: nn.Module, is_unit: Callable[[nn.Module], bool]) -> list[tuple[str, nn.Module]]:
    return _outermost(model, lambda module: is_called(module) and is_unit(module))


def _blocks_and_ends(model: nn.Module) -> list[tuple[str, nn.Module]]:
    blocks = find_blocks(model)
    taken = {module for _, block in blocks for module in block.modules()}
    users = Counter(param for module in model.modules() for param in registered(module).values())

    def own(method: str) -> list[tuple[str, nn.Module]]:
        end = _vouched_end(model, method) if blocks else None
        if end is None or end[1] in taken:
            return []
        params = [*end[1].parameters()]
        alone = len(params) == 1 and params[0] in registered(end[1]).values() and users[params[0]] == 1
        large = alone and params[0].is_floating_point() and params[0].numel() >= OWN_UNIT_ELEMS
        return [end] if large else []

    first, last = own(INPUT), own(OUTPUT)
    return [*first, *blocks, *(end for end in last if end not in first)]


def _vouched_end(model: nn.Module, method: str) -> tuple[str, nn.Module] | None:
    """Return the name and module that `method` of a model declares, or None if the declaration does not count."""
    package = _vouches(model)
    if package not in VOUCHING:
        return None
    try:
        end = getattr(model, method)()
    except (AttributeError, NotImplementedError):  # how transformers models report that there is none
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
    """Return the package that the forward and both methods of a module's class come from, or None if they differ."""
    packages = {_package_of(module, name) for name in (INPUT, OUTPUT, "forward")}
    return packages.pop() if len(packages) == 1 and None not in packages else None


def _package_of(module: nn.Module, method: str) -> str | None:
    """Return the top-level package of a method of a module's class; None if it is missing, or set on the module."""
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
    outside = {p for m in _without(model, {module for _, module in named}) for p in m.parameters(recurse=False)}
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


def _without(model: nn.Module, units: Set[nn.Module]) -> set[nn.Module]:
    """Return the modules of a model that are reached without passing through a unit, as FSDP2 looks for the root's."""
    found: set[nn.Module] = set()
    waiting = [model]
    while waiting:
        module = waiting.pop()
        if module not in found and module not in units:
            found.add(module)
            waiting += module.children()
    return found


Units = list[tuple[str, list[nn.Module]]]


def roots_of(model: nn.Module, stages: ModelStages | None) -> list[nn.Module]:
    """Return the modules whose forward is called: the model, or the pipeline stages of this rank."""
    return [model] if stages is None else [stage.module for stage in stages.own]


def units_of_roots(
    model: nn.Module,
    stages: ModelStages | None,
    choice: UnitChoice = BLOCKS_AND_ENDS,
    experts: Mapping[str, nn.Module] | None = None,
) -> Units:
    """Return the units of every root, each root after the units inside it."""
    roots = roots_of(model, stages)
    units: Units = []
    for number, root in enumerate(roots):
        name = ROOT if len(roots) == 1 else f"{ROOT}.{number}"
        units += [*find_units(root, choice, experts), (name, [root])]
    return units


@dataclass(frozen=True)
class ParamSlot:
    """Location of a parameter, which identifies it: FSDP2 replaces the parameter object."""

    name: str
    owner: nn.Module
    attribute: str

    @property
    def param(self) -> nn.Parameter:
        """Parameter that is there now."""
        param = getattr(self.owner, self.attribute)
        assert isinstance(param, nn.Parameter)
        return param


def swap(modules: Iterable[nn.Module], params: Mapping[nn.Parameter, nn.Parameter]) -> None:
    """Replace parameters throughout `modules` and the modules inside them."""
    for module in {each for of in modules for each in of.modules()} if params else ():
        for attribute, param in [*module.named_parameters(recurse=False, remove_duplicate=False)]:
            if param in params:
                setattr(module, attribute, params[param])


def slots_by_unit(
    model: nn.Module, units: list[tuple[str, list[nn.Module]]], aliases: Mapping[str, str] | None = None
) -> dict[str, list[ParamSlot]]:
    """Return the location of each floating-point parameter, trained or frozen, under the first unit that has it.

    `aliases` replaces parameter names.

    Raises:
        ValueError: If a parameter is complex, or the model has no parameters.
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


def shapes_of(
    slots: Mapping[str, Sequence[ParamSlot]],
    units: Units,
    roots: Sequence[nn.Module],
    codec: WeightCodec | None = None,
) -> list[UnitShape]:
    """Return the unsharded shapes of the units, which include the `roots` of `roots_of`.

    `codec` is the format of frozen matrices; None leaves them in the working dtype.
    """
    in_blocks = {module for root in roots for _, block in find_blocks(root) for module in block.modules()}
    last = {*roots, *(end[1] for root in roots if (end := _vouched_end(root, OUTPUT)) is not None)}
    closing = {name for name, modules in units if not last.isdisjoint(modules)}
    shapes = []
    for name, of_unit in slots.items():
        params = [(slot, shape_of(slot)) for slot in of_unit]
        stored = [
            replace(param, codec=codec) if slot.owner in in_blocks and _is_quantized(slot, param) else param
            for slot, param in params
        ]
        shapes.append(UnitShape(name, tuple(stored), name in closing))
    return shapes


def params_of(model: nn.Module, codec: WeightCodec) -> list[ParamShape]:
    """Return the shapes of a model's parameters, with `codec` as the format of frozen matrices."""
    units: Units = [(ROOT, [model])]
    (whole,) = shapes_of(slots_by_unit(model, units), units, [model], codec)
    return [*whole.params]


def _is_quantized(slot: ParamSlot, param: ParamShape) -> bool:
    """Return whether a parameter of a block can be quantized: the frozen matrix of a linear layer, or of experts.

    Routers and norms have few elements and lose most. The rows of others may not be whole blocks of elements.
    """
    linear = isinstance(slot.owner, nn.Linear) or type(slot.owner).__name__ == "Conv1D"
    experts = len(param.shape) == 3 and type(slot.owner).__module__ != nn.Conv1d.__module__
    matrix = len(param.shape) == 2 and linear and slot.attribute == "weight"
    return not param.trainable and (matrix or experts) and param.row_elems % BLOCK_ELEMS == 0


def shape_of(slot: ParamSlot) -> ParamShape:
    """Return the shape of one parameter, as the ranks of a data-parallel group hold it.

    Raises:
        ValueError: For a DTensor over several axes, or one that its axis does not cut into equal parts.
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
