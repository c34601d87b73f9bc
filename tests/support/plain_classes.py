"""Training in one process by an optimizer class over fp32 masters: what `TorchOptimizer` has to give on any shards."""

from __future__ import annotations

import math
from typing import Any

import reference
import small_decoders
import torch


def train(
    rule: type[torch.optim.Optimizer],
    options: dict[str, Any],
    *,
    precision: str,
    steps: int,
    clip: float | None,
    net: str = "uneven",
    ranks: int = 2,
) -> dict[str, torch.Tensor]:
    """Parameters at the end: rank-averaged gradients of the working copy, clipped, into `rule` over fp32 masters."""
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    torch.set_num_threads(1)  # as the workers: matrix products have the same bits
    model = small_decoders.build(net)
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    masters = {n: torch.nn.Parameter(p.detach().clone()) for n, p in trained.items()}
    model.to(dtype)
    optim = rule(list(masters.values()), **options)
    for of_step in small_decoders.batches(net, steps=steps, ranks=ranks, microbatches=1):
        total = {n: torch.zeros_like(m) for n, m in masters.items()}
        for of_rank in of_step:
            model.zero_grad()
            small_decoders.loss_fn(model, of_rank[0]).backward()  # type: ignore[no-untyped-call]
            for n, p in trained.items():
                assert p.grad is not None
                total[n] += p.grad.float()
        for n, master in masters.items():
            master.grad = (total[n] / ranks).to(dtype).float()
        norm = math.sqrt(sum(m.grad.double().square().sum().item() for m in masters.values()))  # type: ignore[misc, union-attr]
        for master in masters.values():
            assert master.grad is not None
            master.grad.mul_(1.0 if clip is None else min(1.0, clip / (norm + 1e-6)))
        optim.step()
        with torch.no_grad():
            for n, p in trained.items():
                p.copy_(reference.to_working(masters[n].detach(), dtype))
    return {n: p.detach().clone() for n, p in model.named_parameters()}
