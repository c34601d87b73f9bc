"""Attention over sequences that ranks share, in every way that it is cut: its numbers, its traffic and its memory."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from allocated_peak import allocated_peak_bytes
from dispatch_counter import DispatchCounter
from on_ranks import on_ranks
from pool import Pool
from small_runs import settled
from torch import Tensor, nn

from dzero import ParallelConfig, RunError, Sharded, ZeroConfig, make_mesh, parallelize, shard
from dzero.testing import Entry, Traffic

FP32, FP64 = 1e-5, 1e-12
"""Relative to the largest value: sums are cut elsewhere."""
KINDS = ("all_gather", "ulysses", "ring")
CHUNKS = {2: [0, 1, 1, 0], 4: [0, 1, 2, 3, 3, 2, 1, 0]}
"""Which rank has chunk c of a sequence, by the number of ranks."""


@dataclass(frozen=True, kw_only=True)
class Call:
    """Attention over 2 whole sequences of `tokens`, of heads of 6 dims. exact: pairwise moves."""

    kind: str
    dtype: torch.dtype = torch.float64
    heads: int = 8
    kv_heads: int = 4
    tokens: int = 48
    exact: bool = True


CALLS = [
    *(Call(kind=kind, dtype=torch.float32, kv_heads=kv) for kind in KINDS for kv in (8, 4)),
    *(Call(kind=kind, exact=exact) for kind in KINDS[:2] for exact in (True, False)),  # torch's ring merges in fp32
    Call(kind="all_gather", kv_heads=1, heads=3),
    Call(kind="all_gather", kv_heads=1, heads=2, tokens=2080),  # masks of more than a tile of 256 queries
]


class Attending(nn.Module):
    """What a model needs so that its sequences can be cut."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 4))

    def features(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        return tokens if positions is None else positions.expand_as(tokens)

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)


def drawn(call: Call) -> list[Tensor]:
    """query, key, value and the gradient of the result, all of whole sequences."""
    generator = torch.Generator().manual_seed(3)
    heads = (call.heads, call.kv_heads, call.kv_heads, call.heads)
    return [torch.randn(2, each, call.tokens, 6, generator=generator, dtype=torch.float64) for each in heads]


def rows_of(rank: int, ranks: int, tokens: int) -> Tensor:
    """Positions that `rank` has."""
    size = tokens // len(CHUNKS[ranks])
    chunks = [number for number, owner in enumerate(CHUNKS[ranks]) if owner == rank]
    return torch.cat([torch.arange(size) + chunk * size for chunk in chunks])


def cut(kind: str, ranks: int, *, exact: bool = True) -> Sharded:
    mesh = make_mesh("cpu", replicate=ranks)
    model = parallelize(Attending(), mesh, ParallelConfig(cp=ranks, cp_attention=kind))
    return shard(model, ZeroConfig(stage=0, reduction="exact" if exact else "native"), precision="fp32")


def given(call: Call, rank: int, ranks: int) -> tuple[list[Tensor], Tensor]:
    rows = rows_of(rank, ranks, call.tokens)
    query, key, value, grad = (each[:, :, rows].to(call.dtype) for each in drawn(call))
    return [each.requires_grad_() for each in (query, key, value)], grad


Told = tuple[list[Tensor], dict[Entry, Traffic], dict[str, int]]


def attended(rank: int, ranks: int, calls: list[Call]) -> list[Told]:
    """Of each call, and this rank's tokens: the result and the gradients of query, key and value; what was booked, and
    what was sent below it."""
    found = []
    for call in calls:
        sharded = cut(call.kind, ranks, exact=call.exact)
        rows = rows_of(rank, ranks, call.tokens)
        assert torch.equal(sharded.context.positions(len(rows)), rows)
        assert torch.equal(sharded.context.part(torch.arange(call.tokens).expand(2, -1)), rows.expand(2, -1))
        tensors, grad = given(call, rank, ranks)
        sharded.ledger.take()
        counter: Any = DispatchCounter(ranks) if call.exact else nullcontext()
        with counter:
            mixed = sharded.model.attend(*tensors)
            mixed.backward(grad)
        sent = {name: count for name, count in counter.sent_bytes.items() if count} if call.exact else {}
        found.append(([mixed.detach(), *(each.grad for each in tensors)], sharded.ledger.take(), sent))
    return found


def plain_attention(call: Call) -> list[Tensor]:
    """The same of whole sequences, written out, in fp64."""
    query, key, value, grad = drawn(call)
    tensors = [each.requires_grad_() for each in (query, key, value)]
    keys, values = (each.repeat_interleave(call.heads // call.kv_heads, dim=1) for each in (key, value))
    scores = query @ keys.transpose(2, 3) / query.shape[-1] ** 0.5
    later = torch.arange(call.tokens)[None, :] > torch.arange(call.tokens)[:, None]
    mixed = scores.masked_fill(later, -torch.inf).softmax(-1) @ values
    mixed.backward(grad)
    return [mixed.detach(), *(each.grad for each in tensors)]


@pytest.mark.parametrize("ranks", [2, 4])
def test_attention_over_parts_is_that_over_whole_sequences_and_books_what_it_moves(pool: Pool, ranks: int) -> None:
    """Forward and backward; what that is by formulas is asked in test_cut_training.py."""
    calls = [call for call in CALLS if ranks == 2 or call.tokens == 48]
    told = pool.run(attended, ranks, calls)
    for index, call in enumerate(calls):
        of_ranks = [each[index] for each in told]
        check_numbers(call, ranks, of_ranks)
        for _, booked, sent in of_ranks:
            assert {(entry.phase, entry.axis) for entry in booked} == {("context", "cp")}
            if call.exact:
                how = "all_to_all_single" if call.kind == "ring" else "send"
                assert sent == {how: sum(traffic.sent_bytes for traffic in booked.values())}


def check_numbers(call: Call, ranks: int, told: list[Told]) -> None:
    allowed = FP64 if call.dtype == torch.float64 else FP32
    for index, want in enumerate(plain_attention(call)):
        got = torch.full_like(want, torch.nan)
        for rank, (results, _, _) in enumerate(told):
            got[:, :, rows_of(rank, ranks, call.tokens)] = results[index].double()
        assert (got - want).abs().max() < allowed * want.abs().max(), ("result", "query", "key", "value")[index]


def peaks(rank: int, ranks: int, tokens: int) -> list[int]:
    """Bytes above its inputs of each kind, forward and backward, the first call that makes the mask included."""
    found = []
    for kind in KINDS:
        attend = cut(kind, ranks).model.attend
        tensors, grad = given(Call(kind=kind, dtype=torch.float32, heads=2, kv_heads=2, tokens=tokens), rank, ranks)
        found.append(allocated_peak_bytes(lambda: attend(*tensors).backward(grad), torch.device("cpu")))  # noqa: B023
    return found


def test_nothing_of_time_x_time_is_made(pool: Pool) -> None:
    """Less than a quarter of one head's scores; a mask of both chunks alone would be a quarter."""
    for of_kinds in pool.run(peaks, 2, 4096):
        assert max(of_kinds) < 4096 * 4096 * 4 // 4


ODD = "train.sequence_tokens=36"
HEADS = "model.hidden_size=48 model.heads=6 model.kv_heads=3"
REFUSED: list[tuple[str, str]] = [
    (f"mesh.cp=4 {ODD}", "mesh.cp=4 does not divide train.sequence_tokens=36.*take a multiple of 8, as .*tokens=32"),
    (
        f"mesh.cp=2 mesh.tp=4 {ODD} model.heads=4 model.kv_heads=4",
        "mesh.cp=2 x mesh.tp=4 does not .* of 8",
    ),
    ("mesh.cp_attention=ulysses", "mesh.cp_attention=ulysses has no effect with mesh.cp=1"),
    ("mesh.cp_attention=flash mesh.cp=2", r"'flash': choose one of \['all_gather', 'ulysses', 'ring'\]"),
    (f"mesh.cp=4 mesh.cp_attention=ulysses {HEADS}", r"does not divide heads=6 and kv_heads=3.*\[1, 3\]"),
]


@pytest.mark.parametrize(("line", "message"), REFUSED)
def test_settings_that_do_not_fit_are_named_with_what_does(tmp_path: Path, line: str, message: str) -> None:
    with pytest.raises(RunError, match=message):
        settled(tmp_path, *line.split())


@on_ranks(2)
def test_what_a_library_asks_in_vain_is_named(rank: int, ranks: int) -> None:
    """Of a library's user: a model without the methods, another attention, ranks and sequences that do not divide."""
    mesh = make_mesh("cpu")
    with pytest.raises(ValueError, match=r"mesh\.cp=2: Linear has no module with attend\(\)"):
        shard(parallelize(nn.Linear(2, 2), mesh, ParallelConfig(cp=2)), stage=3)
    with pytest.raises(ValueError, match=r"cp_attention='flash': choose one of \['all_gather', 'ulysses', 'ring'\]"):
        cut("flash", ranks)
    with pytest.raises(ValueError, match=r"cp=4 does not divide the 2 data-parallel ranks; allowed: \[1, 2\]"):
        shard(parallelize(Attending(), mesh, ParallelConfig(cp=4)), stage=3)
    with pytest.raises(ValueError, match="sequences of 10 tokens over cp=2 ranks: "):
        cut("ring", ranks).context.part(torch.zeros(1, 10))
