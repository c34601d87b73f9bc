"""What gpu_offload.py compares: each side trains one model on one device; all clip, and use AdamW(**ADAM).

    side               states in host memory                       bytes kept per parameter, device + host
    dzero_resident     none                                        16 + 0    bf16, fp32 masters and moments
    dzero_forward      grad, master, moments; overlap=forward      2 + 16    with new weights on their way
    dzero_backward     the same; overlap=backward                  2 + 28    and room to undo every unit
    dzero_half         half of these kinds; overlap=backward       9 + 14    as dzero_backward
    dzero_third        0.3 of them; overlap=backward               12 + 8    the same
    dzero_host_all     parameters too; stage 3, overlap=forward    0 + 16
    dzero_fetch_fp8    the same; copied to the device as fp8       0 + 17    and what is copied
    dzero_disk         grad; master and moments are on disk        2 + 2     and room for the units under way
    dzero_infinity     none; stage 3, all four kinds on disk       0 + 0     the same
    fsdp2_cpu          all: CPUOffloadPolicy, fp32 parameters      0 + 16    torch's fused AdamW on the host
    torchao_cpu        CPUOffloadOptimizer, gradients too          2 + 8     all bf16: no masters, half the traffic

The peers clip with torch's clip_grad_norm_; torchao's gradients are clipped on the host, where it sends them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from sides import ADAM
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from workload import loss_of

from dzero import AdamW, OffloadConfig, PrecisionConfig, ZeroConfig, make_mesh, shard
from dzero.models.build import build, count, materialiser
from dzero.models.config import ModelConfig
from dzero.parallel.blocks import apply_blocks
from dzero.parallel.config import BlockConfig
from dzero.zero.offload_config import DiskConfig

FILL_STEPS = 2
HOST: dict[str, Any] = {"grad": "host", "master": "host", "moments": "host"}
DISK: dict[str, Any] = {"grad": "host", "master": "disk", "moments": "disk"}
HALF, THIRD = ({f"{kind}_fraction": part for kind in HOST} for part in (0.5, 0.3))
ALL_DISK: dict[str, Any] = {"param": "disk", "grad": "disk", "master": "disk", "moments": "disk"}


class LeftOutError(Exception):
    """A side cannot run here."""


@dataclass(frozen=True)
class Setting:
    """What all sides train, where, and how. `disk`: of the sides that use one."""

    config: ModelConfig
    device: torch.device
    blocks: BlockConfig
    max_norm: float
    disk: DiskConfig

    def model(self) -> tuple[nn.Module, Callable[[nn.Module], None]]:
        """On meta, and what fills it; the same values every time."""
        model = build(self.config)
        apply_blocks(model, self.blocks, self.device.type)
        return model, materialiser(self.config, model, seed=0, device=self.device)

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


@dataclass
class Side:
    """Trains one batch per `step`. `clipped_here`: what the step clips itself, asked for after backward; dzero's
    optimizer clips."""

    setting: Setting
    model: nn.Module
    optim: torch.optim.Optimizer
    clipped_here: Callable[[], list[Tensor]] | None = None
    norms: list[float] = field(default_factory=list)

    def step(self, batch: Tensor) -> Tensor:
        """The loss."""
        loss = loss_of(self.model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        if self.clipped_here is not None:
            nn.utils.clip_grad_norm_(self.clipped_here(), self.setting.max_norm)
        self.optim.step()
        if isinstance(self.optim, AdamW) and self.optim.last_decision is not None:
            self.norms.append(self.optim.last_decision.norm)
        self.optim.zero_grad()
        return loss.detach()

    def turn(self, batches: Sequence[Tensor], steps: int) -> dict[str, list[float]]:
        """Fill the pipeline, then `steps` on the clock: one number of each quantity, and the losses."""
        for batch in batches[:FILL_STEPS]:
            self.step(batch)
        optim = self.optim if isinstance(self.optim, AdamW) else None
        if optim is not None:
            optim.offload.take_use()
        self.norms.clear()
        self.setting.synchronize()
        began = time.perf_counter()
        losses = [self.step(batches[index % len(batches)]) for index in range(steps)]
        self.setting.synchronize()
        found = {"step_s": [(time.perf_counter() - began) / steps], "losses": [float(loss) for loss in losses]}
        if optim is not None:
            use = optim.offload.take_use()
            found["update_s"] = [use["COMPUTE"].busy_s / steps if "COMPUTE" in use else 0.0]
            disk = [lane.busy_s / steps for name, lane in use.items() if name.startswith(("LOAD", "SPILL"))]
            found |= {"disk_s": [max(disk)]} if disk else {}
            found["waited_s"] = [sum(lane.waited_s for lane in use.values()) / steps]
            found["clipped"] = [sum(norm > self.setting.max_norm for norm in self.norms) / steps]
            optim.synchronize()
        return found


def dzero_side(setting: Setting, fetch: str = "param", **offload: Any) -> Side:
    """The library; without `offload` every state is on the device."""
    model, fill = setting.model()
    if offload.get("overlap") == "backward":
        offload["undo_bytes"] = 16 * count(model)
    zero = ZeroConfig(stage=3 if "param" in offload else 2)
    if "disk" in offload.values():
        offload["disk"] = setting.disk
    where = OffloadConfig(**offload) if offload else None
    precision, mesh = PrecisionConfig(fetch=fetch), make_mesh(setting.device.type)
    sharded = shard(model, zero, precision=precision, offload=where, mesh=mesh, init=fill)
    return Side(setting, sharded.model, AdamW(sharded, **ADAM, max_norm=setting.max_norm))


def fsdp2_side(setting: Setting) -> Side:
    """Hand-written FSDP2, resharded after forward, bf16 on its wire."""
    model, fill = setting.model()
    options: dict[str, Any] = {
        "mesh": init_device_mesh(setting.device.type, (1,)),
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16),
        "offload_policy": CPUOffloadPolicy(pin_memory=setting.device.type == "cuda"),
    }
    for part in [*model.get_submodule("layers").children(), model]:
        fill(part)
        fully_shard(part, **options)
    optim = torch.optim.AdamW(model.parameters(), fused=True, **ADAM)
    return Side(setting, model, optim, lambda: list(model.parameters()))


def torchao_side(setting: Setting) -> Side:
    """Plain bf16 parameters on the device; torchao updates those below 4,096 elements there."""
    try:
        from torchao.optim import CPUOffloadOptimizer
    except ImportError as error:
        raise LeftOutError(f"torchao is missing or too old: {error}") from error
    if setting.device.type != "cuda":
        raise LeftOutError("torchao's CPUOffloadOptimizer needs a GPU")
    model, fill = setting.model()
    fill(model)
    params = list(model.bfloat16().parameters())
    optim = CPUOffloadOptimizer(params, torch.optim.AdamW, offload_gradients=True, fused=True, **ADAM)
    if not hasattr(optim, "queue") or not hasattr(optim, "param_d2h_map"):
        raise LeftOutError("this torchao does not tell where its gradients are, so they cannot be clipped")

    def arrived() -> list[Tensor]:
        for event in optim.queue.values():
            event.synchronize()
        return [optim.param_d2h_map.get(param, param) for param in params]

    return Side(setting, model, optim, arrived)


@dataclass(frozen=True)
class Recipe:
    """How a side is built, and the bytes of device and host per parameter that it takes at most between steps (torch
    rounds its page-locked memory up to powers of two). `goal`: whether it is held to gpu_offload's."""

    build: Callable[[Setting], Side]
    device_bytes: int
    host_bytes: int
    goal: bool = False


SIDES = {
    "dzero_resident": Recipe(dzero_side, 16, 0),
    "dzero_forward": Recipe(partial(dzero_side, **HOST, overlap="forward"), 4, 16, goal=True),
    "dzero_backward": Recipe(partial(dzero_side, **HOST, overlap="backward"), 4, 28, goal=True),
    "dzero_half": Recipe(partial(dzero_side, **HOST, **HALF, overlap="backward"), 10, 14, goal=True),
    "dzero_third": Recipe(partial(dzero_side, **HOST, **THIRD, overlap="backward"), 13, 9, goal=True),
    "dzero_host_all": Recipe(partial(dzero_side, **HOST, param="host", overlap="forward"), 0, 18, goal=True),
    "dzero_fetch_fp8": Recipe(
        partial(dzero_side, **HOST, param="host", overlap="forward", fetch="fp8"), 0, 19, goal=True
    ),
    "dzero_disk": Recipe(partial(dzero_side, **DISK, overlap="forward"), 4, 8),
    "dzero_infinity": Recipe(partial(dzero_side, **ALL_DISK, overlap="forward"), 0, 8),
    "fsdp2_cpu": Recipe(fsdp2_side, 0, 32),
    "torchao_cpu": Recipe(torchao_side, 4, 16),
}
