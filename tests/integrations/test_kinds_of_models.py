"""Kinds of models that people train, in a loop of their own: losses and weights are those of plain torch.

docs/guides/which_way.md has the same kinds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import Pool
from torch import Tensor, nn
from torch.nn import functional
from training_loops import params_of

import dzero

pytest.importorskip("transformers")
from small_models import IMAGE, bert, llama, llava, mixtral, t5

ROWS, STEPS = 4, 4
Batch = dict[str, Tensor]


def words(step: int) -> Tensor:
    return torch.randint(3, IMAGE, (ROWS, 12), generator=torch.Generator().manual_seed(step))


def drawn(step: int, *shape: int) -> Tensor:
    return torch.randn(ROWS, *shape, generator=torch.Generator().manual_seed(100 + step))


class Noised(nn.Module):
    """A small net that finds the noise in pictures, as in diffusion."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.time, self.inward = nn.Embedding(10, 16), nn.Conv2d(3, 16, 3, padding=1)
        blocks = [nn.Sequential(nn.GroupNorm(4, 16), nn.SiLU(), nn.Conv2d(16, 16, 3, padding=1)) for _ in range(3)]
        self.blocks, self.outward = nn.ModuleList(blocks), nn.Conv2d(16, 3, 3, padding=1)

    def forward(self, noisy: Tensor, time: Tensor) -> Tensor:
        hidden = self.inward(noisy) + self.time(time)[:, :, None, None]
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.outward(hidden)


def of_words(step: int) -> Batch:
    return {"input_ids": words(step), "labels": words(step)}


def of_images(step: int) -> Batch:
    ids = words(step)
    ids[:, 1:5] = IMAGE
    return {"input_ids": ids, "labels": ids.masked_fill(ids == IMAGE, -100), "pixel_values": drawn(step, 3, 8, 8)}


def of_classes(step: int) -> Batch:
    return {"input_ids": words(step), "labels": words(step)[:, 0] % 3}


def of_pairs(step: int) -> Batch:
    return {"chosen": words(step), "rejected": words(step + 50)}


def of_noise(step: int) -> Batch:
    noise = {"picture": drawn(step, 3, 8, 8), "noise": drawn(step + 50, 3, 8, 8)}
    return {**noise, "time": words(step)[:, 0] % 10}


def own_loss(model: Any, batch: Batch) -> Tensor:
    return model(**batch).loss


def of_noise_found(model: Any, batch: Batch) -> Tensor:
    share = batch["time"].view(-1, 1, 1, 1) / 10
    found = model((1 - share) * batch["picture"] + share * batch["noise"], batch["time"])
    return functional.mse_loss(found, batch["noise"])


def of_preference(model: Any, batch: Batch) -> Tensor:
    """DPO without a reference: the chosen words shall be likelier than the rejected ones."""
    likely = [-functional.cross_entropy(model(ids).logits[:, :-1].mT, ids[:, 1:], reduction="none").sum(1)
              for ids in batch.values()]  # fmt: skip
    return -functional.logsigmoid(0.1 * (likely[0] - likely[1])).mean()


KINDS: dict[str, tuple[Callable[[], Any], Callable[[int], Batch], Callable[[Any, Batch], Tensor]]] = {
    "causal": (llama, of_words, own_loss),
    "experts": (mixtral, of_words, own_loss),
    "vision-language": (llava, of_images, own_loss),
    "encoder-decoder": (t5, of_words, own_loss),
    "classification": (bert, of_classes, own_loss),
    "preference": (llama, of_pairs, of_preference),
    "diffusion": (Noised, of_noise, of_noise_found),
}
Trained = tuple[list[float], dict[str, Tensor]]


def train(kind: str, model: Any, optim: Any, rank: int = 0, ranks: int = 1) -> list[float]:
    _, batch, loss_of = KINDS[kind]
    losses = []
    for step in range(STEPS):
        loss = loss_of(model, {name: rows.chunk(ranks)[rank] for name, rows in batch(step).items()})
        loss.backward()
        optim.step()
        optim.zero_grad()
        losses.append(loss.item())
    return losses


def in_torch(kind: str) -> Trained:
    model = KINDS[kind][0]()
    return train(kind, model, torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4)), dict(model.named_parameters())


def in_dzero(rank: int, ranks: int, kind: str, stage: int) -> Trained:
    sharded = dzero.shard(KINDS[kind][0](), stage=stage, precision="fp32")
    losses = torch.tensor(train(kind, sharded.model, dzero.AdamW(sharded, lr=1e-3, eps=1e-4), rank, ranks))
    dist.all_reduce(losses)
    return (losses / ranks).tolist(), params_of(sharded)


@pytest.mark.full("tests/habits/test_models_and_loops.py::test_a_model_gives_what_torch_gives")
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_a_loop_of_ones_own_trains_it_as_torch_does(pool: Pool, kind: str, stage: int) -> None:
    losses, weights = in_torch(kind)
    found, trained = pool.run(in_dzero, 2, kind, stage)[0]
    assert found == pytest.approx(losses, rel=2e-6)
    assert losses[-1] != losses[0]
    assert trained.keys() == weights.keys()
    for name, value in trained.items():
        torch.testing.assert_close(value, weights[name].detach(), rtol=1e-5, atol=1e-6, msg=name)
