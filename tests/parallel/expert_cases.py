"""Expert-parallel runs for the pool's workers, and the same in the oracle, whose mixture is written token by token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import reference
import torch
import torch.nn.functional as F
from moe_reference import SHAPE, TokenByToken
from parity_cells import whole
from tensor_cases import states
from torch import Tensor, nn

from dzero import (
    AdamW,
    BiasUpdate,
    CheckpointConfig,
    Checkpointer,
    OffloadConfig,
    ParallelConfig,
    PrecisionConfig,
    Sharded,
    ZeroConfig,
    make_mesh,
    parallelize,
    shard,
)
from dzero.mesh import AXES, data_rank_of
from dzero.models.config import MoEShape
from dzero.models.meta_init import MetaInitializer
from dzero.models.moe import MoE
from dzero.parallel.blocks import apply_blocks
from dzero.parallel.config import BlockConfig
from dzero.parallel.context.parallelize import ContextParallel
from dzero.parallel.expert.dispatch import ExpertParallel, parallelize_experts
from dzero.zero.cost_model import expected_control, expected_traffic
from dzero.zero.dtensors import placed_like

STEPS, LR, CLIP, TOKENS = 20, 3e-3, 0.5, 12
EPS = 1e-6
"""Of AdamW: what is smaller than that of a gradient is mostly rounding, and would else be blown up to a whole step."""
FORCED = 3
"""Where all tokens go first, of runs that force it: to the last expert."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """`dp` data-parallel ranks, of which `ep` share the experts and `cp` their sequences. forced: every token chooses
    one expert, and a second by its scores or, alone, none."""

    dp: int
    ep: int
    stage: int
    microbatches: int = 1
    replicate: int = 1
    cp: int = 1
    offload: str = "device"
    recompute: str = "none"
    tied: bool = False
    balance: str = "auxiliary-loss-free"
    top_k: int = 2
    experts: int = 4
    forced: bool = False
    precision: str = "fp32"

    @property
    def ranks(self) -> int:
        return self.dp

    @property
    def readers(self) -> int:
        return self.dp // self.cp

    @property
    def shape(self) -> MoEShape:
        rate = None if self.balance == "none" else 0.01
        return replace(
            SHAPE, tied=self.tied, balance=self.balance, balance_rate=rate, top_k=self.top_k, experts=self.experts
        )


@dataclass
class Made:
    sharded: Sharded
    optim: AdamW
    balance: BiasUpdate
    experts: ExpertParallel | None
    context: ContextParallel | None


def model_on_meta(run: Run) -> MoE:
    with torch.device("meta"):
        return MoE(run.shape)


def build(run: Run) -> Made:
    model = model_on_meta(run)
    fill: Any = MetaInitializer(model, seed=0, device="cpu")
    mesh = make_mesh("cpu", replicate=run.dp if run.stage == 0 else run.replicate)
    cut = parallelize(model, mesh, ParallelConfig(ep=run.ep, cp=run.cp))
    apply_blocks(model, BlockConfig(activation_checkpoint=run.recompute), "cpu")
    sharded = shard(
        cut,
        ZeroConfig(stage=run.stage),
        precision=PrecisionConfig(param=run.precision),
        offload=OffloadConfig(grad=run.offload, master=run.offload, moments=run.offload),
        microbatches=run.microbatches,
        init=fill,
    )
    if run.forced:
        force(sharded.model)
    balance = BiasUpdate(sharded.model, {axis: mesh.get_group(axis) for axis in AXES}, sharded.ledger)
    return Made(sharded, AdamW(sharded, lr=LR, eps=EPS, max_norm=CLIP), balance, cut.experts, sharded.context)


def force(model: nn.Module) -> None:
    """By a bias that no step of a run outweighs."""
    for name, buffer in model.named_buffers():
        if name.endswith("router.bias"):
            buffer[FORCED] = 100.0


def batches(run: Run, steps: int = STEPS) -> list[list[list[Tensor]]]:
    """`[step][reader][microbatch]`: int64 [2, tokens + 1]."""
    generator = torch.Generator().manual_seed(7)
    size = (steps, run.readers, run.microbatches, 2, TOKENS + 1)
    return [[[*of_rank] for of_rank in of_step] for of_step in torch.randint(64, size, generator=generator)]


def loss_of(model: Any, tokens: Tensor, targets: Tensor) -> Tensor:
    loss = F.cross_entropy(model(tokens).float().flatten(0, 1), targets.flatten())
    extra = model.balance_loss()
    return loss if extra is None else loss + extra


def one_step(run: Run, made: Made, microbatches: Sequence[Tensor]) -> float:
    """The mean loss of this rank."""
    total = 0.0
    for index, batch in enumerate(microbatches):
        tokens, targets = batch[:, :-1], batch[:, 1:]
        if made.context is not None:
            tokens, targets = made.context.part(tokens), made.context.part(targets)
        with made.sharded.microbatch(is_last=index == run.microbatches - 1):
            loss = loss_of(made.sharded.model, tokens, targets) / run.microbatches
            loss.backward()  # type: ignore[no-untyped-call]
        total += float(loss.detach())
        del loss
    made.optim.step()
    made.balance.step()
    return total


def trained(rank: int, ranks: int, run: Run) -> dict[str, Any]:
    """Losses of this rank, norms, whole parameters of rank 0 and every rank's biases after 20 steps; what the last step
    moved, and should have."""
    made = build(run)
    losses, norms, before = [], [], 0
    reader = data_rank_of(made.sharded.mesh) // run.cp
    for of_step in batches(run):
        made.sharded.ledger.take()
        before = 0 if made.experts is None else made.experts.rows_moved
        losses.append(one_step(run, made, of_step[reader]))
        assert made.optim.last_decision is not None
        norms.append(made.optim.last_decision.norm)
    moved = made.sharded.ledger.take()
    made.optim.synchronize()
    params = {name: whole(param).clone() for name, param in made.sharded.named_params().items()}
    table = made.sharded.layout, made.sharded.shapes
    theory = {**expected_traffic(*table), **expected_control(*table), **made.balance.expected()}
    return {
        "losses": losses,
        "norms": norms,
        "params": params if rank == 0 else None,
        "biases": biases(made.sharded.model),
        "moved": moved,
        "theory": theory,
        "rows": 0 if made.experts is None else made.experts.rows_moved - before,
    }


def biases(model: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers() if name.endswith("bias")}


def saved(rank: int, ranks: int, run: Run, folder: Path) -> dict[str, Tensor]:
    """Train a little, save; whole parameters, states and biases by name."""
    made = build(run)
    for of_step in batches(run, 2):
        one_step(run, made, of_step[data_rank_of(made.sharded.mesh)])
    with Checkpointer(CheckpointConfig(folder=str(folder), every=1), made.sharded, made.optim) as checkpoints:
        checkpoints.save(2, {})
        checkpoints.finish()
    return states(made.sharded, made.optim) | biases(made.sharded.model)


def loaded(rank: int, ranks: int, run: Run, folder: Path) -> dict[str, Tensor]:
    made = build(run)
    with Checkpointer(CheckpointConfig(folder=str(folder), every=1), made.sharded, made.optim) as checkpoints:
        checkpoints.resume("auto")
    return states(made.sharded, made.optim) | biases(made.sharded.model)


def oracle(run: Run) -> tuple[reference.History, dict[str, Tensor]]:
    """In one process, with plain tensors: a rank for each reader; and the biases at the end."""
    steps = batches(run)
    made: list[nn.Module] = []

    def fresh() -> nn.Module:
        model = model_on_meta(run)
        MetaInitializer(model, seed=0, device="cpu")(model)
        if run.forced:
            force(model)
        for layer in model.layers:
            mixture = TokenByToken(layer.ffn, run.shape)  # type: ignore[arg-type]
            if layer.ffn.router.bias is not None:  # type: ignore[union-attr]
                mixture.bias = layer.ffn.router.bias.clone()  # type: ignore[union-attr, operator]
            layer.ffn = mixture
        made.append(model)
        return model

    seen = 0
    per_step = run.readers * run.microbatches

    def of_batch(model: nn.Module, batch: Tensor) -> Tensor:
        nonlocal seen
        mixtures = [module for module in model.modules() if isinstance(module, TokenByToken)]
        if seen and seen % per_step == 0:
            rebalance(mixtures, run.shape)
        seen += 1
        logits: Tensor = model(batch[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        return loss + sum(each.loss for each in mixtures if each.loss is not None)

    history = reference.train(fresh, steps, of_batch, lrs=[LR] * STEPS, adamw=reference.AdamW(eps=EPS), clip=CLIP)
    mixtures = [module for module in made[0].modules() if isinstance(module, TokenByToken)]
    rebalance(mixtures, run.shape)
    return history, {f"layers.{i}.ffn.router.bias": each.bias for i, each in enumerate(mixtures)}


def rebalance(mixtures: Sequence[TokenByToken], shape: MoEShape) -> None:
    for each in mixtures:
        if shape.balance == "auxiliary-loss-free":
            each.bias = each.bias + shape.rate * torch.sign(each.chosen.mean() - each.chosen)
        each.chosen.zero_()


def afresh(rank: int, ranks: int, run: Run) -> dict[str, Tensor]:
    """Whole parameters and masters before the first step."""
    made = build(run)
    return states(made.sharded, made.optim)


class Experts(nn.Module):
    """One's own, with weights and biases, which does nothing without rows: rows [n, 8] -> the same."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(experts, 8, 8))
        self.bias = nn.Parameter(torch.randn(experts, 8))

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        parts = [(e, part) for e, part in enumerate(rows.split(counts.tolist())) if len(part)]
        return torch.cat([part @ self.weight[e] + self.bias[e] for e, part in parts]) if parts else rows


class Hashed(nn.Module):
    """A mixture of one's own, of which token t goes to expert t mod `used` of 4: x [tokens, 8] -> the same."""

    def __init__(self, used: int = 4) -> None:
        super().__init__()
        self.used = used
        self.experts = Experts(4)
        self.before, self.after = nn.Parameter(torch.ones(8)), nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        chosen = torch.arange(len(x)) % self.used
        order, counts = chosen.argsort(stable=True), torch.bincount(chosen, minlength=4)
        rows = self.experts((x * self.before)[order], counts)
        out: Tensor = torch.empty_like(x).index_copy(0, order, rows) * self.after
        return out


def by_own_module(rank: int, ranks: int, used: int) -> float:
    """How far its gradients are from those of one process that has the first rank's values and all tokens."""
    torch.manual_seed(0)
    alone, tokens = Hashed(used), torch.randn(ranks, 10, 8)
    (sum(alone(each).square().mean() for each in tokens) / ranks).backward()  # type: ignore[union-attr]
    torch.manual_seed(rank)  # other values on every rank
    model, mesh = Hashed(used), make_mesh("cpu")
    sharded = shard(parallelize(model, mesh, ParallelConfig(ep=2)), ZeroConfig(stage=3), precision="fp32")
    optim = AdamW(sharded)
    sharded.model(tokens[rank]).square().mean().backward()
    params, found = sharded.named_params(), optim.gradients.named()
    apart = []
    for name, param in alone.named_parameters():
        assert param.grad is not None
        grad = whole(placed_like(found[name], params[name]))
        apart.append(float((grad - param.grad).norm() / param.grad.norm()))
    return max(apart)


def biases_after_a_skip(rank: int, ranks: int) -> tuple[Tensor, Tensor, Tensor]:
    """The first router's: afresh, after a step that was refused, after one that was made."""
    run = Run(dp=ranks, ep=ranks, stage=2)
    made = build(run)
    seen = [next(iter(biases(made.sharded.model).values()))]
    for of_step, is_made in zip(batches(run, 2), (False, True), strict=True):
        loss_of(made.sharded.model, of_step[rank][0][:, :-1], of_step[rank][0][:, 1:]).backward()  # type: ignore[no-untyped-call]
        if not is_made:
            made.optim.refuse_step(lambda: "the test")
        made.optim.step()
        assert made.optim.last_decision is not None
        made.balance.step(made=made.optim.last_decision.finite)
        seen.append(next(iter(biases(made.sharded.model).values())))
    return seen[0], seen[1], seen[2]


def without_their_handle(rank: int, ranks: int) -> str:
    model, mesh = Hashed(), make_mesh("cpu")
    parallelize_experts(model, mesh, ranks)
    with pytest.raises(ValueError, match="experts") as told:
        shard(model, ZeroConfig(), mesh=mesh)
    return str(told.value)
