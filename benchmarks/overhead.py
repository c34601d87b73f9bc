"""What does the program itself cost per step, where units are many and small?

    python benchmarks/overhead.py                     1 rank, 8 to 128 blocks of nine 16 x 16 matrices
    python benchmarks/overhead.py --ranks 2           the same under gloo

Processor milliseconds of the main thread, by phase of a step; the arithmetic is next to nothing. All sides run in one
process, one step each in turn, shuffled; medians of the steps. `torch` is the plain model with its fused AdamW, without
communication; `fsdp2` shards each block and the root by hand, resharded after forward, with the same AdamW; both in
fp32. dzero trains in bf16 with fp32 masters.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from statistics import median
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from report import append_row, table, write_table
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from dzero import AdamW, PrecisionConfig, ZeroConfig, shard

WIDTH, MATRICES, WARMUP = 16, 9, 3
PHASES = ("forward", "backward", "step")
Take = Callable[[str], None]
Side = Callable[[Tensor, Take], None]


class Block(nn.Module):
    """Nine small matrices, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH) for _ in range(MATRICES))

    def forward(self, x: Tensor) -> Tensor:
        """[batch, width] -> the same."""
        for weight in self.weights:
            x = x + x @ weight
        return x


class Net(nn.Module):
    """Blocks, and a matrix before and after them."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        """[batch, width] -> the same."""
        x = self.first(x)
        for block in self.layers:
            x = block(x)
        out: Tensor = self.last(x)
        return out


def torch_side(model: nn.Module) -> Side:
    """Plain torch."""
    return _side(model, torch.optim.AdamW(model.parameters(), fused=True))


def fsdp2_side(model: nn.Module) -> Side:
    """FSDP2 by hand, on the CPU."""
    for block in model.get_submodule("layers").children():
        fully_shard(block)
    fully_shard(model)
    return _side(model, torch.optim.AdamW(model.parameters(), fused=True))


def dzero_side(model: nn.Module, *, reduction: str, stage: int = 3) -> Side:
    """The library in a plain loop."""
    # bf16 on the wire and in `.grad`, whoever sums: native's default, fp32, would move twice the bytes.
    sharded = shard(model, ZeroConfig(stage=stage, reduction=reduction), precision=PrecisionConfig(reduce="bf16"))
    return _side(sharded.model, AdamW(sharded, threads=1))


SIDES: dict[str, Callable[[nn.Module], Side]] = {
    "torch": torch_side,
    "fsdp2": fsdp2_side,
    "dzero 3 native": partial(dzero_side, reduction="native"),
    "dzero 3 exact": partial(dzero_side, reduction="exact"),
}


def _side(model: nn.Module, optim: torch.optim.Optimizer) -> Side:
    dtype = next(model.parameters()).dtype

    def step(x: Tensor, take: Take) -> None:
        loss = model(x.to(dtype)).float().square().mean()
        take("forward")
        loss.backward()
        take("backward")
        optim.step()
        optim.zero_grad()
        take("step")

    return step


def measured(rank: int, ranks: int, store: str, blocks: list[int], steps: int, answer: mp.SimpleQueue) -> None:
    """Run all sides; rank 0 puts medians by blocks, side and phase into `answer`."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    found = {}
    for count in blocks:
        sides = {}
        for name, make in SIDES.items():
            torch.manual_seed(0)
            sides[name] = make(Net(count))
        took: dict[str, dict[str, list[float]]] = {name: defaultdict(list) for name in sides}
        shuffle, x = random.Random(0), torch.randn(2, WIDTH)
        for number in range(steps + WARMUP):
            order = list(sides)
            shuffle.shuffle(order)
            for name in order:
                began_s, lap = time.thread_time(), {}

                def take(phase: str, lap: dict[str, float] = lap) -> None:
                    lap[phase] = time.thread_time()

                sides[name](x, take)
                for phase in PHASES if number >= WARMUP else ():
                    took[name][phase].append(1e3 * (lap[phase] - began_s))
                    began_s = lap[phase]
        found[count] = {name: {phase: median(took[name][phase]) for phase in PHASES} for name in sides}
    if rank == 0:
        answer.put(found)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Measure, keep a row, write a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--blocks", type=int, nargs="+", default=[8, 32, 64, 128])
    parser.add_argument("--steps", type=int, default=15)
    options = parser.parse_args()
    with TemporaryDirectory() as folder:
        spawn = mp.get_context("spawn")
        answer = spawn.SimpleQueue()
        args = (options.ranks, f"{folder}/store", options.blocks, options.steps, answer)
        mp.spawn(measured, args, nprocs=options.ranks)
        found = answer.get()
    config = {"ranks": options.ranks, "steps": options.steps, "matrices": MATRICES, "width": WIDTH}
    append_row("overhead", {"config": config, "ms": found})
    rows = [
        [count, name, *(f"{ms[phase]:.1f}" for phase in PHASES), f"{sum(ms.values()):.1f}", ratio(sides, name)]
        for count, sides in found.items()
        for name, ms in sides.items()
    ]
    title = f"processor ms of a step, main thread; {options.ranks} rank(s), blocks of {MATRICES} matrices"
    header = ["blocks", "side", *PHASES, "together", "over fsdp2"]
    write_table(f"overhead_{options.ranks}_ranks", f"{title}\n\n{table(header, rows)}")


def ratio(sides: dict[str, dict[str, float]], name: str) -> str:
    """Return a whole step over FSDP2's."""
    return f"{sum(sides[name].values()) / sum(sides['fsdp2'].values()):.2f}"


if __name__ == "__main__":
    main()
