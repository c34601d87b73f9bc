"""The README's lines in a plain loop, on two kinds of model: they train as one process without dzero would.

One process sees the whole batch; two ranks see half each. fp32, so that only the order of sums differs.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pool import Pool
from torch import Tensor, nn

import dzero

STEPS, MICROBATCHES, SAMPLES, TOKENS, VOCAB = 4, 2, 2, 10, 32
LR = 3e-3


def sequential() -> nn.Module:
    return nn.Sequential(nn.Embedding(VOCAB, 16), nn.Linear(16, 24), nn.GELU(), nn.Linear(24, VOCAB))


def transformers_gpt2() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=VOCAB, n_positions=TOKENS, n_embd=16, n_layer=2, n_head=2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    )
    model: nn.Module = transformers.GPT2LMHeadModel(config)
    return model


MODELS = {"sequential": sequential, "transformers": transformers_gpt2}


def made(kind: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[kind]()


def drawn(ranks: int) -> Tensor:
    """int64 [step, microbatch, sample, token + 1]: counting, from random starts."""
    generator = torch.Generator().manual_seed(1)
    start = torch.randint(VOCAB, (STEPS, MICROBATCHES, ranks * SAMPLES, 1), generator=generator)
    return (start + torch.arange(TOKENS + 1)) % VOCAB


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    out: Any = model(batch[:, :-1])
    logits: Tensor = out if isinstance(out, Tensor) else out.logits
    return F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())


def library(rank: int, ranks: int, kind: str, stage: int) -> list[float]:
    """The five lines."""
    model = made(kind)
    steps = drawn(ranks)[:, :, rank * SAMPLES : (rank + 1) * SAMPLES]

    precision = dzero.PrecisionConfig(param="fp32")
    sharded = dzero.shard(model, dzero.ZeroConfig(stage=stage), precision=precision, microbatches=MICROBATCHES)
    optim = dzero.AdamW(sharded, lr=LR, max_norm=1.0)
    losses = []
    for batches in steps:
        total = 0.0
        for i, batch in enumerate(batches):
            with sharded.microbatch(is_last=i == MICROBATCHES - 1):
                loss = loss_of(sharded.model, batch) / MICROBATCHES
                loss.backward()  # type: ignore[no-untyped-call]
            total += loss.item()
        optim.step()
        losses.append(total)
    return losses


def alone(kind: str, ranks: int) -> list[float]:
    """The same by torch alone on one process."""
    model = made(kind)
    optim = torch.optim.AdamW(model.parameters(), lr=LR)
    losses = []
    for batches in drawn(ranks):
        optim.zero_grad()
        total = 0.0
        for batch in batches:
            loss = loss_of(model, batch) / MICROBATCHES
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.item()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optim.step()
        losses.append(total)
    return losses


def library_at_stages(rank: int, ranks: int, kind: str) -> list[list[float]]:
    return [library(rank, ranks, kind, stage) for stage in (1, 3)]


@pytest.mark.parametrize("kind", MODELS)
def test_five_lines_train_as_one_process_does(pool: Pool, kind: str) -> None:
    """Tolerance 1e-4 of the loss: fp32 sums in another order, four steps of Adam."""
    if kind == "transformers":
        pytest.importorskip("transformers")
    want = torch.tensor(alone(kind, 2))
    assert want[-1] < want[0]
    by_rank = pool.run(library_at_stages, 2, kind)
    for of_rank0, of_rank1 in zip(*by_rank, strict=True):
        got = (torch.tensor(of_rank0) + torch.tensor(of_rank1)) / 2
        torch.testing.assert_close(got, want, rtol=1e-4, atol=0)
