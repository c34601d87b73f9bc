"""Memory and time that a run needs on given hardware: whether it fits each tier, and what limits its speed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from dzero.estimate.hardware_spec import HardwareConfig
from dzero.estimate.memory import StepMemory, memory_of
from dzero.estimate.microbatch_costs import MicrobatchCosts
from dzero.estimate.step_time import StepTime, pace_of
from dzero.estimate.timeline import Timeline, timeline_of
from dzero.estimate.transfers import StepTransfers, moved_of
from dzero.hardware import format_bytes
from dzero.optim.owned_states import OwnedStates
from dzero.zero.layout import Layout
from dzero.zero.unit_shapes import UnitShape

FRAGMENTATION = 0.05
"""Fraction of a CUDA device's peak that the caching allocator loses to fragmentation (assumed, not measured)."""
FRAGMENTS = "fragmentation"
DEVICE, HOST, DISK = TIERS = ("device", "host", "disk")


@dataclass(frozen=True)
class Tier:
    """Bytes that one rank needs of a tier, by kind, and its capacity (None: unknown)."""

    kinds: Mapping[str, int]
    capacity_bytes: int | None

    @property
    def total_bytes(self) -> int:
        """Sum over all kinds."""
        return sum(self.kinds.values())

    @property
    def short_bytes(self) -> int:
        """Bytes missing; 0 if the rank fits or if the capacity is unknown."""
        return 0 if self.capacity_bytes is None else max(0, self.total_bytes - self.capacity_bytes)


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """Prediction of the memory and time of a step of one rank.

    Attributes:
        layout: The ZeRO table.
        units: Shapes of the units.
        costs: Costs of one microbatch.
        hardware: The node and its network.
        step_tokens: Tokens per step of all ranks.
        model_flops: FLOPs per token by the convention of MFU, or None if unknown.
        owned: States that owners of whole parameters keep, if the update rule needs them whole.
        slowest: Pipeline stage that the others wait for; None if it is this one.
    """

    layout: Layout
    units: Sequence[UnitShape]
    costs: MicrobatchCosts
    hardware: HardwareConfig
    step_tokens: int
    model_flops: float | None
    owned: OwnedStates | None = None
    slowest: Forecast | None = None

    @cached_property
    def memory(self) -> StepMemory:
        """Memory of a step."""
        return memory_of(self.layout, self.units, self.costs, self.hardware.device_type, self.owned)

    @cached_property
    def tiers(self) -> dict[str, Tier]:
        """Memory by tier at the moment `when` at which the device is fullest."""
        return tiers_of(self.memory, self.hardware, self.layout.world)

    @cached_property
    def moved(self) -> StepTransfers:
        """Bytes that the rank moves in a step."""
        return moved_of(self.layout, self.units, self.costs)

    @cached_property
    def pace(self) -> StepTime:
        """Expected time, at the rates reached in training."""
        return self.slowest.pace if self.slowest else pace_of(self.layout, self.units, self.costs, self.hardware)

    @cached_property
    def bound(self) -> StepTime:
        """Lower bound of the time, at datasheet rates. On measured hardware its rates are those of `pace`."""
        if self.slowest:
            return self.slowest.bound
        return pace_of(self.layout, self.units, self.costs, self.hardware, bound=True)

    @property
    def params(self) -> int:
        """Parameters of the rank's units before sharding."""
        return sum(param.elems for unit in self.units for param in unit.params)

    def timeline(self) -> Timeline | None:
        """Return the bars of a step, or None for a pipeline or if the hardware lacks a figure that the pace needs."""
        if self.pace.step_s is None or self.layout.pipeline_ranks > 1:
            return None
        return timeline_of(self.layout, self.units, self.costs, self.hardware)

    @property
    def when(self) -> str:
        """Moment at which the device is fullest."""
        return self.memory.peak.when

    @property
    def peak_bytes(self) -> int:
        """Peak of the tensors on the device, without fragmentation."""
        return sum(count for kind, count in self.tiers[DEVICE].kinds.items() if kind != FRAGMENTS)

    @property
    def fits(self) -> bool:
        """Whether the run fits on every tier."""
        return not any(tier.short_bytes for tier in self.tiers.values())

    @property
    def tokens_per_s(self) -> float | None:
        """Expected tokens per second of all ranks together."""
        return self.step_tokens / self.pace.step_s if self.pace.step_s else None

    @property
    def mfu(self) -> float | None:
        """Expected model FLOPs utilization of all devices; recomputation does not count."""
        peak = self.hardware.peak_flops(self.layout.param.dtype)
        if self.model_flops is None or not peak or not self.tokens_per_s:
            return None
        return self.model_flops * self.tokens_per_s / (peak * self.layout.world)

    @property
    def hfu(self) -> float | None:
        """Expected hardware FLOPs utilization of this rank's device; recomputation counts."""
        peak = self.hardware.peak_flops(self.layout.param.dtype)
        if not peak or not self.pace.step_s:
            return None
        made = sum(span.work.flops + span.work.fp8_flops + span.work.attention for span in self.costs.spans)
        return self.layout.microbatches * made / (peak * self.pace.step_s)

    @property
    def assumed(self) -> str:
        """Description of the rates that the expected seconds assume."""
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
        """Return one line that says whether the run fits, or how much memory is missing."""
        short = {name: tier.short_bytes for name, tier in self.tiers.items() if tier.short_bytes}
        if short:
            return f"does not fit {self.hardware.name}: each rank lacks {listed(short)}"
        unknown = [name for name, tier in self.tiers.items() if tier.total_bytes and tier.capacity_bytes is None]
        left = f"; the {' and '.join(unknown)}'s size is unknown" if unknown else ""
        return f"fits {self.hardware.name}{left}"


def listed(bytes_of: Mapping[str, int]) -> str:
    """Format bytes by tier as `1.50 GiB on the device and 12.0 GiB on the host`."""
    return " and ".join(f"{format_bytes(count)} on the {name}" for name, count in bytes_of.items())


def tiers_of(memory: StepMemory, hardware: HardwareConfig, ranks: int) -> dict[str, Tier]:
    """Return the memory that one of `ranks` ranks needs and has on each tier, at the device's fullest moment."""
    share = hardware.share(ranks)
    device = {kind: count for kind, count in memory.peak.kinds.items() if count}
    device |= {"staging": memory.staging} if memory.staging else {}
    capacity: int | None = hardware.usable_bytes
    host = dict(memory.host)
    if hardware.devices_are_host:  # device and host share one memory, so the host tier counts here
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
