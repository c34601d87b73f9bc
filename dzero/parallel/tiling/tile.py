"""Memory-centric tiling (ZeRO-Infinity, section 5.1.3): large operators in tiles that are gathered and freed in turn.

    module                                    cut along            tiles give          joined by
    nn.Linear                                 output features      y[..., rows]        concatenation, no rounding
    nn.Embedding                              rows                 rows of their ids   choice, no rounding
    MLP: down(act(gate(x)) * up(x))           hidden features      a part of the sum   addition in fp32, rounded once

A Linear is cut along output features, not input features: each output stays one dot product, and ZeRO shards the same
dim 0. The hidden features of an MLP meet in only one sum, so a tile is a narrower MLP of the same class. If backward
recomputes a tile's forward, hidden activations also exist for one tile at a time. The bias of `down` belongs to the
first tile. The gradient of x is a sum over tiles, in fp32 and rounded once (tiling/shared_input.py).

Note: module attributes. The module keeps its class name, children, hooks and position. Its parameters become None, and
the new child `tiles` holds theirs. Each tile is a unit (`zero/units.py`). State dicts have the untiled keys and shapes
(`tiling/state_dicts.py`). `named_parameters()`, and thus names in logs and optimizer groups, refer to the tiles.

Note: values. A module with values is cut at once. On meta, `fill_tiles` fills the untiled parameters whole, one Linear
or Embedding at a time and once for each tile, and cuts them. The values thus equal those of the untiled model,
whatever their source.
"""

from __future__ import annotations

import copy
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dzero.parallel.forward_wrapping import Forward, checkpointed_part, keep, wrap_method
from dzero.parallel.tiling.embedding import looked_up_in_tiles, set_rows, tile_looking_up, untileable
from dzero.parallel.tiling.shared_input import input_for_each
from dzero.parallel.tiling.state_dicts import cut_on_load, join_on_save
from dzero.parallel.tiling.tiles import TileCut, Tiles
from dzero.utils.torch_internals import hooked_param

# Names in an MLP of the Linears cut along output features, and of the one cut along input features.
MLPS = ((("gate", "up"), "down"), (("gate_proj", "up_proj"), "down_proj"))


def tile(module: nn.Module, n: int, *, recompute: bool = False) -> nn.Module:
    """Tile `module` in place and return it; call this before the model is sharded.

    Args:
        module: An nn.Linear, an nn.Embedding, or an MLP whose only parameters are those of three nn.Linear named as in
            `MLPS`.
        n: Number of tiles.
        recompute: Keep only the input for backward, and recompute each tile. A checkpointed block needs this: its
            recomputation stops before the tiles, and would otherwise gather all of them at once. An nn.Embedding keeps
            no more than its input anyway.

    Raises:
        ValueError: If the module cannot be tiled, or `n` is less than 1 or more than the features or rows.
    """
    tile_all([module], n, recompute=recompute)
    return module


def tile_all(modules: Sequence[nn.Module], n: int, *, recompute: bool = False) -> None:
    """Tile each module as `tile` does; modules of one class keep sharing a class, and so a compilation."""
    if n < 1:
        raise ValueError(f"tiles={n}: must be a whole number ≥ 1")
    plans = [(module, _plan(module, n)) for module in modules]  # checks all modules before any is cut
    if n == 1:
        return
    for module, cuts in plans:
        _cut(module, cuts, n, recompute)
    lookups = [module for module in modules if isinstance(module, nn.Embedding)]
    linears = [module for module in modules if isinstance(module, nn.Linear)]
    mlps = [module for module in modules if not isinstance(module, (nn.Embedding, nn.Linear))]
    if recompute:
        wrap_method([each for module in (*linears, *mlps) for each in tiles_of(module)], "forward", checkpointed_part)
    wrap_method([each for module in lookups for each in tiles_of(module)], "forward", tile_looking_up)
    wrap_method(lookups, "forward", looked_up_in_tiles)
    wrap_method(linears, "forward", _concatenated)
    wrap_method(mlps, "forward", _added)


def tiles_of(module: nn.Module) -> list[nn.Module]:
    """Return the tiles of a module, or an empty list if it is not tiled."""
    tiles = getattr(module, "tiles", None)
    return [*tiles.children()] if isinstance(tiles, Tiles) else []


def is_mlp(module: nn.Module) -> bool:
    """Return whether `tile` recognizes the module as an MLP."""
    return _mlp_names(module) is not None


def find_tiles(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return (name, tile) of every tile; raise ValueError if a tiled parameter is used or tiled elsewhere too."""
    found = []
    params = {*model.parameters()}
    cut: set[int] = set()
    for name, module in model.named_modules():
        if isinstance(module, Tiles):
            origins = {id(origin) for origin in module.origins}  # Python creates one such weak reference per object
            if origins & cut or any(origin() in params for origin in module.origins):
                raise ValueError(
                    f"{name.removesuffix('.tiles')} was tiled, but the model uses its parameter elsewhere too: tied "
                    "parameters cannot be tiled (a tied head: tile_loss cuts its loss by tokens instead)"
                )
            cut |= origins
            found += [(f"{name}.{index}", each) for index, each in module.named_children()]
    return found


def count_tiles(model: nn.Module) -> int:
    """Return the largest number of tiles of a module of `model`; 1 if none has tiles."""
    parents = Counter(name.rpartition(".")[0] for name, _ in find_tiles(model))
    return max(parents.values(), default=1)


def fill_tiles(model: nn.Module, materialise: Callable[[nn.Module], None]) -> Callable[[nn.Module], None]:
    """Return a function that fills a model with tiles by `materialise`, which fills the untiled modules."""
    whose = {each: (module, index) for module in model.modules() for index, each in enumerate(tiles_of(module))}

    def fill(module: nn.Module) -> None:
        for each in module.modules():
            if each in whose:
                _fill(*whose[each], materialise)
        materialise(module)

    return fill


def _fill(module: nn.Module, index: int, materialise: Callable[[nn.Module], None]) -> None:
    """Fill a tile from untiled layers, each restored for a moment at its position, with its name and initializer."""
    tiles = module.tiles
    assert isinstance(tiles, Tiles)
    module.register_module("tiles", None)  # `materialise` needs the untiled module
    on_meta = [cut for cut in tiles.cuts if (param := tiles.param(index, cut)) is not None and param.is_meta]
    for owner, cuts in itertools.groupby(on_meta, key=lambda cut: cut.owner):
        linear = module.get_submodule(owner)
        whole = {cut: tiles.on_meta[cut.key] for cut in tiles.cuts if cut.owner == owner}
        for cut, param in whole.items():
            setattr(linear, cut.attribute, param)
        materialise(linear)
        for cut in cuts:
            tiles.put(index, cut, getattr(linear, cut.attribute))
        for cut in whole:
            setattr(linear, cut.attribute, None)
    module.register_module("tiles", tiles)


def _plan(module: nn.Module, n: int) -> list[TileCut]:
    """Return the cut of every parameter of `module`; raise ValueError if it cannot be tiled."""
    kind = type(module).__name__
    if tiles_of(module):
        raise ValueError(f"{kind} is in {len(tiles_of(module))} tiles already: tile it once")
    if any(isinstance(param, DTensor) for param in module.parameters()):
        raise ValueError(f"{kind} is sharded already: tile it before the model is sharded")
    if (hooked := hooked_param(dict(module.named_parameters()))) is not None:
        raise ValueError(
            f"{hooked} of {kind} has a hook of its own, which would see gradients of tiles: set it aside "
            "(handle.remove()), or leave this module whole"
        )
    params = dict(module.named_parameters(remove_duplicate=False))
    names = _mlp_names(module) if len({*params.values()}) == len(params) else None
    if isinstance(module, nn.Linear) and params.keys() <= {"weight", "bias"}:
        dims: dict[str, int | None] = {"weight": 0, "bias": 0}
        features, what = module.out_features, "output features"
    elif isinstance(module, nn.Embedding) and params.keys() == {"weight"}:
        if reason := untileable(module):
            raise ValueError(f"{kind} cannot be tiled: {reason}")
        dims, features, what = {"weight": 0}, module.num_embeddings, "rows"
    elif names is not None:
        widening, narrowing = names
        dims = {f"{name}.{attribute}": 0 for name in widening for attribute in ("weight", "bias")}
        dims |= {f"{narrowing}.weight": 1, f"{narrowing}.bias": None}
        features, what = module.get_parameter(f"{narrowing}.weight").shape[1], "hidden features"
    else:
        raise ValueError(
            f"{kind} with the parameters {[*params]} cannot be tiled: an nn.Linear and an nn.Embedding can, and an "
            "MLP whose only parameters are those of three nn.Linear named "
            f"{' or '.join(str([*wide, narrow]) for wide, narrow in MLPS)}"
        )
    if n > features:
        raise ValueError(f"tiles={n}: {kind} has {features} {what}; take at most as many tiles")
    sizes = tuple(features // n + (index < features % n) for index in range(n))
    return [TileCut(key, dims[key], sizes) for key in params]


def _mlp_names(module: nn.Module) -> tuple[tuple[str, ...], str] | None:
    owners = {name: child for name, child in module.named_modules() if [*child.named_parameters(recurse=False)]}
    for widening, narrowing in MLPS:
        if owners.keys() == {*widening, narrowing} and all(isinstance(child, nn.Linear) for child in owners.values()):
            return widening, narrowing
    return None


def _cut(module: nn.Module, cuts: list[TileCut], n: int, recompute: bool) -> None:
    """Move the parameters of `module` into `n` narrower copies of it."""
    whole = {cut: module.get_parameter(cut.key) for cut in cuts}
    for cut in cuts:
        setattr(module.get_submodule(cut.owner), cut.attribute, None)
    empty = copy.deepcopy(module)
    tiles = Tiles(cuts, whole, recompute)
    for index in range(n):
        tiles.add_module(str(index), copy.deepcopy(empty))
        for cut, param in whole.items():
            tiles.put(index, cut, param)
        set_rows(tiles.get_submodule(str(index)), *cuts[0].span(index))
    module.tiles = tiles
    module.register_state_dict_post_hook(join_on_save)  # type: ignore[no-untyped-call]
    module.register_load_state_dict_pre_hook(cut_on_load)  # type: ignore[no-untyped-call]


def _concatenated(_: Forward) -> Forward:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        """Map x [..., inputs] to [..., outputs]."""
        return torch.cat([*_outputs(self, x)], dim=-1)

    return forward


def _added(_: Forward) -> Forward:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        """Map x [..., inputs] to the same shape, with partial sums in fp32."""
        outputs = _outputs(self, x)
        first = next(outputs)
        total = first.float()
        for output in outputs:
            total = total + output
        return total.to(first.dtype)

    return forward


def _outputs(module: nn.Module, x: Tensor) -> Iterator[Tensor]:
    """Return an iterator that computes the output of each tile for x on demand."""
    tiles = module.tiles
    assert isinstance(tiles, Tiles)
    again = (keep(x, len(tiles_of(module))),) if tiles.recompute and torch.is_grad_enabled() else ()
    read = input_for_each(x)
    return (tile(read(), *again) for tile in tiles.children())
