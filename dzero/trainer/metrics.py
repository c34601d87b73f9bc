"""Metrics of a run: a record per step and a summary at the end, from the modules that measure each figure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache

import torch
import torch.distributed as dist

from dzero import streams
from dzero.comm import dtensor_traffic
from dzero.comm.collectives import GatherScalars
from dzero.comm.ledger import Entry, Traffic
from dzero.config import RunConfig
from dzero.data.stream import SourceUse
from dzero.hardware import peak_flops
from dzero.mesh import AXES
from dzero.monitor.memory import MemoryMeter, storage_bytes
from dzero.monitor.meter import Meter
from dzero.monitor.records import RunSummary, StepRecord
from dzero.offload.executor import LaneUse
from dzero.optim.base import MasterOptimizer
from dzero.plan.comm_volume import context_traffic, pipeline_traffic, tensor_traffic
from dzero.trainer.build import BuiltModel
from dzero.trainer.held_out import HeldOut
from dzero.zero.cost_model import expected_control, expected_traffic, peak_bytes, resting_bytes


@dataclass(frozen=True)
class SharedLoss:
    """Result of a step that all ranks share: the mean loss in nats, and whether any rank was asked to stop after it.

    `nonfinite_rank` is the last rank whose own loss is not finite, or None.
    """

    loss: float
    nonfinite_rank: int | None
    stop: bool


LEARNING_STEPS = 3
"""Steps after which the sizes of states and gradients are constant; some rules create states in the first step."""
READING_STEPS = 10
"""Steps between two later readings of the peak, which only grows. A reading takes the kernel half a millisecond."""


class MetricsRecorder:
    """Recorder of one worker's metrics; `done_steps` were made before the run was resumed.

    `losses` has the mean loss of every step, `counted_tokens` the number of targets that counted, `sources` what was
    taken of each source of a mixture, and `planned_bytes` the planned peak of this rank, or None.
    """

    def __init__(
        self,
        config: RunConfig,
        built: BuiltModel,
        optim: MasterOptimizer,
        memory: MemoryMeter,
        device: torch.device,
        done_steps: int = 0,
    ) -> None:
        sharded, flops_per_token = built.sharded, built.flops_per_token
        self._assembled, self._sharded, self._optim = built, sharded, optim
        self.memory, self._device = memory, device
        self._scaled = config.precision.param == "fp16"
        readers = config.mesh.readers(sharded.layout.ranks)
        self._step_tokens = config.train.sequences(readers) * config.train.sequence_tokens
        rank_tokens = self._step_tokens / dist.get_world_size()
        self._step_flops = None if flops_per_token is None else flops_per_token * rank_tokens
        self._peak_flops = peak_flops(device, sharded.layout.param.dtype)
        self.meter = Meter(
            total_steps=config.train.steps - done_steps,
            flops_per_token=flops_per_token,
            peak_flops=self._peak_flops,
            ranks=dist.get_world_size(),
        )
        self._tokens_before = done_steps * self._step_tokens
        groups = {axis: sharded.mesh.get_group(axis) for axis in AXES} | sharded.model_groups
        self._has_loss = sharded.stages is None or sharded.stages.has_last
        self._across = [GatherScalars(group, axis, sharded.ledger) for axis, group in groups.items()]
        table = sharded.model, sharded.layout
        self._inside = context_traffic(config, *table, sharded.stages)
        self._inside |= pipeline_traffic(sharded.stages, built.hidden, sharded.layout)
        if built.counts_tensor:
            self._inside |= tensor_traffic(config, *table, sharded.shapes, sharded.stages, sharded.float8)
        self._counted: dict[Entry, Traffic] = {}
        self._traffic: dict[Entry, Traffic] = {}
        self._lanes: dict[str, LaneUse] = {}
        self.losses: list[float] = []
        self.counted_tokens = 0
        self.sources: dict[str, SourceUse] = {}
        self._step_sources: dict[str, SourceUse] = {}
        self.planned_bytes: int | None = None
        self._grad_bytes, self._state_bytes = 0, dict[str, int]()
        self._memory_read: Mapping[str, int] = {}
        self._lr = self._scale = 0.0

    def count(self, tokens: int, sources: dict[str, SourceUse]) -> None:
        """Count the targets of a step that count, and what the step takes of each source of a mixture."""
        self.counted_tokens += tokens
        self._step_sources = sources
        for name, (taken, epochs) in sources.items():
            before = self.sources[name].tokens if name in self.sources else 0
            self.sources[name] = SourceUse(before + taken, epochs)

    def before_update(self) -> None:
        """Record what the update consumes: the size of gradients, the learning rate, and the loss scale."""
        if self.meter.steps < LEARNING_STEPS:
            self._grad_bytes = max(self._grad_bytes, storage_bytes(self._optim.gradients.on_device()))
        self._lr = float(self._optim.param_groups[0]["lr"])
        self._scale = self._optim.scaler.scale

    def share(self, loss: torch.Tensor, *, stop: bool) -> Callable[[], SharedLoss]:
        """Share the loss and the stop request with all ranks, in one small gather along every axis.

        `loss` is a scalar on the device; in a pipeline stage without the loss, what the stage adds to it, or 0. The
        function that is returned waits for the device, so call it where the host has to wait for the step anyway.
        """
        bad = torch.where(loss.isfinite(), -1, dist.get_rank())
        asked, counts = torch.full_like(bad, stop), torch.full_like(bad, self._has_loss)
        values = torch.stack([loss.double(), bad.double(), asked.double(), counts.double()])
        for gather in self._across:
            every = gather(values)
            values = torch.stack([every[:, 0].sum(), every[:, 1].max(), every[:, 2].max(), every[:, 3].sum()])
        on_host = streams.pin_memory(torch.empty(values.shape, dtype=values.dtype), self._device)
        on_host.copy_(values, non_blocking=True)
        copied = streams.record_event(self._device)

        @cache
        def read() -> SharedLoss:
            streams.synchronize(copied)
            total, nonfinite_rank, stopping, losses = on_host.tolist()
            return SharedLoss(total / losses, int(nonfinite_rank) if nonfinite_rank >= 0 else None, stopping > 0)

        return read

    def end_step(self, step: int, mean_loss: float) -> StepRecord:
        """Return the record of `step`, whose mean loss over all ranks is `mean_loss`."""
        seconds = self.meter.end(self._step_tokens)
        self.losses.append(mean_loss)
        moved = self._sharded.ledger.take()
        self._counted |= {entry: each for entry, each in moved.items() if entry.phase == dtensor_traffic.PHASE}
        moved |= self._counted  # counted in the first step; all later steps send the same
        by_kind: Counter[str] = Counter()
        for entry, traffic in moved.items():
            self._traffic[entry] = self._traffic.get(entry, Traffic()) + traffic
            by_kind[entry.kind] += traffic.sent_bytes
        lanes = self._optim.offload.take_use()
        for lane, use in lanes.items():
            self._lanes[lane] = self._lanes.get(lane, LaneUse()) + use
        if self.meter.steps <= LEARNING_STEPS or self.meter.steps % READING_STEPS == 0:
            self._memory_read = self.memory_by_kind()
        decision = self._optim.last_decision
        assert decision is not None
        return StepRecord(
            step=step,
            loss=mean_loss,
            lr=self._lr,
            grad_norm=decision.norm,
            tokens=self._tokens_before + self.meter.tokens,
            seconds=seconds,
            loss_scale=self._scale if self._scaled else None,
            speed=self.meter.now(),
            eta_s=self.meter.eta_s(),
            skipped_steps=self._optim.skipped_steps,
            memory_bytes=self._memory_read,
            traffic_bytes=by_kind,
            lanes=lanes,
            sources=self._step_sources,
        )

    def sum_over_ranks(self, values: torch.Tensor) -> list[float]:
        """Return the sum of fp64 values [n] over all ranks. Collective."""
        for gather in self._across:
            values = gather(values).sum(0)
        return [float(each) for each in values.tolist()]

    def summarise(self, held_out: HeldOut | None) -> RunSummary:
        """Return the summary of the run so far; `held_out` is the last evaluation."""
        return RunSummary(
            steps=self.meter.steps,
            tokens=self.meter.tokens,
            counted_tokens=None if self.counted_tokens == self.meter.tokens else self.counted_tokens,
            seconds=self.meter.seconds,
            counted_steps=self.meter.counted_steps,
            first_loss=self.losses[0],
            loss=self.losses[-1],
            held_out_loss=None if held_out is None else held_out.loss,
            held_out_by_source={} if held_out is None else held_out.by_source,
            sources=self.sources,
            speed=self.meter.overall(),
            peak_flops=self._peak_flops,
            skipped_steps=self._optim.skipped_steps,
            peak_bytes=self._memory_of_ranks(),
            traffic=self._traffic,
            traffic_steps=self.meter.steps,
            expected=self._expected(),
            routed=self._assembled.routed(self.meter.steps),
            lanes=self._lanes,
            host_bytes=self._optim.offload.host_bytes,
            step_flops=self._step_flops,
            planned_bytes=self.planned_bytes if self._device.type == "cuda" else None,
        )

    def _expected(self) -> dict[Entry, Traffic]:
        """Return the traffic of a step according to formulas."""
        table = self._sharded.layout, self._sharded.shapes
        stages, balance = self._sharded.stages, self._assembled.balance.expected()
        moved = expected_traffic(*table, stages.shared if stages else ())
        control = expected_control(*table, len(self._sharded.names))
        return {**moved, **control, **self._inside, **balance, **self._optim.traffic}

    def memory_by_kind(self) -> Mapping[str, int]:
        """Return this rank's peak by kind.

        States are as measured; `param` includes the unsharded parameters that stages 1 and 2 keep. On the CPU, the host
        memory pool of the offload is in the same memory and is a kind of its own.
        """
        if not self._state_bytes or self.meter.steps <= LEARNING_STEPS:
            states, table = self._optim.state_bytes(), (self._sharded.layout, self._sharded.shapes)
            unsharded = peak_bytes(*table).param - resting_bytes(*table).param
            self._state_bytes = {**states, "param": states["param"] + unsharded}
        kinds = {**self._state_bytes, "grad": self._grad_bytes}
        if self._device.type == "cpu" and (host_pool := self._optim.offload.host_bytes):
            kinds["host_pool"] = host_pool
        return self.memory.split(kinds)

    def _memory_of_ranks(self) -> list[dict[str, int]]:
        memory = self.memory_by_kind()
        values = torch.tensor([*memory.values()], dtype=torch.float64, device=self._device)
        for gather in reversed(self._across):
            values = gather(values.flatten())
        self._sharded.ledger.take()
        rows = values.reshape(-1, len(memory)).long().tolist()
        return [dict(zip(memory, row, strict=True)) for row in rows]
