"""Expected traffic of tensor parallelism in a step; comm/dtensor_traffic.py counts the actual one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dzero.comm.dtensor_traffic import PHASE
from dzero.comm.ledger import Entry, Traffic, dtype_key
from dzero.mesh import TENSOR

LOSS_SUMS = 3
"""All-reduces of a loss over split logits: their maximum, the sum of exponentials, and the target's logit."""


@dataclass(frozen=True, kw_only=True)
class TensorSizes:
    """Sizes that determine the traffic of tensor parallelism.

    Attributes:
        tokens: Tokens of a microbatch that all ranks of the axis have together.
        width: Features of each token, in `dtype`.
        blocks: Blocks on this rank.
        cuts_ffn: Whether more of the blocks than attention is split; experts are not.
        experts: Experts of each block if a loss balances them, else 0.
        has_first: Whether this rank has the embedding.
        has_last: Whether this rank has the head and the loss.
        out, down, head: Ranks (of the matrices) of each adapter beside a block's output projection, beside its last
            matrix, and beside the head.
        untrained: Numbers of all_gather and of reduce_scatter that backward leaves out, because nothing before them is
            trained.
        tiles_loss: Whether the loss is computed in tiles of tokens.
    """

    tokens: int
    width: int
    blocks: int
    cuts_ffn: bool
    experts: int
    has_first: bool
    has_last: bool
    dtype: torch.dtype
    out: tuple[int, ...] = ()
    down: tuple[int, ...] = ()
    head: tuple[int, ...] = ()
    untrained: tuple[int, int] = (0, 0)
    tiles_loss: bool = False


def expected_tensor(sizes: TensorSizes, *, ranks: int, microbatches: int, recomputed: bool) -> dict[Entry, Traffic]:
    """Return the calls and bytes sent per rank in a step over `ranks` of tp, by ledger entry (phase tensor).

    The traffic is that of Megatron-LM's sequence parallelism (Korthikanti et al., 2022, section 4.2.2). In a
    microbatch:

            per                forward                         backward              recomputed
            block's attention  all_gather, reduce_scatter      the same              the same
            block's ffn        all_gather, reduce_scatter      the same              only all_gather
            embedding          reduce_scatter                  all_gather
            head               all_gather                      reduce_scatter
            loss               3 all_reduce, fp32, tokens
            loss in tiles      all_gather, fp32, 2 * tokens
            block's balance    all_reduce, fp32, 2 * experts                         the same
            adapter of a row   reduce_scatter, tokens * r      all_gather            the same; ffn: its output too
            adapter of a head  all_gather, tokens * r          reduce_scatter

    All but the last five rows send (ranks - 1) / ranks of tokens * width. Adapters beside other matrices send nothing
    (tensor/adapters.py). Gradients of parameters that all ranks have are in `expected_copies` (zero/cost_model.py).
    """
    cut = sizes.blocks * (1 + sizes.cuts_ffn)
    ends = sizes.has_first + sizes.has_last
    rows, heads = (*sizes.out, *sizes.down), sizes.head
    gathers, reduces = 2 * cut + ends + recomputed * cut, 2 * cut + ends + recomputed * (sizes.blocks + len(sizes.down))
    part = sizes.tokens * sizes.dtype.itemsize * (ranks - 1) // ranks
    totals = {}
    for kind, calls, of_adapters in (
        ("all_gather", gathers - sizes.untrained[0], (*rows, *heads)),
        ("reduce_scatter", reduces - sizes.untrained[1], (*rows, *heads, *(rows if recomputed else ()))),
    ):
        sent = microbatches * part * (calls * sizes.width + sum(of_adapters))
        times = microbatches * (calls + len(of_adapters))
        totals[Entry(PHASE, kind, TENSOR, dtype_key(sizes.dtype))] = Traffic(times, sent)
    if sizes.has_last and sizes.tiles_loss:
        of_tiles = Entry(PHASE, "all_gather", TENSOR, dtype_key(torch.float32))
        sent = (ranks - 1) * 2 * sizes.tokens * torch.float32.itemsize
        totals[of_tiles] = totals.get(of_tiles, Traffic()) + Traffic(microbatches, microbatches * sent)
    of_the_loss = LOSS_SUMS * sizes.has_last * (not sizes.tiles_loss)
    balances = sizes.blocks * (1 + recomputed) if sizes.experts else 0
    sums = [(microbatches * of_the_loss, sizes.tokens), (microbatches * balances, 2 * sizes.experts)]
    if calls := sum(times for times, _ in sums):
        sent = sum(times * (2 * (ranks - 1) * elems * torch.float32.itemsize // ranks) for times, elems in sums)
        totals[Entry(PHASE, "all_reduce", TENSOR, dtype_key(torch.float32))] = Traffic(calls, sent)
    return totals


@dataclass(frozen=True, kw_only=True)
class Float8Sizes:
    """Sizes of a matrix that multiplies in 8 bits.

    Attributes:
        dim: Dim of the weight [outputs, inputs] that ranks of tp share: 0 column-wise, 1 row-wise.
        inputs, outputs: Features of the whole layer.
    """

    dim: int
    inputs: int
    outputs: int


def expected_scales(
    layers: Sequence[Float8Sizes],
    *,
    tensorwise: bool,
    tokens: int,
    ranks: int,
    microbatches: int,
    recomputed: bool,
) -> dict[Entry, Traffic]:
    """Return the calls and bytes sent per rank in a step for the scales of operands that ranks of tp share.

    The largest magnitude of what a scale covers is reduced over the ranks in fp64, where they have parts of it. An
    operand is cast anew for every product that it is in. In a microbatch, by layer and with the elements of each
    all_reduce:

                       forward, also recomputed     backward
        tensorwise
            columns    weight: 1                    output gradient: 1, twice; weight: 1
            rows       input: 1, weight: 1          weight: 1, input: 1
        rowwise
            columns                                 output gradient: tokens; weight: inputs
            rows       input: tokens; weight: outputs
    """
    forward: list[int] = []
    backward: list[int] = []
    for layer in layers:
        if tensorwise:
            forward += [1] * (1 + layer.dim)
            backward += [1] * (3 - layer.dim)
        elif layer.dim == 0:
            backward += [tokens, layer.inputs]
        else:
            forward += [tokens, layer.outputs]
    reduced = forward * (1 + recomputed) + backward
    sent = sum(2 * (ranks - 1) * elems * torch.float64.itemsize // ranks for elems in reduced)
    entry = Entry(PHASE, "all_reduce", TENSOR, dtype_key(torch.float64))
    return {entry: Traffic(microbatches * len(reduced), microbatches * sent)} if reduced else {}
