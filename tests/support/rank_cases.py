"""The same step really made: what simulations are held against. For pool workers, so importable by name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from simulator.measured_memory import MeasuredMemory, MemoryCount
from simulator.observe import Observed, observe
from simulator.scenario import Scenario
from simulator.storage_meter import StorageMeter, Where
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

from dzero import AdamW, ParallelModel, Pipeline, Sharded, ZeroConfig, make_mesh, shard
from dzero.comm.ledger import Entry, Traffic
from dzero.config import RunConfig
from dzero.data.batch import Batch
from dzero.mesh_config import MeshConfig
from dzero.models.build import build, materialiser
from dzero.models.config import ModelConfig
from dzero.parallel.blocks import apply_blocks
from dzero.parallel.config import BlockConfig
from dzero.trainer.build import BuiltModel

STEPS = 3


def really(rank: int, ranks: int, scenarios: list[Scenario]) -> list[Observed]:
    """Return a step of each scenario on this rank, on the CPU."""
    return [measured(scenario) for scenario in scenarios]


def made(scenario: Scenario, mesh: DeviceMesh, part: int = 0) -> tuple[ParallelModel, Sharded, AdamW]:
    """The scenario with values, on the CPU."""
    model = build(scenario.model, scenario.vocab_size)
    fill = materialiser(scenario.model, model, seed=0, device="cpu")
    cut = scenario.cut(model, mesh, part)
    apply_blocks(model, scenario.block, "cpu")
    how = {"precision": scenario.precision, "microbatches": scenario.accumulate, "init": fill}
    sharded = shard(cut, scenario.zero, **how)  # type: ignore[arg-type]
    if cut.stages is not None:
        cut.stages.forget()
    return cut, sharded, AdamW(sharded, max_norm=scenario.max_norm, threads=1)


def measured(scenario: Scenario) -> Observed:
    """Return what a step with values does, and the least that is held after each operator in one of several steps.

    A collective's thread lets go of its tensors a moment after the collective has ended, later on a busy machine.
    """
    degrees = scenario.mesh.degrees(dist.get_world_size(), stage=scenario.zero.stage)
    _, sharded, optim = made(scenario, make_mesh("cpu", replicate=degrees[0]))
    with StorageMeter() as meter:
        steps = [observe(sharded, optim, scenario.loss_of(sharded.model), meter) for _ in range(STEPS)]
    together = zip(*(step.moments for step in steps), strict=True)
    return replace(steps[0], moments=[min(moments, key=lambda moment: moment.total) for moments in together])


def piped(rank: int, ranks: int, scenario: Scenario) -> tuple[int, dict[Entry, Traffic]]:
    """The most that this rank of a pipeline holds in the second of two steps, and what it moves; with values."""
    mesh = make_mesh("cpu", replicate=scenario.degrees[0], shard=scenario.degrees[1], pp=scenario.mesh.pp)
    cut, sharded, optim = made(scenario, mesh, mesh.get_local_rank("pp"))
    parts, microbatches = cut.stages, scenario.accumulate
    assert parts is not None

    def run(part: nn.Module, x: Tensor) -> Tensor:
        out: Tensor = part(x, torch.arange(scenario.tokens))
        return out

    def loss(part: nn.Module, x: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(run(part, x).float().flatten(0, 1), targets.flatten())

    with StorageMeter() as meter:
        for states in optim.state.values():
            meter.claim("moments", [tensor for key, tensor in states.items() if key != "step"])
        meter.claim("param", sharded.named_params().values())
        pipeline = Pipeline(
            parts,
            mesh.get_group("pp"),
            sharded.ledger,
            schedule=scenario.mesh.pp_schedule,
            microbatches=microbatches,
            hidden=scenario.hidden(parts),
            device=torch.device("cpu"),
            hooks=sharded,
            run=run,
            loss=loss,
        )
        for step in range(2):
            meter.where = Where(step, "step", "")
            sharded.ledger.take()
            if step:
                meter.begin()
            tokens = [torch.zeros(scenario.sequences, scenario.tokens, dtype=torch.int64) for _ in range(microbatches)]
            pipeline.step(tokens, tokens, lambda each: each / microbatches)
            optim.step()
        return max(moment.total for moment in meter.moments()), sharded.ledger.take()


def trained(run: RunConfig, vocab_size: int) -> tuple[int, dict[Entry, Traffic]]:
    """The device's peak in a step of the run on this rank, of tokens that are all 0, and what the next one moves."""
    took, moved = taken_and_moved(run, vocab_size)
    return took.device, moved


def taken_and_moved(run: RunConfig, vocab_size: int) -> tuple[MeasuredMemory, dict[Entry, Traffic]]:
    """The same of each tier."""
    tokens = torch.zeros(run.train.microbatch_sequences, run.train.sequence_tokens, dtype=torch.int64)
    with MemoryCount() as taking:
        built = BuiltModel(run, torch.device("cpu"), vocab_size)
        sharded, optim = built.sharded, AdamW(built.sharded, threads=1)

        def step() -> None:
            if built.pipeline is not None:
                batches = [Batch(tokens, tokens) for _ in range(built.microbatches)]
                built.pipelined(batches, tokens.numel(), lambda loss: loss)
            for index in range(built.microbatches if built.pipeline is None else 0):
                with sharded.microbatch(is_last=index == built.microbatches - 1), built.losses():
                    (built.loss(Batch(tokens, tokens), tokens.numel()) / built.microbatches).backward()  # type: ignore[no-untyped-call]
            optim.step()

        took = taking.taken(step, optim)
    sharded.ledger.take()
    with built.counted():
        step()
    return took, sharded.ledger.take()


TINY = {"vocab_size": 256, "hidden_size": 64, "layers": 2, "heads": 4, "kv_heads": 2, "ffn_size": 128}
"""A llama, as model.* of the configuration."""


def scenario_of(
    *,
    model: dict[str, Any] | None = None,
    mesh: dict[str, Any] | None = None,
    block: dict[str, Any] | None = None,
    stage: int = 2,
    **settings: Any,
) -> Scenario:
    """A run to be simulated; by default `TINY` on two ranks, with the CPU's own reduction (exact).

    model, mesh, block: over the defaults, as those parts of the configuration. settings: as `Scenario` takes them.
    """
    given: dict[str, Any] = {"ranks": 2, "sequences": 2, "tokens": 32, "device_type": "cpu", **settings}
    return Scenario(
        model=ModelConfig(**TINY | (model or {})),
        mesh=MeshConfig(**mesh or {}),
        block=BlockConfig(**{"activation_checkpoint": "none", **(block or {})}),
        **{"zero": ZeroConfig(stage=stage)} | given,
    )
