"""Device memory of offloaded states: absent between uses, two units at a time during use.

state              on the device                                                          source
master, moments    two units' while updated there, if they are stored elsewhere           computed
grad               until the next unit's backward begins; if gradients accumulate on
                   the device, until then in the last microbatch                          simulated
                   two units' while updated there                                         computed
param              shards of the current unit and of the next one                         computed
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dzero.offload.buffer_layout import BufferLayout, moment_fields
from dzero.offload.build_schedule import update_order
from dzero.optim.adamw import AdamW
from dzero.zero.sharded import Sharded
from dzero.zero.unit_shapes import ParamShape, UnitShape
from simulator.storage_meter import KINDS, Bytes, StorageMeter, StorageMoment


class Absent:
    """Exclusion of the offloaded states of `buffer_layout` from the meter."""

    def __init__(self, buffer_layout: BufferLayout, sharded: Sharded, optim: AdamW, meter: StorageMeter) -> None:
        self._buffer_layout, self._optim, self._meter = buffer_layout, optim, meter
        for name, param in sharded.named_params().items():
            if buffer_layout.on_host("param", name):
                meter.leave([param])
            for key, tensor in optim.state.get(param, {}).items():
                kind = "master" if key in ("master", "remainder") else "moments"
                if key != "step" and buffer_layout.on_host(kind, name):
                    meter.leave([tensor])

    def left(self, is_last: bool) -> None:
        """Exclude offloaded gradients reduced so far; if they accumulate on the device, only in the last microbatch."""
        if not (is_last or self._buffer_layout.accumulates_on_host):
            return
        grads = self._optim.gradients.arriving()
        staying = {
            id(g.untyped_storage()) for name, g in grads.items() if not self._buffer_layout.on_host("grad", name)
        }
        self._meter.leave(g for g in grads.values() if id(g.untyped_storage()) not in staying)


def with_brought(moments: Sequence[StorageMoment], buffer_layout: BufferLayout) -> list[StorageMoment]:
    """Add the offloaded states that are on the device for their use."""
    extra = {phase: _brought(buffer_layout, in_step=phase == "step") for phase in ("forward", "backward", "step")}
    return [
        StorageMoment(m.where, tuple(a + b for a, b in zip(m.bytes, extra[m.where.phase], strict=True)))
        for m in moments
    ]


def _brought(buffer_layout: BufferLayout, *, in_step: bool) -> Bytes:
    layout = buffer_layout.layout

    def params(param: ParamShape) -> int:
        return (
            param.shard_elems(layout.shard) * layout.param.dtype.itemsize
            if buffer_layout.on_host("param", param.name)
            else 0
        )

    def grads(param: ParamShape) -> int:
        comes = buffer_layout.on_host("grad", param.name) and not buffer_layout.updated_on_host(param.name)
        return param.shard_elems(layout.shard, layout.replica_shards) * layout.grad.dtype.itemsize if comes else 0

    def moments(param: ParamShape) -> int:
        comes = buffer_layout.on_host("moments", param.name) and not buffer_layout.updated_on_host(param.name)
        fields = moment_fields(layout, param.shard_elems(layout.shard, layout.replica_shards)) if comes else ()
        return sum(dtype.itemsize * elems for _, dtype, elems in fields)

    of_kind = {"grad": grads, "moments": moments} if in_step else {"param": params}
    return tuple(_of_two(buffer_layout.units, of_kind[kind]) if kind in of_kind else 0 for kind in KINDS)


def _of_two(units: Sequence[UnitShape], bytes_of: Callable[[ParamShape], int]) -> int:
    """Return the maximum bytes of two consecutive units."""
    sizes = [sum(map(bytes_of, unit.params)) for unit in update_order(units)]
    return max((a + b for a, b in zip(sizes, [*sizes[1:], 0], strict=True)), default=0)
