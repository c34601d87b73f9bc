"""Of states that owners keep whole, a plan counts the bytes of the owner that has the most, to the byte."""

from __future__ import annotations

from typing import Any

import pytest
from pool import Pool
from training_loops import sharded_net, train

from dzero import OffloadConfig, TorchOptimizer
from dzero.estimate.memory import off_device
from dzero.optim.build import build_optimizer, owned_states
from dzero.optim.config import OptimConfig
from dzero.optim.owned_states import OwnedStates
from dzero.zero.tiers import names_off_device

HOST = {"grad": "host", "master": "host", "moments": "host"}
HALF = {**HOST, "master_fraction": 0.5, "moments_fraction": 0.5}
KINDS: dict[str, dict[str, Any]] = {
    "stage 0": {"stage": 0},
    "stage 3": {"stage": 3, "param": "fp32"},
    "on the host": {"stage": 2, "offload": HOST},
    "half of it": {"stage": 1, "offload": HALF},
}


def counted(rank: int, ranks: int, kind: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """By tier: predicted bytes, and those of this rank after a step."""
    offload = OffloadConfig(**kind["offload"]) if "offload" in kind else None
    sharded = sharded_net("uneven", **{**kind, "offload": offload})
    config = OptimConfig(rule="Adafactor", lr=0.01)
    optim, owned = build_optimizer(sharded, config), owned_states(config)
    assert isinstance(optim, TorchOptimizer)
    assert isinstance(owned, OwnedStates)
    train(sharded, optim, "uneven", steps=1)
    optim.synchronize()
    away = names_off_device(sharded.layout.tiers, sharded.shapes)["master"]
    targets = {held.name: held.target for held in optim._held.values() if held.target is not None}
    states = {name: optim.inner.state[target].values() for name, target in targets.items()}
    took = {name: sum(each.nbytes for each in values if each.ndim) for name, values in states.items()}
    host = sum(each for name, each in took.items() if name in away)
    assert optim.state_bytes()["moments"] == sum(took.values()) - host
    foreseen, on_host = owned.most_bytes(sharded.layout, sharded.shapes, away)
    assert off_device(sharded.layout, sharded.shapes, owned)[0].get("moments", 0) == on_host
    return {"device": (foreseen, sum(took.values()) - host), "host": (on_host, host)}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_the_fullest_owner_has_the_predicted_bytes(pool: Pool, kind: dict[str, Any]) -> None:
    one, other = pool.run(counted, 2, kind)
    for tier in ("device", "host"):
        assert max(one[tier][1], other[tier][1]) == one[tier][0]
    assert one["host"][0] > 0 if "offload" in kind else one["device"][0] > 0
