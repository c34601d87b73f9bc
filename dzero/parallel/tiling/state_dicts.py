"""State dicts of tiled modules, with the keys and shapes of the untiled module.

On save, the tiles of a parameter are joined into one tensor; on load, it is cut. With sharded parameters both are
DTensors with `Shard(0)`. Tiles cut along dim 1 are adjacent on every rank. Tiles cut along dim 0 are on other ranks
than the same rows of the whole, so rows move between ranks, one tile at a time: no rank holds more than its own rows of
the whole and one gathered tile. Making or loading a state dict is therefore a collective that every rank must call. A
state dict holds copies: values read into its tensors take effect only through `load_state_dict`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from dzero.parallel.tiling.tiles import TileCut, Tiles


@torch.no_grad()
def join_on_save(module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: object) -> None:
    """Join the tiles in a state dict; post-hook of a tiled module."""
    tiles = module.tiles
    assert isinstance(tiles, Tiles)
    for cut in tiles.cuts:
        parts = [
            state_dict.pop(f"{prefix}tiles.{index}.{cut.key}")
            for index in range(len(cut.sizes))
            if tiles.param(index, cut) is not None
        ]
        state_dict[prefix + cut.key] = join(parts, cut)


@torch.no_grad()
def cut_on_load(
    module: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    local_metadata: object,
    strict: bool,
    missing_keys: list[str],
    unexpected_keys: list[str],
    error_msgs: list[str],
) -> None:
    """Cut whole parameters in a state dict into tiles; load pre-hook of a tiled module."""
    tiles = module.tiles
    assert isinstance(tiles, Tiles)
    for cut in tiles.cuts:
        key = prefix + cut.key
        params = {index: param for index in range(len(cut.sizes)) if (param := tiles.param(index, cut)) is not None}
        whole, shape = state_dict.pop(key, None), _whole_shape(params[0], cut)
        parts: Mapping[int, Tensor] = params  # loaded into themselves if the state dict has no fitting tensor
        if whole is None:
            missing_keys.append(key)
        elif whole.shape != shape:
            error_msgs.append(f"size mismatch for {key}: {tuple(whole.shape)} in the state dict, {shape} in the model")
        else:
            parts = {index: part_of(whole, cut, index, param) for index, param in params.items()}
        state_dict.update({f"{prefix}tiles.{index}.{cut.key}": part for index, part in parts.items()})


@torch.no_grad()
def join_optimizer(model: nn.Module, packed: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a result of `get_optimizer_state_dict(model, optim)` to untiled names and shapes. Collective.

    Raises:
        ValueError: If a state is not placed like its parameter, as 8-bit states, whose blocks follow the tiles.
    """
    state, groups = dict(packed["state"]), packed["param_groups"]
    names = {}
    for whole, cut, parts in tiled(model):
        names.update({part: whole if index == 0 else None for index, part in enumerate(parts)})
        kept = [state.pop(part) for part in parts if part in state]
        if kept:
            params = [model.get_parameter(part) for part in parts]
            state[whole] = {key: _joined_state(whole, key, [s[key] for s in kept], cut, params[0]) for key in kept[0]}
    renamed = [[names.get(param, param) for param in group["params"]] for group in groups]
    filtered = [[name for name in of_group if name is not None] for of_group in renamed]
    return {
        **packed,
        "state": state,
        "param_groups": [{**group, "params": params} for group, params in zip(groups, filtered, strict=True)],
    }


@torch.no_grad()
def cut_optimizer(model: nn.Module, packed: Mapping[str, Any]) -> dict[str, Any]:
    """Convert untiled optimizer states for `set_optimizer_state_dict(model, optim, …)`. Collective."""
    state, groups = dict(packed["state"]), packed["param_groups"]
    names = {}
    for whole, cut, parts in tiled(model):
        names[whole] = parts
        if (kept := state.pop(whole, None)) is not None:
            for index, part in enumerate(parts):
                param = model.get_parameter(part)
                state[part] = {key: _state_of_part(value, cut, index, param) for key, value in kept.items()}
    return {
        **packed,
        "state": state,
        "param_groups": [
            {**group, "params": [part for name in group["params"] for part in names.get(name, [name])]}
            for group in groups
        ],
    }


def tiled(model: nn.Module) -> Iterator[tuple[str, TileCut, list[str]]]:
    """Yield untiled name, cut, and names of the parts of every tiled parameter."""
    for name, tiles in model.named_modules():
        if isinstance(tiles, Tiles):
            for cut in tiles.cuts:
                parts = [i for i in range(len(cut.sizes)) if tiles.param(i, cut) is not None]
                yield name.removesuffix("tiles") + cut.key, cut, [f"{name}.{i}.{cut.key}" for i in parts]


def _joined_state(name: str, key: str, parts: Sequence[Any], cut: TileCut, param: nn.Parameter) -> Any:
    if not isinstance(parts[0], Tensor) or parts[0].ndim == 0:
        return parts[0]  # a step count, equal for all tiles
    if parts[0].shape != param.shape:
        raise ValueError(
            f"{key} of {name} is not shaped like its parameter (8-bit moments lie in blocks of their shards), so the "
            "tiles' cannot be joined: take precision.moments=fp32 or bf16, or save it under the tiles' own names, for "
            "the same tiles and ranks"
        )
    return join(parts, cut)


def _state_of_part(whole: Any, cut: TileCut, index: int, param: nn.Parameter) -> Any:
    if not isinstance(whole, Tensor):
        return whole
    return whole.clone() if whole.ndim == 0 else part_of(whole, cut, index, param)


def join(parts: Sequence[Tensor], cut: TileCut) -> Tensor:
    """Join the tiles of a parameter, or of its state."""
    first = parts[0]
    if cut.dim is None:
        return first
    if not isinstance(first, DTensor):
        return torch.cat([*parts], cut.dim)
    locals_ = [part.to_local() for part in parts if isinstance(part, DTensor)]
    shape, mesh = _whole_shape(first, cut), first.device_mesh
    if cut.dim > 0:
        return _sharded(torch.cat(locals_, cut.dim), mesh, shape)
    rank, ranks = mesh.get_local_rank(), mesh.size()
    lower, upper = _rows_of(rank, shape[0], ranks)
    mine = first.to_local().new_empty((upper - lower, *shape[1:]))
    for index, local in enumerate(locals_):
        start, size = cut.span(index)
        gathered = _gather(local, [_rows_of(each, size, ranks) for each in range(ranks)], mesh)
        begin, end = max(lower, start), min(upper, start + size)
        if begin < end:
            mine[begin - lower : end - lower] = gathered[begin - start : end - start]
    return _sharded(mine, mesh, shape)


def part_of(whole: Tensor, cut: TileCut, index: int, like: Tensor) -> Tensor:
    """Return tile `index` of a whole parameter, or of its state, placed like the tile `like`."""
    if not isinstance(whole, DTensor):
        part = whole if cut.dim is None else whole.narrow(cut.dim, *cut.span(index))
        if isinstance(like, DTensor):  # every rank has the whole
            return distribute_tensor(part, like.device_mesh, like.placements, src_data_rank=None)
        return part
    if cut.dim is None:
        return whole
    whole = whole.redistribute(placements=[Shard(0)])
    mesh, (start, size) = whole.device_mesh, cut.span(index)
    local, shape = whole.to_local(), list(whole.shape)
    shape[cut.dim] = size
    if cut.dim > 0:
        return _sharded(local.narrow(cut.dim, start, size).contiguous(), mesh, tuple(shape))
    rank, ranks = mesh.get_local_rank(), mesh.size()
    spans = [_rows_of(each, whole.shape[0], ranks) for each in range(ranks)]
    within = [(min(max(low - start, 0), size), min(max(high - start, 0), size)) for low, high in spans]
    first = within[rank][0] + start - spans[rank][0]  # index in this rank's rows of the first one in the tile
    gathered = _gather(local[first : first + within[rank][1] - within[rank][0]], within, mesh)
    low, high = _rows_of(rank, size, ranks)
    return _sharded(gathered[low:high].clone(), mesh, tuple(shape))


def _gather(local: Tensor, rows: Sequence[tuple[int, int]], mesh: DeviceMesh) -> Tensor:
    """Gather on every rank the rows of all ranks, `rows[r]` of mesh rank r, as bytes of any dtype."""
    gathered = local.new_empty((rows[-1][1], *local.shape[1:]))
    low, high = rows[mesh.get_local_rank()]
    gathered[low:high] = local
    for rank, (low, high) in enumerate(rows):
        if low < high and mesh.size() > 1:
            dist.broadcast(gathered[low:high].view(-1).view(torch.uint8), group=mesh.get_group(), group_src=rank)
    return gathered


def _rows_of(rank: int, rows: int, ranks: int) -> tuple[int, int]:
    """Return the rows [first, last) of a rank under `Shard(0)`."""
    step = -(-rows // ranks)
    return min(rank * step, rows), min((rank + 1) * step, rows)


def _whole_shape(part: Tensor, cut: TileCut) -> tuple[int, ...]:
    shape = list(part.shape)
    if cut.dim is not None:
        shape[cut.dim] = sum(cut.sizes)
    return tuple(shape)


def _sharded(local: Tensor, mesh: DeviceMesh, shape: tuple[int, ...]) -> DTensor:
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=torch.Size(shape), stride=stride)
