"""The loss of a step is the mean over its tokens that count, however the step is split over ranks and microbatches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import small_runs
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from parity_cells import whole
from pool import Pool

from dzero.data.batch import IGNORED, Batch
from dzero.data.prefetch import BatchPrefetcher
from dzero.data.stream import SequenceStream
from dzero.models.build import build, materialiser
from dzero.monitor.sinks import Monitor
from dzero.trainer.trainer import Trainer

SEQUENCES, TOKENS, VOCAB, STEPS = 16, 8, 256, 2
LENGTHS = [1, 8, 3, 8, 2, 1, 5, 8, 1, 1, 7, 4, 8, 1, 2, 6]
"""Targets that count at the end of each sequence."""


class Masked:
    """The same sequences in every epoch, of which few or many targets count."""

    name = "masked"

    def __init__(self) -> None:
        drawn = torch.randint(VOCAB, (SEQUENCES, TOKENS + 1), generator=torch.Generator().manual_seed(0))
        self.tokens, self.targets = drawn[:, :-1].contiguous(), drawn[:, 1:].clone()
        for row, length in zip(self.targets, LENGTHS, strict=True):
            row[: TOKENS - length] = IGNORED

    def __len__(self) -> int:
        return SEQUENCES

    def read(self, indices: NDArray[np.int64]) -> Batch:
        return Batch(self.tokens[indices], self.targets[indices])

    def counted(self, indices: NDArray[np.int64]) -> int:
        return sum(LENGTHS[index] for index in indices)

    def identity(self) -> dict[str, int]:
        return {}


class Silent(Monitor):
    """Monitor without sinks."""

    def __init__(self) -> None:
        self.sinks = []


def trained(rank: int, ranks: int, data: Path, folder: Path, *settings: str) -> dict[str, Any]:
    """Losses, norms and whole parameters after two steps over the masked sequences."""
    run = small_runs.settled(
        data,
        "precision=fp32",
        "optim.rule=SGD",
        "optim.lr=0.1",
        "optim.max_norm=null",
        "optim.weight_decay=0",
        "schedule.kind=constant",
        "schedule.warmup_steps=0",
        f"train.sequence_tokens={TOKENS}",
        f"train.steps={STEPS}",
        "train.evaluate_batches=0",
        *settings,
    )
    return stepped(Trainer(run, folder, torch.device("cpu")))


def stepped(trainer: Trainer) -> dict[str, Any]:
    """Losses, norms and whole parameters after `STEPS` steps over the masked sequences."""
    built = trainer.built
    trainer.stream = SequenceStream(
        Masked(),
        microbatch_sequences=trainer.config.train.microbatch_sequences,
        rank=built.reader,
        ranks=built.readers,
        seed=0,
        shuffle=False,
    )
    trainer.batches = BatchPrefetcher(trainer.stream, torch.device("cpu"))
    losses, norms = [], []
    for step in range(1, STEPS + 1):
        losses.append(trainer.step(step, Silent()).loss)
        assert trainer.optim.last_decision is not None
        norms.append(trainer.optim.last_decision.norm)
    trainer.optim.synchronize()
    params = {name: whole(param) for name, param in trainer.sharded.named_params().items()}
    return {"losses": losses, "norms": norms, "params": params}


def oracle(data: Path, *settings: str) -> dict[str, Any]:
    """In plain torch: one batch of all sequences, `F.cross_entropy` over all targets that count."""
    run = small_runs.settled(data, *settings)
    model = build(run.model, VOCAB)
    materialiser(run.model, model, seed=run.train.seed, device="cpu")(model)
    batch, losses, norms = Masked().read(np.arange(SEQUENCES)), [], []
    for _ in range(STEPS):
        loss = F.cross_entropy(model(batch.tokens).flatten(0, 1), batch.targets.flatten(), ignore_index=IGNORED)
        grads = torch.autograd.grad(loss, [*model.parameters()])
        losses.append(float(loss))
        norms.append(float(torch.cat([grad.flatten() for grad in grads]).norm()))
        with torch.no_grad():
            for param, grad in zip(model.parameters(), grads, strict=True):
                param -= 0.1 * grad
    return {"losses": losses, "norms": norms, "params": dict(model.named_parameters())}


SPLITS = [
    (1, "train.microbatch_sequences=16"),
    (1, "train.microbatch_sequences=4 train.accumulate=4"),
    (2, "train.microbatch_sequences=8 zero.stage=3"),
    (2, "train.microbatch_sequences=4 train.accumulate=2 zero.stage=2"),
    (2, "train.microbatch_sequences=16 mesh.cp=2 zero.stage=1"),
    (2, "train.microbatch_sequences=4 train.accumulate=4 mesh.pp=2"),
    (2, "train.microbatch_sequences=8 train.accumulate=2 mesh.tp=2 model.kv_heads=2"),
    (2, "train.microbatch_sequences=2 train.accumulate=4 zero.stage=3 block.loss_tiles=3"),
    (4, "train.microbatch_sequences=2 train.accumulate=2 zero.stage=3 offload=host"),
    (4, "train.microbatch_sequences=1 train.accumulate=4 zero.stage=2"),
    (4, "train.microbatch_sequences=4 train.accumulate=1 mesh.replicate=2 zero.stage=1"),
]


@pytest.mark.product(keep=6)
@pytest.mark.parametrize(("ranks", "split"), SPLITS)
def test_every_split_of_a_step_has_its_loss_and_gradient(pool: Pool, tmp_path: Path, ranks: int, split: str) -> None:
    data = small_runs.write_text(tmp_path / "text.txt")
    found = pool.run(trained, ranks, data, tmp_path, "model.kv_heads=2", *split.split())
    run = oracle(data, "model.kv_heads=2")
    assert found[0]["losses"] == pytest.approx(run["losses"], rel=1e-6)
    assert found[0]["norms"] == pytest.approx(run["norms"], rel=1e-5)
    for each in found:
        for name, param in each["params"].items():
            torch.testing.assert_close(param, run["params"][name].detach(), rtol=1e-5, atol=1e-6)
