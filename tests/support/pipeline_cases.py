"""Runs over the ranks of a pipeline for the pool's workers, alone and with other axes; the same in the oracle."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import reference
import torch
import torch.nn.functional as F
from parity_cells import whole
from tensor_cases import CLIP, STEPS, batches, loss_of, states
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dzero import (
    AdamW,
    CheckpointConfig,
    Checkpointer,
    DiskConfig,
    HiddenStates,
    OffloadConfig,
    ParallelConfig,
    Pipeline,
    PipelinePlan,
    PrecisionConfig,
    Sharded,
    ZeroConfig,
    make_mesh,
    parallelize,
    shard,
)
from dzero.comm.ledger import Entry, Traffic
from dzero.mesh import data_rank_of
from dzero.models.config import LlamaShape
from dzero.models.llama import Llama
from dzero.models.meta_init import MetaInitializer
from dzero.parallel.blocks import apply_blocks
from dzero.parallel.config import BlockConfig
from dzero.parallel.pipeline.schedule import expected_pipeline
from dzero.zero.cost_model import expected_decision, expected_traffic

SHAPE = LlamaShape(vocab_size=64, hidden_size=32, layers=4, heads=4, kv_heads=4, ffn_size=48)
TOKENS = 12
LR = 1e-3  # at three times as much a step's rounding grows to 1e-4 in 20 steps, whoever makes them


@dataclass(frozen=True, kw_only=True)
class Piped:
    """`pp` x `dp` x `tp` ranks, `replicate` copies of stages 1 to 3. offload: of gradients, masters and moments."""

    pp: int = 2
    dp: int = 1
    tp: int = 1
    stage: int
    microbatches: int = 4
    schedule: str = "1f1b"
    parts: int = 1
    replicate: int = 1
    offload: str = "device"
    recompute: str = "none"
    tied: bool = False
    param: str = "fp32"
    unused: str = "union"
    steps: int = STEPS

    @property
    def ranks(self) -> int:
        return self.pp * self.dp * self.tp


@dataclass(frozen=True)
class Made:
    run: Piped
    sharded: Sharded
    optim: AdamW
    pipeline: Pipeline | None
    hidden: HiddenStates
    around_loss: Callable[[], AbstractContextManager[None]]


def model_of(run: Piped) -> Llama:
    with torch.device("meta"):
        return Llama(replace(SHAPE, tied=run.tied))


def build(run: Piped) -> Made:
    model = model_of(run)
    fill: Any = MetaInitializer(model, seed=0, device="cpu")
    replicas = run.dp if run.stage == 0 else run.replicate
    mesh = make_mesh("cpu", replicate=replicas, tp=run.tp, pp=run.pp)
    cut = parallelize(model, mesh, ParallelConfig(stages_per_rank=run.parts))
    axis, parts = mesh["pp"] if run.pp > 1 else None, cut.stages
    apply_blocks(model, BlockConfig(activation_checkpoint=run.recompute), "cpu")
    disk = DiskConfig(paths=[gettempdir()], block_bytes=8192) if run.offload == "disk" else DiskConfig()
    sharded = shard(
        cut,
        ZeroConfig(stage=run.stage, unused=run.unused),
        precision=PrecisionConfig(param=run.param),
        offload=OffloadConfig(**dict.fromkeys(("grad", "master", "moments"), run.offload), disk=disk),
        microbatches=run.microbatches,
        init=fill,
    )
    optim = AdamW(sharded, lr=LR, max_norm=CLIP)
    hidden = HiddenStates((2, TOKENS // run.tp, SHAPE.hidden_size), sharded.layout.param.dtype)
    pipeline = None
    if parts is not None and axis is not None:
        parts.forget()
        pipeline = Pipeline(
            parts,
            axis.get_group(),
            sharded.ledger,
            schedule=run.schedule,
            microbatches=run.microbatches,
            hidden=hidden,
            device=torch.device("cpu"),
            hooks=sharded,
            run=forward,
            loss=lambda part, x, targets: cross_entropy(forward(part, x), targets),
        )
    return Made(run, sharded, optim, pipeline, hidden, cut.loss)


def forward(part: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = part(x, torch.arange(TOKENS))
    return out


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
    return loss.to_local() if isinstance(loss, DTensor) else loss


def one_step(made: Made, microbatches: list[Tensor]) -> float | None:
    """The mean loss, where the last part is."""
    run, losses = made.run, list[float]()

    def take(loss: Tensor) -> Tensor:
        losses.append(float(loss.detach()))
        return loss / run.microbatches

    tokens, targets = [batch[:, :-1] for batch in microbatches], [batch[:, 1:] for batch in microbatches]
    if made.pipeline is not None:
        with made.around_loss():
            made.pipeline.step(tokens, targets, take)
    else:
        for index, (x, y) in enumerate(zip(tokens, targets, strict=True)):
            with made.sharded.microbatch(is_last=index == run.microbatches - 1), made.around_loss():
                take(cross_entropy(forward(made.sharded.model, x), y)).backward()  # type: ignore[no-untyped-call]
    made.optim.step()
    return sum(losses) / run.microbatches if losses else None


def steps_of(made: Made, steps: int) -> tuple[list[float | None], list[float]]:
    run, losses, norms = made.run, [], []
    own = data_rank_of(made.sharded.mesh)
    for of_step in batches(STEPS, run.dp, run.microbatches)[:steps]:
        losses.append(one_step(made, of_step[own]))
        assert made.optim.last_decision is not None
        norms.append(made.optim.last_decision.norm)
    return losses, norms


def trained(rank: int, ranks: int, run: Piped) -> dict[str, Any]:
    """Losses of this rank, norms, its whole parameters after the steps, and what the last of them moved."""
    made = build(run)
    losses, norms = steps_of(made, run.steps)
    made.optim.synchronize()
    made.sharded.ledger.take()
    again = batches(STEPS, run.dp, run.microbatches)[0][data_rank_of(made.sharded.mesh)]
    params = {name: whole(param).clone() for name, param in made.sharded.named_params().items()}
    one_step(made, again)
    moved = {entry: each for entry, each in made.sharded.ledger.take().items() if entry.axis != "tp"}
    return {"losses": losses, "norms": norms, "params": params, "moved": moved, "expected": expected(made)}


def at_one_end(rank: int, ranks: int, run: Piped) -> tuple[list[Tensor], float]:
    """A tied weight at its start, after a step of other weights, and after one of the last end's; the last's norm."""
    made = build(run)
    (name,) = made.sharded.stages.shared if made.sharded.stages else ()
    params = made.sharded.named_params()
    tied, other = params[name], next(param for each, param in params.items() if each != name)
    found = [whole(tied).clone()]
    for weight in other, tied if rank >= ranks // 2 else other:
        total: Any = weight.square().sum()
        total.full_tensor().backward()
        made.optim.step()
        found.append(whole(tied).clone())
    assert made.optim.last_decision is not None
    return found, made.optim.last_decision.norm


def expected(made: Made) -> dict[Entry, Traffic]:
    """Of a step, by formulas; without the loss that the trainer shares."""
    sharded = made.sharded
    shared = sharded.stages.shared if sharded.stages else ()
    moved = expected_traffic(sharded.layout, sharded.shapes, shared)
    decision = expected_decision(sharded.layout, sharded.shapes, len(sharded.names))
    moved |= {entry: each for entry, each in decision.items() if entry.axis != "tp"}
    if sharded.stages is None:
        return moved
    return moved | expected_pipeline(sharded.stages, made.hidden, microbatches=made.run.microbatches)


@cache
def oracle(dp: int, microbatches: int, tied: bool, steps: int) -> reference.History:
    """In one process, with plain tensors."""

    def fresh() -> nn.Module:
        model = model_of(Piped(stage=0, tied=tied))
        MetaInitializer(model, seed=0, device="cpu")(model)
        return model

    return reference.train(fresh, batches(STEPS, dp, microbatches)[:steps], loss_of, lrs=[LR] * steps, clip=CLIP)


def saved(rank: int, ranks: int, run: Piped, folder: Path) -> dict[str, Tensor]:
    """Train a little, save; whole parameters and states by name, of this rank's."""
    made = build(run)
    steps_of(made, 2)
    with Checkpointer(CheckpointConfig(folder=str(folder), every=1), made.sharded, made.optim) as checkpoints:
        checkpoints.save(2, {})
        checkpoints.finish()
    return states(made.sharded, made.optim)


def loaded(rank: int, ranks: int, run: Piped, folder: Path) -> dict[str, Tensor]:
    made = build(run)
    with Checkpointer(CheckpointConfig(folder=str(folder), every=1), made.sharded, made.optim) as checkpoints:
        checkpoints.resume("auto")
    return states(made.sharded, made.optim)


class Own(nn.Module):
    """Of its own kind: x [batch, 8] -> [batch, 4]. outside: a function between its blocks, of no module."""

    def __init__(self, outside: bool) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(8, 16), nn.Linear(16, 4)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3))
        self.outside = outside

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x).sin() if self.outside else block(x)
        out: Tensor = self.leave(x)
        return out


def own_loop(
    rank: int, ranks: int, outside: bool, last_rows: int = 4, evaluates: bool = False
) -> dict[str, Tensor] | str:
    """As the README has it; parameters after three steps of two microbatches, the last of `last_rows`, or why not.

    If it `evaluates`, a loop of several ranks evaluates the last microbatch before each step.
    """
    torch.manual_seed(0)
    model, mesh = Own(outside), make_mesh("cpu", pp=ranks)
    cut = parallelize(model, mesh, ParallelConfig(pipeline_plan=PipelinePlan(("enter",), ("leave",), width=16)))
    sharded, parts = shard(cut, stage=1, microbatches=2, precision="fp32"), cut.stages
    optim, pipeline = AdamW(sharded, lr=1e-2), None
    if parts is not None:
        try:
            pipeline = Pipeline(
                parts,
                mesh.get_group("pp"),
                sharded.ledger,
                schedule="1f1b",
                microbatches=2,
                device=torch.device("cpu"),
                hooks=sharded,
                hidden=HiddenStates((4, parts.width), torch.float32),
                run=lambda part, x: part(x),
                loss=lambda part, x, targets: F.mse_loss(part(x), targets),
            )
        except ValueError as error:
            return str(error)
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        x, y = (torch.randn(2, 4, width, generator=generator) for width in (8, 4))
        if pipeline is not None:
            try:
                if evaluates:
                    pipeline.evaluate(x[1, :last_rows], y[1, :last_rows])
                pipeline.step([x[0], x[1, :last_rows]], [y[0], y[1, :last_rows]], lambda loss: loss / 2)
            except ValueError as error:
                return str(error)
        else:
            for index in range(2):
                with sharded.microbatch(is_last=index == 1):
                    (F.mse_loss(sharded.model(x[index]), y[index]) / 2).backward()
        optim.step()
    return {name: whole(param).clone() for name, param in sharded.named_params().items()}
