"""Expert parallelism: neighboring ranks share the experts of a mixture, and tokens are sent to their experts.

    rows, sorted by expert -> to the rank that has the expert -> sorted by expert there -> its experts -> back again

Each rank of ep has 1/ep of every expert parameter, along dim 0. ZeRO shards that further over the ranks that have the
same experts (`Layout.of_unit`), so modules of experts are units of their own.

A rank's loss is the mean over its own tokens, and gradients are averaged over all data-parallel ranks, so the whole
loss is the mean over these ranks. Experts get gradients of the tokens of ep ranks, and are averaged over 1/ep as many.
Gradients that come to experts from the loss are therefore divided by ep, and those that continue to the tokens are
multiplied by it. Ranks of tp have parts of the same sequences and one loss together, so with tp the factor is ep / tp,
the number of losses that ep ranks have.

All ranks take part in every exchange, with however few rows. Experts without rows get gradients of zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from dzero.comm.expert_exchange import PHASE, ExpertExchange
from dzero.comm.ledger import Entry, Ledger, Traffic, dtype_key
from dzero.mesh import EXPERT, expert_mesh, tensor_ranks
from dzero.models.moe import numbers_of
from dzero.parallel.cut_params import CutParams, Places, local_params, own_of, part_of
from dzero.parallel.forward_wrapping import Forward, wrap_method


class ExpertParallel(CutParams):
    """The split experts of a model, as returned by `parallelize_experts` and taken by `shard`.

    Attributes:
        mesh: Mesh (replicate, shard, ep) of the ranks with the same layers.
        losses: Number of losses that the ranks of ep have between them.
        modules: Modules that hold experts, by name.
        ledger: Counts the traffic of experts, here and in `shard`.
        rows_moved: Rows sent to and received from other ranks in all forwards with gradients so far.
    """

    def __init__(
        self,
        mesh: DeviceMesh,
        losses: int,
        modules: dict[str, nn.Module],
        made: dict[nn.Parameter, nn.Parameter],
        places: Places,
    ) -> None:
        super().__init__(mesh[EXPERT], made, places)
        self.mesh, self.losses, self.modules, self.ledger, self.rows_moved = mesh, losses, modules, Ledger(), 0
        self.exchange = ExpertExchange(mesh.get_group(EXPERT), EXPERT, self.ledger)


def parallelize_experts(
    model: nn.Module, mesh: DeviceMesh, ep: int, is_experts: Callable[[nn.Module], bool] | None = None
) -> ExpertParallel:
    """Split the experts of `model` over `ep` neighboring ranks, in place. Collective over `mesh`.

    Call this before `shard` and, with tp, before `parallelize`; the ranks of tp are then among the `ep`.

    Args:
        model: Model with experts.
        mesh: Mesh of `make_mesh`.
        ep: Ranks that share the experts.
        is_experts: Returns whether a module holds experts; by default, if its class is named Experts. Such a module is
            called as `experts(rows, counts)`, with rows [n, ...] sorted by expert and counts int64 [experts], the rows
            of each, and returns rows [n, ...]. All its parameters stack the experts along dim 0. It must read their
            number from `counts`, which holds only those of its own experts.

    Raises:
        ValueError: If `ep` does not divide the ranks or a parameter, the model has no such module, or other modules use
            its parameters.
    """
    is_experts = is_experts or (lambda module: type(module).__name__ == "Experts")
    found = {name: module for name, module in model.named_modules() if is_experts(module)}
    if not found:
        raise ValueError(
            f"mesh.ep={ep}: {type(model).__name__} has no module of experts; take mesh.ep=1, a model with a mixture "
            "(model=tiny_moe), or say which modules they are with is_experts="
        )
    whole_mesh = expert_mesh(mesh, ep)
    axis, losses = whole_mesh[EXPERT], ep // tensor_ranks(mesh)
    places: Places = {}
    for owner, attribute, param in own_of(model):
        places.setdefault(param, []).append((owner, attribute))
    names = {param: name for name, param in model.named_parameters()}
    held = [whole for module in found.values() for _, _, whole in own_of(module)]
    for whole in held:
        _check(names[whole], whole, len(places[whole]), ep)
    made: dict[nn.Parameter, nn.Parameter] = {}
    for whole in held:
        part = _part(whole, axis)
        owner, attribute = places[whole][0]
        setattr(owner, attribute, part)
        if whole.is_meta:
            made[whole] = part
    experts = ExpertParallel(whole_mesh, losses, found, made, {whole: places[whole] for whole in made})
    for module in found.values():
        module.expert_parallel = experts
    wrap_method([*found.values()], "forward", _travelling)
    return experts


def _check(name: str, param: nn.Parameter, uses: int, ep: int) -> None:
    if uses > 1:
        raise ValueError(
            f"mesh.ep={ep}: parameter {name} of experts is used elsewhere too; ties of experts are not cut"
        )
    if param.ndim == 0 or param.shape[0] % ep:
        raise ValueError(
            f"mesh.ep={ep} does not divide dim 0 of parameter {name}, {list(param.shape)}, along which experts lie"
        )


def _part(whole: nn.Parameter, mesh: DeviceMesh) -> nn.Parameter:
    """Return this rank's part of `whole`, with the values of the first rank of `mesh`, if any."""
    values = whole.detach()
    if not whole.is_meta:
        values = values.to(mesh.device_type).contiguous()
        dist.broadcast(values, group=mesh.get_group(), group_src=0)
    shape = (whole.shape[0] // mesh.size(), *whole.shape[1:])
    local = torch.empty(shape, dtype=whole.dtype, device="meta")
    placed = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride())
    like = nn.Parameter(placed, whole.requires_grad)
    return like if whole.is_meta else part_of(like, values, mesh)


def _travelling(forward: Forward) -> Forward:
    def of_all(self: Any, rows: Tensor, counts: Tensor) -> Tensor:
        """Map rows [n, ...] of this rank to [n, ...]; counts [experts] are those of all experts."""
        experts: ExpertParallel = self.expert_parallel
        exchange = experts.exchange
        if counts.numel() % exchange.ranks:
            raise ValueError(f"mesh.ep={exchange.ranks} does not divide the {counts.numel()} experts of a mixture")
        given = counts.view(exchange.ranks, -1)
        taken = exchange.counts(given)
        give = numbers_of(given.sum(1), len(rows))
        take = numbers_of(taken.sum(1), exchange.ranks * give[exchange.rank])
        if torch.is_grad_enabled():
            experts.rows_moved += sum(give) + sum(take) - give[exchange.rank] - take[exchange.rank]
        came: Tensor = _Travel.apply(rows, exchange, give, take, float(experts.losses))  # type: ignore[no-untyped-call]
        own = torch.arange(taken.shape[1], device=rows.device).repeat(exchange.ranks)
        order = own.repeat_interleave(taken.flatten(), output_size=sum(take)).argsort(stable=True)
        with local_params(self) as params:
            out = forward(self, came[order], taken.sum(0))
        if not sum(take):
            out = _Used.apply(out, *params)  # type: ignore[no-untyped-call]
        back = torch.empty_like(out).index_copy(0, order, out)
        gone: Tensor = _Travel.apply(back, exchange, take, give, 1.0 / experts.losses)  # type: ignore[no-untyped-call]
        return gone

    return of_all


class _Travel(torch.autograd.Function):
    """Exchange of rows between ranks; backward sends their gradients back, times `scale`."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, exchange: ExpertExchange, give: Sequence[int], take: Sequence[int], scale: float
    ) -> Tensor:
        ctx.route = exchange, give, take, scale
        return exchange.rows(rows, give, take)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        exchange, give, take, scale = ctx.route
        return exchange.rows(grads[0], take, give).mul_(scale), None, None, None, None


class _Used(torch.autograd.Function):
    """Identity on `out` that also makes it depend on `params`, whose gradients are zeros if nothing else uses them.

    It serves a module that does nothing without rows: a rank without gradients would skip its reduction.
    """

    @staticmethod
    def forward(ctx: Any, out: Tensor, *params: Tensor) -> Tensor:
        ctx.params = params
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        return grads[0], *(torch.zeros_like(param) for param in ctx.params)


def expected_experts(
    *, ranks: int, experts: int, calls: int, rows_moved: int, row_elems: int, dtype: torch.dtype, recomputed: bool
) -> dict[Entry, Traffic]:
    """Return the calls and bytes sent per rank over `ranks` of ep, by ledger entry (phase experts).

    In each call, `away` of this rank's rows are for other ranks, and `came` of theirs for this rank:

            forward    counts   8 (ranks - 1) experts / ranks         once more if it is recomputed
                       rows     away there, came back                 once more if it is recomputed
            backward   rows     away there, came back

    `rows_moved` is away + came over all calls, with one forward each; a row has `row_elems` elements of `dtype`.
    """
    forwards = calls * (2 if recomputed else 1)
    row_bytes = rows_moved * row_elems * dtype.itemsize
    counts = Entry(PHASE, "all_to_all", EXPERT, dtype_key(torch.int64))
    rows = Entry(PHASE, "all_to_all", EXPERT, dtype_key(dtype))
    return {
        counts: Traffic(forwards, forwards * (ranks - 1) * (experts // ranks) * torch.int64.itemsize),
        rows: Traffic(2 * (forwards + calls), row_bytes * (3 if recomputed else 2)),
    }
