"""Records that sinks receive: one per step, and one summary per run, as plain values."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dzero.comm.ledger import Entry, Traffic
from dzero.data.stream import SourceUse
from dzero.monitor.meter import Throughput
from dzero.offload.executor import LaneUse

MOST_SHOWN_PLAIN = 1e6
"""Perplexity from which on it is printed with an exponent."""


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """Metrics of one optimizer step.

    Attributes:
        step: Number of steps so far, including this one.
        loss: Mean over the step's tokens of all ranks, in nats.
        grad_norm: Global gradient norm before clipping.
        tokens: Tokens of all ranks so far.
        seconds: Duration of this step.
        loss_scale: None if losses are not scaled.
        speed: Current throughput, from the meter.
        eta_s: Seconds left, from the meter.
        skipped_steps: Number of skipped steps so far.
        memory_bytes: Peak of this rank by kind; the kinds add up to the total.
        lanes: Use of the offload lanes in this step.
        traffic_bytes: Bytes that this rank sent in this step, by kind of collective.
        sources: What this step took of each source of a mixture, and the passes over it so far.
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
    sources: Mapping[str, SourceUse] = field(default_factory=dict)


def perplexity(loss: float) -> float:
    """Return exp(loss) of a mean loss in nats per token; infinity where that is no number of a computer."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def shown_perplexity(loss: float) -> str:
    """Return the perplexity of a mean loss in nats per token, as it is printed."""
    value = perplexity(loss)
    return f"{value:.3f}" if value < MOST_SHOWN_PLAIN else f"{value:.3g}"


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """Results of the whole run, for the closing table.

    Attributes:
        tokens: Number of tokens of all sequences.
        counted_tokens: Number of those whose targets count; None if all do.
        seconds: Duration of all steps.
        counted_steps: Number of steps that `speed` is measured over.
        first_loss: Train loss of the first step, in nats.
        loss: Train loss of the last step, in nats.
        held_out_by_source: Last held-out loss of each source of a mixture, in nats.
        sources: What all steps took of each source of a mixture, and the passes over it.
        speed: Throughput over all counted steps, from the meter.
        peak_flops: Peak FLOP/s of one device; None if unknown.
        peak_bytes: Peak memory by kind, one mapping per rank, in rank order.
        traffic: Calls and bytes that this rank sent in `traffic_steps` steps.
        expected: Calls and bytes per step according to formulas.
        routed: Expected traffic of all steps that depends on the experts that tokens chose.
        lanes: Use of the offload lanes in all steps.
        host_bytes: Size of this rank's host memory pool.
        step_flops: Model FLOPs of this rank per step; None if unknown.
        planned_bytes: Planned peak of this rank without the process. None without a plan, and on the CPU, whose
            measured peak includes libraries and memory that the allocator keeps.
        places: Lines that say where TensorBoard files and traces are, and how to open them.
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
    expected: Mapping[Entry, Traffic]
    routed: Mapping[Entry, Traffic] = field(default_factory=dict)
    lanes: Mapping[str, LaneUse] = field(default_factory=dict)
    host_bytes: int = 0
    counted_tokens: int | None = None
    step_flops: float | None = None
    planned_bytes: int | None = None
    places: Sequence[str] = ()
    held_out_by_source: Mapping[str, float] = field(default_factory=dict)
    sources: Mapping[str, SourceUse] = field(default_factory=dict)
