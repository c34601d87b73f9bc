"""Classes of torch.optim that mix the elements of a parameter train on shards as in one process, to the bit.

A class gets whole parameters on the ranks that own them, so its own reductions add in the same order as in one process.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import plain_classes
import pytest
import torch
from pool import Pool
from training_loops import params_of, sharded_net, train, unequal

from dzero import OffloadConfig, Sharded, TorchOptimizer
from dzero.comm.ledger import Traffic
from dzero.zero.dtensors import local_of

STEPS = 5


class Rule(NamedTuple):
    """A class and its settings; the oracle gives it the whole parameters of one process."""

    kind: type[torch.optim.Optimizer]
    options: dict[str, Any]


RULES = {
    "Adafactor": Rule(torch.optim.Adafactor, {"lr": 0.05, "weight_decay": 0.1}),
    "LAMB": Rule(plain_classes.Lamb, {"lr": 0.05, "weight_decay": 0.1}),
    "Shampoo": Rule(plain_classes.Shampoo, {"lr": 0.05, "weight_decay": 0.1}),
}


def optimizer(sharded: Any, name: str, **settings: Any) -> TorchOptimizer:
    rule = RULES[name]
    return TorchOptimizer(sharded, rule.kind, elementwise=False, **rule.options, **settings)


def at_stages(rank: int, ranks: int, name: str, cells: list[dict[str, Any]]) -> list[dict[str, torch.Tensor]]:
    """Whole parameters after `STEPS` steps, clipped unless a cell says otherwise."""
    found = []
    for cell in cells:
        clip, net = cell.pop("clip", 0.5), cell.pop("net", "uneven")
        sharded = sharded_net(net, **cell)
        sharded.ledger.collective_log.check = ranks == 2
        optim = optimizer(sharded, name, max_norm=clip)
        train(sharded, optim, net, steps=STEPS)
        found.append(params_of(sharded))
    return found


@pytest.mark.parametrize("name", RULES)
def test_every_stage_has_the_bits_of_one_process(pool: Pool, name: str) -> None:
    """Unclipped, as norms add in another order; and clipped, where all stages agree."""
    cells = [{"stage": stage, "param": param, "clip": clip} for stage, param, clip in CELLS]
    found = pool.run(at_stages, 2, name, cells)[0]
    of_kind: dict[tuple[str, float | None], list[dict[str, torch.Tensor]]] = {}
    for (_, param, clip), params in zip(CELLS, found, strict=True):
        of_kind.setdefault((param, clip), []).append(params)
    for (param, clip), alike in of_kind.items():
        assert all(unequal(each, alike[0]) == [] for each in alike), (param, clip)
        if clip is None:
            rule = RULES[name]
            want = plain_classes.train(rule.kind, rule.options, precision=param, steps=STEPS, clip=None)
            assert unequal(alike[0], want) == [], param


CELLS = [(0, "fp32", None), (3, "fp32", None), (2, "bf16", None), *((stage, "bf16", 0.5) for stage in (0, 1, 3))]


@pytest.mark.full
@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("net", ["uneven", "tied", "frozen"])
def test_four_ranks_have_the_same_bits_at_every_stage(pool: Pool, name: str, net: str) -> None:
    """Shards of some ranks are empty."""
    cells = [{"stage": stage, "net": net, "param": "fp32", "clip": None} for stage in range(4)]
    found = pool.run(at_stages, 4, name, cells)[0]
    rule = RULES[name]
    want = plain_classes.train(rule.kind, rule.options, precision="fp32", steps=STEPS, clip=None, net=net, ranks=4)
    assert [unequal(each, want) for each in found] == [[]] * len(cells)


def test_replicas_of_hybrid_sharding_stay_replicas(pool: Pool) -> None:
    """Each replica of two shards has its own owners."""
    cells = [{"stage": stage, "replicate": 2, "param": "bf16"} for stage in (2, 3)]
    runs = pool.run(at_stages, 4, "Adafactor", cells)
    assert all(unequal(each, runs[0][0]) == [] for of_rank in runs for each in of_rank)


HOST = {
    "all": OffloadConfig(grad="host", master="host", moments="host"),
    "within the step": OffloadConfig(master="host", moments="host", overlap="step"),
    "gradients": OffloadConfig(grad="host"),
    "half": OffloadConfig(grad="host", master="host", moments="host", master_fraction=0.5, moments_fraction=0.5),
    "parameters too": OffloadConfig(param="host", grad="host", master="host", moments="host"),
}


def on_the_host(rank: int, ranks: int, name: str, cells: list[tuple[int, str, str]]) -> list[str]:
    """What differs from the device in parameters, losses and traffic."""
    wrong = []
    for stage, param, where in cells:
        ends: list[dict[str, torch.Tensor]] = []
        for offload in (None, HOST[where]):
            sharded = sharded_net("uneven", stage=stage, param=param, offload=offload)
            optim = optimizer(sharded, name, max_norm=0.5)
            losses = train(sharded, optim, "uneven", steps=4)
            optim.synchronize()
            ends.append({"losses": torch.tensor(losses), **params_of(sharded)})
            ends[-1] |= {f"{n} {key}": value for n, key, value in states_of(sharded, optim)}
            sent = sum((each for e, each in sharded.ledger.totals().items() if e.phase == "update"), Traffic())
            due = sum(optim.traffic.values(), Traffic())
            if (sent.calls, sent.sent_bytes) != (4 * due.calls, 4 * due.sent_bytes):
                wrong.append(f"{where}: {sent} for four times {due}")
            optim.offload.executor.close()
        wrong += [f"{stage} {param} {where}: {key}" for key in unequal(*ends)]
    return wrong


def states_of(sharded: Sharded, optim: TorchOptimizer) -> list[tuple[str, str, torch.Tensor]]:
    """The states of this rank's parameters, by name and key."""
    named = sharded.named_params().items()
    return [
        (n, key, local_of(value))
        for n, p in named
        if p in optim.state
        for key, value in optim.state[p].items()
        if key != "step"
    ]


@pytest.mark.parametrize("name", RULES)
def test_states_on_the_host_change_no_bit(pool: Pool, name: str) -> None:
    cells = [(3, "bf16", "parameters too"), (2, "fp32", "all"), (1, "bf16", "half"), (0, "bf16", "all")]
    cells += [(2, "bf16", "gradients"), (3, "fp32", "within the step")]
    assert pool.run(on_the_host, 2, name, cells) == [[], []]
