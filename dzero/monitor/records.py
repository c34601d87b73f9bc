"""What sinks are told: one record per step, and one summary per run. Plain values, ready to be written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dzero.comm.ledger import Entry, Traffic
from dzero.monitor.meter import Throughput
from dzero.offload.executor import LaneUse


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One optimizer step.

    `step`: steps made so far, this one included. `loss`: mean over the step's tokens of all ranks, nats.
    `grad_norm`: global, before clipping. `loss_scale`: None where losses are not scaled. `tokens`: of all ranks, so
    far. `seconds`: of this step. `speed`, `eta_s`: the meter's readings. `skipped_steps`: so far, in all.
    `memory_bytes`: peak of this rank by kind; the kinds add up to the whole. `traffic_bytes`: sent by this rank in
    this step, by kind of collective. `lanes`: the offload's lanes in this step.
    """

    step: int
    loss: float
    lr: float
    grad_norm: float
    tokens: int
    seconds: float
    loss_scale: float | None = None
    speed: Throughput = field(default_factory=Throughput)
    eta_s: float | None = None
    skipped_steps: int = 0
    memory_bytes: Mapping[str, int] = field(default_factory=dict)
    lanes: Mapping[str, LaneUse] = field(default_factory=dict)
    traffic_bytes: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """The whole run, for the closing table.

    `first_loss`, `loss`: train loss of the first and the last step, nats. `seconds`: of all steps. `counted_steps`:
    those in `speed`, which is the meter's overall reading. `peak_flops`: FLOP/s of one device, None where unknown.
    `peak_bytes`: peak memory by kind, one mapping per rank, in rank order. `traffic`: calls and bytes sent by this
    rank in `traffic_steps` steps; `theory`: the same for one step, by formula; `routed`: for all of them, of what
    depends on the experts that tokens chose. `lanes`: the offload's lanes in all steps; `host_bytes`: of this rank's
    arena. `step_flops`: of the model on this rank in a step, None where unknown.
    `planned_bytes`: this rank's peak as the plan says, the process aside; None without a plan, and on a CPU, whose
    measured peak has libraries and the allocator's rest in it.
    `places`: where board and trace of this run lie and what opens them, a line each.
    """

    steps: int
    tokens: int
    seconds: float
    counted_steps: int
    first_loss: float
    loss: float
    held_out_loss: float | None
    speed: Throughput
    peak_flops: float | None
    skipped_steps: int
    peak_bytes: Sequence[Mapping[str, int]]
    traffic: Mapping[Entry, Traffic]
    traffic_steps: int
    theory: Mapping[Entry, Traffic]
    routed: Mapping[Entry, Traffic] = field(default_factory=dict)
    lanes: Mapping[str, LaneUse] = field(default_factory=dict)
    host_bytes: int = 0
    step_flops: float | None = None
    planned_bytes: int | None = None
    places: Sequence[str] = ()
