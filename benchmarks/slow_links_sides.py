"""What slow_links.py compares: stage 3 in bf16 of one decoder, and what crosses between nodes by the formulas."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from children import process_group
from network_nodes import enter
from workload import Batches, Workload

NODES, NODE_RANKS = 2, 2
RANKS = NODES * NODE_RANKS
HPZ, GROUP = {"reshard_after_forward": NODE_RANKS}, {"node_ranks": NODE_RANKS}
DZERO: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dzero exact": ({}, {}),
    "dzero exact, two hops": (GROUP, {}),
    "dzero hpZ": (HPZ, {}),
    "dzero qwZ int8": ({}, {"gather": "int8"}),
    "dzero qgZ int4, two hops": (GROUP, {"reduce": "int4"}),
    "dzero all three": (HPZ | GROUP, {"gather": "int8", "reduce": "int4"}),
}
"""Settings of `ZeroConfig` and `PrecisionConfig`, by side."""
DEEPSPEED: dict[str, dict[str, Any]] = {
    "deepspeed": {},
    "deepspeed, all sharded": {"stage3_param_persistence_threshold": 0},
    "deepspeed hpZ": {"zero_hpz_partition_size": NODE_RANKS},
    "deepspeed ZeRO++": {
        "zero_quantized_weights": True,
        "zero_quantized_gradients": True,
        "zero_hpz_partition_size": NODE_RANKS,
    },
}
"""Settings of `zero_optimization`, by side."""
SIDES = (*DZERO, *DEEPSPEED)


@dataclass(frozen=True, kw_only=True)
class Decoder(Workload):
    """A decoder of 8.2 M parameters, whose gathers and sums take longer than its matrix products on a slow link."""

    samples: int = 1
    tokens: int = 128

    def build(self) -> Any:
        import torch

        from dzero.models.config import LlamaShape
        from dzero.models.llama import Llama

        torch.manual_seed(self.seed)
        return Llama(LlamaShape(vocab_size=256, hidden_size=256, layers=10, heads=4, kv_heads=4, ffn_size=704))


def build(side: str, workload: Decoder) -> tuple[Callable[[Any], Any], int | None]:
    """Return the step function of a side, and the bytes that this rank sends to other nodes in a step, if known."""
    import sides

    model = workload.build()
    if side in DEEPSPEED:
        return sides.deepspeed_side(model, stage=3, samples=workload.samples, zero=DEEPSPEED[side]), None
    from dzero import AdamW, PrecisionConfig, ZeroConfig, shard

    zero, precision = DZERO[side]
    sharded = shard(model, ZeroConfig(stage=3, **zero), precision=PrecisionConfig(**precision))
    return sides.plain_step(sharded.model, AdamW(sharded, **sides.ADAM)), crossing_bytes(sharded)


def crossing_bytes(sharded: Any) -> int:
    """Return the bytes of parameters and gradients that a rank sends to other nodes in a step of one microbatch."""
    from dzero.zero.cost_model import collectives_of

    total = 0
    for unit in sharded.shapes:
        sent = collectives_of(sharded.layout, unit)
        for leg in (*sent.gather, *sent.gather_again, *sent.reduce):
            peers = range(leg.stride, leg.ranks * leg.stride, leg.stride)  # of rank 0
            total += leg.sent_bytes * sum(peer >= NODE_RANKS for peer in peers) // len(peers)
    return total


def serve(pipe: Connection, nodes: tuple[str, str], side: str, workload: Decoder, rendezvous: str, rank: int) -> None:
    """A child process: rank `rank` of `side`, in its node."""
    enter(nodes[rank // NODE_RANKS])
    try:
        with process_group(rank, RANKS, rendezvous):
            _train(pipe, side, workload, rank)
    except BaseException as error:
        pipe.send(RuntimeError(f"{type(error).__name__}: {error}"))
        raise


def _train(pipe: Connection, side: str, workload: Decoder, rank: int) -> None:
    """Answer numbers of steps with seconds and losses, until there is none."""
    import time

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    batches, done = Batches(workload), 0
    step, crossing = build(side, workload)

    def run(count: int) -> list[float]:
        nonlocal done
        losses = [step(batches.get(done + index, rank)) for index in range(count)]
        done += count
        return [float(loss) for loss in losses]

    run(2)
    pipe.send(crossing)
    while (count := pipe.recv()) is not None:
        dist.barrier()
        start = time.perf_counter()
        losses = run(count)
        pipe.send((time.perf_counter() - start, losses))
