"""Look into a run from outside: what it sends and keeps, where, and what the formulas say of both.

    sharded = dzero.shard(model, stage=3, offload="host")
    optim = dzero.AdamW(sharded, lr=3e-4)
    sharded.ledger.take()  # count from here
    ...  # one step
    sent = testing.by_phase(sharded.ledger.take())
    assert sent["unshard"] == testing.by_phase(testing.expected_traffic(sharded))["unshard"]

For tests of programs that use dzero, and for those of dzero itself, which look inside nowhere else but in their folders
`inside/`. It is as stable as the names of `import dzero`; nothing here takes part in training.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING

import torch

from dzero.comm.ledger import Entry, Traffic
from dzero.zero import cost_model
from dzero.zero.dtensors import local_of

if TYPE_CHECKING:
    from dzero.optim.base import MasterOptimizer
    from dzero.zero.sharded import Sharded

__all__ = [
    "Entry",
    "Traffic",
    "by_phase",
    "bytes_on_tiers",
    "expected_decision",
    "expected_traffic",
    "local",
    "local_bytes",
    "paper_bytes",
    "peak_bytes",
    "resting_bytes",
    "schedule",
]


def by_phase(sent: Mapping[Entry, Traffic]) -> dict[str, Traffic]:
    """Return calls and bytes by phase of the step: unshard, reduce, tensor, update, control and others of `Entry`."""
    found: dict[str, Traffic] = {}
    for entry, traffic in sent.items():
        found[entry.phase] = found.get(entry.phase, Traffic()) + traffic
    return found


def expected_traffic(sharded: Sharded) -> dict[Entry, Traffic]:
    """Return what a rank sends in one step by the table, without what decides whether the step is taken."""
    return cost_model.expected_traffic(sharded.layout, sharded.shapes)


def expected_decision(sharded: Sharded) -> dict[Entry, Traffic]:
    """Return what a rank sends in one step to decide whether it is taken, for norms of one type."""
    return cost_model.expected_decision(sharded.layout, sharded.shapes)


def resting_bytes(sharded: Sharded) -> dict[str, int]:
    """Return the bytes of a rank's states between steps by the table, on whichever tier.

    Keys are param, grad, master, moments and frozen; shards are padded to the largest.
    """
    return asdict(cost_model.resting_bytes(sharded.layout, sharded.shapes))


def peak_bytes(sharded: Sharded) -> dict[str, int]:
    """Return the bytes of a rank's states at the end of the last backward, with the keys of `resting_bytes`."""
    return asdict(cost_model.peak_bytes(sharded.layout, sharded.shapes))


def paper_bytes(sharded: Sharded) -> dict[str, int]:
    """Return the bytes of ZeRO's own formulas (Rajbhandari et al. 2020, section 5) for the model's parameters."""
    elems = sum(param.elems for unit in sharded.shapes for param in unit.params)
    return asdict(cost_model.paper_bytes(sharded.layout, elems))


def bytes_on_tiers(optim: MasterOptimizer) -> dict[str, int]:
    """Return the bytes that this rank keeps on each tier: device (states between steps), host and disk (all slots)."""
    plan = optim.offload.schedule
    return {"device": sum(optim.state_bytes().values()), "host": plan.host_bytes, "disk": plan.disk_bytes}


def schedule(optim: MasterOptimizer) -> list[str]:
    """Return the lines of the offload schedule: slots, actions of a step with what they wait for, and totals."""
    return list(optim.offload.schedule.lines())


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a DTensor, or another tensor itself, without recording gradients."""
    return local_of(tensor.detach())


def local_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of the distinct storages behind this rank's parts of tensors."""
    storages = [local(tensor).untyped_storage() for tensor in tensors]
    return sum({each.data_ptr(): each.nbytes() for each in storages}.values())
