"""How often a step makes the host wait for the device: once, where all ranks decide what becomes of the gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import small_decoders
import small_runs
import torch
import torch.distributed as dist
from memory import Space
from pool import Pool
from simulation import Simulation
from training_loops import sharded_net

from dzero import AdamW
from dzero.optim.base import MasterOptimizer
from dzero.trainer.trainer import Trainer


def keep_counts_on_the_host(simulation: Simulation, optimizer: MasterOptimizer) -> None:
    """Put the numbers of steps where they are beside a GPU, too."""
    counts = simulation.block_of(optimizer._steps)
    assert counts is not None
    counts.space = Space.HOST


def stops(rank: int, ranks: int, net: dict[str, Any]) -> list[list[str]]:
    """Return what the host waited for in each of three steps."""
    told = []
    with Simulation().running() as simulation:
        sharded = sharded_net(**net)
        optimizer = AdamW(sharded, lr=1e-3, max_norm=1.0)
        keep_counts_on_the_host(simulation, optimizer)
        layout = sharded.layout
        drawn = small_decoders.batches("even", steps=3, ranks=layout.ranks, microbatches=layout.microbatches)
        for of_step in drawn:
            simulation.stops.clear()
            batches = of_step[dist.get_rank()]
            for index, batch in enumerate(batches):
                with sharded.microbatch(is_last=index == len(batches) - 1):
                    (small_decoders.loss_fn(sharded.model, batch) / len(batches)).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            told.append([*simulation.stops])
    return told


@pytest.mark.parametrize(
    "net",
    [{"stage": 2}, {"stage": 3, "microbatches": 2}, {"stage": 0, "reduction": "native"}],
    ids=["stage 2", "stage 3, M=2", "native, stage 0"],
)
def test_a_step_stops_the_host_once(pool: Pool, net: dict[str, Any]) -> None:
    for of_rank in pool.run(stops, 2, net):
        for of_step in of_rank[1:]:
            assert len(of_step) == 1, "\n".join(of_step)
            assert "dzero/optim/grad_norm.py" in of_step[0]


class Watched(Trainer):
    """A trainer that notes what the host waited for in each step."""

    simulation: Simulation
    told: list[list[str]]

    def step(self, *args: Any, **more: Any) -> Any:
        self.simulation.stops.clear()
        shared = super().step(*args, **more)
        self.told.append([*self.simulation.stops])
        return shared


def stops_of_trainer(rank: int, ranks: int, folder: Path) -> list[list[str]]:
    """Return what the host waited for in each step of train.py."""
    text = small_runs.write_text(folder / f"text_{rank}.txt", words=2000)
    words = (f"launch.workers={ranks}", "train.steps=4", "train.evaluate_batches=0")
    run = small_runs.settled(text, *words)
    with Simulation().running() as simulation:
        trainer = Watched(run, folder, torch.device("cpu"))
        trainer.simulation, trainer.told = simulation, []
        keep_counts_on_the_host(simulation, trainer.optim)
        trainer.run()
    return trainer.told


def test_a_step_of_the_trainer_stops_the_host_once(pool: Pool, tmp_path: Path) -> None:
    for of_rank in pool.run(stops_of_trainer, 2, tmp_path):
        for of_step in of_rank[2:]:
            assert len(of_step) == 1, "\n".join(of_step)
            assert "dzero/optim/grad_norm.py" in of_step[0]
