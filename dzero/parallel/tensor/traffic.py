"""What the ranks of tp exchange in a step, by formula; comm/dtensor_traffic.py counts it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dzero.comm.dtensor_traffic import PHASE
from dzero.comm.ledger import Entry, Traffic, dtype_key
from dzero.mesh import TENSOR

LOSS_SUMS = 3
"""Of the loss of logits that are cut: their largest, the sum of exponentials, and what the target's rank has."""


@dataclass(frozen=True, kw_only=True)
class TensorSizes:
    """tokens: of a microbatch, all that the axis's ranks have together, each `width` features in `dtype`.

    blocks: of this rank; cuts_ffn: whether anything but their attention is cut, which experts are not; experts: in
    each, where a loss balances them, else 0. has_first, has_last: whether it has the embedding, and the head with the
    loss.
    """

    tokens: int
    width: int
    blocks: int
    cuts_ffn: bool
    experts: int
    has_first: bool
    has_last: bool
    dtype: torch.dtype


def expected_tensor(sizes: TensorSizes, *, ranks: int, microbatches: int, recomputed: bool) -> dict[Entry, Traffic]:
    """Calls and bytes sent per rank over `ranks` of tp, by the ledger's entries (phase tensor), as Megatron-LM's
    sequence parallelism has them (Korthikanti et al., 2022, section 4.2.2). In a microbatch:

        of each            forward                         backward              recomputed
        block's attention  all_gather, reduce_scatter      the same              the same
        block's ffn        all_gather, reduce_scatter      the same              all_gather: then all is there
        embedding          reduce_scatter                  all_gather
        head               all_gather                      reduce_scatter
        loss               3 all_reduce, fp32, tokens
        block's balance    all_reduce, fp32, 2 * experts                         the same

    All but the last two send (ranks - 1) / ranks of tokens * width. Gradients of what all ranks have are
    zero/cost_model.py's `expected_copies`.
    """
    cut = sizes.blocks * (1 + sizes.cuts_ffn)
    ends = sizes.has_first + sizes.has_last
    gathers, reduces = 2 * cut + ends + recomputed * cut, 2 * cut + ends + recomputed * sizes.blocks
    part = sizes.tokens * sizes.width * sizes.dtype.itemsize * (ranks - 1) // ranks
    totals = {
        Entry(PHASE, kind, TENSOR, dtype_key(sizes.dtype)): Traffic(microbatches * calls, microbatches * calls * part)
        for kind, calls in (("all_gather", gathers), ("reduce_scatter", reduces))
    }
    of_the_loss, balances = LOSS_SUMS * sizes.has_last, sizes.blocks * (1 + recomputed) if sizes.experts else 0
    sums = [(microbatches * of_the_loss, sizes.tokens), (microbatches * balances, 2 * sizes.experts)]
    if calls := sum(times for times, _ in sums):
        sent = sum(times * (2 * (ranks - 1) * elems * torch.float32.itemsize // ranks) for times, elems in sums)
        totals[Entry(PHASE, "all_reduce", TENSOR, dtype_key(torch.float32))] = Traffic(calls, sent)
    return totals
