"""AdamW with decoupled decay (Loshchilov & Hutter 2019) as separate fp32 operations on plain tensors.

    g = grad * scale                                    scale: unscaling and clipping in one factor
    m = m * beta1 + g * (1 - beta1)
    v = v * beta2 + (g * g) * (1 - beta2)
    master = master * (1 - lr * decay) - (m / (sqrt(v) / sqrt(1 - beta2^t) + eps)) * lr / (1 - beta1^t)

The order of these operations is the numerics contract: `optim/cpu_kernels.py` performs them in one pass and gives the
same bits. No operation is a fused multiply-add (torch's addcmul, lerp, add with alpha), because the vectorized body and
the scalar tail of a loop would round differently.

bf16 moments are rounded stochastically, because rounding to nearest would never change them when beta2 is near 1:
16 random bits are added to the fp32 pattern before its low half is dropped. The random bits are a hash of parameter,
step and global index, so they do not depend on the sharding.
"""

from __future__ import annotations

import zlib
from dataclasses import astuple, dataclass
from functools import cached_property

import numpy as np
import torch

Scalar = float | torch.Tensor


@dataclass(frozen=True)
class Coefficients:
    """Scalars of one update, each rounded once from float64 to fp32, as floats or 0-dim fp32 tensors.

    Attributes:
        scale: Factor of the gradient: unscaling and clipping.
        blend1: 1 - beta1.
        blend2: 1 - beta2.
        root: 1 / sqrt(1 - beta2^t).
        keep: 1 - lr * weight_decay.
        rate: lr / (1 - beta1^t).
    """

    scale: Scalar
    beta1: Scalar
    blend1: Scalar
    beta2: Scalar
    blend2: Scalar
    root: Scalar
    eps: Scalar
    keep: Scalar
    rate: Scalar

    @classmethod
    def of(
        cls, *, step: int, lr: float, betas: tuple[float, float], eps: float, weight_decay: float, scale: float
    ) -> Coefficients:
        """Compute the coefficients of update number `step`, which counts from 1."""
        beta1, beta2 = betas
        values = (
            scale,
            beta1,
            1 - beta1,
            beta2,
            1 - beta2,
            1 / (1 - beta2**step) ** 0.5,
            eps,
            1 - lr * weight_decay,
            lr / (1 - beta1**step),
        )
        return cls(*(float(np.float32(value)) for value in values))

    @cached_property
    def floats(self) -> tuple[np.float32, ...]:
        """Values in declaration order, for the CPU and CUDA kernels."""
        return tuple(np.float32(value) for value in astuple(self))

    def as_tensors(self, device: torch.device) -> Coefficients:
        """Return the coefficients as 0-dim fp32 tensors on `device`, copied there at once."""
        return Coefficients(*torch.tensor([float(v) for v in astuple(self)], device=device).unbind())


def adamw(grad: torch.Tensor, master: torch.Tensor, m: torch.Tensor, v: torch.Tensor, c: Coefficients) -> None:
    """Update `master`, `m` and `v` in place.

    All tensors are fp32 and have one shape. `grad` is still scaled and unclipped: `c.scale` is applied here.
    """
    g = grad * c.scale
    m.mul_(c.beta1).add_(g * c.blend1)
    v.mul_(c.beta2).add_((g * g).mul_(c.blend2))
    denominator = exact_sqrt(v).mul_(c.root).add_(c.eps)
    master.mul_(c.keep).sub_((m / denominator).mul_(c.rate))


def exact_sqrt(x: torch.Tensor) -> torch.Tensor:
    """Return the correctly rounded fp32 square root of `x` as a new tensor.

    On the CPU, `torch.sqrt` may call a vector library that is off by one unit in the last place in 1 of 150 values.
    Computed in fp64 and then rounded to fp32, the root is exact, because 53 ≥ 2 * 24 + 2 bits.
    """
    return x.sqrt() if x.is_cuda else x.double().sqrt_().float()


def noise_seed(name: str, step: int) -> int:
    """Return the 32-bit seed of the rounding noise of parameter `name` at update `step`."""
    return zlib.crc32(f"{step}:{name}".encode())


def mix(x: torch.Tensor) -> torch.Tensor:
    """Return 32 well-mixed bits (MurmurHash3's finalizer) of each int64 value in [0, 2^32)."""
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & 0xFFFFFFFF
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & 0xFFFFFFFF
    return x ^ (x >> 16)


def rounding_noise(first: int, length: int, seed: int, device: torch.device) -> torch.Tensor:
    """Return noise of elements first, first + 1, ... as int64 [length]: the low 16 bits for m, the high 16 for v."""
    index = torch.arange(first, first + length, device=device) & 0xFFFFFFFF
    return mix(index ^ seed)


def stochastic_bf16(value: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """Round finite fp32 `value` [n] to bf16, up or down with the probability that preserves its mean.

    `noise` is int64 [n], uniform in [0, 2^16).
    """
    bits = value.view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    return ((bits + noise) >> 16).to(torch.int16).view(torch.bfloat16)
