"""Counting never ends a run: a collective that the table does not know is counted under its name, with one warning."""

from __future__ import annotations

import warnings

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional

from dzero.comm import dtensor_traffic
from dzero.comm.dtensor_traffic import PHASE
from dzero.comm.ledger import Entry, Ledger, Traffic
from dzero.estimate.fake_group import fake_group


def test_a_collective_that_is_not_in_the_table_is_counted_under_its_name() -> None:
    dtensor_traffic._warn_of.cache_clear()
    ledger, tensor = Ledger(), torch.ones(6)
    with fake_group(2), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        group = dist.group.WORLD
        assert group is not None
        with dtensor_traffic.dtensor_traffic(group, "tp", ledger):
            functional.all_reduce(tensor, "sum", group)
            functional.broadcast(tensor, 0, group)
            functional.broadcast(tensor, 0, group)
            functional.all_reduce_coalesced([tensor, tensor], "sum", group)
    assert ledger.totals() == {
        Entry(PHASE, "all_reduce", "tp", "float32"): Traffic(1, 2 * 6 * 4 // 2),
        Entry(PHASE, "unknown broadcast", "tp", "float32"): Traffic(2, 0),
        Entry(PHASE, "unknown all_reduce_coalesced", "tp", "float32"): Traffic(1, 0),
    }
    told = [str(each.message) for each in said]
    assert [line.split(",")[0] for line in told if "calls the collective" in line] == [
        "an operator of the model calls the collective broadcast",
        "an operator of the model calls the collective all_reduce_coalesced",
    ]
