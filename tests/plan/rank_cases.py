"""The same step really made: what simulations are held against. For pool workers, so importable by name."""

from __future__ import annotations

import torch.distributed as dist

from dzero import AdamW, make_mesh, shard
from dzero.models.build import build, materialiser
from dzero.parallel.blocks import apply_blocks
from dzero.plan.observe import Observed, observe
from dzero.plan.scenario import Scenario
from dzero.plan.storages import StorageMeter


def really(rank: int, ranks: int, scenarios: list[Scenario]) -> list[Observed]:
    """A step of each scenario on this rank, on the CPU."""
    return [measured(scenario) for scenario in scenarios]


def measured(scenario: Scenario) -> Observed:
    """On this rank of the group, with values."""
    model = build(scenario.model, scenario.vocab_size)
    fill = materialiser(scenario.model, model, seed=0, device="cpu")
    apply_blocks(model, scenario.block, "cpu")
    sharded = shard(
        model,
        scenario.zero,
        precision=scenario.precision,
        mesh=make_mesh("cpu", replicate=scenario.mesh.degrees(dist.get_world_size(), stage=scenario.zero.stage)[0]),
        microbatches=scenario.accumulate,
        materialise=fill,
    )
    optim = AdamW(sharded, max_norm=scenario.max_norm, threads=1)
    with StorageMeter() as meter:
        return observe(sharded, optim, scenario.loss_of(sharded.model), meter)
