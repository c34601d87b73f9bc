"""A staged group of four CPU ranks gives what gloo gives, and trains to the bits of the oracle."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import recorded
import staged_cases
import torch
import torch.distributed as dist
from pool import Pool
from recorded import Run, off
from staged_group import BACKEND, staged
from training_loops import masters_of, step

RANKS = 4
PLAIN = Run(3, "uneven", RANKS, steps=12, precision={"param": "fp32"})
HOST = off("host", "grad", "master", "moments", overlap="step")


@contextmanager
def staged_world(rank: int, ranks: int, rendezvous: str, device: torch.device) -> Iterator[None]:
    """Leave the pool's group for one whose tensors on `device` are staged; `rendezvous`: a file, new for each run."""
    dist.barrier()  # a rank that left now would break the connections that others are still making
    dist.destroy_process_group()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = f"cpu:gloo,cuda:{BACKEND}" if device.type == "cuda" else f"cpu:{BACKEND}"
    with staged(device):
        at, timeout = f"file://{rendezvous}", timedelta(seconds=60)
        dist.init_process_group(backend, init_method=at, rank=rank, world_size=ranks, timeout=timeout)
        try:
            yield
            dist.barrier()
        finally:
            dist.destroy_process_group()


def train(
    rank: int, ranks: int, rendezvous: str, device_type: str, run: Run
) -> tuple[dict[str, torch.Tensor], list[float | None]]:
    """Masters on the CPU and norms of a run over a staged group, in which nothing but the transport is a stand-in."""
    device = torch.device(device_type, 0) if device_type == "cuda" else torch.device(device_type)
    with staged_world(rank, ranks, rendezvous, device):
        sharded, optim = recorded.made(run, device=device_type)
        norms = [step(sharded, optim, of_step[rank])[1] for of_step in recorded.batches_of(run)]
        optim.synchronize()
        masters = {name: master.cpu() for name, master in masters_of(sharded, optim).items()}
    return masters, norms


def test_every_collective_gives_what_gloo_gives(pool: Pool) -> None:
    assert pool.run(staged_cases.compare, RANKS) == [[]] * RANKS


FULL = pytest.mark.full("tests/gpu/test_staged_group.py::test_training_has_the_bits_of_the_oracle")
FIRST = "stage 3 in bf16"
ROWS = {
    FIRST: replace(PLAIN, precision={"param": "bf16"}),
    "stage 0": replace(PLAIN, stage=0),
    "stage 1 by torch's sums": replace(PLAIN, stage=1, zero={"reduction": "native"}),
    "stage 2 on the host": replace(PLAIN, stage=2, microbatches=2, offload=HOST),
}


@pytest.mark.parametrize("row", [FIRST, *(pytest.param(name, marks=FULL) for name in ROWS if name != FIRST)])
def test_training_has_the_bits_of_the_oracle(pool: Pool, tmp_path: Path, row: str) -> None:
    """What test_four_ranks.py runs on a GPU."""
    want = recorded.oracle(ROWS[row])
    for masters, norms in pool.run(train, RANKS, str(tmp_path / "rendezvous"), "cpu", ROWS[row]):
        assert norms == want.norms
        assert [name for name in want.masters if not torch.equal(masters[name], want.masters[name])] == []


@FULL
def test_hybrid_sharding_follows_the_oracle(pool: Pool, tmp_path: Path) -> None:
    """Two hops in fp32 round otherwise than one: 1e-7 of a gradient, which AdamW may turn into a part of a step."""
    run = replace(PLAIN, microbatches=2, replicate=2)
    want = recorded.oracle(run)
    for masters, norms in pool.run(train, RANKS, str(tmp_path / "rendezvous"), "cpu", run):
        assert norms == pytest.approx(want.norms, rel=1e-5)
        for name, master in want.masters.items():
            torch.testing.assert_close(masters[name], master, rtol=0, atol=1e-4)
