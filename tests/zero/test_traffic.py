"""Every step moves exactly what the table says: the ledger, the formulas, and an auditor below all of it agree."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import small_decoders
import torch.distributed as dist
from dispatch_counter import DispatchCounter
from pool import Pool
from torch.testing._internal.distributed.fake_pg import FakeStore
from training_loops import backward, sharded_net

from dzero import AdamW, OffloadConfig, Sharded
from dzero.comm.ledger import Entry, Traffic
from dzero.zero.cost_model import expected_traffic

BLOCKS = 3
UNITS = BLOCKS + 1


def step_traffic(net: str, **kwargs: Any) -> tuple[Sharded, dict[Entry, Traffic], DispatchCounter, bool]:
    """The second step of a run: its ledger, the auditor that watched it, and whether its gradients were finite."""
    sharded = sharded_net(net, **kwargs)
    optim, layout = AdamW(sharded), sharded.layout
    first, second = small_decoders.batches(net, steps=2, ranks=1, microbatches=layout.microbatches, samples=1, tokens=4)
    backward(sharded, optim, first[0][:1])
    optim.step()
    sharded.ledger.take()
    with DispatchCounter(layout.replicate if layout.shard == 1 else layout.shard) as counter:
        backward(sharded, optim, second[0])
        optim.step()
    assert optim.last_decision is not None
    return sharded, sharded.ledger.take(), counter, optim.last_decision.finite


def check(net: str, **kwargs: Any) -> None:
    """One rank's traffic of a step against the table and against the auditor."""
    sharded, ledger, counter, finite = step_traffic(net, **kwargs)
    layout = sharded.layout
    where = f"{net} {kwargs} on {layout.replicate}x{layout.shard}"
    deciding = ("control", "exceptional")
    control = {entry: traffic for entry, traffic in ledger.items() if entry.phase in deciding}
    moved = {entry: traffic for entry, traffic in ledger.items() if entry.phase not in deciding}
    assert moved == expected_traffic(layout, sharded.shapes), where

    by_hand = control_by_hand(sharded) | ({} if finite else named_by_hand(sharded))
    assert control == by_hand, where
    audit(sharded, moved, by_hand, counter, where)


def trained(sharded: Sharded) -> int:
    return sum(param.trainable for unit in sharded.shapes for param in unit.params)


def control_by_hand(sharded: Sharded) -> dict[Entry, Traffic]:
    """One small gather per axis and step decides for all: 8 bytes (fp64) for each trained parameter, and a checksum; of
    the copies first, and what they said along the shard axis. (Slices between many ranks: tests/optim/test_grad_norm.)
    """
    copies, shards, told = sharded.layout.replicate, sharded.layout.shard, 8 * (1 + trained(sharded))
    sent = {"replicate": (copies - 1) * told, "shard": (shards - 1) * copies * told}
    return {Entry("control", "all_gather", axis, "float64"): Traffic(1, count) for axis, count in sent.items() if count}


def named_by_hand(sharded: Sharded) -> dict[Entry, Traffic]:
    """What a step that is skipped sends besides, as some of the fake groups are, where gradients are whatever memory
    held: a byte for each trained parameter of every rank, between the copies and then of all copies."""
    copies, shards = sharded.layout.replicate, sharded.layout.shard
    sent = {"replicate": (copies - 1) * trained(sharded), "shard": (shards - 1) * copies * trained(sharded)}
    return {
        Entry("exceptional", "all_gather", axis, "uint8"): Traffic(1, count) for axis, count in sent.items() if count
    }


def audit(
    sharded: Sharded,
    moved: dict[Entry, Traffic],
    control: dict[Entry, Traffic],
    counter: DispatchCounter,
    where: str,
) -> None:
    """Bytes in the ledger = bytes dispatched, but for the short last chunks of an exact all-reduce."""
    layout = sharded.layout
    booked = sum(traffic.sent_bytes for traffic in moved.values())
    sent = sum(counter.sent_bytes.values()) - sum(traffic.sent_bytes for traffic in control.values())
    padding = 0
    if layout.replicate > 1 and layout.replica_shards == 1:
        grad, wire = layout.grad.dtype.itemsize, layout.replicate_wire.itemsize
        short = sum(-unit.shard_elems(layout.shard, trainable_only=True) % layout.replicate for unit in sharded.shapes)
        # A rank with a full chunk sends the short one once less; one with a short chunk sends less back to all.
        padding = short * max(wire, (layout.replicate - 1) * grad)
    assert booked - padding <= sent <= booked, where
    if layout.exact:
        assert counter.calls.keys() <= {"send", "recv_", "_allgather_base_", "alltoall_base_"}, where
        for kind, name in (("all_gather", "_allgather_base_"), ("all_to_all", "alltoall_base_")):
            assert counter.calls[name] == sum(entry.kind == kind for entry in control), where
    else:
        assert counter.calls["send"] == 0, where


def check_stages(rank: int, ranks: int) -> None:
    for stage, microbatches in itertools.product((0, 1, 2, 3), (1, 4)):
        check("even", stage=stage, microbatches=microbatches, param="bf16")
    for stage, net in itertools.product((0, 1, 2, 3), ("uneven", "tied")):
        check(net, stage=stage, microbatches=1 + stage % 2)
    for stage in (0, 1, 2, 3):
        check("even", stage=stage, microbatches=1, reduction="native", param="fp32")
    check("even", stage=3, microbatches=4, reshard=False)
    check("even", stage=2, grad="fp32", reduce="fp32")
    check("even", stage=1, param="fp16", microbatches=4)
    check("even", stage=3, microbatches=4, unit_bytes=6000)
    check("uneven", stage=2, unit_bytes=1)


def check_four_ranks(rank: int, ranks: int) -> None:
    for stage, microbatches in itertools.product((0, 1, 2, 3), (1, 4)):
        check("even", stage=stage, microbatches=microbatches)
    for stage, microbatches in ((1, 4), (2, 1), (3, 1), (3, 4)):
        check("even", stage=stage, microbatches=microbatches, replicate=2)
    check("uneven", stage=3, replicate=2)
    for stage, microbatches in ((1, 4), (2, 1), (3, 4)):
        check(
            "uneven", stage=stage, microbatches=microbatches, replicate=2, optimizer_shard_axes=("replicate", "shard")
        )
    check("even", stage=3, replicate=2, optimizer_shard_axes=("replicate", "shard"), reduction="native")
    late = OffloadConfig(grad="host", master="host", moments="host")  # new values travel in the next step's forward
    check("even", stage=2, replicate=2, optimizer_shard_axes=("replicate", "shard"), offload=late)
    check("even", stage=2, replicate=2, reduction="native")
    check("even", stage=3, microbatches=4, reshard=2)
    check("uneven", stage=2, node_ranks=2)
    check("even", stage=3, microbatches=2, reshard=2, gather="int8", reduce="int4", node_ranks=2)
    check("uneven", stage=3, gather="int4", reduce="int8")


def test_a_step_of_two_ranks_moves_what_the_table_says(pool: Pool) -> None:
    pool.run(check_stages, 2)


def test_a_step_of_four_ranks_moves_what_the_table_says_hybrid_and_partial_reshard_included(pool: Pool) -> None:
    pool.run(check_four_ranks, 4)


@contextmanager
def fake_group(rank: int, ranks: int) -> Iterator[None]:
    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.product(keep=2)
@pytest.mark.parametrize("ranks", [64, 1024])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_step_of_many_ranks_moves_what_the_table_says(ranks: int, stage: int) -> None:
    with fake_group(1, ranks):
        check("even", stage=stage, microbatches=2 if ranks == 64 else 1)


@pytest.mark.parametrize(("ranks", "messages"), [(64, 14), (1024, 62)])
def test_a_collective_of_many_ranks_posts_messages_to_few_of_them(ranks: int, messages: int) -> None:
    """In one hop these were 63 and 1023. A gather and a reduction of each unit at stage 2, each in one piece."""
    with fake_group(1, ranks):
        _, _, counter, _ = step_traffic("even", stage=2)
        assert counter.calls["send"] == counter.calls["recv_"] == 2 * UNITS * messages


def test_a_hybrid_step_of_64_ranks_moves_what_the_table_says() -> None:
    with fake_group(9, 64):
        check("even", stage=3, microbatches=2, replicate=8)


def traffic_by_hand(rank: int, ranks: int) -> list[list[tuple[str, int, int]]]:
    """(kind, calls, bytes) of bf16 steps at 2 ranks, for stages 0 to 3."""
    rows = []
    for stage in (0, 1, 2, 3):
        _, ledger, _, _ = step_traffic("even", stage=stage, microbatches=4, grad="bf16")
        rows.append([(e.kind, t.calls, t.sent_bytes) for e, t in ledger.items() if e.phase != "control"])
    return rows


def test_the_numbers_of_the_table_written_out(pool: Pool) -> None:
    stage0, stage1, stage2, stage3 = pool.run(traffic_by_hand, 2)[0]
    block = 2 * 2 * 32 + 3 * 32 * 32 + (32 * 32 + 32) + (64 * 32 + 64) + (32 * 64 + 32)
    root = 64 * 32 + 16 * 32 + 2 * 32 + 64 * 32
    elems = BLOCKS * block + root
    half = elems * 2 // 2  # what one of two ranks sends of Ψ bf16 elements
    assert stage0 == [("all_reduce", UNITS, 2 * half)]
    assert stage1 == [("reduce_scatter", UNITS, half), ("all_gather", UNITS, half)]
    assert stage2 == [("reduce_scatter", 4 * UNITS, 4 * half), ("all_gather", UNITS, half)]
    # Blocks are gathered for forward and for backward, the root once for both.
    assert stage3 == [
        ("reduce_scatter", 4 * UNITS, 4 * half),
        ("all_gather", 4 * (2 * BLOCKS + 1), 8 * half - 4 * root),
    ]
