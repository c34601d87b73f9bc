"""One rank of four on one device: training over a staged group, in which nothing but the transport is a stand-in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import parity_cells
import reference
import small_decoders
import torch
import torch.distributed as dist
from parity_cells import CLIP, LR, STEPS, master_of, whole
from staged_group import BACKEND, staged

from dzero import AdamW, OffloadConfig, PrecisionConfig, ZeroConfig, make_mesh, shard

RANKS, NET = 4, "uneven"


@dataclass(frozen=True)
class Run:
    """What is trained: tier is that of gradients, masters and moments."""

    stage: int
    microbatches: int = 1
    precision: str = "fp32"
    replicate: int = 1
    tier: str = "device"
    overlap: str = "step"
    reduction: str = "auto"

    @property
    def offload(self) -> OffloadConfig | None:
        """The library's setting for it."""
        if self.tier == "device":
            return None
        return OffloadConfig(grad=self.tier, master=self.tier, moments=self.tier, overlap=self.overlap)  # type: ignore[arg-type]


@contextmanager
def staged_world(rank: int, ranks: int, rendezvous: str, device: torch.device) -> Iterator[None]:
    """Leave the pool's group for one whose tensors on `device` are staged; `rendezvous`: a file, new for each run."""
    dist.barrier()  # a rank that left now would break the connections that others are still making
    dist.destroy_process_group()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = f"cpu:gloo,cuda:{BACKEND}" if device.type == "cuda" else f"cpu:{BACKEND}"
    with staged(device):
        at, timeout = f"file://{rendezvous}", timedelta(seconds=60)
        dist.init_process_group(backend, init_method=at, rank=rank, world_size=ranks, timeout=timeout)
        try:
            yield
            dist.barrier()
        finally:
            dist.destroy_process_group()


def train(
    rank: int, ranks: int, rendezvous: str, device_type: str, run: Run
) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Return masters on the CPU and norms after `STEPS` steps."""
    device = torch.device(device_type, 0) if device_type == "cuda" else torch.device(device_type)
    with staged_world(rank, ranks, rendezvous, device):
        replicate = ranks if run.stage == 0 else run.replicate
        sharded = shard(
            small_decoders.build(NET),
            ZeroConfig(stage=run.stage, reduction=run.reduction),
            precision=PrecisionConfig(param=run.precision),
            offload=run.offload,
            mesh=make_mesh(device_type, replicate=replicate),
            microbatches=run.microbatches,
        )
        optim, norms = AdamW(sharded, lr=LR, max_norm=CLIP), []
        for of_step in small_decoders.batches(NET, steps=STEPS, ranks=ranks, microbatches=run.microbatches):
            for index, batch in enumerate(of_step[rank]):
                with sharded.microbatch(is_last=index == run.microbatches - 1):
                    loss = small_decoders.loss_fn(sharded.model, batch.to(device)) / run.microbatches
                    optim.scale_loss(loss).backward()
            optim.step()
            assert optim.last_decision is not None
            norms.append(optim.last_decision.norm)
        optim.synchronize()
        params = sharded.named_params().items()
        masters = {name: whole(master_of(p, optim.state[p])).cpu() for name, p in params}
    return masters, norms


def oracle(run: Run) -> reference.History:
    """The same run by tests/support/reference.py, on the CPU."""
    return parity_cells.oracle(
        parity_cells.Cell(run.stage, run.precision, run.microbatches, master="fp32", net=NET, ranks=RANKS)
    )
