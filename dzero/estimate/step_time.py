"""Seconds of a step, and what sets them: each lane's work (durations.py), and which lanes work at once.

    lane               work
    compute            forward and backward of the microbatches
    shard, replicate   collectives along an axis, decisions included
    tp, cp, ep         the same of a model that is cut, of attention over cut sequences, and of tokens to experts of
                       other ranks, all of which operators wait for
    pp                 what travels between the parts of a pipeline
    waiting            of its ranks for each other, while the first microbatch comes and the last goes
    update             parameters whose masters are on the device
    host link          what leaves the device and what comes back: the larger, since both go at once (a CPU: both)
    host update        parameters whose masters are off it
    disk               what is read and written, one after the other

    phase      what goes on at once                             so it takes
    backward   compute with tp, cp, ep; collectives, host link, disk   the longest of them
    update     host update, host link, disk (states)            the longest of them; before it, that on the device
    step       overlap=step: one after the other; forward: the update beside forward; backward, delayed: beside both

On a CPU, cores are the device, the links and the host at once: there everything but the disk adds up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dzero.estimate.durations import Durations, of_experts
from dzero.estimate.hardware_spec import HardwareConfig
from dzero.estimate.in_flight import ALONE, InFlight
from dzero.estimate.microbatch_costs import BACKWARD, FORWARD, MicrobatchCosts
from dzero.estimate.transfers import moved_of
from dzero.mesh import CONTEXT, EXPERT, PIPELINE, REPLICATE, SHARD, TENSOR
from dzero.zero.layout import Layout
from dzero.zero.unit_shapes import UnitShape

COMPUTE, UPDATE = "compute", "update"
HOST_LINK, HOST_UPDATE, DISK = "host link", "host update", "disk"
WAITING = "waiting"
INSIDE = (TENSOR, CONTEXT, EXPERT)
LINKS = (*INSIDE, SHARD, REPLICATE, PIPELINE)


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step by what takes them. `unknown`: figures that the hardware lacks; without them no `step_s`."""

    seconds: Mapping[str, float]
    step_s: float | None
    bound: str
    unknown: tuple[str, ...]


def pace_of(
    layout: Layout,
    units: Sequence[UnitShape],
    costs: MicrobatchCosts,
    hardware: HardwareConfig,
    flights: InFlight = ALONE,
    *,
    bound: bool = False,
) -> StepTime:
    """Return the seconds of a step on `hardware`. flights: of a pipeline. bound: at its datasheets' rates."""
    take, moved = Durations(layout, hardware, costs.beside, bound=bound), moved_of(layout, units, costs, flights)
    moves = moved.units.values()
    parts = dict.fromkeys((FORWARD, BACKWARD), 0.0)
    for span in costs.spans:
        parts[span.direction] += layout.microbatches * take.compute(span.work)
    axes = {axis: take.sent(axis, count, moved.calls[axis]) for axis, count in moved.axes.items()}
    seconds = {
        COMPUTE: sum(parts.values()),
        **{
            axis: axes.get(axis, 0.0) + axes.get(of_experts(axis), 0.0) + take.decided(moved.decisions.get(axis, 0))
            for axis in LINKS
        },
        UPDATE: take.updated_on_device(sum(each.device_elems for each in moves)),
        HOST_LINK: take.copied(moved.out + moved.back if hardware.devices_are_host else max(moved.out, moved.back)),
        HOST_UPDATE: take.updated(sum(each.host_elems for each in moves)),
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
