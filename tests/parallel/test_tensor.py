"""Matrices that ranks share: plans, values, and what a rank keeps of activations; training is in test_cut_training."""

from __future__ import annotations

import gc
import re
import weakref
from typing import Any

import cut_runs
import decoders
import pytest
import torch
from cut_runs import SEQUENCES, TOKENS, Run
from on_ranks import on_ranks
from parity_cells import whole
from pool import Pool, WorkerError
from torch import Tensor, nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from dzero import AdamW, ModelInit, ParallelConfig, ParallelModel, PrecisionConfig, make_mesh, parallelize, shard

PLAN = {"up": ColwiseParallel(), "down": RowwiseParallel()}


class Mlp(nn.Module):
    """Of its own kind: x [batch, 8] -> the same, a norm between a widening and a narrowing."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(8, 16), nn.RMSNorm(8), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        wide = self.up(x).unflatten(-1, (-1, 8))
        out: Tensor = self.down(self.norm(wide).flatten(-2))
        return out


def cut(model: nn.Module, plan: Any = None, *, replicated: tuple[str, ...] = ()) -> ParallelModel:
    return parallelize(model, make_mesh("cpu", tp=2), ParallelConfig(tensor_plan=plan, replicated=replicated))


def without_its_mesh() -> None:
    shard(cut(Mlp(), PLAN, replicated=("*",)).model, mesh=make_mesh("cpu", shard=2))


def moments_of_8_bits() -> None:
    meta = ModelInit(device=torch.device("meta"))
    shard(cut(decoders.of_transformers("gpt2")), precision=PrecisionConfig(moments="int8"), init=meta)


def of_one_head() -> None:
    cut(decoders.of_transformers("gpt2", n_head=1))


REFUSED = {
    "tp=2 does not divide the model's kv_heads=1; allowed: [1]": lambda: cut(decoders.on_meta(kv_heads=1)),
    "tp=2 does not divide the model's heads=1, kv_heads=1; allowed: [1]": of_one_head,
    "moments=int8 with parameter model.transformer.h.0.attn.c_attn.weight, which is cut in": moments_of_8_bits,
    "tp=2: the plan says nothing of ['norm.weight']; where a rank sees a part": lambda: cut(Mlp(), PLAN),
    "tp=2: the plan names ['upp', 'layers.*.down'], which Mlp has not as modules": lambda: cut(
        Mlp(), {"upp": PLAN["up"], "layers.*.down": PLAN["down"]}, replicated=("*",)
    ),
    "tp=2: no plan is known for Linear, only for ['GPT2LMHeadModel', 'Llama', ": lambda: cut(nn.Linear(4, 4)),
    "says nothing of ['layers.0.ffn.experts.gate', ": lambda: cut(
        decoders.on_meta(**{**decoders.EXPERTS, "shared_experts": 0})
    ),
    "parameter up.weight is cut along the axis tp, which the mesh does not have: pass the whole mesh": without_its_mesh,
}


@on_ranks(2)
def test_what_cannot_be_cut_is_refused_by_name_on_all_ranks(rank: int, ranks: int) -> None:
    for message, attempt in REFUSED.items():
        with pytest.raises(ValueError, match=re.escape(message)):
            attempt()


@on_ranks(2)
def test_a_plan_that_is_wrong_of_one_is_found_at_the_first_step(rank: int, ranks: int) -> None:
    """The norm sees a part of what the widening made, and the plan's author says that it does not."""
    torch.manual_seed(0)
    sharded = shard(cut(Mlp(), PLAN, replicated=("norm.*",)), precision="fp32")
    optim = AdamW(sharded)
    sharded.model(torch.randn(4, 8)).square().sum().backward()
    found = "ranks of tp found different gradients of norm.weight, of which each has a copy"
    with pytest.raises(RuntimeError, match=found):
        optim.step()


def of_its_own(rank: int, ranks: int) -> tuple[dict[str, Tensor], int, list[str]]:
    """A model that every rank draws by itself, once it is sharded: its parameters and buffers, how many whole ones of
    those that were cut are still alive, and the names of those that train."""
    torch.manual_seed(rank)
    model = Mlp()
    model.norm.requires_grad_(False)
    model.shift = nn.Parameter(torch.rand(2))
    model.register_buffer("scale", torch.rand(3))
    alive = [weakref.ref(model.up.weight), weakref.ref(model.down.weight)]
    sharded = shard(cut(model, PLAN, replicated=("norm.*", "shift")), precision="fp32")
    gc.collect()
    params = sharded.named_params()
    values = {name: whole(param) for name, param in params.items()} | dict(sharded.model.named_buffers())
    return values, sum(each() is not None for each in alive), [n for n, p in params.items() if p.requires_grad]


def test_ranks_that_draw_values_of_their_own_begin_with_those_of_the_first(pool: Pool) -> None:
    """What is frozen stays so, and whole parameters are gone once they are cut."""
    torch.manual_seed(0)
    first = Mlp()
    expected = {**dict(first.named_parameters()), "shift": torch.rand(2), "scale": torch.rand(3)}
    for values, alive, trained in pool.run(of_its_own, 2):
        assert alive == 0
        assert trained == [name for name in values if name not in ("norm.weight", "scale")]
        assert values.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(values[name], value), name


def losses_and_slots(rank: int, ranks: int, run: Run) -> tuple[list[float | None], list[int]]:
    """Of two steps, and the sizes in bytes of what this rank's activations took off the device."""
    made = cut_runs.build(run)
    steps = cut_runs.batches(2, 1, 1)
    losses = [cut_runs.one_step(run, made, of_step[0]) for of_step in steps]
    made.optim.synchronize()
    moving = made.optim.offload.activations
    return losses, [] if moving is None else sorted(moving.pool.seat_bytes.values())


@pytest.mark.parametrize("tier", ["host", pytest.param("disk", marks=pytest.mark.slow)])
def test_each_rank_keeps_its_part_of_a_blocks_input_on_any_tier(pool: Pool, tier: str) -> None:
    """Partitioned activations (ZeRO, section 6.1): of 3 blocks of width 128, in bf16."""
    on_device = Run(stage=2, tp=2, recompute="full", wide=True, precision={"param": "bf16"})
    off_device = Run(**{**vars(on_device), "activations": tier})
    input_bytes = SEQUENCES * TOKENS * 128 * 2
    results = (pool.run(losses_and_slots, 2, run) for run in (on_device, off_device))
    for (expected, none), (losses, slots) in zip(*results, strict=True):
        assert losses == expected
        assert none == []
        assert {*slots} == {input_bytes // 2}
        assert len(slots) >= 2  # the last block's input may stay


class Words(nn.Module):
    """An embedding and a block behind it, of its own kind: tokens [batch, n] -> [batch, n, 8]."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.block = nn.Embedding(16, 8), Mlp()

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.block(self.words(tokens))
        return out


WORDS = {
    "words": RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate()),
    "block.up": ColwiseParallel(),
    "block.down": RowwiseParallel(),
}


def compiled(rank: int, ranks: int, backend: str | None) -> dict[str, Tensor]:
    """Gradients where the block that reads what ranks share is compiled."""
    torch.manual_seed(0)
    made = shard(cut(Words(), WORDS, replicated=("block.norm.weight",)), stage=1, precision="fp32")
    if backend is not None:
        made.model.get_submodule("block").compile(backend=backend)
    optim = AdamW(made)
    made.model(torch.arange(16).view(2, 8)).square().sum().backward()
    grads = {name: param.grad for name, param in made.named_params().items()}
    del optim
    return {name: whole(grad) for name, grad in grads.items() if grad is not None}


def test_a_compiled_block_passes_on_the_gradient_of_what_ranks_share(pool: Pool) -> None:
    """Of an input whose collective is under way, torch 2.13 gives zeros or an error. fp32, another order of sums."""
    if torch.__version__.startswith(
        "2.11."
    ):  # its compiler ends with an internal error, as docs/reference/limits.md says
        with pytest.raises(WorkerError, match="InternalTorchDynamoError"):
            pool.run(compiled, 2, "aot_eager")
        return
    for want, found in zip(*(pool.run(compiled, 2, backend) for backend in (None, "aot_eager")), strict=True):
        assert float(want["words.weight"].abs().max()) > 0
        for name, grad in want.items():
            torch.testing.assert_close(found[name], grad, rtol=1e-5, atol=1e-6)
