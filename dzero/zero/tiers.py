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

from dzero.zero.offload_config import FROZEN, KINDS
from dzero.zero.unit_shapes import ParamShape, UnitShape


def names_off_device(tiers: Mapping[str, tuple[str, float]], units: Sequence[UnitShape]) -> dict[str, frozenset[str]]:
    """Return the names of the parameters whose state is not on the device, by kind of state.

    Frozen parameters have only kind "frozen". A trained parameter leaves the device only if its master does.
    `tiers` has the tier and the fraction of each kind.
    """
    every = [param for unit in units for param in unit.params]
    trained = [param for param in every if param.trainable]
    elems = sum(param.elems for param in trained)

    def leaving(kind: str, params: Sequence[ParamShape], elems: int) -> frozenset[str]:
        tier, fraction = tiers[kind]
        return _trailing(params, fraction * elems) if tier != "device" else frozenset()

    names = {kind: leaving(kind, trained, elems) for kind in KINDS if kind != "param"}
    frozen = [param for param in every if not param.trainable]
    names[FROZEN] = leaving(FROZEN, frozen, sum(param.elems for param in frozen))
    return {"param": leaving("param", [param for param in trained if param.name in names["master"]], elems), **names}


def _trailing(params: Sequence[ParamShape], wanted_elems: float) -> frozenset[str]:
    """Return the names of the last parameters that hold at least `wanted_elems` elements, or of all."""
    taken, names = 0, set()
    for param in reversed(params):
        if taken >= wanted_elems:
            break
        names.add(param.name)
        taken += param.elems
    return frozenset(names)
