"""`dzero.testing` tells what a run sends and keeps, beside the formulas, on every tier."""

from __future__ import annotations

from typing import Any

import pytest
import small_decoders
from pool import Pool
from training_loops import backward, sharded_net

import dzero
from dzero import testing


def looked_at(rank: int, ranks: int, offload: str | None) -> dict[str, Any]:
    given = None if offload is None else dzero.OffloadConfig(master=offload, moments=offload)
    sharded = sharded_net("even", stage=3, offload=given, param="bf16")
    optim = dzero.AdamW(sharded)
    (first,) = small_decoders.batches("even", steps=1, ranks=ranks, microbatches=1)
    sharded.ledger.take()
    backward(sharded, optim, first[rank])
    optim.step()
    optim.synchronize()
    sent = sharded.ledger.take()
    params = list(sharded.named_params().values())
    return {
        "sent": sent,
        "expected": {**testing.expected_traffic(sharded), **testing.expected_decision(sharded)},
        "phases": testing.by_phase(sent),
        "rest": testing.resting_bytes(sharded),
        "peak": testing.peak_bytes(sharded),
        "paper": testing.paper_bytes(sharded),
        "tiers": testing.bytes_on_tiers(optim),
        "schedule": testing.schedule(optim),
        "param": testing.local_bytes(params),
        "shapes": [tuple(testing.local(param).shape) for param in params],
        "elems": sum(param.numel() for param in params),
    }


@pytest.mark.parametrize("offload", [None, "host"])
def test_what_a_run_sends_and_keeps_is_told_beside_the_formulas(pool: Pool, offload: str | None) -> None:
    told = pool.run(looked_at, 2, offload)[0]
    elems = told["elems"]
    assert told["sent"] == told["expected"]
    assert told["phases"].keys() == {"unshard", "reduce", "control"}
    assert told["rest"] == {"param": elems, "grad": 0, "master": 2 * elems, "moments": 4 * elems, "frozen": 0}
    assert told["peak"]["grad"] == elems
    assert told["paper"] == {"param": elems, "grad": elems, "master": 2 * elems, "moments": 4 * elems, "frozen": 0}
    assert told["param"] == told["rest"]["param"]
    if offload is None:
        assert told["tiers"] == {"device": 7 * elems, "host": 0, "disk": 0}
        assert told["schedule"][0] == "0 actions a step, 0 B of host memory"
    else:
        assert told["tiers"]["device"] == elems
        assert told["tiers"]["host"] >= 6 * elems
        assert any(line.startswith("slot ") and "moments" in line for line in told["schedule"])
