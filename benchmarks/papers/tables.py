"""Tables of the ZeRO papers, computed from their assumptions, beside dzero's own bytes."""

from __future__ import annotations

from collections.abc import Callable

from dzero.hardware import format_count
from dzero.utils.terminal import Table
from dzero.zero.layout import Layout
from dzero.zero.offload_config import OffloadConfig
from papers.arithmetic import (
    bandwidth_for,
    deepest,
    infinity_need,
    largest,
    layout_of,
    missing_tiers,
    on_device,
    own_bytes,
    own_infinity_need,
    widest_that_fits,
    zero_bytes,
)
from papers.assumptions import Efficiency, Infinity, Papers, Shape, ShardedModel, SizedModel, Zero, ZeroOffload


def paper_tables(papers: Papers) -> list[Table]:
    """Return all tables in the order of the papers."""
    return [
        *(_states(papers.zero, model) for model in papers.zero.models),
        _one_device(papers.offload),
        _nodes(papers.infinity),
        _states_bandwidth(papers.efficiency),
        _checkpoint_bandwidth(papers.efficiency),
    ]


def _states(zero: Zero, model: SizedModel) -> Table:
    """Return bytes per rank by ranks and stage: the paper's formula, then dzero with one microbatch per step."""
    shape = model.shape
    header = [cell for name, stage in zero.stages.items() for cell in (name, f"stage {stage}")]
    rows = [
        (
            str(ranks),
            *(
                _bytes(count)
                for stage in zero.stages.values()
                for count in (
                    zero_bytes(zero, model.elems, stage, ranks),
                    own_bytes(layout_of(stage, ranks), shape)["device"],
                )
            ),
        )
        for ranks in zero.ranks
    ]
    title = f"{model.name} parameters: model states per rank, the paper's and dzero's ({zero.source}; {_shape(shape)})"
    return Table(title, ("ranks", *header), tuple(rows), left=0)


def _one_device(offload: ZeroOffload) -> Table:
    """Return the largest model on one device, by the device memory of its states."""
    host = OffloadConfig(grad="host", master="host", moments="host")
    ways: list[tuple[str, Callable[[Shape], float]]] = [
        *((system.name, _per_param(system.bytes)) for system in offload.systems),
        ("dzero, all on the device", _own_device(layout_of(0, 1))),
        ("dzero, offload=host", _own_device(layout_of(0, 1, host))),
    ]
    rows = []
    for name, states in ways:
        model = largest(offload, states)
        if model is None:
            rows.append((name, "-", "none", "-", "-", "-"))
            continue
        shape = deepest(on_device(offload, states, model), model.hidden, offload.device_bytes)
        assert shape is not None, "a model that fits has blocks"
        per_param = f"{states(shape) / shape.elems:.1f} B"
        rows.append((name, per_param, model.name, f"{model.batch:g}", _shape(shape), format_count(shape.elems)))
    title = f"The largest model on one device of {_bytes(offload.device_bytes)} ({offload.source})"
    header = ("states", "per parameter", "largest of the paper's", "at batch", "deepest of its width", "parameters")
    return Table(title, header, tuple(rows))


def _per_param(count: int) -> Callable[[Shape], float]:
    return lambda shape: count * shape.elems


def _own_device(layout: Layout) -> Callable[[Shape], float]:
    return lambda shape: own_bytes(layout, shape)["device"]


def _nodes(infinity: Infinity) -> Table:
    """Return the disk and host memory of a node and the memory of a device, as the paper and dzero count them."""
    capacity = {"disk": infinity.disk_bytes, "host": infinity.host_bytes, "device": infinity.device_bytes}

    def row(who: str, model: ShardedModel, need: dict[str, float]) -> tuple[str, ...]:
        missing = missing_tiers(infinity, need)
        most = infinity.disk_bytes / need["disk"] * model.elems
        where = (f"{model.name}, {_shape(model.shape)}", who, str(model.nodes * infinity.devices_per_node))
        said = f"no: {', '.join(missing)}" if missing else "yes"
        return (*where, *(_bytes(need[tier]) for tier in capacity), format_count(most), said)

    rows = []
    for model in infinity.models:
        rows.append(row("ZeRO-Infinity", model, infinity_need(infinity, model)))
        narrower = widest_that_fits(infinity, model)
        rows += [
            row("dzero", each, own_infinity_need(infinity, each))
            for each in ([model] if narrower in (model, None) else [model, narrower])
        ]
    sizes = [f"{tier} of {_bytes(count)}" for tier, count in capacity.items()]
    header = ("model", "counted by", "devices", *sizes, "disks hold", "fits")
    title = f"States on disk, nodes of {infinity.devices_per_node} devices ({infinity.source})"
    return Table(title, header, tuple(rows), left=2)


def _states_bandwidth(efficiency: Efficiency) -> Table:
    """Return the bytes/s per device for parameters with gradients and for optimizer states, by batch."""
    kinds = {"params, grads": efficiency.param_intensity, "optimizer": efficiency.optimizer_intensity}
    rows = [
        (
            f"{batch:g}",
            *(
                _rate(bandwidth_for(target, intensity(batch), efficiency.achievable_flops))
                for intensity in kinds.values()
                for target in efficiency.targets
            ),
        )
        for batch in efficiency.batches
    ]
    header = ("batch", *(f"{kind} {target:.0%}" for kind in kinds for target in efficiency.targets))
    return Table(f"Bandwidth per device for an efficiency ({efficiency.source})", header, tuple(rows), left=0)


def _checkpoint_bandwidth(efficiency: Efficiency) -> Table:
    """Return the bytes/s per device for activation checkpoints, by hidden size."""
    rows = [
        (
            str(hidden),
            *(
                _rate(bandwidth_for(target, efficiency.checkpoint_intensity(hidden), efficiency.achievable_flops))
                for target in efficiency.targets
            ),
        )
        for hidden in efficiency.hidden
    ]
    header = ("hidden", *(f"checkpoints {target:.0%}" for target in efficiency.targets))
    return Table(f"Bandwidth per device for an efficiency ({efficiency.source})", header, tuple(rows), left=0)


def _shape(shape: Shape) -> str:
    return f"{shape.layers} layers of {shape.hidden}"


def _bytes(count: float) -> str:
    """Return bytes in decimal units, as the papers do: `31.4 GB`."""
    return f"{format_count(count)}B"


def _rate(bytes_per_s: float) -> str:
    return f"{format_count(bytes_per_s)}B/s"
