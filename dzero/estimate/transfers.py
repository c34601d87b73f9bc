"""Bytes that one rank moves per step: along mesh axes, from the ZeRO table, and between tiers, unit by unit.

transfer                     when
param, frozen                to the device for each use, and from disk before it
grad                         to the host at each reduction, and to disk, from where the next reduction loads it
late_grad, grad_back         once per step, to where the update runs
moments                      to where the update runs, and back
work                         new working copies to the device and to disk
states                       from disk for an update, and back; not read again if a host slot still has them
copies                       gradients of parameters that tp replicates, summed over tp before each reduction
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from dzero.comm.ledger import Traffic
from dzero.estimate.durations import of_experts
from dzero.estimate.microbatch_costs import BACKWARD, FORWARD, STATES_ALONE, MicrobatchCosts
from dzero.mesh import PIPELINE, TENSOR
from dzero.offload.buffer_layout import BufferLayout, Payload
from dzero.offload.build_schedule import update_order
from dzero.zero.cost_model import copies_of, expected_control, expected_copies, expected_traffic
from dzero.zero.layout import Layout
from dzero.zero.offload_config import FROZEN
from dzero.zero.tiers import names_off_device
from dzero.zero.unit_shapes import UnitShape


@dataclass(frozen=True)
class UnitTransfers:
    """Bytes of one unit per transfer, and the elements that host and device update; `copies` counts collectives.

    `decoded` are the bytes that the device reads and writes to decode quantized weights, or payloads, for one use, and
    `encoded` those that the host reads and writes to make payloads after an update.
    """

    param: int
    disk_param: int
    frozen: int
    disk_frozen: int
    decoded: int
    encoded: int
    grad: int
    disk_grad: int
    late_grad: int
    grad_back: int
    moments: int
    work: int
    read_states: int
    written_states: int
    copies_grad: int
    copies: int
    host_elems: int
    device_elems: int


@dataclass(frozen=True)
class StepTransfers:
    """Bytes of all units in a step.

    Attributes:
        axes, calls: Bytes sent and number of collectives by axis; those of expert units are under `of_experts` names.
        decisions: Number of collectives of a few numbers, by axis.
        out, back: Bytes from device to host and from host to device.
        read, written: Bytes from and to disk.
        decoded: Bytes that the device reads and writes to decode quantized weights and payloads.
    """

    units: Mapping[str, UnitTransfers]
    axes: Mapping[str, int]
    calls: Mapping[str, int]
    decisions: Mapping[str, int]
    out: int
    back: int
    read: int
    written: int
    decoded: int


def moves_of(layout: Layout, units: Sequence[UnitShape]) -> dict[str, UnitTransfers]:
    """Return the transfers of each unit."""
    away, buffer_layout = names_off_device(layout.tiers, units), BufferLayout(layout, units)
    read = _states_read(buffer_layout, units)
    sizes, on_disk = buffer_layout.piece_bytes(), {kind: tier == "disk" for kind, (tier, _) in layout.tiers.items()}
    gradient, working, moment = layout.grad.dtype.itemsize, layout.param.dtype.itemsize, layout.moments.dtype.itemsize
    found = {}
    for unit in units:
        own = layout.of_unit(unit)
        replica_shards = {param.name: param.shard_elems(own.shard, own.replica_shards) for param in unit.params}
        copies = copies_of(layout, unit)
        trained = {param.name for param in unit.params if param.trainable}

        def elems(names: Iterable[str], replica_shards: dict[str, int] = replica_shards) -> int:
            return sum(replica_shards.get(name, 0) for name in names)

        grad, payloads = elems(away["grad"]) * gradient, buffer_layout.payloads[unit.name]
        param, frozen = (_fetched(unit, own, kind, away[kind], payloads) for kind in ("param", FROZEN))
        in_blocks = sum(each.blocks.elems for each in payloads) * working
        sent = sum(each.blocks.nbytes for each in payloads)
        weights = sum(int(p.elems * p.codec.decode_bytes(working)) for p in unit.params if p.codec is not None)
        found[unit.name] = UnitTransfers(
            param=param,
            disk_param=param if on_disk["param"] else 0,
            frozen=frozen,
            disk_frozen=frozen if on_disk[FROZEN] else 0,
            decoded=weights + sent + in_blocks,
            encoded=sum(each.blocks.nbytes + each.blocks.elems * working for each in payloads if not _is_frozen(each)),
            grad=grad,
            disk_grad=grad if on_disk["grad"] else 0,
            late_grad=elems(away["master"] - away["grad"]) * gradient,
            grad_back=elems(away["grad"] - away["master"]) * gradient,
            moments=2 * elems(away["master"] ^ away["moments"]) * moment,
            work=elems(away["master"] - away["param"]) * working,
            read_states=read[unit.name],
            written_states=sum(sizes[pair.disk] for pair in buffer_layout.going("states", unit.name)),
            copies_grad=copies.sent_bytes,
            copies=copies.calls,
            host_elems=elems(away["master"]),
            device_elems=elems(trained - away["master"]),
        )
    return found


def moved_of(layout: Layout, units: Sequence[UnitShape], costs: MicrobatchCosts = STATES_ALONE) -> StepTransfers:
    """Return what one rank moves in a step; `costs` add the traffic within the model (tp, cp, ep) and along pp."""
    flights = costs.flights
    axes = {PIPELINE: flights.sent.sent_bytes} if flights.sent.calls else {}
    calls = {PIPELINE: flights.sent.calls} if flights.sent.calls else {}
    for shared in (False, True):
        alike = [unit for unit in units if (unit.shared_by > 1) is shared]
        for entry, traffic in expected_traffic(layout, alike, flights.shared).items():
            axis = of_experts(entry.axis) if shared else entry.axis
            axes[axis] = axes.get(axis, 0) + traffic.sent_bytes
            calls[axis] = calls.get(axis, 0) + traffic.calls
    reductions = layout.microbatches if layout.grad.sharded else 1
    uses = {unit.name: layout.microbatches * (2 if layout.of_unit(unit).gathers_again else 1) for unit in units}
    moves = moves_of(layout, units)
    each = moves.values()
    for axis, sent_bytes, count in (costs.work(FORWARD) + costs.work(BACKWARD)).exchanged():
        if count:
            copied = sum(expected_copies(layout, units).values(), Traffic()) if axis == TENSOR else Traffic()
            axes[axis] = layout.microbatches * int(sent_bytes) + copied.sent_bytes
            calls[axis] = layout.microbatches * count + copied.calls
    decisions = Counter[str]()
    for entry, traffic in expected_control(layout, units, flights.names).items():
        decisions[entry.axis] += traffic.calls
    return StepTransfers(
        units=moves,
        axes=axes,
        calls=calls,
        decisions=decisions,
        out=sum(reductions * unit.grad + unit.late_grad + unit.moments for unit in each),
        back=sum(
            uses[name] * (unit.param + unit.frozen) + unit.grad_back + unit.moments + unit.work
            for name, unit in moves.items()
        ),
        read=sum(
            uses[name] * (unit.disk_param + unit.disk_frozen) + reductions * unit.disk_grad + unit.read_states
            for name, unit in moves.items()
        ),
        written=sum(unit.disk_param + reductions * unit.disk_grad + unit.written_states for unit in each),
        decoded=sum(uses[name] * unit.decoded for name, unit in moves.items()),
    )


def _is_frozen(payload: Payload) -> bool:
    """Return whether a payload is of frozen parameters, which are encoded once."""
    return payload.source.slot.startswith(FROZEN)


def _fetched(unit: UnitShape, own: Layout, kind: str, away: Collection[str], payloads: Sequence[Payload]) -> int:
    """Return the bytes of a unit's parameters of one kind that are copied to the device for one use."""
    in_blocks = {name for payload in payloads for name in payload.names}
    stored = [param for param in unit.params if param.name in away and param.name not in in_blocks]
    sent = [payload for payload in payloads if _is_frozen(payload) is (kind == FROZEN)]
    as_stored = sum(param.shard_bytes(own.shard, own.param.dtype.itemsize) for param in stored)
    return as_stored + sum(payload.blocks.nbytes for payload in sent)


def _states_read(buffer_layout: BufferLayout, units: Sequence[UnitShape]) -> dict[str, int]:
    """Return the bytes of states read from disk by unit, in a step after the first."""
    read: dict[str, int] = {}
    sizes, holds = buffer_layout.piece_bytes(), dict[str, str]()
    for _ in range(2):
        for unit in update_order(units, buffer_layout.layout.offload.mode):
            pairs = buffer_layout.pairs("states", unit.name)
            read[unit.name] = sum(sizes[pair.disk] for pair in pairs if holds.get(pair.host) != unit.name)
            holds |= {pair.host: unit.name for pair in pairs}
    return read
