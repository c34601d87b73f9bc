"""Records for the tests of sinks."""

from __future__ import annotations

from dataclasses import replace

from dzero.comm.ledger import Entry, Traffic
from dzero.monitor.meter import Throughput
from dzero.monitor.records import RunSummary, StepRecord

MIB = 2**20

RECORD = StepRecord(
    step=1,
    loss=5.5,
    lr=3e-4,
    grad_norm=1.25,
    tokens=4096,
    seconds=0.5,
    loss_scale=65536.0,
    speed=Throughput(8192.0, 0.421),
    eta_s=83.0,
    memory_bytes={"param": 10 * MIB, "moments": 54 * MIB},
    traffic_bytes={"all_gather": 1000, "reduce_scatter": 2000},
)

GATHER = Entry("unshard", "all_gather", "shard", "bfloat16")
REDUCE = Entry("reduce", "reduce_scatter", "shard", "bfloat16")
CONTROL = Entry("control", "all_gather", "shard", "float64")

SUMMARY = RunSummary(
    steps=300,
    tokens=1_228_800,
    seconds=150.0,
    counted_steps=297,
    first_loss=5.55,
    loss=2.25,
    held_out_loss=2.5,
    speed=Throughput(8192.0, 0.421),
    peak_flops=989.4e12,
    skipped_steps=1,
    peak_bytes=({"param": 10 * MIB, "activations": 54 * MIB}, {"param": 11 * MIB, "activations": 53 * MIB}),
    traffic={GATHER: Traffic(1500, 300_000), REDUCE: Traffic(1501, 600_000), CONTROL: Traffic(300, 2400)},
    traffic_steps=300,
    expected={GATHER: Traffic(5, 1000), REDUCE: Traffic(5, 2000), CONTROL: Traffic(1, 8)},
)


def record_of(step: int) -> StepRecord:
    """RECORD of another step; the loss falls by 0.01 a step."""
    return replace(RECORD, step=step, loss=5.5 - 0.01 * step)
