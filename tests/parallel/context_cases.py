"""Runs over cut sequences for the pool's workers, and the same in the oracle."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import reference
import torch
import torch.nn.functional as F
from allocated_peak import allocated_peak_bytes
from dispatch_counter import DispatchCounter
from parity_cells import whole
from torch import Tensor, nn

from dzero import (
    AdamW,
    OffloadConfig,
    ParallelConfig,
    PrecisionConfig,
    Sharded,
    ZeroConfig,
    make_mesh,
    parallelize,
    shard,
)
from dzero.comm.context_exchange import ContextExchange
from dzero.comm.ledger import Entry, Ledger, Traffic
from dzero.comm.reduction import ExactReduction, NativeReduction
from dzero.mesh import data_rank_of
from dzero.models.config import LlamaShape
from dzero.models.llama import Llama
from dzero.models.meta_init import MetaInitializer
from dzero.parallel.blocks import apply_blocks
from dzero.parallel.config import BlockConfig
from dzero.parallel.context import attention
from dzero.parallel.context.attention import ATTENTIONS
from dzero.parallel.context.parallelize import ContextParallel
from dzero.parallel.tensor.parallelize import TensorParallel
from dzero.zero.dtensors import local_of

CHUNKS = {1: [0, 0], 2: [0, 1, 1, 0], 4: [0, 1, 2, 3, 3, 2, 1, 0]}
"""Which rank has chunk c of a sequence, by the number of ranks."""


@dataclass(frozen=True, kw_only=True)
class Call:
    """Attention over whole sequences of `tokens`. tile: queries that share a mask. exact: pairwise moves."""

    kind: str
    ranks: int
    dtype: torch.dtype = torch.float32
    heads: int = 8
    kv_heads: int = 8
    tokens: int = 48
    tile: int = 256
    exact: bool = True


def drawn(call: Call) -> list[Tensor]:
    """query, key, value and the gradient of the result, all of whole sequences: [2, heads, tokens, 6]."""
    generator = torch.Generator().manual_seed(3)
    heads = (call.heads, call.kv_heads, call.kv_heads, call.heads)
    return [torch.randn(2, each, call.tokens, 6, generator=generator, dtype=torch.float64) for each in heads]


def rows_of(rank: int, ranks: int, tokens: int) -> Tensor:
    """Positions that `rank` has."""
    size = tokens // len(CHUNKS[ranks])
    chunks = [number for number, owner in enumerate(CHUNKS[ranks]) if owner == rank]
    return torch.cat([torch.arange(size) + chunk * size for chunk in chunks])


@contextmanager
def tiles_of(tokens: int) -> Iterator[None]:
    before, attention.TILE_TOKENS = attention.TILE_TOKENS, tokens
    try:
        yield
    finally:
        attention.TILE_TOKENS = before


def attended(rank: int, ranks: int, call: Call) -> tuple[list[Tensor], dict[Entry, Traffic], dict[str, int]]:
    """Of this rank's tokens: the result and the gradients of query, key and value; what was booked, and what was sent
    below it."""
    rows = rows_of(rank, ranks, call.tokens)
    query, key, value, grad = (each[:, :, rows].to(call.dtype) for each in drawn(call))
    given = [each.requires_grad_() for each in (query, key, value)]
    group, ledger = torch.distributed.group.WORLD, Ledger()
    assert group is not None
    exchange = ContextExchange((ExactReduction if call.exact else NativeReduction)(group), rank, "cp", ledger)
    attend: Any = ATTENTIONS[call.kind](exchange)
    counter: Any = DispatchCounter(ranks) if call.exact else nullcontext()
    with tiles_of(call.tile), counter:
        mixed = attend(*given)
        mixed.backward(grad)
    sent = {name: count for name, count in counter.sent_bytes.items() if count} if call.exact else {}
    return [mixed.detach(), *(each.grad for each in given)], ledger.take(), sent


def peak_of_attention(rank: int, ranks: int, call: Call) -> int:
    """Bytes above its inputs, forward and backward, the first call that makes the mask included."""
    rows = rows_of(rank, ranks, call.tokens)
    query, key, value, grad = (each[:, :, rows].to(call.dtype) for each in drawn(call))
    given = [each.requires_grad_() for each in (query, key, value)]
    group = torch.distributed.group.WORLD
    assert group is not None
    attend: Any = ATTENTIONS[call.kind](ContextExchange(ExactReduction(group), rank, "cp", Ledger()))
    with tiles_of(call.tile):
        return allocated_peak_bytes(lambda: attend(*given).backward(grad), torch.device("cpu"))


def plain_attention(call: Call) -> list[Tensor]:
    """The same of whole sequences, written out, in fp64."""
    query, key, value, grad = drawn(call)
    given = [each.requires_grad_() for each in (query, key, value)]
    keys, values = (each.repeat_interleave(call.heads // call.kv_heads, dim=1) for each in (key, value))
    scores = query @ keys.transpose(2, 3) / query.shape[-1] ** 0.5
    later = torch.arange(call.tokens)[None, :] > torch.arange(call.tokens)[:, None]
    mixed = scores.masked_fill(later, -torch.inf).softmax(-1) @ values
    mixed.backward(grad)
    return [mixed.detach(), *(each.grad for each in given)]


STEPS, LR, CLIP, TOKENS = 20, 1e-3, 0.5, 16
SHAPE = LlamaShape(vocab_size=64, hidden_size=32, layers=2, heads=8, kv_heads=4, ffn_size=48)
SEQUENCES = 4
"""Of a microbatch."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """`dp` x `cp` x `tp` ranks; `replicate` copies, of stages 1 to 3. offload: of gradients, masters and moments."""

    stage: int
    dp: int = 1
    cp: int = 2
    tp: int = 1
    attention: str = "all_gather"
    microbatches: int = 1
    replicate: int = 1
    offload: str = "device"
    recompute: str = "none"
    loss_tiles: int = 1
    tile: int = 256
    steps: int = STEPS

    @property
    def ranks(self) -> int:
        return self.dp * self.cp * self.tp


Made = tuple[Sharded, AdamW, TensorParallel | None, ContextParallel]


def model_on_meta() -> Llama:
    with torch.device("meta"):
        return Llama(SHAPE)


def build(run: Run) -> Made:
    model = model_on_meta()
    fill: Any = MetaInitializer(model, seed=0, device="cpu")
    mesh = make_mesh("cpu", replicate=run.dp * run.cp if run.stage == 0 else run.replicate, tp=run.tp)
    cut = parallelize(model, mesh, ParallelConfig(cp=run.cp, cp_attention=run.attention))
    apply_blocks(model, BlockConfig(activation_checkpoint=run.recompute, loss_tiles=run.loss_tiles), "cpu")
    sharded = shard(
        cut,
        ZeroConfig(stage=run.stage),
        precision=PrecisionConfig(param="fp32"),
        offload=OffloadConfig(grad=run.offload, master=run.offload, moments=run.offload),
        microbatches=run.microbatches,
        init=fill,
    )
    context = sharded.context or cut.cut_sequences(sharded.ledger, exact=sharded.layout.exact)
    return sharded, AdamW(sharded, lr=LR, max_norm=CLIP), cut.tensor, context


def batches(readers: int, microbatches: int) -> list[list[list[Tensor]]]:
    """`[step][reader][microbatch]`: int64 [sequences, tokens + 1], whole."""
    generator = torch.Generator().manual_seed(7)
    size = (STEPS, readers, microbatches, SEQUENCES, TOKENS + 1)
    return [[[*of_rank] for of_rank in of_step] for of_step in torch.randint(64, size, generator=generator)]


def loss_of(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens).float().flatten(0, 1), targets.flatten())


def trained(rank: int, ranks: int, run: Run) -> dict[str, Any]:
    """Losses of this rank, norms, what the last step moved along cp, and rank 0's whole parameters at the end."""
    sharded, optim, tensor, context = build(run)
    reader, losses, norms, moved = data_rank_of(sharded.mesh) // run.cp, [], [], {}
    for of_step in batches(run.dp, run.microbatches)[: run.steps]:
        total = 0.0
        for index, batch in enumerate(of_step[reader]):
            last = index == run.microbatches - 1
            with sharded.microbatch(is_last=last), tensor.loss() if tensor else tiles_of(run.tile):
                made = context.part(batch[:, :-1]), context.part(batch[:, 1:])
                loss = sharded.model(*made) if run.loss_tiles > 1 else loss_of(sharded.model, *made)
                (loss / run.microbatches).backward()
            total += float(local_of(loss.detach())) / run.microbatches
        optim.step()
        assert optim.last_decision is not None
        losses.append(total)
        norms.append(optim.last_decision.norm)
        moved = {entry: traffic for entry, traffic in sharded.ledger.take().items() if entry.phase == "context"}
    optim.synchronize()
    params = {name: whole(param).clone() for name, param in sharded.model.state_dict().items()}  # tiles joined
    return {"losses": losses, "norms": norms, "moved": moved, "params": params if rank == 0 else None}


@cache
def oracle(readers: int, microbatches: int, steps: int = STEPS) -> reference.History:
    """In one process, with plain tensors and whole sequences: a rank for each reader."""

    def fresh() -> nn.Module:
        model = model_on_meta()
        MetaInitializer(model, seed=0, device="cpu")(model)
        return model

    def of_batch(model: nn.Module, batch: Tensor) -> Tensor:
        return loss_of(model, batch[:, :-1], batch[:, 1:])

    return reference.train(fresh, batches(readers, microbatches)[:steps], of_batch, lrs=[LR] * steps, clip=CLIP)
