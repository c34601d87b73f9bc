"""AdamW with decoupled decay (Loshchilov & Hutter 2019) as separate fp32 operations on plain tensors.

    g = grad * scale                                    scale: unscaling and clipping in one factor
    m = m * beta1 + g * (1 - beta1)
    v = v * beta2 + (g * g) * (1 - beta2)
    master = master * (1 - lr * decay) - (m / (sqrt(v) / sqrt(1 - beta2^t) + eps)) * lr / (1 - beta1^t)

The order of operations is the contract: `cpu_kernels.py` performs the same ones in one pass and gives the same bits.
No fused multiply-add (torch's addcmul, lerp, add with alpha) because vector body and tail would round differently.

bf16 moments are rounded stochastically, or a beta2 near 1 would never move them: 16 random bits are added to the fp32
pattern before it is cut. The bits are a hash of (parameter, step, global index), so they do not depend on the shard.
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
    """The scalars of one step, each rounded once from float64 to fp32; as floats, or as 0-dim fp32 tensors."""

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
        """Bias corrections and factors of update number `step` (from 1)."""
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
        """The values in declaration order, for the CPU kernels."""
        return tuple(np.float32(value) for value in astuple(self))

    def as_tensors(self, device: torch.device) -> Coefficients:
        """For compiled code, which would be compiled anew for every new float; one small copy to the device."""
        return Coefficients(*torch.tensor([float(v) for v in astuple(self)], device=device).unbind())


def adamw(grad: torch.Tensor, master: torch.Tensor, m: torch.Tensor, v: torch.Tensor, c: Coefficients) -> None:
    """Update `master`, `m`, `v` in place; all fp32 and of one shape, `grad` unscaled and unclipped."""
    g = grad * c.scale
    m.mul_(c.beta1).add_(g * c.blend1)
    v.mul_(c.beta2).add_((g * g).mul_(c.blend2))
    denominator = exact_sqrt(v).mul_(c.root).add_(c.eps)
    master.mul_(c.keep).sub_((m / denominator).mul_(c.rate))


def exact_sqrt(x: torch.Tensor) -> torch.Tensor:
    """The correctly rounded fp32 square root, new. torch's own on the CPU may go to a vector library that is off by one
    place in 1 of 150 values; by way of fp64 the rounding is exact (53 ≥ 2 * 24 + 2 bits)."""
    return x.sqrt() if x.is_cuda else x.double().sqrt_().float()


def noise_seed(name: str, step: int) -> int:
    """32 bits that key the rounding of parameter `name` at update `step`."""
    return zlib.crc32(f"{step}:{name}".encode())


def mix(x: torch.Tensor) -> torch.Tensor:
    """32 well-mixed bits (MurmurHash3's finaliser) of int64 values in [0, 2^32)."""
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & 0xFFFFFFFF
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & 0xFFFFFFFF
    return x ^ (x >> 16)


def rounding_noise(first: int, length: int, seed: int, device: torch.device) -> torch.Tensor:
    """int64 [length] hashes for elements first, first + 1, ...: the low half is for m, the high half for v."""
    index = torch.arange(first, first + length, device=device) & 0xFFFFFFFF
    return mix(index ^ seed)


def stochastic_bf16(value: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """Round finite fp32 [n] to bf16 up or down with the probability of its distance; `noise` int64 in [0, 2^16)."""
    bits = value.view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    return ((bits + noise) >> 16).to(torch.int16).view(torch.bfloat16)
