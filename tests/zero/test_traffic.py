"""Every step moves exactly what the table says: the ledger, the formulas, and an auditor below all of it agree."""

from __future__ import annotations

from typing import Any

import pytest
import small_decoders
from dispatch_counter import DispatchCounter
from fake_ranks import fake_ranks
from on_ranks import on_ranks
from pair_counter import PairCounter
from pool import Pool
from training_loops import backward, sharded_net

from dzero import AdamW, OffloadConfig, Sharded
from dzero.testing import Entry, Traffic, expected_decision, expected_traffic

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


def check(net: str = "even", **kwargs: Any) -> None:
    """One rank's traffic of a step against the table and against the auditor."""
    sharded, ledger, counter, finite = step_traffic(net, **kwargs)
    layout = sharded.layout
    where = f"{net} {kwargs} on {layout.replicate}x{layout.shard}"
    deciding = ("control", "exceptional")
    control = {entry: traffic for entry, traffic in ledger.items() if entry.phase in deciding}
    moved = {entry: traffic for entry, traffic in ledger.items() if entry.phase not in deciding}
    assert moved == expected_traffic(sharded), where

    assert expected_decision(sharded) == control_by_hand(sharded), where
    by_hand = control_by_hand(sharded) | ({} if finite else named_by_hand(sharded))
    assert control == by_hand, where
    audit(sharded, moved, by_hand, counter, where)


def trained(sharded: Sharded) -> int:
    return sum(param.trainable for unit in sharded.shapes for param in unit.params)


def control_by_hand(sharded: Sharded) -> dict[Entry, Traffic]:
    """One small gather per axis and step decides for all: 8 bytes (fp64) for each trained parameter, and a checksum; of
    the copies first, and what they said along the shard axis. Slices between many ranks are asked in
    tests/optim/inside/test_inside_norm_sums.py.
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


SHARED_OUT = {"replicate": 2, "optimizer_shard_axes": ("replicate", "shard")}
LATE = OffloadConfig(grad="host", master="host", moments="host")
"""New values travel in the next step's forward."""
CELLS: dict[int, list[dict[str, Any]]] = {
    2: [
        *({"stage": stage, "microbatches": 4, "param": "bf16"} for stage in (0, 1, 2, 3)),
        *({"net": net, "stage": stage} for stage in (0, 1, 2, 3) for net in ("uneven", "tied")),
        *({"stage": stage, "reduction": "native", "param": "fp32"} for stage in (0, 2, 3)),
        {"stage": 3, "microbatches": 4, "reshard": False},
        {"stage": 2, "grad": "fp32", "reduce": "fp32"},
        {"stage": 1, "microbatches": 4, "param": "fp16"},
        {"stage": 3, "microbatches": 4, "unit_bytes": 6000},
        {"net": "uneven", "stage": 2, "unit_bytes": 1},
    ],
    4: [
        *({"stage": stage} for stage in (0, 3)),
        *({"stage": stage, "microbatches": 4, "replicate": 2} for stage in (1, 3)),
        {"net": "uneven", "stage": 2, "replicate": 2},
        {"stage": 2, "replicate": 2, "reduction": "native"},
        {"stage": 3, "microbatches": 4, "reshard": 2},
        {"net": "uneven", "stage": 2, "node_ranks": 2},
        {"stage": 3, "microbatches": 2, "reshard": 2, "gather": "int8", "reduce": "int4", "node_ranks": 2},
        {"net": "uneven", "stage": 3, "gather": "int4", "reduce": "int8"},
    ],
}


REALLY: list[tuple[int, dict[str, Any]]] = [
    (2, {"net": "uneven", "stage": 3, "microbatches": 2}),
    (2, {"net": "tied", "stage": 1}),
    (4, {"net": "uneven", "stage": 1, "microbatches": 2, **SHARED_OUT}),
    (4, {"net": "uneven", "stage": 3, "microbatches": 2, **SHARED_OUT}),
    (4, {"stage": 2, "offload": LATE, **SHARED_OUT}),
    (4, {"stage": 3, "reduction": "native", **SHARED_OUT}),
]
"""What real ranks do: replicas that share out states send new values only where a step is taken, and a group that moves
nothing may skip any step, for its gradients are whatever memory held."""


@pytest.mark.parametrize("ranks", CELLS)
def test_a_step_moves_what_the_table_says(ranks: int) -> None:
    with fake_ranks(ranks, rank=1):
        for cell in CELLS[ranks]:
            check(**cell)


@pytest.mark.product(keep=2)
@pytest.mark.parametrize(("ranks", "cell"), [*REALLY, *((4, cell) for cell in CELLS[4])], ids=str)
@on_ranks()
def test_a_step_of_real_ranks_moves_what_the_table_says(rank: int, ranks: int, cell: dict[str, Any]) -> None:
    check(**cell)


@pytest.mark.product(keep=1)
@pytest.mark.parametrize(
    ("ranks", "cell"),
    [(64, {"stage": 2, "microbatches": 2}), (64, {"stage": 3, "replicate": 8}), (1024, {"stage": 3})],
    ids=str,
)
def test_a_step_of_many_ranks_moves_what_the_table_says(ranks: int, cell: dict[str, Any]) -> None:
    with fake_ranks(ranks, rank=9):
        check(**cell)


@pytest.mark.product(keep=1)
@pytest.mark.parametrize(("ranks", "messages"), [(64, 14), (1024, 62)])
def test_a_collective_of_many_ranks_posts_messages_to_few_of_them(ranks: int, messages: int) -> None:
    """In one hop these were 63 and 1023. A gather and a reduction of each unit at stage 2, each in one piece."""
    with fake_ranks(ranks, rank=1):
        _, _, counter, _ = step_traffic("even", stage=2)
        assert counter.calls["send"] == counter.calls["recv_"] == 2 * UNITS * messages


def test_the_numbers_of_the_table_written_out() -> None:
    """(kind, calls, bytes) of bf16 steps of four microbatches at 2 ranks."""
    with fake_ranks(2):
        stages = [step_traffic("even", stage=stage, microbatches=4, grad="bf16")[1] for stage in (0, 1, 2, 3)]
    found = [
        [(e.kind, t.calls, t.sent_bytes) for e, t in ledger.items() if e.phase in ("reduce", "unshard")]
        for ledger in stages
    ]
    block = 2 * 2 * 32 + 3 * 32 * 32 + (32 * 32 + 32) + (64 * 32 + 64) + (32 * 64 + 32)
    root = 64 * 32 + 16 * 32 + 2 * 32 + 64 * 32
    half = (BLOCKS * block + root) * 2 // 2  # what one of two ranks sends of Ψ bf16 elements
    assert found == [
        [("all_reduce", UNITS, 2 * half)],
        [("reduce_scatter", UNITS, half), ("all_gather", UNITS, half)],
        [("reduce_scatter", 4 * UNITS, 4 * half), ("all_gather", UNITS, half)],
        # Blocks are gathered for forward and for backward, the root once for both.
        [("reduce_scatter", 4 * UNITS, 4 * half), ("all_gather", 4 * (2 * BLOCKS + 1), 8 * half - 4 * root)],
    ]


@pytest.mark.parametrize(
    ("stage", "precision", "dtype"),
    [
        (0, {"param": "fp16"}, "float32"),
        (2, {"param": "bf16"}, "float32"),
        (3, {"param": "bf16", "reduce": "bf16"}, "bfloat16"),
        (2, {"param": "bf16", "grad": "bf16"}, "bfloat16"),
    ],
    ids=str,
)
def test_what_the_backend_sums_travels_in_fp32_by_default(stage: int, precision: dict[str, str], dtype: str) -> None:
    """As torchtitan reduces: in the working dtype every addition, and every hop, would round."""
    with fake_ranks(4):
        moved = expected_traffic(sharded_net(stage=stage, reduction="native", **precision))
    assert {entry.dtype for entry in moved if entry.kind in ("all_reduce", "reduce_scatter")} == {dtype}


# What crosses the boundary of nodes, counted by who sends to whom: neighbouring ranks are a node

Counted = dict[str, tuple[int, int]]


def passes(node_ranks: int, **kwargs: Any) -> Counted:
    """(across, inside) bytes that this rank sends in a forward and in its backward, without an optimizer."""
    sharded = sharded_net("even", stage=3, param="fp32", **kwargs)
    batch = small_decoders.batches("even", steps=1, ranks=1, microbatches=1, samples=1, tokens=4)[0][0][0]
    with PairCounter() as forward:
        loss = small_decoders.loss_fn(sharded.model, batch)
    with PairCounter() as backward:
        loss.backward()  # type: ignore[no-untyped-call]
    told = {"forward": forward, "backward": backward}
    return {name: (each.across(node_ranks), each.total - each.across(node_ranks)) for name, each in told.items()}


def between_nodes(ranks: int, node_ranks: int) -> dict[str, Counted]:
    """By hand, of Ψ elements of fp32 (dims that the ranks divide), N = r nodes of s ranks, a microbatch at stage 3.

    Φ of them are in blocks, which are gathered again for backward, as the root is not, unless its second shards are:

        a rank sends            forward, across    backward, across     backward, inside
        over all N              4Ψ (r-1)/r         4(Ψ+Φ) (r-1)/r       4(Ψ+Φ) (s-1)/N
        hpZ over s              4Ψ (r-1)/r         4Ψ (r-1)/r           4Ψ (s-1)/s + 4Ψ (s-1)/N
        HSDP, r x s             0                  8Ψ/s (r-1)/r         4(Ψ+Φ) (s-1)/s
    """
    whole, blocks = (4 * count for count in elems_and_blocks())
    nodes, n, s = ranks // node_ranks, ranks, node_ranks
    gathered = whole * (nodes - 1) // nodes, whole * (s - 1) // n
    again = blocks * (nodes - 1) // nodes, blocks * (s - 1) // n
    inside = whole * (s - 1) // s
    inside_again = blocks * (s - 1) // s
    across = 2 * whole * (nodes - 1) // (s * nodes)
    return {
        "over all": {"forward": gathered, "backward": (gathered[0] + again[0], gathered[1] + again[1])},
        "hpZ": {"forward": gathered, "backward": (gathered[0], inside + gathered[1])},
        "HSDP": {"forward": (0, inside), "backward": (across, inside + inside_again)},
    }


def elems_and_blocks() -> tuple[int, int]:
    """Elements of the net, and of its blocks."""
    model = small_decoders.build("even")
    return tuple(sum(p.numel() for p in each.parameters()) for each in (model, model.layers))  # type: ignore[return-value]


@pytest.mark.parametrize(("ranks", "node_ranks"), [(4, 2), (8, 4), (16, 4)])
def test_hpz_gathers_in_backward_inside_nodes_only_and_hsdp_reduces_a_shard_across(ranks: int, node_ranks: int) -> None:
    want = between_nodes(ranks, node_ranks)
    with fake_ranks(ranks, node_ranks + 1):
        assert passes(node_ranks) == want["over all"]
        assert passes(node_ranks, reshard=node_ranks) == want["hpZ"]
        assert passes(node_ranks, replicate=ranks // node_ranks) == want["HSDP"]
    # What remains across of a reduction is 1/s of what it is over all ranks, there and back; a gather sends as much.
    assert want["HSDP"]["backward"][0] == 2 * want["over all"]["forward"][0] // node_ranks


def states_over_all(rank: int, ranks: int) -> list[tuple[int, int]]:
    """(across, inside) of a step with the states of a shard whole, and in parts."""
    told = []
    for optimizer_shard_axes in (("shard",), ("replicate", "shard")):
        sharded = sharded_net("even", stage=3, replicate=2, optimizer_shard_axes=[*optimizer_shard_axes], param="bf16")
        optim = AdamW(sharded)
        batch = small_decoders.batches("even", steps=1, ranks=1, microbatches=1)[0][0][0]
        with PairCounter() as counter:
            small_decoders.loss_fn(sharded.model, batch).backward()  # type: ignore[no-untyped-call]
            optim.step()
        norm = 8 * (1 + len(sharded.named_params()))  # to the copy, and what both said to the neighbour
        told.append((counter.across(2) - norm, counter.total - counter.across(2) - 2 * norm))
    return told


def test_a_hybrid_step_sends_8_bytes_of_each_element_across_or_6_with_states_over_all_ranks(pool: Pool) -> None:
    """bf16, of which a rank has Ψ/2 and sends half to its copy; inside, two gathers, the second of blocks alone, and a
    reduction of 2Ψ/2."""
    elems, blocks = elems_and_blocks()
    inside = (2 * elems + blocks) * 2 // 2
    for whole, parts in pool.run(states_over_all, 4):
        assert whole == (8 * elems // 4, inside)
        assert parts == (6 * elems // 4, inside)
