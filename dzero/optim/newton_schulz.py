"""Muon on plain tensors (Jordan et al. 2024): momentum, orthogonalization of whole matrices, decoupled decay.

    g = grad * scale                              scale: unscaling and clipping in one factor
    m = m * momentum + g * (1 - momentum)
    u = g * (1 - momentum) + m * momentum         with Nesterov momentum; otherwise u = m
    o = orthogonalise(u)                          the whole matrix [rows, cols]: its singular values become about 1
    master = master * (1 - lr * decay) - o * (lr * factor)

    scale     factor                              effect
    rms       0.2 * sqrt(max(rows, cols))         o has the RMS of AdamW's updates (Liu et al. 2025): one lr for both
    original  sqrt(max(1, rows / cols))           o has a spectral norm that follows the shape (Jordan)

The orthogonalization runs on whole matrices, each on one rank. Everything else is element-wise, in separate fp32
operations, so any slice of a matrix gets the same bits (see `optim/adamw_math.py`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from dzero.optim.adamw_math import noise_seed, rounding_noise, stochastic_bf16
from dzero.optim.flat_update import ParamStates, master_of, write_back
from dzero.zero.unit_shapes import ParamShape

QUINTIC = 3.4445, -4.7750, 2.0315
"""Coefficients a, b, c of the polynomial a x + b x³ + c x⁵ that each iteration applies to the singular values.

Its slope at 0 is steep, so small singular values grow fast. All of them end between 0.7 and 1.2."""
LEAST_NORM = 1e-7
"""Lower bound of the norm by which a matrix is divided, so that zeros stay zeros."""


@dataclass(frozen=True)
class MatrixCoefficients:
    """Scalars of one matrix's update. Floats are rounded once from float64 to fp32.

    Attributes:
        scale: Factor of the gradient: unscaling and clipping.
        blend: 1 - momentum.
        keep: 1 - lr * weight_decay.
        rate: lr * `shape_factor`.
    """

    scale: float
    momentum: float
    blend: float
    keep: float
    rate: float
    nesterov: bool
    iterations: int

    @classmethod
    def of(
        cls,
        rows: int,
        cols: int,
        *,
        lr: float,
        momentum: float,
        weight_decay: float,
        nesterov: bool,
        iterations: int,
        scale: str,
        grad_scale: float,
    ) -> MatrixCoefficients:
        """Compute the coefficients of a matrix [rows, cols]; `scale` is "rms" or "original"."""
        rate = lr * shape_factor(rows, cols, scale)
        return cls(
            scale=_fp32(grad_scale),
            momentum=_fp32(momentum),
            blend=_fp32(1 - momentum),
            keep=_fp32(1 - lr * weight_decay),
            rate=_fp32(rate),
            nesterov=nesterov,
            iterations=iterations,
        )


def _fp32(value: float) -> float:
    return float(np.float32(value))


def shape_factor(rows: int, cols: int, scale: str) -> float:
    """Return the factor of the learning rate of a matrix [rows, cols]."""
    return 0.2 * math.sqrt(max(rows, cols)) if scale == "rms" else math.sqrt(max(1.0, rows / cols))


def cost_of(shape: ParamShape) -> int:
    """Return the number of multiplications of one iteration on a matrix."""
    short, long = sorted(shape.shape)
    return 2 * short * short * long + short**3


def mixed(grad: torch.Tensor, states: ParamStates, c: MatrixCoefficients, step: int) -> torch.Tensor:
    """Update the momentum of a shard, and return the input of `orthogonalise`, fp32 [n]; `step` seeds the noise."""
    g = grad.float() * c.scale
    m = states.m.float()  # an fp32 state is not copied
    g.mul_(c.blend)
    m.mul_(c.momentum).add_(g)
    found = g.add_(m * c.momentum) if c.nesterov else m
    if states.m.dtype == torch.bfloat16:
        noise = rounding_noise(states.first, m.numel(), noise_seed(states.name, step), m.device)
        states.m.copy_(stochastic_bf16(m, noise & 0xFFFF))
    return found


def orthogonalise(matrix: torch.Tensor, iterations: int) -> torch.Tensor:
    """Approximate U V' of a matrix U S V' [rows, cols] by Newton-Schulz iterations in its dtype; zeros stay zeros."""
    a, b, c = QUINTIC
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix
    x = x / x.norm().clamp(min=LEAST_NORM)  # the Frobenius norm, so that no singular value exceeds 1
    for _ in range(iterations):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


def apply(update: torch.Tensor, states: ParamStates, c: MatrixCoefficients) -> None:
    """Apply a shard [n] of an orthogonalized matrix to the shard's master and working copy."""
    state = master_of(states.work, states.master, states.remainder, follows=states.follows)
    state.mul_(c.keep).sub_(update.float() * c.rate)
    write_back(state, states.work, states.remainder)
