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
from frames import Site
from simulation import Simulation
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
    is not finite. penalty: the squares of all weights in the loss, made
    `before` the forward or `behind` it.
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


def whole(folder: Path, *, settings: tuple[str, ...]) -> None:
    """Train as train.py does."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    text = small_runs.write_text(folder / f"text_{rank}.txt", words=2000)
    words = [*settings, f"checkpoint.folder={folder / 'checkpoints'}", f"offload.disk.paths=[{folder}]"]
    run = small_runs.settled(text, f"launch.workers={ranks}", *(word for word in words if needed(word, settings)))
    small_runs.train(rank, ranks, run, folder)


def needed(word: str, settings: tuple[str, ...]) -> bool:
    """Return whether a folder has an effect beside `settings`."""
    uses = {"checkpoint.folder": "checkpoint.every", "offload.disk.paths": "disk"}
    key = word.split("=")[0]
    return key not in uses or any(uses[key] in each or "infinity" in each for each in settings)


def send_columns(folder: Path) -> None:
    """Send columns to kernels of two streams that take turns, as a step on a GPU does."""
    device = torch.device("cpu")
    sender = column_upload.ColumnUpload(64, device)
    sender._arrays = [Watched(host) for host in sender._hosts]  # type: ignore[misc]
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
    """Look at every parameter that is on the device."""
    for param in sharded.model.parameters():
        local_of(param.detach()) + 0


def weights_of(sharded: Any) -> torch.Tensor:
    """Return a thousandth of the sum of squares of this rank's weights."""
    squares: Any = sum(param.pow(2).sum().to_local() for param in sharded.model.parameters())
    return 1e-3 * squares


def read_grads(sharded: Any, optimizer: Any) -> None:
    """Look at every gradient, as a logger does."""
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
    """A block that keeps its input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * x


def edit_params(sharded: Any, optimizer: Any) -> None:
    """Change every parameter by hand."""
    with torch.no_grad():
        for param in sharded.model.parameters():
            param.mul_(0.99)


def evaluate(sharded: Any, optimizer: Any) -> None:
    """Run a forward without backward."""
    with torch.no_grad():
        sharded.model(torch.zeros(2, 8, dtype=torch.int64))


def park(sharded: Any, optimizer: Any) -> None:
    """Park all states, and let something else write to the memory that they had."""
    sharded.park()
    torch.zeros(1 << 16)
    sharded.unpark()


def scenarios() -> dict[str, Scenario]:
    """By name."""
    found: dict[str, Scenario] = {}

    def add(name: str, ranks: int = 2, **settings: Any) -> None:
        found[name] = Scenario(partial(loop, **settings), ranks)

    for stage in range(4):
        for microbatches in (1, 2):
            add(f"stage {stage}, M={microbatches}", net={"stage": stage, "microbatches": microbatches})
    add("one rank", 1, net={"stage": 3, "microbatches": 2})
    add("native", net={"stage": 3, "reduction": "native", "microbatches": 2})
    add("hybrid", 4, net={"stage": 3, "replicate": 2})
    add("hybrid, M=2", 4, net={"stage": 2, "replicate": 2, "microbatches": 2})
    add("states over all", 4, net={"stage": 3, "replicate": 2, "optimizer_shard_axes": ("replicate", "shard")})
    add(
        "states over all, host",
        4,
        net={"stage": 2, "replicate": 2, "optimizer_shard_axes": ("replicate", "shard")},
        offload=HOST,
    )
    for reduction in ("exact", "native"):
        net = {
            "stage": 3,
            "replicate": 2,
            "optimizer_shard_axes": ("replicate", "shard"),
            "microbatches": 2,
            "reduction": reduction,
        }
        add(f"states over all, M=2, {reduction}", 4, net=net)
    over_all: dict[str, Any] = {"stage": 2, "replicate": 2, "optimizer_shard_axes": ("replicate", "shard")}
    add("states over all, host, step", 4, net=over_all, offload={**HOST, "overlap": "step"})
    add("penalty before", net={"stage": 3}, penalty="before")
    add("penalty", net={"stage": 3}, penalty="behind")
    add("penalty, M=2", net={"stage": 2, "microbatches": 2}, penalty="behind")
    add("penalty, hybrid, M=2", 4, net={"stage": 3, "replicate": 2, "microbatches": 2}, penalty="before")
    add("parameters read between steps", net={"stage": 2}, offload=HOST, between=read_params)
    host_all: dict[str, Any] = {"net": {"stage": 3}, "offload": {**HOST, "param": "host"}}
    add("host parameters read between steps", **host_all, between=read_params)
    add("host parameters edited between steps", **host_all, between=edit_params)
    in_blocks = {"net": {"stage": 3, "microbatches": 2, "fetch": "fp8"}, "offload": {**HOST, "param": "host"}}
    add("host parameters in blocks", **in_blocks)
    add("host parameters in blocks edited between steps", 1, **in_blocks, between=edit_params)
    add("hpz", 4, net={"stage": 3, "reshard": 2})
    add("two hops", 4, net={"stage": 3, "node_ranks": 2})
    quantized = {"gather": "int8", "reduce": "int4"}
    add("blocks in two hops", 4, net={"stage": 3, "node_ranks": 2, "microbatches": 2, **quantized})
    for overlap in ("step", "forward", "backward", "delayed"):
        add(f"host, {overlap}", net={"stage": 2}, offload={**HOST, "overlap": overlap})
        add(f"host all, {overlap}", net={"stage": 3}, offload={**HOST, "param": "host", "overlap": overlap})
    add("host, M=2", net={"stage": 2, "microbatches": 2}, offload=HOST)
    add("host, one rank, M=2", 1, net={"stage": 2, "microbatches": 2}, offload=HOST)
    add("host, stage 0", net={"stage": 0}, offload=HOST)
    add("host, clipped after early updates", net={"stage": 2}, offload={**HOST, "overlap": "backward"}, max_norm=1e-3)
    add("host, not finite", net={"stage": 2}, offload={**HOST, "overlap": "backward"}, poisoned=1)
    add("moments on the host", net={"stage": 3}, offload={"moments": "host"})
    add("masters on the host", net={"stage": 3}, offload={"master": "host"})
    add("gradients on the host", net={"stage": 2, "microbatches": 2}, offload={"grad": "host"})
    add("half of it on the host", net={"stage": 2}, offload=HALF)
    add("disk", net={"stage": 3}, offload={**DISK, "param": "disk"})
    add("disk, backward", net={"stage": 3}, offload={**DISK, "overlap": "backward"})
    add("disk, M=2", net={"stage": 2, "microbatches": 2}, offload=DISK)
    scaler = ScalerConfig(init=2.0**30, growth_interval=4, hysteresis=1)
    add("fp16, skipped", net={"stage": 2, "param": "fp16"}, scaler=scaler)
    add("states read between steps", net={"stage": 3}, offload={**HOST, "param": "host"}, between=read_states)
    add("parameters edited between steps", net={"stage": 2}, offload=HOST, between=edit_params)
    add("evaluation between steps", net={"stage": 3}, offload={**HOST, "param": "host"}, between=evaluate)

    add("parked between steps", net={"stage": 3}, between=park)
    add("parked between steps, half of it on the host", net={"stage": 2}, between=park, offload=HALF)
    add("gradients read before steps", net={"stage": 2}, offload=HOST, before=read_grads)
    for when in ("amid", "between"):
        by_hand: dict[str, Any] = {when: gather_by_hand}
        add(f"gathered by hand {when} steps", net={"stage": 3}, offload={**HOST, "param": "host"}, **by_hand)
    add("gathered ahead by hand", net={"stage": 3}, offload={**HOST, "param": "host"}, amid=gather_ahead)
    found["another optimizer"] = Scenario(another_optimizer)
    found["activations of two streams"] = Scenario(two_streams, 1)
    found["columns of a step"] = Scenario(send_columns, 1)

    def train(name: str, ranks: int, *settings: str) -> None:
        found[name] = Scenario(partial(whole, settings=settings), ranks)

    big = "model.hidden_size=64"  # so large that what blocks keep leaves the device
    act = "train.sequence_tokens=64", "block.activation_checkpoint=full", "model.layers=6"
    train("activations on the host", 2, "zero.stage=3", "offload.activations=host", big, *act)
    train("activations on disk", 2, "zero.stage=3", "offload.activations=disk", big, *act)
    train("everything off the device", 2, "zero.stage=3", "offload=infinity", "offload.activations=disk", big, *act)
    train("checkpoints beside training", 2, "zero.stage=3", "offload=host", "checkpoint.every=1")
    train("tensor parallel", 2, "mesh.tp=2", "model.kv_heads=2")
    train("tensor parallel, sharded", 4, "mesh.tp=2", "mesh.dp=2", "model.kv_heads=2", "zero.stage=3")
    train("context parallel", 2, "mesh.cp=2")
    train("pipeline", 2, "mesh.pp=2", "zero.stage=1", "train.accumulate=4")
    train(
        "zero bubble",
        2,
        "mesh.pp=2",
        "mesh.pp_schedule=zero_bubble",
        "model.layers=4",
        "zero.stage=1",
        "train.accumulate=4",
    )
    train("several microbatches", 2, "zero.stage=2", "train.accumulate=4")
    train("muon", 2, "optim.rule=muon", "zero.stage=2")
    return found


SCENARIOS = scenarios()


def run(rank: int, ranks: int, name: str, folder: str, without: Site | None = None) -> tuple[list[str], list[Site]]:
    """Return the races of one rank, and the waits that it came to."""
    with Simulation(without).running() as simulation:
        SCENARIOS[name].run(Path(folder))
    return [str(race) for race in simulation.races.values()], sorted(simulation.sites)
