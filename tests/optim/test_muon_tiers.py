"""Muon has the same bits with its states off the device: owners orthogonalize what they gather on the host."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pool import Pool
from training_loops import masters_of, params_of, sharded_net, train, unequal

from dzero import DiskConfig, Muon, OffloadConfig, Sharded
from dzero.comm.ledger import Traffic
from dzero.zero.dtensors import local_of

STEPS = 4
ON_HOST = {"grad": "host", "master": "host", "moments": "host"}
TIERS: dict[str, dict[str, Any]] = {
    "all": ON_HOST,
    "parameters too": {"param": "host", **ON_HOST},
    "master alone": {"master": "host"},
    "moments alone": {"moments": "host"},
    "gradients alone": {"grad": "host"},
    "half": {**ON_HOST, "master_fraction": 0.5, "moments_fraction": 0.5},
    "within the step": {**ON_HOST, "overlap": "step"},
    "disk": {"grad": "host", "master": "disk", "moments": "disk"},
}


def ends_of(offload: OffloadConfig | None, **kind: Any) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Losses, parameters, masters and momenta after `STEPS` steps, and what was sent otherwise than `traffic` says."""
    sharded = sharded_net("uneven", offload=offload, **kind)
    optim = Muon(sharded, lr=3e-3, max_norm=0.5)
    losses = train(sharded, optim, "uneven", steps=STEPS)
    optim.synchronize()
    sent = sum((each for entry, each in sharded.ledger.totals().items() if entry.phase == "update"), Traffic())
    due = sum(optim.traffic.values(), Traffic())
    wrong = [] if (sent.calls, sent.sent_bytes) == (STEPS * due.calls, STEPS * due.sent_bytes) else [f"{sent} {due}"]
    ends = {"losses": torch.tensor(losses), **params_of(sharded), **states_of(sharded, optim)}
    ends |= {f"{name} master": value for name, value in masters_of(sharded, optim).items()}
    optim.offload.executor.close()
    return ends, wrong


def states_of(sharded: Sharded, optim: Muon) -> dict[str, torch.Tensor]:
    return {
        f"{name} {key}": local_of(value).clone()
        for name, param in sharded.named_params().items()
        for key, value in optim.state[param].items()
        if key.startswith("exp_avg")
    }


def off_the_device(rank: int, ranks: int, cells: list[tuple[str, dict[str, Any]]], folder: Path) -> list[str]:
    """What differs from states on the device."""
    wrong = []
    for where, kind in cells:
        disk = {"disk": DiskConfig(paths=[str(folder)])} if where == "disk" else {}
        want, _ = ends_of(None, **kind)
        got, sent = ends_of(OffloadConfig(**TIERS[where], **disk), **kind)
        wrong += [f"{where} {kind}: {what}" for what in (*unequal(got, want), *sent)]
    return wrong


CELLS: list[tuple[str, dict[str, Any]]] = [
    ("all", {"stage": 2, "param": "fp32"}),
    ("all", {"stage": 0}),
    ("parameters too", {"stage": 3, "microbatches": 2}),
    ("master alone", {"stage": 1}),
    ("moments alone", {"stage": 2, "moments": "bf16"}),
    ("gradients alone", {"stage": 3}),
    ("half", {"stage": 3, "master": "remainder"}),
    ("within the step", {"stage": 1}),
    ("disk", {"stage": 3}),
    ("disk", {"stage": 0, "param": "fp32"}),
    ("all", {"stage": 2, "moments": "int8"}),
]


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_tiers_change_no_bit(pool: Pool, tmp_path: Path, cell: tuple[str, dict[str, Any]]) -> None:
    assert pool.run(off_the_device, 2, [cell], tmp_path) == [[], []]
