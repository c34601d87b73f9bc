"""Classes of users that need whole parameters, and training in one process by a class over fp32 masters.

This is what `TorchOptimizer` has to give on any shards.
"""

from __future__ import annotations

import math
from typing import Any

import reference
import small_decoders
import torch


class Lamb(torch.optim.Optimizer):
    """LAMB (You et al. 2020, algorithm 2): AdamW whose step is scaled by norms of the parameter and of the update."""

    def __init__(self, params: Any, lr: float, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if not state:
                    state.update(step=0, m=torch.zeros_like(p), v=torch.zeros_like(p))
                state["step"] += 1
                state["m"].lerp_(p.grad, 0.1)
                state["v"].mul_(0.999).addcmul_(p.grad, p.grad, value=0.001)
                m, v = state["m"] / (1 - 0.9 ** state["step"]), state["v"] / (1 - 0.999 ** state["step"])
                move = m / (v.sqrt() + 1e-6) + group["weight_decay"] * p
                size, length = float(p.norm()), float(move.norm())
                p.sub_(move, alpha=group["lr"] * (size / length if size and length else 1.0))


class Shampoo(torch.optim.Optimizer):
    """Shampoo (Gupta et al. 2018, algorithm 1) of matrices, AdaGrad of vectors; its states have shapes of their own."""

    def __init__(self, params: Any, lr: float, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state, grad = self.state[p], p.grad
                if not state:
                    state["step"] = torch.tensor(0.0)
                    sides = {"left": p.shape[0], "right": p.shape[1]} if p.ndim == 2 else {}
                    state.update({key: 1e-4 * torch.eye(n) for key, n in sides.items()} or {"sum": torch.zeros_like(p)})
                state["step"] += 1
                if p.ndim == 2:
                    state["left"].addmm_(grad, grad.T)
                    state["right"].addmm_(grad.T, grad)
                    move = _inverse_fourth_root(state["left"]) @ grad @ _inverse_fourth_root(state["right"])
                else:
                    state["sum"].addcmul_(grad, grad)
                    move = grad / (state["sum"].sqrt() + 1e-8)
                p.mul_(1 - group["lr"] * group["weight_decay"]).sub_(move, alpha=group["lr"])


def _inverse_fourth_root(matrix: torch.Tensor) -> torch.Tensor:
    values, vectors = torch.linalg.eigh(matrix)
    return vectors * values.clamp(min=1e-8).pow(-0.25) @ vectors.T


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
