"""Simulation of one rank of a run of any size, without its memory and its device.

    what                                  how
    sharding, microbatches, collectives   simulated: the real code (`zero/shard.py`, `comm/`) with a process group that
                                          moves nothing, on fake tensors, which have shapes and storages but no memory
    forward, loss, backward               simulated: the model's own code, as on a CPU (see the note)
    gradients, states, decision           simulated: the real optimizer (`optim/`); ranks agree, all values are finite
    updates                               not simulated: they are in place and take no memory
    offloaded states                      absent (`offloaded_states.py`): gradients leave when the next unit's backward
                                          begins; states fetched for use are computed
    host, disk, transfers, updates        computed: exact, from the schedule
    experts                               chosen equally: the same number of tokens goes to each
    equal blocks                          simulated three and four at a time, then extrapolated (`extrapolate.py`)

The simulated rank is rank 0, whose shards are the largest.

Note: device. FSDP2 needs streams and events of a CUDA device, which a machine without one lacks, so the simulated
device is a CPU. Storages are the same, made and freed in program order, but a GPU's attention kernels may save other
statistics for backward. `device_type` determines `zero.reduction=auto`, which is `native` on CUDA. Blocks are not
compiled.

Note: values. A fake tensor has no values. Code that reads one gets the value that `_NoValues` returns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode

from dzero.comm import dtensor_traffic, expert_exchange
from dzero.comm.ledger import Entry, Traffic
from dzero.estimate.fake_group import fake_group
from dzero.mesh import TENSOR, make_mesh
from dzero.offload.buffer_layout import BufferLayout
from dzero.offload.build_schedule import schedule_of
from dzero.offload.schedule import OffloadSchedule
from dzero.optim.adamw import AdamW
from dzero.parallel.parallelize import ParallelModel
from dzero.parallel.pipeline.schedule import expected_pipeline
from dzero.parallel.pipeline.split import ModelStages
from dzero.utils.torch_internals import NEWEST, RELEASE, VERSIONS, fake_tensors
from dzero.zero.config import sums_exactly
from dzero.zero.cost_model import expected_decision, expected_traffic
from dzero.zero.layout import Layout
from dzero.zero.shard import ModelInit, shard
from dzero.zero.sharded import Sharded
from dzero.zero.unit_shapes import UnitShape
from dzero.zero.units import ROOT, UnitChoice, find_units, shapes_of, slots_by_unit
from simulator.extrapolate import SHORT, repeat
from simulator.observe import Observed, ObservedAction, Passes, observe
from simulator.offloaded_states import Absent, with_brought
from simulator.scenario import Scenario
from simulator.storage_meter import StorageMeter, StorageMoment

META = torch.device("meta")
COUNTED = ("control", expert_exchange.PHASE, dtensor_traffic.PHASE)
"""Phases outside the ZeRO table, whose traffic is counted only."""


@dataclass(frozen=True)
class Simulated:
    """Step of rank 0.

    Attributes:
        shapes: Shapes of the units of the whole model.
        moments: Moments at which the device may be fullest.
        schedule: Schedule of host memory and disk.
    """

    layout: Layout
    shapes: list[UnitShape]
    moments: list[StorageMoment]
    actions: list[ObservedAction]
    traffic: dict[Entry, Traffic]
    schedule: OffloadSchedule

    @property
    def peak(self) -> StorageMoment:
        """First moment at which the device is fullest."""
        return max(self.moments, key=lambda moment: moment.total)


def simulate(scenario: Scenario, *, whole: bool = False, part: int = 0) -> Simulated:
    """Simulate the second step of rank 0, which equals all later steps.

    Args:
        scenario: The run.
        whole: Simulate every block instead of three and four; the result is the same, with more moments.
        part: Pipeline stage, whose first rank is simulated; with a pipeline every block is simulated.

    Raises:
        ValueError: The settings contradict each other.
        RuntimeError: This process has a process group, torch is newer than those that are tested, or the simulated
            collectives differ from those of the ZeRO table.
    """
    if RELEASE > NEWEST:
        raise RuntimeError(f"torch {torch.__version__}: simulation was not tried with it; take {VERSIONS}")
    layout, layers = scenario.layout(), scenario.model.layers
    with simulated_mesh(scenario, part) as mesh:
        if scenario.mesh.pp > 1:
            return _part(scenario, mesh, part)
        shapes = _shapes(scenario, mesh)
        if whole or layers is None or layers <= SHORT + 1 or not _blocks_are_equal(scenario):
            observed = _observe(scenario, mesh)
        else:
            short, long = (_observe(_with_layers(scenario, count), mesh) for count in (SHORT, SHORT + 1))
            observed = repeat(short, long, layers, shapes, expected_decision(layout, shapes))
    return _told(layout, shapes, observed)


@contextmanager
def simulated_mesh(scenario: Scenario, part: int = 0) -> Iterator[DeviceMesh]:
    """Make a process group that moves nothing, of which this process is the first rank of a pipeline stage."""
    degrees, parts = scenario.degrees, scenario.mesh.pp
    with fake_group(scenario.ranks, part * scenario.ranks // parts), _parameters_stay_themselves():
        yield make_mesh("cpu", replicate=degrees[0], shard=degrees[1], tp=scenario.mesh.tp, pp=parts)


def _part(scenario: Scenario, mesh: DeviceMesh, part: int) -> Simulated:
    """Simulate the pipeline stage of the rank in this process."""
    model, layout = scenario.build(), scenario.layout()
    cut = scenario.cut(model, mesh, part)
    assert cut.stages is not None
    shapes, parts = _shapes_of(scenario, cut), cut.stages
    told = _told(layout, shapes, _observe(scenario, mesh, part), parts.shared)
    moved = expected_pipeline(parts, scenario.hidden(parts), microbatches=scenario.accumulate)
    return replace(told, traffic=told.traffic | moved)


def _told(layout: Layout, shapes: list[UnitShape], observed: Observed, shared: Sequence[str] = ()) -> Simulated:
    _check_traffic(layout, shapes, observed.traffic, shared)
    buffer_layout = BufferLayout(layout, shapes)
    moments, schedule = with_brought(observed.moments, buffer_layout), schedule_of(buffer_layout)
    return Simulated(layout, shapes, moments, observed.actions, observed.traffic, schedule)


def _blocks_are_equal(scenario: Scenario) -> bool:
    """Return whether all blocks are equal, which a partially offloaded kind of state rules out."""
    return scenario.model.kind == "llama" and all(fraction == 1 for _, fraction in scenario.layout().tiers.values())


def _with_layers(scenario: Scenario, layers: int) -> Scenario:
    return replace(scenario, model=replace(scenario.model, layers=layers))


def _check_traffic(
    layout: Layout, shapes: list[UnitShape], traffic: dict[Entry, Traffic], shared: Sequence[str] = ()
) -> None:
    """Check that the simulated collectives are those of the ZeRO table, to the byte."""
    if unknown := [entry.kind for entry in traffic if entry.kind.startswith(dtensor_traffic.UNKNOWN)]:
        raise RuntimeError(f"the simulated step calls collectives whose bytes nothing counts: {unknown}")
    moved = {entry: each for entry, each in traffic.items() if entry.phase not in COUNTED}
    expected = expected_traffic(layout, shapes, shared)
    if moved != expected:
        raise RuntimeError(f"the simulated step moves\n{moved}\nand the table says\n{expected}")


def _observe(scenario: Scenario, mesh: DeviceMesh, part: int = 0) -> Observed:
    meter = StorageMeter()
    with simulated_rank(scenario, mesh, meter, part) as rank:
        loss: Any = scenario.loss_of(rank.sharded.model, rank.parts)
        passes = _passes(scenario, rank.parts, loss) if rank.parts else loss
        return observe(rank.sharded, rank.optim, passes, meter, rank.absent.left)


@dataclass(frozen=True)
class SimulatedRank:
    """Sharded model of fake tensors and its optimizer, ready for a step."""

    sharded: Sharded
    optim: AdamW
    parts: ModelStages | None
    absent: Absent


@contextmanager
def simulated_rank(scenario: Scenario, mesh: DeviceMesh, meter: StorageMeter, part: int = 0) -> Iterator[SimulatedRank]:
    """Make the rank of this process, and let `meter` count its storages from the first one on.

    Args:
        scenario: The run.
        mesh: Mesh of the scenario, from `simulated_mesh`.
        meter: The meter, not yet entered.
        part: Pipeline stage.
    """
    model = scenario.build()
    working = scenario.layout().param.dtype
    for param in model.parameters():
        param.data = param.data.to(working)  # now, so that no fp32 values wait for the masters
    cut = scenario.cut(model, mesh, part)
    sharded = _sharded_on_meta(scenario, cut)
    counted: AbstractContextManager[object] = nullcontext()
    if cut.tensor is not None:
        counted = dtensor_traffic.dtensor_traffic(mesh.get_group(TENSOR), TENSOR, sharded.ledger)
    # The optimizer asks for real memory only where states are off the device, and here all of them are on it.
    with fake_tensors(), _NoValues(), meter:  # type: ignore[no-untyped-call]
        sharded.model.to_empty(device="cpu")
        optim = AdamW(sharded, max_norm=scenario.max_norm, threads=1)
        absent = Absent(BufferLayout(scenario.layout(), sharded.shapes), sharded, optim, meter)
        with cut.loss(), counted:
            yield SimulatedRank(sharded, optim, cut.stages, absent)


def _passes(scenario: Scenario, parts: ModelStages, run: Callable[[torch.Tensor | None], torch.Tensor]) -> Passes:
    """Return the passes of a pipeline stage in torch's schedules, which keep receive buffers for every microbatch."""
    count, sent, hidden = range(scenario.accumulate), list[torch.Tensor](), scenario.hidden(parts)
    comes = None if parts.has_first else [hidden.on("cpu").requires_grad_() for _ in count]
    back = None if parts.has_last else [hidden.on("cpu") for _ in count]

    def forward(index: int) -> torch.Tensor:
        out = run(comes[index] if comes else None)
        return out / len(count) if back is None else out

    def backward(index: int, value: torch.Tensor) -> None:
        value.backward(back[index] if back else None)  # type: ignore[no-untyped-call]
        if comes:
            sent[:] = [grad for grad in [comes[index].grad] if grad is not None]  # alive until the next is sent
            comes[index].grad = None

    return Passes(scenario.order(parts.own[0].index), forward, backward)


def _sharded_on_meta(scenario: Scenario, cut: ParallelModel) -> Sharded:
    """Shard the model before it has storages, since cutting fake tensors into thousands of shards is 10 x slower."""
    exact = sums_exactly(scenario.zero, scenario.precision, scenario.device_type)
    return shard(
        cut,
        replace(scenario.zero, reduction="exact" if exact else "native"),
        precision=scenario.precision,
        microbatches=scenario.accumulate,
        init=ModelInit(device=META),
    )


def _shapes(scenario: Scenario, mesh: DeviceMesh) -> list[UnitShape]:
    return _shapes_of(scenario, scenario.cut(scenario.build(), mesh))


def _shapes_of(scenario: Scenario, cut: ParallelModel) -> list[UnitShape]:
    model, parts = cut.model, cut.stages
    units = find_units(
        model,
        UnitChoice.of(scenario.zero, scenario.precision),
        None if cut.experts is None else cut.experts.modules,
    )
    units.append((ROOT, [model]))
    return shapes_of(slots_by_unit(model, units, parts.aliases if parts else None), units, [model])


class _NoValues(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that answers reads of values, such that all ranks agree and all gradients are finite.

    A number is 1 (true), no element is nonzero, and two tensors are equal.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aten = torch.ops.aten
        if func is aten._local_scalar_dense.default:
            return 1
        if func is aten.nonzero.default:
            return args[0].new_empty((0, args[0].ndim), dtype=torch.int64)
        if func is aten.equal.default:
            return True
        return func(*args, **(kwargs or {}))


@contextmanager
def _parameters_stay_themselves() -> Iterator[None]:
    """Keep the identity of parameters when `to_empty` allocates them, which units, hooks and optimizers rely on."""
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)
