"""What a run will need and how fast it will be on some hardware: whether it fits, by tier, and what sets its pace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dzero.estimate.hardware_spec import HardwareConfig
from dzero.estimate.in_flight import ALONE, InFlight
from dzero.estimate.memory import StepMemory, memory_of, with_moments
from dzero.estimate.microbatch_costs import MicrobatchCosts
from dzero.estimate.step_time import StepTime, pace_of
from dzero.estimate.timeline import Timeline, timeline_of
from dzero.estimate.transfers import StepTransfers, moved_of
from dzero.hardware import format_bytes
from dzero.zero.layout import Layout
from dzero.zero.unit_shapes import UnitShape

FRAGMENTATION = 0.05
"""Of a CUDA device's peak, lost between blocks of the caching allocator: an assumption, not measured."""
FRAGMENTS = "fragmentation"
DEVICE, HOST, DISK = TIERS = ("device", "host", "disk")


@dataclass(frozen=True)
class Tier:
    """One rank's bytes on a tier by kind, and what it may have; None: unknown."""

    kinds: Mapping[str, int]
    capacity_bytes: int | None

    @property
    def total_bytes(self) -> int:
        """All kinds together."""
        return sum(self.kinds.values())

    @property
    def short_bytes(self) -> int:
        """By how much it does not fit; 0 where it does, or where the capacity is unknown."""
        return 0 if self.capacity_bytes is None else max(0, self.total_bytes - self.capacity_bytes)


@dataclass(frozen=True)
class Forecast:
    """Of one rank. `tiers` at the device's fullest moment, which is at `when`.

    pace: what is expected, at the rates that training reaches. bound: what no run is faster than, at the datasheets'
    rates; where the machine was measured, the same.
    """

    hardware: HardwareConfig
    layout: Layout
    params: int
    memory: StepMemory
    tiers: Mapping[str, Tier]
    moved: StepTransfers
    pace: StepTime
    bound: StepTime
    step_tokens: int
    model_flops: float | None
    units: Sequence[UnitShape]
    costs: MicrobatchCosts

    def timeline(self) -> Timeline | None:
        """A step, bar by bar; None where the hardware does not say all that its pace needs, and of a pipeline."""
        if self.pace.step_s is None or self.layout.pipeline_ranks > 1:
            return None
        return timeline_of(self.layout, self.units, self.costs, self.hardware)

    @property
    def when(self) -> str:
        """The device's fullest moment."""
        return self.memory.peak.when

    @property
    def peak_bytes(self) -> int:
        """Of the device, as tensors take it: what fragmentation loses is left out."""
        return sum(count for kind, count in self.tiers[DEVICE].kinds.items() if kind != FRAGMENTS)

    @property
    def fits(self) -> bool:
        """On every tier."""
        return not any(tier.short_bytes for tier in self.tiers.values())

    @property
    def tokens_per_s(self) -> float | None:
        """Return the expected tokens per second of all ranks together."""
        return self.step_tokens / self.pace.step_s if self.pace.step_s else None

    @property
    def mfu(self) -> float | None:
        """Expected model FLOPs of all ranks over the peak of all devices: what is recomputed does not count."""
        peak = self.hardware.peak_flops(self.layout.param.dtype)
        if self.model_flops is None or not peak or not self.tokens_per_s:
            return None
        return self.model_flops * self.tokens_per_s / (peak * self.layout.world)

    @property
    def hfu(self) -> float | None:
        """Return the hardware FLOPs utilisation, recomputation included: FLOP/s of this rank's device over its peak."""
        peak = self.hardware.peak_flops(self.layout.param.dtype)
        if not peak or not self.pace.step_s:
            return None
        made = sum(span.work.flops + span.work.attention for span in self.costs.spans)
        return self.layout.microbatches * made / (peak * self.pace.step_s)

    @property
    def assumed(self) -> str:
        """Return what the expected seconds assume of the hardware's rates, in words."""
        hardware, dtype = self.hardware, self.layout.param.dtype
        if hardware.reaches_its_rates:
            return "measured rates"
        words = [f"products at {hardware.efficiency:.0%} of the peak"]
        peak = hardware.peak_flops(dtype)
        if peak and hardware.attention_flops:
            words.append(f"attention at {min(hardware.attention_flops / peak, hardware.efficiency):.0%}")
        rest = f"memory at {hardware.memory_efficiency:.0%}, links at {hardware.link_efficiency:.0%}"
        return f"assuming {', '.join(words)}, {rest}"

    def verdict(self) -> str:
        """One line: it fits, or by how much it does not."""
        short = {name: tier.short_bytes for name, tier in self.tiers.items() if tier.short_bytes}
        if short:
            lacks = " and ".join(f"{format_bytes(count)} on the {name}" for name, count in short.items())
            return f"does not fit {self.hardware.name}: each rank lacks {lacks}"
        unknown = [name for name, tier in self.tiers.items() if tier.total_bytes and tier.capacity_bytes is None]
        left = f"; the {' and '.join(unknown)}'s size is unknown" if unknown else ""
        return f"fits {self.hardware.name}{left}"


def forecast(
    layout: Layout,
    units: Sequence[UnitShape],
    costs: MicrobatchCosts,
    hardware: HardwareConfig,
    *,
    step_tokens: int,
    model_flops: float | None,
    moments: int = 2,
    flights: InFlight = ALONE,
) -> Forecast:
    """step_tokens: of all ranks. model_flops: per token, by the convention of MFU; None where it is unknown.

    moments: tensors that the optimizer's rule keeps per parameter. flights: of a pipeline.
    """
    memory = with_moments(memory_of(layout, units, costs, hardware.device_type), moments)
    memory = flights.held(memory, costs)
    return Forecast(
        hardware=hardware,
        layout=layout,
        params=sum(param.elems for unit in units for param in unit.params),
        memory=memory,
        tiers=tiers_of(memory, hardware, layout.world),
        moved=moved_of(layout, units, costs, flights),
        pace=pace_of(layout, units, costs, hardware, flights),
        bound=pace_of(layout, units, costs, hardware, flights, bound=True),
        step_tokens=step_tokens,
        model_flops=model_flops,
        units=units,
        costs=costs,
    )


def tiers_of(memory: StepMemory, hardware: HardwareConfig, ranks: int) -> dict[str, Tier]:
    """The device's fullest moment, host and disk, against what one of `ranks` ranks has of each."""
    share = hardware.share(ranks)
    device = {kind: count for kind, count in memory.peak.kinds.items() if count}
    device |= {"staging": memory.staging} if memory.staging else {}
    capacity: int | None = hardware.usable_bytes
    host = dict(memory.host)
    if hardware.devices_are_host:  # one memory: what lies on the host tier is on the device's
        device |= {f"{kind} (host)": count for kind, count in host.items()}
        capacity = None if share.host_bytes is None else share.host_bytes - hardware.reserved_bytes
        host = {}
    else:
        device[FRAGMENTS] = int(FRAGMENTATION * sum(device.values()))
    return {
        DEVICE: Tier(device, capacity),
        HOST: Tier(host, share.host_bytes),
        DISK: Tier(dict(memory.disk), share.disk_bytes),
    }
