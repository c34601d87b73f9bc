"""Operators on sharded parameters and gradients, which mean what they mean for whole tensors.

DTensor runs an operator on the shards by a rule of its own for each, and some of these rules are wrong for uneven
shards, means, losses, views and writes. So only what is right by its nature runs on shards:

    operator                                runs on
    of one tensor, element by element;      shards, by DTensor itself: it is called as fast as ever
    products of matrices, copies,
    transposed tensors
    of several tensors of one shape,        shards, with all operands placed like one of them; numbers are joined before
    element by element; writes into one
    sum, mean, norm, max, min, any, all     shards; `full_tensor()` joins their numbers, and nothing is sent before
    any other                               whole tensors, which all ranks gather: all of them must call it

The result of whole tensors is placed like an operand of its shape, else every rank has all of it. The rest:

    a write into a gathered view, such as weight[0].zero_()     error, because it would be lost
    weight - x, an ordinary tensor                              of whole tensors; error if it differs between ranks
    p.grad.norm().item()                                        error: often only rank 0 calls it, to log it
    if p.grad.isnan().any(): continue                           the value of the whole
    nn.init.normal_(weight), on CPU                             rows of what one process draws for the whole
    loss + weight.norm()                                        the gradient of `loss` is an ordinary tensor
    loss(weight.full_tensor(), data)                            gradients are the mean over ranks, as for any loss

Only DTensors on meshes of sharded models are affected.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Sequence
from functools import cache, partial, wraps
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch.autograd.graph import Node, get_gradient_edge
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate

from dzero.utils.torch_internals import (
    Arguments,
    ExtremeOfParts,
    Keywords,
    base_of,
    become,
    detach_parts,
    handle_operators,
    local_tensor_of,
    name_of,
    number_operator,
    out_of_place,
    run_next,
    schema_of,
    set_local_tensor,
    storage_key,
    tensor_operators,
    tree_leaves,
    tree_map_only,
)
from dzero.zero.dtensors import local_of, written
from dzero.zero.offloaded_param import memory_of
from dzero.zero.watched_tensor import WatchedTensor

RIGHT_BY_NATURE = frozenset(
    {
        *("mm", "bmm", "addmm", "baddbmm"),
        *("t", "transpose", "permute", "unsqueeze"),
        *("clone", "detach", "detach_", "alias", "lift_fresh"),
        *("empty_like", "zeros_like", "ones_like", "full_like"),
        *("new_empty", "new_empty_strided", "new_zeros", "new_ones", "new_full"),
    }
)
"""Operators that DTensor runs on shards without an error of value, besides those of one tensor by element."""
NO_VALUES = frozenset({"is_same_size", "is_pinned", "record_stream", "_amp_foreach_non_finite_check_and_unscale_"})
"""Operators whose handlers in DTensor concern no values, or all ranks."""
BY_ELEMENT = frozenset({"copy_", "fill_", "zero_", "_to_copy"})
"""Operators that run element by element, although torch does not mark them so."""
DRAWN = frozenset({"normal_", "uniform_", "bernoulli_", "rand_like", "randn_like", "native_dropout"})
"""Operators that draw random values, for which DTensor has generators per rank, but on a CPU."""
NUMBERS = {
    **dict.fromkeys(("sum", "mean", "nansum", "count_nonzero", "linalg_vector_norm"), "sum"),
    **dict.fromkeys(("max", "amax", "any"), "max"),
    **dict.fromkeys(("min", "amin", "all"), "min"),
}
"""Operators that make a number of all elements, and how those of parts are joined."""

LOST = (
    "a write into rows, or another view, of a sharded tensor, of which it is a gathered copy: "
    "the write would be lost. Write into the whole tensor on all ranks: full = weight.full_tensor(), change "
    "full, then weight.copy_(distribute_tensor(full, weight.device_mesh, weight.placements))"
)
_meshes: WeakSet[DeviceMesh] = WeakSet()


def watch_operators(meshes: Iterable[DeviceMesh]) -> None:
    """Run operators on DTensors on `meshes` as the table says from now on."""
    _meshes.update(meshes)
    _average_over_ranks()
    handle_operators(_run, [operator for operator in tensor_operators() if not _is_right_by_nature(operator)])
    handle_operators(_number, [number_operator()])
    detach_parts()


def place_grads(params: Iterable[torch.Tensor]) -> list[Node]:
    """Place the gradients that expressions on sharded parameters have like these, while the result is kept."""
    nodes = []
    for param in params:
        if isinstance(param, DTensor) and param.requires_grad:
            nodes.append(get_gradient_edge(param).node)
            nodes[-1].register_prehook(partial(_place_like, param.device_mesh, param.placements))
    return nodes


def _place_like(mesh: DeviceMesh, placements: Sequence[Placement], grads: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(
        # Autograd copies what is not contiguous, and with torch 2.11 the copy of a DTensor is whole on every rank.
        (grad if grad.placements == placements else grad.redistribute(mesh, placements)).contiguous()
        if isinstance(grad, DTensor)
        else grad
        for grad in grads
    )


@cache
def _average_over_ranks() -> None:
    """Let the backward of `full_tensor()` average the gradients of the ranks, unless the caller says what they are.

    The whole tensor is the same on all ranks, but what each computes of it may depend on its own data.
    """
    whole_of = DTensor.full_tensor

    @wraps(whole_of)
    def full_tensor(self: DTensor, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        if grad_placements is None and self.requires_grad and torch.is_grad_enabled() and _is_sharded_models(self):
            sizes = self.device_mesh.shape
            grad_placements = [Partial("avg") if size > 1 else Replicate() for size in sizes]
            if any(each.is_partial() for each in self.placements):  # a norm, whose gradient takes no sums
                self = self.redistribute(placements=[Replicate()] * len(sizes))
        whole = whole_of(self, grad_placements=grad_placements)
        return local_of(whole) if getattr(whole, "use", None) is _GatheredView else whole

    DTensor.full_tensor = full_tensor  # type: ignore[method-assign]


@cache
def _is_right_by_nature(operator: Any) -> bool:
    """Return whether DTensor's own rule gives the parts of the whole result, whatever the parts."""
    schema = schema_of(operator)
    name = name_of(operator)
    if name in NO_VALUES or name in RIGHT_BY_NATURE:
        return True
    if schema.is_mutable:
        return False
    tensors = sum("Tensor" in str(argument.type) for argument in schema.arguments)
    is_random = torch.Tag.nondeterministic_seeded in operator.tags
    return tensors == 1 and torch.Tag.pointwise in operator.tags and not is_random


def _is_ordinary(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not isinstance(value, DTensor)


def _is_sharded_models(tensor: Any) -> bool:
    return isinstance(tensor, DTensor) and tensor.device_mesh in _meshes


def _cut_along(tensor: Any) -> list[Placement]:
    """Return the placements by which ranks have different parts of a DTensor of a sharded model; none for others."""
    if not _is_sharded_models(tensor):
        return []
    mesh = tensor.device_mesh
    return [p for axis, p in enumerate(tensor.placements) if mesh.size(axis) > 1 and not p.is_replicate()]


def _number(operator: Any, args: Arguments, kwargs: Keywords) -> Any:
    tensor = args[0]
    assert isinstance(tensor, DTensor)
    if not (cut := _cut_along(tensor)):
        return operator(local_tensor_of(tensor))
    if tensor.dtype == torch.bool:
        return tensor.full_tensor().item()
    raise RuntimeError(
        f"item() or float() of a DTensor whose ranks have different parts ({cut[0]}), as of p.grad.norm(), or in "
        "torch.optim.Adafactor: call .full_tensor() of it on all ranks before; optim.last_decision has the norm of all "
        "gradients, and dzero.TorchOptimizer(sharded, torch.optim.Adafactor) runs such a class"
    )


def _run(operator: Any, args: Arguments, kwargs: Keywords) -> Any:
    """Run an operator on shards where that is right, else on the whole tensors."""
    if not (_concerns_sharded_model(args) or (kwargs and _concerns_sharded_model(kwargs.values()))):
        return run_next(_run, operator, args, kwargs)
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    into = written(operator, args, kwargs)
    for tensor in into:
        _refuse_lost(tensor)
    parts = [tensor for tensor in tensors if isinstance(tensor, DTensor)]
    name = name_of(operator)
    mesh = next(part.device_mesh for part in parts if _is_sharded_models(part))
    _refuse_different(operator, filter(_is_ordinary, tensors), mesh)
    if name == "_foreach_norm":
        norms, *options = args
        assert isinstance(norms, (list, tuple))
        return [torch.ops.aten.linalg_vector_norm.default(part, *options, **kwargs) for part in norms]
    if any(map(_cut_along, parts)):
        if name in NUMBERS and (number := _part_of_number(operator, name, args, kwargs)) is not None:
            return number
        if (name == "sum" and len(args) > 1 and args[1]) or (name in DRAWN and mesh.device_type != "cpu"):
            return run_next(_run, operator, args, kwargs)
        if (aligned := _aligned(operator, name, args, kwargs, into)) is not None:
            if not into:
                return run_next(_run, operator, *aligned)
            local_args, local_kwargs = tree_map_only(DTensor, local_tensor_of, aligned)
            operator(*local_args, **local_kwargs)
            return into[0] if schema_of(operator).returns else None
        if _is_same_view(operator, args):
            return torch.ops.aten.alias.default(parts[0])
        if operator is torch.ops.aten.view.dtype:
            return _of_another_dtype(parts[0], args[1])
    return _run_whole(operator, args, kwargs, parts, into)


def _concerns_sharded_model(values: Iterable[Any]) -> bool:
    """Return whether a DTensor of a sharded model is among the arguments of an operator, or in a list among them."""
    return any(
        value.device_mesh in _meshes
        if isinstance(value, DTensor)
        else isinstance(value, (list, tuple)) and _concerns_sharded_model(value)
        for value in values
    )


def _refuse_different(operator: Any, ordinary: Iterable[torch.Tensor], mesh: DeviceMesh) -> None:
    """Refuse ordinary tensors that differ between ranks, which all ranks call this for; numbers may differ, as losses.

    Their gradients are ordinary tensors, too.
    """
    for tensor in ordinary:
        if tensor.requires_grad:
            tensor.register_hook(_as_ordinary)  # type: ignore[no-untyped-call]
        if tensor.dim() and not _is_alike(tensor, mesh):
            raise RuntimeError(
                f"{operator} of a sharded tensor and an ordinary tensor of shape {tuple(tensor.shape)} "
                "that differs between ranks: take full_tensor() of the sharded one"
            )


def _is_alike(tensor: torch.Tensor, mesh: DeviceMesh) -> bool:
    """Return whether all ranks of a mesh have the same tensor, by a checksum of its bytes."""
    content = local_of(tensor.detach()).cpu().clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)
    checksum = zlib.crc32(repr((tensor.shape, tensor.dtype)).encode() + content.numpy().tobytes())
    least = torch.tensor([checksum, -checksum], device=mesh.device_type)
    for axis, ranks in enumerate(mesh.shape):
        if ranks > 1:
            dist.all_reduce(least, dist.ReduceOp.MIN, group=mesh.get_group(axis))
    smallest, largest = least.tolist()
    return bool(smallest == -largest)


def _as_ordinary(grad: torch.Tensor) -> torch.Tensor:
    return grad.full_tensor() if isinstance(grad, DTensor) else grad


def _refuse_lost(tensor: torch.Tensor) -> None:
    """Refuse a write into a view of a sharded tensor that does not lie in its memory, because it was gathered."""
    base = base_of(tensor)
    if base is tensor or not isinstance(base, DTensor) or not _is_sharded_models(tensor):
        return
    if _memory(tensor) != _memory(base):
        raise RuntimeError(LOST)


def _memory(tensor: torch.Tensor) -> object:
    memory = memory_of(tensor)
    return storage_key(local_of(tensor).untyped_storage()) if memory is None else memory


def _aligned(
    operator: Any, name: str, args: Arguments, kwargs: Keywords, into: Sequence[torch.Tensor]
) -> tuple[Any, Any] | None:
    """Return arguments whose tensors are all placed alike, for an operator by element; None if that cannot be."""
    ordinary = [leaf for leaf in tree_leaves((args, kwargs)) if _is_ordinary(leaf)]
    if (
        not _is_by_element(operator, name)
        or torch.Tag.nondeterministic_seeded in operator.tags
        or any(tensor.dim() for tensor in ordinary)
    ):
        return None
    aligned: dict[int, DTensor] = {}
    for group in _groups(name, args, kwargs):
        written_here = [part for part in group if any(part is tensor for tensor in into)]
        like = next((part for part in written_here or group if part.dim() and _cut_along(part)), None)
        if like is None or any(each.is_partial() for each in _cut_along(like)):
            return None
        if any(part.dim() and part.shape != like.shape for part in group):
            return None
        if any(part.placements != like.placements for part in written_here):
            return None
        for part in group:
            placements = like.placements if part.dim() else [Replicate()] * part.device_mesh.ndim
            aligned[id(part)] = _redistributed(part, placements)
    args, kwargs = tree_map_only(DTensor, lambda part: aligned[id(part)], (tuple(args), dict(kwargs)))
    return args, kwargs


@cache
def _is_by_element(operator: Any, name: str) -> bool:
    """Return whether elements of the result depend on those in the same place, and on numbers."""
    if name.startswith("_foreach_"):
        return hasattr(torch.ops.aten, name.removesuffix("_") + "_")
    if name.startswith("_fused_") or name in BY_ELEMENT:
        return True
    return torch.Tag.pointwise in operator.tags or torch.Tag.pointwise in out_of_place(operator).tags


def _groups(name: str, args: Arguments, kwargs: Keywords) -> list[list[DTensor]]:
    """Return the DTensors that an operator computes with each other; of lists, those in the same places."""
    values = [*args, *kwargs.values()]
    if not name.startswith(("_foreach_", "_fused_")):
        return [[leaf for leaf in tree_leaves(values) if isinstance(leaf, DTensor)]]
    lists = [value for value in values if isinstance(value, (list, tuple)) and value]
    lists = [value for value in lists if any(isinstance(each, torch.Tensor) for each in value)]
    single = [value for value in values if isinstance(value, DTensor)]
    return [[each for each in (*row, *single) if isinstance(each, DTensor)] for row in zip(*lists, strict=True)]


def _redistributed(part: DTensor, placements: Sequence[Placement]) -> DTensor:
    if tuple(part.placements) == tuple(placements):
        return part
    with torch.no_grad():
        return DTensor.redistribute(part.detach(), placements=placements)  # type: ignore[arg-type]


def _is_same_view(operator: Any, args: Arguments) -> bool:
    """Return whether a view shows all elements of its operand in their places, as weight[:] does."""
    tensor = args[0]
    if not operator.is_view or not isinstance(tensor, DTensor) or tensor.is_complex():
        return False
    outline = torch.empty(0, device="meta", dtype=tensor.dtype).as_strided(tensor.shape, tensor.stride())
    view = operator(outline, *args[1:])
    return (
        isinstance(view, torch.Tensor)
        and (view.shape, view.stride(), view.dtype) == (outline.shape, outline.stride(), outline.dtype)
        and bool(view.storage_offset() == 0)
    )


def _of_another_dtype(tensor: DTensor, dtype: Any) -> DTensor:
    """Return the bytes of a sharded tensor as another dtype, in its own memory if the size of an element is the same.

    Else it is a gathered copy, which torch gives no base, so that it watches for writes itself.
    """
    if dtype.itemsize == tensor.dtype.itemsize:
        return _placed(local_tensor_of(tensor).view(dtype), tensor, tensor.placements, shaped=tensor)
    return _placed(WatchedTensor(_gathered(tensor).view(dtype), _GatheredView), tensor, _everywhere(tensor))


class _GatheredView:
    """Watcher of a gathered view, in which every write would be lost."""

    def before_read(self) -> None:
        """Allow reads."""

    def before_write(self) -> None:
        """Refuse a write."""
        raise RuntimeError(LOST)

    def before_address(self) -> None:
        """Allow what may be a read."""


def _part_of_number(operator: Any, name: str, args: Arguments, kwargs: Keywords) -> Any:
    """Return a number of all elements as numbers of parts, which `full_tensor()` joins later; None for others.

    Nothing is sent, because often only one rank takes such a number, to log it.
    """
    tensor = args[0]
    if not isinstance(tensor, DTensor) or not all(each.is_shard() for each in _cut_along(tensor)):
        return None
    if not tensor.dim() or not tensor.numel():
        return None
    options: dict[str, Any] = dict(zip((each.name for each in schema_of(operator).arguments), args, strict=False))
    options |= kwargs
    dims = options.get("dim")
    dims = [dims] if isinstance(dims, int) else dims
    is_of_all = not dims or len({dim % tensor.dim() for dim in dims}) == tensor.dim()
    if options.get("keepdim") or not is_of_all or "out" in options or "other" in options:
        return None
    local, dtype = local_tensor_of(tensor), options.get("dtype")  # which reports the read
    if name == "linalg_vector_norm":
        return _norm(operator, tensor, options.get("ord", 2), dtype)
    if NUMBERS[name] != "sum":
        truths = local.ne(0) if name in {"any", "all"} else local
        return _joined(_extreme(truths, NUMBERS[name]), tensor, NUMBERS[name])
    if name == "count_nonzero":
        return _joined((local != 0).sum(), tensor, "sum")
    if name in {"sum", "nansum"}:
        return _joined((local.sum if name == "sum" else local.nansum)(dtype=dtype), tensor, "sum")
    if not (dtype or local.dtype).is_floating_point:  # complex numbers, or torch's error about the mean of integers
        return None
    wide = torch.promote_types(dtype or local.dtype, torch.float32)
    return _joined((local.sum(dtype=wide) / tensor.numel()).to(dtype or local.dtype), tensor, "sum")


def _norm(operator: Any, tensor: DTensor, order: Any, dtype: Any) -> Any:
    """Return a norm of all elements as those of parts; DTensor's own joins those of finite positive order."""
    if 0 < order < math.inf:
        return run_next(_run, operator, (tensor, order), {"dtype": dtype})
    sizes = local_tensor_of(tensor).to(dtype or tensor.dtype).abs()
    if order == 0:
        return _joined((sizes != 0).sum(dtype=sizes.dtype), tensor, "sum")
    if abs(order) == math.inf:
        return _joined(_extreme(sizes, "max" if order > 0 else "min"), tensor, "max" if order > 0 else "min")
    return None


def _extreme(local: torch.Tensor, kind: str) -> torch.Tensor:
    """Return the largest or smallest element of a part, NaN if there is one; of an empty part, what any other beats."""
    if local.numel():
        return local.amax() if kind == "max" else local.amin()
    if local.dtype == torch.bool:
        return local.new_full((), kind == "min")
    if not local.is_floating_point():
        limits = torch.iinfo(local.dtype)
        return local.new_full((), limits.min if kind == "max" else limits.max)
    return local.new_full((), -math.inf if kind == "max" else math.inf)


def _joined(part: torch.Tensor, of: DTensor, kind: str) -> DTensor:
    """Return the number of a part as the part of a number of all elements of `of`."""
    join = Partial() if kind == "sum" else ExtremeOfParts(kind)
    axes = zip(of.device_mesh.shape, of.placements, strict=True)
    return _placed(part, of, [join if size > 1 and at.is_shard() else Replicate() for size, at in axes])


def _run_whole(
    operator: Any, args: Arguments, kwargs: Keywords, parts: Sequence[DTensor], into: Sequence[torch.Tensor]
) -> Any:
    """Run an operator on the gathered tensors, write back what it wrote, and place what it returns."""
    cut = [part for part in parts if _cut_along(part)]
    if torch.Tag.inplace_view in operator.tags:
        raise RuntimeError(
            f"{operator} of a sharded tensor, a change of its shape in place, which quantile, vector @ matrix and "
            "others make of their own: call them on full_tensor() of it, on all ranks, and write into a weight by "
            "weight.copy_(distribute_tensor(full, weight.device_mesh, weight.placements))"
        )
    whole = {id(part): _gathered(part) if _cut_along(part) else local_tensor_of(part) for part in parts}
    whole_args, whole_kwargs = tree_map_only(DTensor, lambda part: whole[id(part)], (tuple(args), dict(kwargs)))
    result = operator(*whole_args, **whole_kwargs)
    for part in into:
        if isinstance(part, DTensor) and _cut_along(part):
            _write_back(operator, part, whole[id(part)])
    passed = {id(whole[id(part)]) if isinstance(part, DTensor) else id(part): part for part in into}
    shards = [part for part in parts if _is_sharded(part)]

    def placed(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) in passed:
            return passed[id(tensor)]
        like = None if operator.is_view else next((part for part in shards if part.shape == tensor.shape), None)
        if like is None:
            return _placed(tensor, parts[0], _everywhere(parts[0]))
        return _own_part(tensor, like) if cut else _placed(tensor, like, like.placements)

    return tree_map_only(torch.Tensor, placed, result)


def _write_back(operator: Any, part: DTensor, whole: torch.Tensor) -> None:
    """Let a DTensor have the values of a whole tensor; numbers of parts become whole."""
    if whole.shape != part.shape:
        raise RuntimeError(f"{operator} changes the shape of a sharded tensor to {tuple(whole.shape)}")
    if any(each.is_partial() for each in part.placements):
        become(part, _placed(whole, part, _everywhere(part)))
    else:
        local_tensor_of(part).copy_(local_of(_own_part(whole, part)))


def _is_sharded(part: DTensor) -> bool:
    return any(each.is_shard() for each in part.placements) and not any(each.is_partial() for each in part.placements)


def _everywhere(like: DTensor) -> list[Placement]:
    return [Replicate()] * like.device_mesh.ndim


def _gathered(tensor: DTensor) -> torch.Tensor:
    """Return the whole of a DTensor, in memory of its own."""
    with torch.no_grad():
        whole: torch.Tensor = DTensor.full_tensor(tensor.detach())  # type: ignore[arg-type]
        own = local_of(tensor)
        return whole.clone() if whole.numel() and whole.data_ptr() == own.data_ptr() else whole


def _placed(
    local: torch.Tensor, like: DTensor, placements: Sequence[Placement], *, shaped: torch.Tensor | None = None
) -> DTensor:
    """Return a DTensor on the mesh of another one, of the shape of `shaped` if its ranks have different parts.

    A watched local tensor stays the one that reports its uses.
    """
    plain = local_of(local)
    whole = plain if shaped is None else shaped
    with torch.no_grad():
        placed = DTensor.from_local(
            plain, like.device_mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
        )
    if plain is not local:
        set_local_tensor(placed, local)
    return placed


def _own_part(whole: torch.Tensor, like: DTensor) -> DTensor:
    """Return this rank's part of a tensor that all ranks have, as a DTensor placed like another one."""
    with torch.no_grad():
        everywhere = DTensor.from_local(whole, like.device_mesh, _everywhere(like), run_check=False)
        return everywhere.redistribute(placements=like.placements)
