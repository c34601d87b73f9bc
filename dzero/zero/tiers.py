"""Where each kind of state lives between its uses: the table's third column.

    tier      what it is
    device    the memory that computes the model: the GPU's, or on a CPU machine the process's own
    host      the offload arena (offload/memory_pool.py)
    disk      scratch files (offload/disk.py); host memory then holds what is in use, and what comes next

A parameter is updated on the device if its master lives there, else on the host; its gradient and moments travel there
if they live elsewhere. Activations are no row of the table, but what blocks keep of their inputs for backward may wait
on the host or on disk as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dzero.zero.offload_config import KINDS
from dzero.zero.unit_shapes import ParamShape, UnitShape


def names_off_device(tiers: Mapping[str, tuple[str, float]], units: Sequence[UnitShape]) -> dict[str, frozenset[str]]:
    """The parameters whose state of each kind does not live on the device, from the (tier, fraction) of each kind.

    Frozen ones have a "param" only; a trained one's leaves the device where its master does.
    """
    every = [param for unit in units for param in unit.params]
    trained = [param for param in every if param.trainable]

    def leaving(kind: str, params: Sequence[ParamShape], of: Sequence[ParamShape]) -> frozenset[str]:
        tier, fraction = tiers[kind]
        return _trailing(params, fraction * sum(param.elems for param in of)) if tier != "device" else frozenset()

    names = {kind: leaving(kind, trained, trained) for kind in KINDS if kind != "param"}
    free = [param for param in every if not param.trainable or param.name in names["master"]]
    return {"param": leaving("param", free, every), **names}


def _trailing(params: Sequence[ParamShape], wanted_elems: float) -> frozenset[str]:
    """The last parameters that hold at least `wanted_elems`, or all."""
    taken, names = 0, set()
    for param in reversed(params):
        if taken >= wanted_elems:
            break
        names.add(param.name)
        taken += param.elems
    return frozenset(names)
