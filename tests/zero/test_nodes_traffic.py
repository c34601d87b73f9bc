"""What crosses the boundary of nodes, counted by who sends to whom: neighbouring ranks are a node.

Of Ψ elements of fp32 (dims that the ranks divide), N = r nodes of s ranks, one microbatch at stage 3; Φ of them are in
blocks, which are gathered again for backward, as the root is not, unless its second shards are (hpZ):

    a rank sends            forward, across    backward, across     backward, inside
    over all N              4Ψ (r-1)/r         4(Ψ+Φ) (r-1)/r       4(Ψ+Φ) (s-1)/N
    hpZ over s              4Ψ (r-1)/r         4Ψ (r-1)/r           4Ψ (s-1)/s + 4Ψ (s-1)/N
    HSDP, r x s             0                  8Ψ/s (r-1)/r         4(Ψ+Φ) (s-1)/s
"""

from __future__ import annotations

from typing import Any

import pytest
import small_decoders
from fake_ranks import fake_ranks
from pair_counter import PairCounter
from pool import Pool
from training_loops import sharded_net

from dzero import AdamW

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


def expected(ranks: int, node_ranks: int) -> dict[str, Counted]:
    """By hand, as above."""
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


def check(ranks: int, node_ranks: int) -> None:
    want = expected(ranks, node_ranks)
    assert passes(node_ranks) == want["over all"]
    assert passes(node_ranks, reshard=node_ranks) == want["hpZ"]
    assert passes(node_ranks, replicate=ranks // node_ranks) == want["HSDP"]
    # What remains across of a reduction is 1/s of what it is over all ranks, there and back; a gather sends as much.
    reduction = want["over all"]["forward"][0]
    assert want["HSDP"]["backward"][0] == 2 * reduction // node_ranks


@pytest.mark.parametrize(("ranks", "node_ranks"), [(4, 2), (8, 4), (16, 4)])
def test_hpz_gathers_in_backward_inside_nodes_only_and_hsdp_reduces_a_shard_across(ranks: int, node_ranks: int) -> None:
    with fake_ranks(ranks, node_ranks + 1):
        check(ranks, node_ranks)


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
