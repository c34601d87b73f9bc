"""Factorings by hand from torch's own APIs, as torchtitan's recipes go.

    tp    parallelize_module with the plan that the library has
    cp    contiguous parts of every sequence; keys and values gathered before attention, which gets a mask
    ep    rows to their experts' ranks by all_to_all_single_autograd; experts a unit over the other ranks
    pp    PipelineStage and Schedule1F1B over the library's cut, each part fully_shard's

What remains is fully_shard's over dp x cp: blocks, then the root.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from parallel_sides import Factoring, Step
from sides import ADAM
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_gather_tensor_autograd, all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel, parallelize_module

from dzero.models.moe import Experts
from dzero.parallel.pipeline.split import ModelStages, split_pipeline
from dzero.parallel.tensor.plans import plan_for

POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)


def build(model: nn.Module, stage: int, cut: Factoring, samples: int) -> Step:
    """See parallel_sides."""
    mesh = init_device_mesh("cpu", (cut.pp, cut.dp, cut.cp, cut.tp), mesh_dim_names=("pp", "dp", "cp", "tp"))
    ranks = mesh["dp", "cp"]._flatten("fsdp")
    if cut.tp > 1:
        parallelize_module(model, mesh["tp"], plan_for(model, cut.tp, "tp")[0])
    if cut.cp > 1:
        _gather_keys(model, mesh.get_group("cp"))
    parts = split_pipeline(model, mesh["pp"].get_local_rank(), cut.pp) if cut.pp > 1 else None
    keep = {"mp_policy": POLICY, "reshard_after_forward": stage == 3}
    if cut.ep > 1:
        _share_experts(model, cut, keep)
    for block in model.get_submodule("layers").children():
        if any(True for _ in block.parameters()):  # else it is on another rank of the pipeline
            fully_shard(block, mesh=ranks, **keep)
    fully_shard(model, mesh=ranks, **keep)
    optim = torch.optim.AdamW(model.parameters(), fused=True, **ADAM)
    return _Loop(model, optim, cut, mesh, parts, samples)


class _Loop:
    """A step of four kinds: with logits cut or whole, and with microbatches through a pipeline or one after another."""

    def __init__(
        self,
        model: nn.Module,
        optim: torch.optim.Optimizer,
        cut: Factoring,
        mesh: DeviceMesh,
        parts: ModelStages | None,
        samples: int,
    ) -> None:
        self.model, self.optim, self.cut, self.parts, self.samples = model, optim, cut, parts, samples
        self.group, self.own = mesh.get_group("pp"), mesh["cp"].get_local_rank()
        self.cut_logits: Any = loss_parallel if cut.tp > 1 else nullcontext
        self.schedule: Schedule1F1B | None = None
        experts = [module for module in model.modules() if isinstance(module, Experts)] if cut.ep > 1 else []
        self.experts = [param for module in experts for param in module.parameters()]

    def __call__(self, batch: Tensor) -> Tensor:
        tokens, targets = (each.chunk(self.cut.cp, dim=1)[self.own] for each in (batch[:, :-1], batch[:, 1:]))
        positions = torch.arange(tokens.shape[1]) + self.own * tokens.shape[1]
        with self.cut_logits():
            if self.parts is None:
                loss = _loss(self.model(tokens, positions), targets)
                loss.backward()  # type: ignore[no-untyped-call]
            else:
                loss = self._through(self.parts, tokens, targets, positions)
        if self.experts:  # their gradients are of the tokens of ep ranks; gloo has no other divide factor
            torch._foreach_div_([param.grad for param in self.experts], self.cut.ep)
        self.optim.step()
        self.optim.zero_grad()
        found = loss.detach()
        return found.full_tensor() if isinstance(found, DTensor) else found

    def _through(self, parts: ModelStages, tokens: Tensor, targets: Tensor, positions: Tensor) -> Tensor:
        self.schedule = self.schedule or self._schedule(parts, tokens, positions)
        losses: list[Tensor] = []
        target = targets if parts.has_last else None
        self.schedule.step(*((tokens,) if parts.has_first else ()), target=target, losses=losses)
        if not losses:
            return torch.zeros(())
        local = [each.full_tensor() if isinstance(each, DTensor) else each for each in losses]
        return torch.stack(local).mean() * self.cut.pp

    def _schedule(self, parts: ModelStages, tokens: Tensor, positions: Tensor) -> Schedule1F1B:
        self.model.forward = partial(self.model.forward, positions=positions)  # type: ignore[method-assign]
        shape = (1, tokens.shape[1] // self.cut.tp, parts.width)
        hidden = torch.empty(shape, dtype=torch.bfloat16, device="meta", requires_grad=True)
        goes = hidden
        if parts.has_last:
            vocabulary = self.model.get_parameter("head.weight").shape[0]
            goes = torch.empty(1, tokens.shape[1], vocabulary, dtype=torch.bfloat16, device="meta", requires_grad=True)
        stage = PipelineStage(
            self.model,
            parts.rank,
            parts.count,
            torch.device("cpu"),
            input_args=tokens[:1].to("meta") if parts.has_first else hidden,
            output_args=goes,
            group=self.group,
        )
        return Schedule1F1B(stage, self.samples, loss_fn=_loss)


def _loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def _gather_keys(model: nn.Module, group: dist.ProcessGroup) -> None:
    def attend(query: Tensor, key: Tensor, value: Tensor, _: None) -> Tensor:
        keys, values = (all_gather_tensor_autograd(each.contiguous(), 2, group) for each in (key, value))
        time = query.shape[2]
        ends = torch.arange(time).unsqueeze(1) + group.rank() * time
        return F.scaled_dot_product_attention(query, keys, values, attn_mask=torch.arange(keys.shape[2]) <= ends)

    for module in model.modules():
        if callable(getattr(module, "attend", None)):
            module.attend = attend  # type: ignore[assignment]


def _share_experts(model: nn.Module, cut: Factoring, keep: dict[str, Any]) -> None:
    mesh = init_device_mesh("cpu", (cut.dp // cut.ep, cut.ep), mesh_dim_names=("rest", "ep"))
    group = mesh.get_group("ep")
    for module in model.modules():
        if not isinstance(module, Experts):
            continue
        for name, whole in list(module.named_parameters()):
            setattr(module, name, nn.Parameter(whole.detach().chunk(cut.ep)[group.rank()].clone()))
        module.forward = partial(_travelling, module.forward, group)  # type: ignore[method-assign]
        fully_shard(module, mesh=mesh["rest"], **keep)


def _travelling(forward: Any, group: dist.ProcessGroup, rows: Tensor, counts: Tensor) -> Tensor:
    """Rows to the ranks of their experts, through those, and back."""
    given = counts.view(group.size(), -1)
    taken = torch.empty_like(given)
    dist.all_to_all_single(taken, given, group=group)
    give, take = given.sum(1).tolist(), taken.sum(1).tolist()
    came = all_to_all_single_autograd(rows, take, give, group)
    experts = torch.arange(taken.shape[1]).repeat(group.size()).repeat_interleave(taken.flatten())
    order = experts.argsort(stable=True)
    out = forward(came[order], taken.sum(0))
    back = torch.empty_like(out).index_copy(0, order, out)
    gone: Tensor = all_to_all_single_autograd(back, give, take, group)
    return gone
