"""Classes of users that need whole parameters, and training in one process by a class over fp32 masters.

This is what `TorchOptimizer` has to give on any shards.
"""

from __future__ import annotations

from typing import Any

import reference
import small_decoders
import torch
from torch import Tensor, nn


class ByParameter(torch.optim.Optimizer):
    def __init__(self, params: Any, lr: float, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.update(p, p.grad, self.state[p], group)

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        raise NotImplementedError


class Lamb(ByParameter):
    """LAMB (You et al. 2020, algorithm 2): AdamW whose step is scaled by norms of the parameter and of the update."""

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            state.update(step=0, m=torch.zeros_like(p), v=torch.zeros_like(p))
        state["step"] += 1
        state["m"].lerp_(grad, 0.1)
        state["v"].mul_(0.999).addcmul_(grad, grad, value=0.001)
        m, v = state["m"] / (1 - 0.9 ** state["step"]), state["v"] / (1 - 0.999 ** state["step"])
        move = m / (v.sqrt() + 1e-6) + group["weight_decay"] * p
        size, length = float(p.norm()), float(move.norm())
        p.sub_(move, alpha=group["lr"] * (size / length if size and length else 1.0))


class Shampoo(ByParameter):
    """Shampoo (Gupta et al. 2018, algorithm 1) of matrices, AdaGrad of vectors; its states have shapes of their own."""

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
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


def _inverse_fourth_root(matrix: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(matrix)
    return vectors * values.clamp(min=1e-8).pow(-0.25) @ vectors.T


class OfClass:
    """A class of torch for one parameter, as a `Rule` of reference.py; the class has the rate and the states."""

    def __init__(self, kind: type[torch.optim.Optimizer], options: dict[str, Any]) -> None:
        self._param = nn.Parameter(torch.empty(0))
        self._make = lambda: kind([self._param], **options)
        self._optim: torch.optim.Optimizer | None = None

    def __call__(self, master: Tensor, moment: Tensor, g: Tensor, lr: float) -> tuple[Tensor, Tensor]:
        self._param.data, self._param.grad = master.clone(), g
        self._optim = self._optim or self._make()
        self._optim.step()
        return self._param.detach().clone(), moment


def train(
    rule: type[torch.optim.Optimizer],
    options: dict[str, Any],
    *,
    precision: str,
    steps: int,
    clip: float | None,
) -> dict[str, Tensor]:
    """Parameters at the end: rank-averaged gradients of the working copy, clipped, into `rule` over fp32 masters."""
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    return reference.train(
        lambda: small_decoders.build("uneven"),
        small_decoders.batches("uneven", steps=steps, ranks=2, microbatches=1),
        small_decoders.loss_fn,
        lrs=[0.0] * steps,
        numerics=reference.Numerics(working=dtype, wire=dtype, grad=dtype),
        clip=clip,
        rules={name: OfClass(rule, options) for name, _ in small_decoders.build("uneven").named_parameters()},
    ).params
