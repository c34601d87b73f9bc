"""A loop of accelerate as users write it, over a plain model (DDP) and over one that dzero shards.

    torchrun --nproc-per-node=2 accelerate_runs.py OUT '[{"stage": 3}, ...]' [all]

OUT/results.json has, for each of these settings and for "plain", the losses, norms, learning rates and final weights;
with `all`, also what else of accelerate was tried, by name.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from launched import as_script, whole
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dzero
from dzero.integrations.accelerate import checkpoint_with

ACCUMULATE, BATCH, SAMPLES = 2, 4, 44
"""On 2 ranks 5.5 batches: the last step of the epoch has one microbatch, and its last batch repeats samples."""


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def loader(shuffle: bool) -> DataLoader[Any]:
    x = torch.randn(SAMPLES, 8, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(x, x.sum(1, keepdim=True))
    return DataLoader(data, BATCH, shuffle=shuffle, generator=torch.Generator().manual_seed(3))


def train(settings: dict[str, Any] | None) -> dict[str, Any]:
    """Run the loop that accelerate's documentation shows."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATE)
    if settings is None:
        model: Any = net()
        optim: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    else:
        sharded = dzero.shard(net(), precision="fp32", microbatches=ACCUMULATE, **settings)
        model, optim = sharded.model, dzero.AdamW(sharded, lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optim, 100)
    model, optim, batches, schedule = accelerator.prepare(model, optim, loader(shuffle=True), schedule)
    logs, seen = [], 0
    for _ in range(2):
        for x, y in batches:
            norm = None
            with accelerator.accumulate(model):
                found = model(x)
                loss = nn.functional.mse_loss(found, y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norm = float(whole(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
                optim.step()
                schedule.step()
                optim.zero_grad()
            seen += len(accelerator.gather_for_metrics(found.detach()))
            logs.append([float(accelerator.reduce(loss.detach(), "mean")), norm or 0.0, optim.param_groups[0]["lr"]])
    params = accelerator.unwrap_model(model).parameters()
    return {"logs": logs, "seen": seen, "weights": [whole(param).double().sum().item() for param in params]}


class Loop:
    """The loop of the guide: accelerate has the data and the schedule, dzero the model and the optimizer."""

    def __init__(self, *prepared: str) -> None:
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATE)
        self.sharded = dzero.shard(net(), stage=3, precision="bf16", microbatches=ACCUMULATE)
        self.optim = dzero.AdamW(self.sharded, lr=1e-2, max_norm=0.5)
        self.schedule: Any = torch.optim.lr_scheduler.OneCycleLR(self.optim, 1e-2, total_steps=100)  # of betas too
        own = [{"model": self.sharded.model, "optim": self.optim}[name] for name in prepared]
        *_, self.loader, self.schedule = self.accelerator.prepare(*own, loader(shuffle=False), self.schedule)
        checkpoint_with(self.accelerator, self.sharded, self.optim)

    def run(self, skip: int = 0, save: Callable[[], None] | None = None) -> list[list[float]]:
        logs = []
        for number, (x, y) in enumerate(self.accelerator.skip_first_batches(self.loader, skip)):
            with self.accelerator.accumulate(), self.sharded.microbatch(is_last=self.accelerator.sync_gradients):
                loss = nn.functional.mse_loss(self.sharded.model(x.bfloat16()).float(), y)
                self.accelerator.backward(loss)
            if self.accelerator.sync_gradients:
                self.optim.step()
            self.schedule.step()
            logs.append([loss.item(), self.optim.param_groups[0]["lr"], self.optim.param_groups[0]["betas"][0]])
            if save is not None and number == 1:
                save()
        return logs


def resumes(folder: Path, *prepared: str) -> bool:
    """Return whether a loop that loads a state inside of an epoch goes on with the bits of the one that saved it."""
    loop = Loop(*prepared)
    logs = loop.run(save=lambda: loop.accelerator.save_state(str(folder)))
    again = Loop(*prepared)
    again.accelerator.load_state(str(folder))
    return again.run(skip=2) == logs[2:]


def told(do: Callable[[], object]) -> str:
    try:
        do()
    except (ValueError, RuntimeError) as error:
        return str(error)
    return ""


def steps_on_each_microbatch() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATE)
    sharded = dzero.shard(net(), stage=3, precision="fp32", microbatches=ACCUMULATE)
    optim, batches = dzero.AdamW(sharded), accelerator.prepare(loader(shuffle=False))
    for x, y in batches:
        with accelerator.accumulate(), sharded.microbatch(is_last=accelerator.sync_gradients):
            accelerator.backward(nn.functional.mse_loss(sharded.model(x), y))
        optim.step()


def dtype_in_autocast() -> str:
    """Return the dtype of an output within `accelerator.autocast`, of a model with fp32 parameters."""
    accelerator = Accelerator(cpu=True)
    sharded = dzero.shard(nn.Linear(8, 8), stage=3, precision="fp32")
    with accelerator.autocast():
        return str(sharded.model(torch.ones(2, 8)).dtype)


def main(folder: Path, words: list[str]) -> dict[str, Any]:
    settings, *more = words
    found: dict[str, Any] = {"plain": train(None), "dzero": [train(each) for each in json.loads(settings)]}
    if not more:
        return found
    found["resumes"] = resumes(folder / "a")
    found["resumes with a prepared model"] = resumes(folder / "b", "model")
    found["saves a prepared optimizer"] = told(lambda: resumes(folder / "c", "optim"))
    found["steps on each microbatch"] = told(steps_on_each_microbatch)
    (folder / "empty").mkdir(exist_ok=True)
    found["no states"] = told(lambda: Loop().accelerator.load_state(str(folder / "empty")))
    found["autocast"] = dtype_in_autocast()
    return found


if __name__ == "__main__":
    as_script(main)
