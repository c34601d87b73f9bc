"""Tiers of model states: where each kind is stored between its uses.

    tier      storage
    device    memory of the device that computes the model: a GPU's, or on a CPU machine the process's own
    host      host memory pool (offload/memory_pool.py)
    disk      scratch files (offload/disk.py); host memory then holds what is in use and what comes next

A parameter is updated on the device if its master is stored there, otherwise on the host. Its gradient and moments are
moved there if they are stored elsewhere. Activations are not part of the layout, but the inputs that blocks keep for
backward may be on the host or on disk as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dzero.zero.offload_config import KINDS
from dzero.zero.unit_shapes import ParamShape, UnitShape


def names_off_device(tiers: Mapping[str, tuple[str, float]], units: Sequence[UnitShape]) -> dict[str, frozenset[str]]:
    """Return the names of the parameters whose state is not on the device, by kind of state.

    Frozen parameters have only kind "param". A trained parameter leaves the device only if its master does.
    `tiers` has the tier and the fraction of each kind.
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
    """Return the names of the last parameters that hold at least `wanted_elems` elements, or of all."""
    taken, names = 0, set()
    for param in reversed(params):
        if taken >= wanted_elems:
            break
        names.add(param.name)
        taken += param.elems
    return frozenset(names)
