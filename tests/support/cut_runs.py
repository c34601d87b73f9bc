"""Training of decoders that are cut along any axes, for the pool's workers, and the same in one process by the oracle.

    dp x cp   data-parallel ranks; cp neighbours share their sequences, ep neighbours (with tp: tp x ep) the experts
    tp        ranks that share matrices
    pp        ranks that share layers

A run is made from outside, through what `import dzero` offers, on a model of decoders.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from tempfile import gettempdir
from typing import Any, NamedTuple

import decoders
import moe_reference
import reference
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from training_loops import master_of, whole

import dzero
from dzero import testing

STEPS, LR, CLIP = 20, 1e-3, 0.5
EPS = 1e-6
"""Of AdamW: what is smaller than that of a gradient is mostly rounding, and would else be blown up to a whole step."""
TOKENS, SEQUENCES, VOCAB, WIDTH = 16, 2, 64, 32
FORCED = 3
"""The expert that all tokens choose first, in runs that force it."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """What is trained, over `pp` x `dp` x `cp` x `tp` ranks.

    Attributes:
        replicate: Replicas of stages 1 to 3.
        offload: Tier of gradients, masters and moments; `activations`: that of activations.
        parts: Pipeline stages on a rank.
        hf: Kind of a model of transformers, which has the values that each rank draws.
        experts: Number of experts; 0 for a dense model. forced: every token chooses one of them.
    """

    stage: int
    dp: int = 1
    cp: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1
    steps: int = 5
    microbatches: int = 1
    replicate: int = 1
    offload: str = "device"
    activations: str = "device"
    recompute: str = "none"
    attention: str = "all_gather"
    reduction: str = "auto"
    schedule: str = "1f1b"
    parts: int = 1
    loss_tiles: int = 1
    unused: str = "union"
    layers: int = 2
    heads: int = 4
    tied: bool = False
    wide: bool = False
    gpt2: bool = False
    hf: str = ""
    experts: int = 0
    top_k: int = 2
    balance: str = "auxiliary-loss-free"
    forced: bool = False
    precision: dict[str, Any] = field(default_factory=lambda: {"param": "fp32"}, hash=False)

    @property
    def ranks(self) -> int:
        return self.pp * self.dp * self.cp * self.tp

    def __str__(self) -> str:
        """What differs from the defaults."""
        plain = Run(stage=4)
        given = {each.name: getattr(self, each.name) for each in fields(self)}
        return " ".join(f"{name}={value}" for name, value in given.items() if value != getattr(plain, name))


def model_of(run: Run) -> nn.Module:
    """The whole model, on meta; one of transformers with values of its own, the same on every rank."""
    if run.hf:
        torch.manual_seed(3)
        return decoders.of_transformers(run.hf, on="cpu")
    if run.gpt2:
        wide = {"vocab_size": 512, "n_embd": 128, "n_layer": 3} if run.wide else {}
        dropouts = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        return decoders.of_transformers("gpt2", **wide, **dropouts)
    if run.wide:
        return decoders.on_meta(512, hidden_size=128, layers=3, heads=4, kv_heads=4, ffn_size=256, tied=run.tied)
    sizes: dict[str, Any] = {"layers": run.layers, "heads": run.heads, "kv_heads": 4, "tied": run.tied}
    if run.experts:
        rate = None if run.balance == "none" else 0.01
        mixed = {"experts": run.experts, "top_k": run.top_k, "balance": run.balance, "balance_rate": rate}
        sizes |= {**decoders.EXPERTS, **mixed}
    return decoders.on_meta(VOCAB, **sizes)


class Made(NamedTuple):
    """A run that was built; `cut` is what `parallelize` returned."""

    sharded: dzero.Sharded
    optim: Any
    cut: dzero.ParallelModel
    pipeline: dzero.Pipeline | None
    balance: dzero.BiasUpdate | None


def reader_of(run: Run) -> int:
    """Whose batches this rank reads: the same on ranks of cp, of tp, and of pp."""
    return dist.get_rank() // run.tp % (run.dp * run.cp) // run.cp


def adamw(sharded: dzero.Sharded) -> dzero.AdamW:
    return dzero.AdamW(sharded, lr=LR, eps=EPS, max_norm=CLIP)


def build(run: Run, optimizer: Callable[[dzero.Sharded], Any] = adamw) -> Made:
    """This rank's part of a run."""
    model = model_of(run)
    fill = None if run.hf else decoders.filling(model)
    mesh = dzero.make_mesh("cpu", replicate=run.dp * run.cp if run.stage == 0 else run.replicate, tp=run.tp, pp=run.pp)
    how = dzero.ParallelConfig(ep=run.ep, cp=run.cp, cp_attention=run.attention, stages_per_rank=run.parts)
    cut = dzero.parallelize(model, mesh, how)
    decoders.in_blocks(model, activation_checkpoint=run.recompute, loss_tiles=run.loss_tiles)
    tiers: dict[str, Any] = dict.fromkeys(("grad", "master", "moments"), run.offload)
    if "disk" in (run.offload, run.activations):
        tiers["disk"] = dzero.DiskConfig(paths=[gettempdir()], block_bytes=8192)
    sharded = dzero.shard(
        cut,
        dzero.ZeroConfig(stage=run.stage, reduction=run.reduction, unused=run.unused),
        precision=dzero.PrecisionConfig(**run.precision),
        offload=dzero.OffloadConfig(**tiers, activations=run.activations),
        microbatches=run.microbatches,
        init=fill,
    )
    balance = None
    if run.forced:
        force(sharded.model)
    if run.experts:
        groups = {axis: sharded.mesh.get_group(axis) for axis in ("replicate", "shard")}
        groups |= {axis: group for axis, group in sharded.model_groups.items() if axis == "tp"}
        balance = dzero.BiasUpdate(sharded.model, groups, sharded.ledger)
    return Made(sharded, optimizer(sharded), cut, pipeline_of(run, sharded, cut), balance)


def pipeline_of(run: Run, sharded: dzero.Sharded, cut: dzero.ParallelModel) -> dzero.Pipeline | None:
    if cut.stages is None:
        return None
    cut.stages.forget()
    time = TOKENS // run.cp
    positions = torch.arange(TOKENS) if sharded.context is None else sharded.context.positions(time)

    def forward(stage: nn.Module, x: Tensor) -> Tensor:
        out: Tensor = stage(x, positions)
        return out

    return dzero.Pipeline(
        cut.stages,
        cut.mesh.get_group("pp"),
        sharded.ledger,
        schedule=run.schedule,
        microbatches=run.microbatches,
        hidden=dzero.HiddenStates((SEQUENCES, time // run.tp, WIDTH), sharded.layout.param.dtype),
        device=torch.device("cpu"),
        hooks=sharded,
        run=forward,
        loss=lambda stage, x, targets: without_mesh(cross_entropy(forward(stage, x), targets)),
    )


def without_mesh(loss: Tensor) -> Tensor:
    """The loss without its mesh, where the vocabulary is cut, with its gradient."""
    return loss.to_local() if isinstance(loss, DTensor) else loss


def force(model: nn.Module) -> None:
    """By a bias that no step of a run outweighs."""
    for name, buffer in model.named_buffers():
        if name.endswith("router.bias"):
            buffer[FORCED] = 100.0


def batches(steps: int, ranks: int, microbatches: int) -> list[list[list[Tensor]]]:
    """`[step][reader][microbatch]`: int64 [sequences, tokens + 1]."""
    generator = torch.Generator().manual_seed(7)
    drawn = torch.randint(VOCAB, (steps, ranks, microbatches, SEQUENCES, TOKENS + 1), generator=generator)
    return [[list(of_rank) for of_rank in of_step] for of_step in drawn]


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return loss_between(model, batch[:, :-1], batch[:, 1:])


def loss_between(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    """Of whole logits, and what a mixture adds for its balance."""
    loss = cross_entropy(model(tokens), targets)
    extra = model.balance_loss() if hasattr(model, "balance_loss") else None
    return loss if extra is None else loss + extra


def backward(run: Run, made: Made, microbatches: Sequence[Tensor]) -> float | None:
    """Forward and backward of a step; the mean loss of this rank, where the last layers are."""
    sharded, context, losses = made.sharded, made.sharded.context, list[float]()

    def take(loss: Tensor) -> Tensor:
        losses.append(float(testing.local(loss)))
        scaled: Tensor = made.optim.scale_loss(loss / run.microbatches)
        return scaled

    pairs = [(batch[:, :-1], batch[:, 1:]) for batch in microbatches]
    if context is not None:
        pairs = [(context.part(tokens), context.part(targets)) for tokens, targets in pairs]
    if made.pipeline is not None:
        made.optim.scale_loss(torch.zeros(()))  # which the optimizer expects on ranks without a loss too
        with made.cut.loss():
            made.pipeline.step([x for x, _ in pairs], [y for _, y in pairs], take)
        return sum(losses) / run.microbatches if losses else None
    loss_fn: Any = nn.Module.__call__ if run.loss_tiles > 1 else loss_between
    for index, (tokens, targets) in enumerate(pairs):
        with sharded.microbatch(is_last=index == run.microbatches - 1), made.cut.loss():
            take(loss_fn(sharded.model, tokens, targets)).backward()  # type: ignore[no-untyped-call]
    return sum(losses) / run.microbatches


def one_step(run: Run, made: Made, microbatches: Sequence[Tensor]) -> float | None:
    """The loss as `backward` has it, of a step that is made."""
    loss = backward(run, made, microbatches)
    made.optim.step()
    if made.balance is not None:
        made.balance.step(made=made.optim.last_decision.finite)
    return loss


def trained(rank: int, ranks: int, run: Run) -> dict[str, Any]:
    """What this rank knows after the steps: its losses, norms, whole parameters of its layers, and biases of routers.

    sent, due: what the last step moved, and what it should have by the library's table, which has nothing of what
    models exchange within forward and backward. rows: those that were sent to experts of other ranks, or came.
    """
    made = build(run)
    losses, norms, rows = [], [], 0
    for of_step in batches(STEPS, run.dp, run.microbatches)[: run.steps]:
        made.sharded.ledger.take()
        rows = made.cut.experts.rows_moved if made.cut.experts else 0
        losses.append(one_step(run, made, of_step[reader_of(run)]))
        norms.append(made.optim.last_decision.norm)
    sent = made.sharded.ledger.take()
    made.optim.synchronize()
    return {
        "losses": losses,
        "norms": norms,
        "params": {name: whole(value) for name, value in params_of(run, made).items()},
        "biases": biases(made),
        "sent": sent,
        "due": testing.expected_traffic(made.sharded) | (made.balance.expected() if made.balance else {}),
        "rows": made.cut.experts.rows_moved - rows if made.cut.experts else 0,
    }


def params_of(run: Run, made: Made) -> dict[str, Tensor]:
    """By the names of the whole model; a state dict joins the tiles of a head."""
    return made.sharded.model.state_dict() if run.loss_tiles > 1 else {**made.sharded.named_params()}


def biases(made: Made) -> dict[str, Tensor]:
    return {name: each.clone() for name, each in made.sharded.model.named_buffers() if name.endswith("router.bias")}


@cache
def oracle(run: Run) -> tuple[reference.History, dict[str, Tensor]]:
    """In one process, with plain tensors; and the biases of routers at the end. Ask `known_to_oracle` for the run."""
    mixtures: list[moe_reference.TokenByToken] = []
    seen = 0

    def fresh() -> nn.Module:
        model = model_of(run)
        if not run.hf:
            decoders.filling(model)(model)
        if run.forced:
            force(model)
        mixtures[:] = moe_reference.token_by_token(model) if run.experts else []
        return model

    def of_batch(model: nn.Module, batch: Tensor) -> Tensor:
        nonlocal seen
        if seen and seen % (run.dp * run.microbatches) == 0:
            moe_reference.rebalance(mixtures)
        seen += 1
        loss = cross_entropy(model(batch[:, :-1]), batch[:, 1:])
        return loss + sum(each.loss for each in mixtures if each.loss is not None)

    drawn = batches(STEPS, run.dp, run.microbatches)[: run.steps]
    adamw = reference.AdamW(eps=EPS)
    history = reference.train(fresh, drawn, of_batch, lrs=[LR] * run.steps, adamw=adamw, clip=CLIP)
    moe_reference.rebalance(mixtures)
    return history, {f"layers.{index}.ffn.router.bias": each.bias for index, each in enumerate(mixtures)}


def known_to_oracle(run: Run) -> Run:
    """The run with what the oracle knows of it, so that others share its own."""
    names = ("dp", "steps", "microbatches", "layers", "heads", "tied", "gpt2", "hf", "experts", "top_k", "balance")
    return Run(stage=0, forced=run.forced, **{name: getattr(run, name) for name in names})


def states(made: Made) -> dict[str, Tensor]:
    """Whole parameters, masters, moments and biases, by key and name."""
    found = {f"bias {name}": each for name, each in biases(made).items()}
    for name, param in made.sharded.named_params().items():
        of_param = made.optim.state[param]
        found |= {f"param {name}": whole(param), f"master {name}": master_of(param, of_param)}
        found |= {f"{key} {name}": whole(of_param[key]) for key in ("exp_avg", "exp_avg_sq", "step")}
    fused = ("attn.c_attn.weight", "attn.c_attn.bias")  # of GPT-2, whose ranks of tp view it as [..., 3, columns]
    return {
        key: each.flatten(-2) if key.endswith(fused) and key[:4] != "step" and each.shape[-2:-1] == (3,) else each
        for key, each in found.items()
    }


def checkpoints(made: Made, folder: Path) -> dzero.Checkpointer:
    return dzero.Checkpointer(dzero.CheckpointConfig(folder=str(folder), every=1), made.sharded, made.optim)


def saved(rank: int, ranks: int, run: Run, folder: Path) -> dict[str, Tensor]:
    """Train a little and save; the states of this rank's layers."""
    made = build(run)
    for of_step in batches(STEPS, run.dp, run.microbatches)[:2]:
        one_step(run, made, of_step[reader_of(run)])
    with checkpoints(made, folder) as files:
        files.save(2, {"model": dzero.describe(model_of(run))})
        files.finish()
    return states(made)


def loaded(rank: int, ranks: int, run: Run, folder: Path) -> dict[str, Tensor]:
    made = build(run)
    with checkpoints(made, folder) as files:
        files.resume("auto")
    return states(made)
