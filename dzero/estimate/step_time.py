"""Seconds of a step from the work of each lane (`durations.py`), given which lanes run at the same time.

    lane               work
    compute            forward and backward of the microbatches, and decoding of quantized weights
    shard, replicate   collectives along the axis, decisions included
    tp, cp, ep         collectives that operators wait for: of matrices (tp), attention (cp) and token dispatch (ep)
    pp                 sends between pipeline stages
    waiting            pipeline bubble, while the first microbatch arrives and the last one leaves
    update             update of parameters with masters on the device
    host link          transfers between device and host; both directions run at once, so the larger (on a CPU: the sum)
    host update        update of parameters with offloaded masters
    disk               reads and writes, one after the other

    phase      lanes that run at the same time                             seconds
    training   compute with tp, cp, ep and waiting; shard; replicate;      maximum
               pp; host link
    update     host update; disk; host link if the host updates            maximum, after the update on the device
    step       training and update                                         overlap=step: sum; forward: the update runs
                                                                           beside forward; backward, delayed: both

On a CPU the cores are the device, the links and the host, so all lanes add up except disk, which runs beside them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dzero.estimate.durations import Durations, of_experts
from dzero.estimate.hardware_spec import HardwareConfig
from dzero.estimate.microbatch_costs import BACKWARD, FORWARD, MicrobatchCosts
from dzero.estimate.transfers import moved_of
from dzero.mesh import CONTEXT, EXPERT, PIPELINE, REPLICATE, SHARD, TENSOR
from dzero.zero.cost_model import unit_traffic
from dzero.zero.layout import Layout
from dzero.zero.unit_shapes import UnitShape

COMPUTE, UPDATE = "compute", "update"
HOST_LINK, HOST_UPDATE, DISK = "host link", "host update", "disk"
WAITING = "waiting"
INSIDE = (TENSOR, CONTEXT, EXPERT)
LINKS = (*INSIDE, SHARD, REPLICATE, PIPELINE)


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step by lane.

    Attributes:
        seconds: Seconds by lane, without lanes that have no work.
        step_s: Seconds of the step, or None if a figure is unknown.
        bound: Lane with the most work.
        unknown: Figures that the hardware lacks.
    """

    seconds: Mapping[str, float]
    step_s: float | None
    bound: str
    unknown: tuple[str, ...]


def pace_of(
    layout: Layout,
    units: Sequence[UnitShape],
    costs: MicrobatchCosts,
    hardware: HardwareConfig,
    *,
    bound: bool = False,
) -> StepTime:
    """Return the seconds of a step on `hardware`; if `bound`, at datasheet rates."""
    take, moved = Durations(layout, hardware, costs.beside, bound=bound), moved_of(layout, units, costs)
    moves = moved.units.values()
    parts = dict.fromkeys((FORWARD, BACKWARD), 0.0)
    for span in costs.spans:
        parts[span.direction] += layout.microbatches * take.compute(span.work)
    parts[FORWARD] += take.decoded(moved.decoded)
    apart = (SHARD, REPLICATE, of_experts(SHARD), of_experts(REPLICATE))
    axes = {axis: take.sent(axis, n, moved.calls[axis]) for axis, n in moved.axes.items() if axis not in apart}
    for unit in units:
        for entry, legs, calls in unit_traffic(layout, unit):
            axis = of_experts(entry.axis) if unit.shared_by > 1 else entry.axis
            axes[axis] = axes.get(axis, 0.0) + take.collective(axis, legs, calls)
    seconds = {
        COMPUTE: sum(parts.values()),
        **{
            axis: axes.get(axis, 0.0) + axes.get(of_experts(axis), 0.0) + take.decided(moved.decisions.get(axis, 0))
            for axis in LINKS
        },
        UPDATE: take.updated_on_device(sum(each.device_elems for each in moves)),
        HOST_LINK: take.copied(moved.out + moved.back if hardware.devices_are_host else max(moved.out, moved.back)),
        HOST_UPDATE: take.updated(sum(each.host_elems for each in moves))
        + take.encoded(sum(each.encoded for each in moves)),
        DISK: take.read(moved.read) + take.written(moved.written),
    }
    if layout.pipeline_ranks > 1:
        within = seconds[COMPUTE] + sum(seconds[axis] for axis in INSIDE)
        seconds[WAITING] = within * (layout.pipeline_ranks - 1) / layout.microbatches
    if hardware.devices_are_host:
        step = max(sum(seconds.values()) - seconds[DISK], seconds[DISK])
    else:
        within = seconds[COMPUTE] + sum(seconds[axis] for axis in INSIDE) + seconds.get(WAITING, 0.0)
        train = max(within, *(seconds[each] for each in (SHARD, REPLICATE, PIPELINE, HOST_LINK)))
        update = max(seconds[HOST_UPDATE], seconds[DISK], seconds[HOST_LINK] if seconds[HOST_UPDATE] else 0.0)
        forward = train * parts[FORWARD] / seconds[COMPUTE] if seconds[COMPUTE] else 0.0
        beside = {"step": 0.0, "forward": forward}.get(layout.offload.mode, train)
        step = train + seconds[UPDATE] + max(0.0, update - beside)
    longest = max(seconds, key=lambda what: seconds[what])
    taken = {what: each for what, each in seconds.items() if each}
    return StepTime(taken, None if take.unknown else step, longest, tuple(dict.fromkeys(take.unknown)))
