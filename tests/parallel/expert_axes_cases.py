"""Runs with experts on ranks that share layers or matrices as well, assembled from a line of settings, for the pool's
workers; the same in the oracle of `expert_cases`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import reference
import torch
from expert_cases import CLIP, EPS, LR, STEPS, TOKENS, Run, batches, biases
from expert_cases import oracle as oracle_of
from moe_reference import SHAPE
from parity_cells import whole
from small_runs import agrees, settled
from tensor_cases import states
from torch import Tensor

from dzero import AdamW, CheckpointConfig, Checkpointer
from dzero.config import RunConfig
from dzero.data.batch import Batch
from dzero.models.moe import Experts
from dzero.monitor.memory import MemoryMeter
from dzero.monitor.records import StepRecord
from dzero.trainer.build import BuiltModel
from dzero.trainer.metrics import MetricsRecorder
from dzero.zero.dtensors import local_of

CPU = torch.device("cpu")
COMMON = (
    "model=tiny_moe model.hidden_size=32 model.layers=2 model.heads=4 model.kv_heads=4 model.ffn_size=24 "
    "model.experts=4 model.tied=false model.balance_rate=0.01 precision=fp32 data.held_out=0 "
    f"train.sequence_tokens={TOKENS} train.microbatch_sequences=2 train.accumulate=2 train.steps={STEPS}"
)


def config_of(line: str) -> RunConfig:
    """The model that `expert_cases` trains, with the settings of `line`."""
    return settled(Path("unread.npy"), *COMMON.split(), *line.split())


@dataclass
class Made:
    built: BuiltModel
    optim: AdamW
    recorder: MetricsRecorder
    steps: list[list[Tensor]]
    """Of each step the microbatches that this rank reads, int64 [2, tokens + 1]."""

    @classmethod
    def of(cls, config: RunConfig) -> Made:
        built = BuiltModel(config, CPU, SHAPE.vocab_size)
        optim = AdamW(built.sharded, lr=LR, eps=EPS, max_norm=CLIP, scaler=config.scaler)
        drawn = batches(run_of(config), config.train.steps)
        recorder = MetricsRecorder(config, built, optim, MemoryMeter(CPU), CPU)
        return cls(built, optim, recorder, [of_step[built.reader] for of_step in drawn])

    def step(self, number: int) -> StepRecord:
        """As the trainer's."""
        self.recorder.meter.begin()
        with self.built.counted() if number == 0 else nullcontext():
            loss = self._backward(self.steps[number])
        read_shared = self.recorder.share(loss, stop=False)
        self.recorder.before_update()
        self.optim.step()
        assert self.optim.last_decision is not None
        self.built.balance.step(made=self.optim.last_decision.finite)
        return self.recorder.end_step(number + 1, read_shared().loss)

    def _backward(self, microbatches: list[Tensor]) -> Tensor:
        made, total = self.built, torch.zeros(())
        pairs = [Batch(batch[:, :-1], batch[:, 1:]) for batch in microbatches]
        share = pairs[0].targets.numel() * len(pairs) * made.readers / made.parts
        if made.pipeline is not None:
            return made.pipelined(pairs, share, self.optim.scale_loss)
        for index, pair in enumerate(pairs):
            with made.sharded.microbatch(is_last=index == len(pairs) - 1), made.losses():
                loss = made.loss(pair, share) / len(pairs)
                self.optim.scale_loss(loss).backward()  # type: ignore[no-untyped-call]
            total += local_of(loss.detach())
        return total

    def params(self) -> dict[str, Tensor]:
        """Whole, by their names; of this rank's layers."""
        self.optim.synchronize()
        return {name: whole(param).clone() for name, param in self.built.sharded.named_params().items()}


def run_of(config: RunConfig) -> Run:
    """What the oracle knows of a run: how many read, and what."""
    assert config.mesh.dp is not None
    assert config.train.accumulate is not None
    balance = config.model.balance or "auxiliary-loss-free"
    return Run(dp=config.mesh.dp, ep=1, stage=0, microbatches=config.train.accumulate, balance=balance)


@cache
def oracle(run: Run) -> tuple[reference.History, dict[str, Tensor]]:
    """In one process, with plain tensors; runs that differ in nothing that it knows of share its own."""
    return oracle_of(run)


def trained(rank: int, ranks: int, config: RunConfig) -> dict[str, Any]:
    """Losses and norms of all steps, this rank's parameters and biases after them, and whether traffic was theory's."""
    made = Made.of(config)
    records = [made.step(number) for number in range(len(made.steps))]
    return {
        "losses": [record.loss for record in records],
        "norms": [record.grad_norm for record in records],
        "params": made.params(),
        "biases": biases(made.built.sharded.model),
        "agrees": agrees(made.recorder.summarise(None)),
    }


def saved(rank: int, ranks: int, config: RunConfig, folder: Path) -> dict[str, Tensor]:
    """Train a little, save; whole parameters, states and biases by name, of this rank's layers."""
    made = Made.of(config)
    for number in range(2):
        made.step(number)
    with checkpoints_of(made, folder) as checkpoints:
        checkpoints.save(2, {})
        checkpoints.finish()
    return everything(made)


def loaded(rank: int, ranks: int, config: RunConfig, folder: Path) -> dict[str, Tensor]:
    made = Made.of(config)
    with checkpoints_of(made, folder) as checkpoints:
        checkpoints.resume("auto")
    return everything(made)


def checkpoints_of(made: Made, folder: Path) -> Checkpointer:
    return Checkpointer(CheckpointConfig(folder=str(folder), every=1), made.built.sharded, made.optim)


def everything(made: Made) -> dict[str, Tensor]:
    return states(made.built.sharded, made.optim) | biases(made.built.sharded.model)


def overflowed(rank: int, ranks: int, config: RunConfig) -> tuple[tuple[str, ...], bool, bool]:
    """In a first step the last rank finds an infinite gradient of one expert: culprits, whether all that this rank has
    stayed the same, and whether the next step was made."""
    plain, still = Experts.forward, [True]
    if rank == ranks - 1:
        Experts.forward = overflowing(plain, still)  # type: ignore[method-assign]
    try:
        made = Made.of(config)
    finally:
        Experts.forward = plain  # type: ignore[method-assign]
    before = everything(made)
    made.step(0)
    assert made.optim.last_decision is not None
    nonfinite_params, after = made.optim.last_decision.nonfinite_params, everything(made)
    still.clear()
    made.step(1)
    same = all(torch.equal(value, after[name]) for name, value in before.items())
    return nonfinite_params, same, made.optim.last_decision.finite


def overflowing(forward: Callable[..., Tensor], still: list[bool]) -> Callable[..., Tensor]:
    def with_hook(self: Experts, rows: Tensor, counts: Tensor) -> Tensor:
        def overflow(grad: Tensor) -> Tensor:
            return grad.index_fill(0, torch.tensor([0]), float("inf")) if still else grad

        self.down.register_hook(overflow)  # type: ignore[no-untyped-call]
        return forward(self, rows, counts)

    return with_hook
