"""Muon for the oracle, from its published formulas, with plain tensors and nothing of dzero.

    m <- mu m + (1 - mu) g,  u = mu m + (1 - mu) g (Nesterov) or m
    X = u / |u|, then `iterations` times  X <- a X + (b A + c A A) X  with A = X X'
    w <- w (1 - lr decay) - lr f X,  f = 0.2 sqrt(larger side) or sqrt(max(1, rows / cols))

A matrix that is taller than wide is orthogonalised on its side. Every line of an iteration is computed in fp32 and
rounded once to `dtype`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Muon:
    """A `Rule` of reference.py. `lr`: instead of the run's."""

    lr: float | None = None
    momentum: float = 0.95
    nesterov: bool = True
    iterations: int = 5
    weight_decay: float = 0.1
    rms: bool = True
    dtype: torch.dtype = torch.float32

    def __call__(self, master: Tensor, m: Tensor, g: Tensor, lr: float) -> tuple[Tensor, Tensor]:
        lr = lr if self.lr is None else self.lr
        rows, cols = master.shape
        m = self.momentum * m + (1 - self.momentum) * g
        u = self.momentum * m + (1 - self.momentum) * g if self.nesterov else m
        factor = 0.2 * max(rows, cols) ** 0.5 if self.rms else max(1, rows / cols) ** 0.5
        return master * (1 - lr * self.weight_decay) - lr * factor * self.orthogonal(u), m

    def orthogonal(self, u: Tensor) -> Tensor:
        """fp32 [rows, cols]."""
        if u.shape[0] > u.shape[1]:
            return self.orthogonal(u.T).T
        x = self.rounded(u)
        norm = self.rounded(torch.tensor(math.sqrt(x.double().square().sum().item())))
        x = self.rounded(x / max(norm.item(), 1e-7))
        for _ in range(self.iterations):
            a = self.rounded(x @ x.T)
            b = self.rounded(-4.7750 * a + 2.0315 * (a @ a))
            x = self.rounded(3.4445 * x + b @ x)
        return x

    def rounded(self, x: Tensor) -> Tensor:
        """fp32, of what `dtype` has."""
        return x.to(self.dtype).float()
