"""What runs on simulated streams: every stage, tier and overlap, and what happens between and beside steps.

Loops call nothing that makes the host wait for the device: what happens to be over by then hides what is not ordered.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import small_decoders
import small_runs
import torch
import torch.distributed as dist
from simulation import Simulation
from sites import Site
from training_loops import sharded_net

from dzero import AdamW, DiskConfig, OffloadConfig, ScalerConfig, streams
from dzero.offload.activation_pool import ActivationPool
from dzero.offload.activations import ActivationOffload
from dzero.offload.executor import ScheduleExecutor
from dzero.offload.memory_pool import HostMemoryPool
from dzero.offload.schedule import OffloadSchedule
from dzero.optim import column_upload
from dzero.zero.dtensors import local_of

STEPS = 3
HOST = {"grad": "host", "master": "host", "moments": "host"}
HALF = {**HOST, "master_fraction": 0.5, "moments_fraction": 0.5}
DISK = {"grad": "disk", "master": "disk", "moments": "disk"}
ALL = {**HOST, "param": "host"}
OVER_ALL = {"replicate": 2, "optimizer_shard_axes": ("replicate", "shard")}


@dataclass(frozen=True)
class Scenario:
    """`run` on each of `ranks`, in a folder that they share."""

    run: Callable[[Path], None]
    ranks: int = 2


def loop(
    folder: Path,
    *,
    net: dict[str, Any] | None = None,
    offload: dict[str, Any] | None = None,
    amid: Callable[[Any, Any], None] | None = None,
    before: Callable[[Any, Any], None] | None = None,
    between: Callable[[Any, Any], None] | None = None,
    poisoned: int | None = None,
    penalty: str = "",
    **optim: Any,
) -> None:
    """Train a net of small_decoders.py for a few steps.

    amid, before, between: called between forward and backward, before each step, and after it. poisoned: a step that
    is not finite. penalty: the squares of all weights in the loss, made `before` the forward or `behind` it.
    """
    if offload is not None and "disk" in offload.values():
        offload = {**offload, "disk": DiskConfig(paths=[str(folder)], block_bytes=8192)}
    sharded = sharded_net(**(net or {}), offload=None if offload is None else OffloadConfig(**offload))
    optimizer = AdamW(sharded, lr=1e-3, **optim)
    layout = sharded.layout
    drawn = small_decoders.batches("even", steps=STEPS, ranks=layout.ranks, microbatches=layout.microbatches)
    for step, of_step in enumerate(drawn):
        batches = of_step[dist.get_rank()]
        for index, batch in enumerate(batches):
            with sharded.microbatch(is_last=index == len(batches) - 1):
                first = weights_of(sharded) if penalty == "before" else 0.0  # its gradient comes last in backward
                loss = small_decoders.loss_fn(sharded.model, batch) / len(batches) + first
                if amid is not None:
                    amid(sharded, optimizer)
                if penalty == "behind":
                    loss = loss + weights_of(sharded)
                if step == poisoned:
                    loss = loss * float("nan")
                optimizer.scale_loss(loss).backward()
        if before is not None:
            before(sharded, optimizer)
        optimizer.step()
        if between is not None:
            between(sharded, optimizer)
    optimizer.synchronize()


def another_optimizer(folder: Path) -> None:
    """Go on with a new optimizer while the old one's last updates are under way."""
    sharded = sharded_net(stage=2, offload=OffloadConfig(**HOST))
    for _ in range(2):
        optimizer = AdamW(sharded, lr=1e-3)
        for of_step in small_decoders.batches("even", steps=2, ranks=2, microbatches=1):
            small_decoders.loss_fn(sharded.model, of_step[dist.get_rank()][0]).backward()
            optimizer.step()
        del optimizer


def whole(folder: Path, *, settings: str) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    text = small_runs.write_text(folder / f"text_{rank}.txt", words=2000)
    run = small_runs.settled(text, f"launch.workers={ranks}", *settings.format(folder=folder).split())
    small_runs.train(rank, ranks, run, folder)


def send_columns(folder: Path) -> None:
    """Send columns to kernels of two streams that take turns, as a step on a GPU does."""
    device = torch.device("cpu")
    sender = column_upload.ColumnUpload(64, device)
    hosts = sender._hosts  # kept: memory that a pool had would be known as page-locked in another tensor too
    sender._arrays = [Watched(host) for host in hosts]  # type: ignore[misc]
    other = streams.new_stream(device)
    for turn in range(8):
        with streams.use_stream(other if turn % 4 > 1 else None, device):
            sender.send(np.arange(16)) + 0
    with streams.use_stream(other, device):
        sender.send(np.arange(16)) + 0
    del sender
    torch.empty(64, dtype=torch.int64).fill_(0)


class Watched:
    """The array of a page-locked buffer, whose writes a simulation sees."""

    def __init__(self, host: torch.Tensor) -> None:
        self._host, self._array = host, host.numpy()
        simulation = Simulation.now()
        simulation.memory.add_pool(host.data_ptr(), host.nbytes)

    def __getitem__(self, cut: slice) -> Any:
        Simulation.now().run("columns", [], [self._host])
        return self._array[cut]


def read_states(sharded: Any, optimizer: Any) -> None:
    """Take a state dict of everything, as a user does between steps."""
    for each in (sharded.model.state_dict(), optimizer.state_dict()["state"]):
        for value in each.values():
            for tensor in value.values() if isinstance(value, dict) else [value]:
                if isinstance(tensor, torch.Tensor):
                    tensor + 0


def read_params(sharded: Any, optimizer: Any) -> None:
    for param in sharded.model.parameters():
        local_of(param.detach()) + 0


def weights_of(sharded: Any) -> torch.Tensor:
    """Return a thousandth of the sum of squares of this rank's weights."""
    squares: Any = sum(param.pow(2).sum().to_local() for param in sharded.model.parameters())
    return 1e-3 * squares


def read_grads(sharded: Any, optimizer: Any) -> None:
    for param in sharded.model.parameters():
        local_of(param.grad) + 0


def gather_by_hand(sharded: Any, optimizer: Any) -> None:
    """Gather every unit in the order of backward, and free it, on the stream that computes."""
    for unit in reversed(sharded.units):
        unit.modules[0].unshard()
        torch.zeros(1000)
    sharded.reshard()


def gather_ahead(sharded: Any, optimizer: Any) -> None:
    """Begin to gather the unit that backward needs last, on the stream that computes."""
    sharded.units[0].modules[0].unshard(async_op=True)


def two_streams(folder: Path) -> None:
    """Save inputs of blocks that run on two streams by turns, of growing size, for backwards on the same."""
    device = torch.device("cpu")
    blocks = [Square() for _ in range(4)]
    activations = ActivationOffload(
        ActivationPool(ScheduleExecutor(OffloadSchedule(), HostMemoryPool(0), device), pin=False), "cpu"
    )
    activations.attach(blocks)
    queues = [streams.current_stream(device), streams.new_stream(device)]
    for size in (2048, 4096, 2048):
        made: list[torch.Tensor] = [torch.ones(size)]
        for turn, block in enumerate(blocks):
            with streams.use_stream(queues[turn % 2], device):
                streams.wait_stream(queues[1 - turn % 2], device)
                made.append(block(made[-1].detach().requires_grad_()))
        grad = torch.ones(size)
        for turn, out in reversed([*enumerate(made[1:])]):
            with streams.use_stream(queues[turn % 2], device):
                torch.zeros(size)  # of nobody else's concern
                streams.wait_stream(queues[1 - turn % 2], device)
                out.backward(grad)
        streams.wait_stream(queues[1], device)


class Square(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * x


def edit_params(sharded: Any, optimizer: Any) -> None:
    with torch.no_grad():
        for param in sharded.model.parameters():
            param.mul_(0.99)


def evaluate(sharded: Any, optimizer: Any) -> None:
    with torch.no_grad():
        sharded.model(torch.zeros(2, 8, dtype=torch.int64))


def park(sharded: Any, optimizer: Any) -> None:
    """Park all states, and let something else write to the memory that they had."""
    sharded.park()
    torch.zeros(1 << 16)
    sharded.unpark()


def scenarios() -> dict[str, Scenario]:
    found: dict[str, Scenario] = {}

    def add(
        name: str,
        stage: int,
        offload: dict[str, Any] | None = None,
        *,
        ranks: int = 2,
        net: dict[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        cut = {"stage": stage, **(net or {})}
        found[name] = Scenario(partial(loop, net=cut, offload=offload, **settings), ranks)

    twice: dict[str, Any] = {"microbatches": 2}
    for stage in range(4):
        add(f"stage {stage}, M=1", stage)
        add(f"stage {stage}, M=2", stage, net=twice)
    add("one rank", 3, ranks=1, net=twice)
    add("native", 3, net={"reduction": "native", **twice})
    add("hybrid", 3, ranks=4, net={"replicate": 2})
    add("hybrid, M=2", 2, ranks=4, net={"replicate": 2, **twice})
    add("states over all", 3, ranks=4, net=OVER_ALL)
    for reduction in ("exact", "native"):
        add(f"states over all, M=2, {reduction}", 3, ranks=4, net={"reduction": reduction, **OVER_ALL, **twice})
    add("states over all, host", 2, HOST, ranks=4, net=OVER_ALL)
    add("states over all, host, step", 2, {**HOST, "overlap": "step"}, ranks=4, net=OVER_ALL)
    add("penalty before", 3, penalty="before")
    add("penalty", 3, penalty="behind")
    add("penalty, M=2", 2, net=twice, penalty="behind")
    add("penalty, hybrid, M=2", 3, ranks=4, net={"replicate": 2, **twice}, penalty="before")
    add("parameters read between steps", 2, HOST, between=read_params)
    add("parameters edited between steps", 2, HOST, between=edit_params)
    add("host parameters read between steps", 3, ALL, between=read_params)
    add("host parameters edited between steps", 3, ALL, between=edit_params)
    add("host parameters in blocks", 3, ALL, net={"fetch": "fp8", **twice})
    in_blocks = {"fetch": "fp8", **twice}
    add("host parameters in blocks edited between steps", 3, ALL, ranks=1, net=in_blocks, between=edit_params)
    add("states read between steps", 3, ALL, between=read_states)
    add("evaluation between steps", 3, ALL, between=evaluate)
    add("hpz", 3, ranks=4, net={"reshard": 2})
    add("two hops", 3, ranks=4, net={"node_ranks": 2})
    add("blocks in two hops", 3, ranks=4, net={"node_ranks": 2, "gather": "int8", "reduce": "int4", **twice})
    for overlap in ("step", "forward", "backward", "delayed"):
        add(f"host, {overlap}", 2, {**HOST, "overlap": overlap})
        add(f"host all, {overlap}", 3, {**ALL, "overlap": overlap})
    add("host, M=2", 2, HOST, net=twice)
    add("host, one rank, M=2", 2, HOST, ranks=1, net=twice)
    add("host, stage 0", 0, HOST)
    add("host, clipped after early updates", 2, {**HOST, "overlap": "backward"}, max_norm=1e-3)
    add("host, not finite", 2, {**HOST, "overlap": "backward"}, poisoned=1)
    add("moments on the host", 3, {"moments": "host"})
    add("masters on the host", 3, {"master": "host"})
    add("gradients on the host", 2, {"grad": "host"}, net=twice)
    add("half of it on the host", 2, HALF)
    add("disk", 3, {**DISK, "param": "disk"})
    add("disk, backward", 3, {**DISK, "overlap": "backward"})
    add("disk, M=2", 2, DISK, net=twice)
    scaler = ScalerConfig(init=2.0**30, growth_interval=4, hysteresis=1)
    add("fp16, skipped", 2, net={"param": "fp16"}, scaler=scaler)
    add("parked between steps", 3, between=park)
    add("parked between steps, half of it on the host", 2, HALF, between=park)
    add("gradients read before steps", 2, HOST, before=read_grads)
    add("gathered by hand amid steps", 3, ALL, amid=gather_by_hand)
    add("gathered by hand between steps", 3, ALL, between=gather_by_hand)
    add("gathered ahead by hand", 3, ALL, amid=gather_ahead)
    found["another optimizer"] = Scenario(another_optimizer)
    found["activations of two streams"] = Scenario(two_streams, 1)
    found["columns of a step"] = Scenario(send_columns, 1)

    # So large, and as many blocks, that what they keep leaves the device.
    blocks = (
        "model.hidden_size=64 train.sequence_tokens=64 block.activation_checkpoint=full model.layers=6 zero.stage=3"
    )
    disks = "offload.activations=disk offload.disk.paths=[{folder}]"
    many = "train.accumulate=4"
    runs = {
        "activations on the host": f"{blocks} offload.activations=host",
        "activations on disk": f"{blocks} {disks}",
        "everything off the device": f"{blocks} {disks} offload=infinity",
        "checkpoints beside training": "zero.stage=3 offload=host checkpoint.every=1 checkpoint.folder={folder}/saved",
        "tensor parallel": "mesh.tp=2 model.kv_heads=2",
        "context parallel": "mesh.cp=2",
        "pipeline": f"mesh.pp=2 zero.stage=1 {many}",
        "zero bubble": f"mesh.pp=2 mesh.pp_schedule=zero_bubble model.layers=4 zero.stage=1 {many}",
        "several microbatches": f"zero.stage=2 {many}",
        "muon": "optim.rule=muon zero.stage=2",
    }
    found |= {name: Scenario(partial(whole, settings=settings)) for name, settings in runs.items()}
    sharded = "mesh.tp=2 mesh.dp=2 model.kv_heads=2 zero.stage=3"
    found["tensor parallel, sharded"] = Scenario(partial(whole, settings=sharded), 4)
    return found


SCENARIOS = scenarios()


def run(rank: int, ranks: int, name: str, folder: str, without: Site | None = None) -> tuple[list[str], list[Site]]:
    """Return the races of one rank, and the waits that it came to."""
    with Simulation(without).running() as simulation:
        SCENARIOS[name].run(Path(folder))
    return [str(race) for race in simulation.races.values()], sorted(simulation.sites)
