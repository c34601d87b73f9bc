"""Sequences of models of transformers, cut: the numbers of whole sequences, or a refusal in one line."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from on_ranks import on_ranks
from pool import Pool
from torch import Tensor, nn

import dzero

transformers = pytest.importorskip("transformers")

LOSS, GRADS = 1e-6, 3e-6
"""Relative, of gradients to the length of each: fp32 sums are cut elsewhere, and rounded a few times 2^-24."""
TIME, SEQUENCES, VOCAB = 32, 2, 96
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WINDOW = {"sliding_window": 5}
BOTH_LAYERS = {**WINDOW, "layer_types": ["full_attention", "sliding_attention"]}
NO_DROPOUT = dict.fromkeys(("embd_pdrop", "resid_pdrop", "attn_pdrop"), 0.0)
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 6}
KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": WINDOW,
    "qwen2": {**WINDOW, "use_sliding_window": True, "max_window_layers": 1},
    "qwen3": {},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "gemma2": {**BOTH_LAYERS, "attn_logit_softcapping": 0.5},
    "gemma3_text": BOTH_LAYERS,
    "gpt_oss": {**BOTH_LAYERS, "num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 8, "n_positions": TIME, **NO_DROPOUT},
    "deepseek_v3": {**LATENT, "head_dim": 4, "num_key_value_heads": 8, "first_k_dense_replace": 2},
}
MIXES_DOCUMENTS = ("gpt_oss",)
"""Kinds whose own masks do not keep the documents of a sequence apart."""


@dataclass(frozen=True, kw_only=True)
class Case:
    kind: str
    attention: str = "all_gather"
    packed: bool = False


FIRST = [
    Case(kind="mistral", packed=True),
    Case(kind="gemma2", attention="ulysses"),
    Case(kind="gpt_oss"),
    Case(kind="gpt2", packed=True),
    Case(kind="deepseek_v3", attention="ulysses"),
    Case(kind="llama", attention="ring"),
]


def model_of(kind: str, **changes: Any) -> Any:
    """A small model in fp32 with seeded weights, large enough that attention is far from uniform."""
    sizes = {} if kind == "gpt2" else SIZES
    config = transformers.AutoConfig.for_model(kind, **{**sizes, "vocab_size": VOCAB, **KINDS.get(kind, {}), **changes})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        model = transformers.AutoModelForCausalLM.from_config(config)
        for param in model.parameters():
            param.data.add_(torch.randn_like(param), alpha=0.1)
    return model


def drawn() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return tuple(torch.randint(VOCAB, (2, SEQUENCES, TIME), generator=generator))  # type: ignore[return-value]


def positions_of(packed: bool) -> Tensor | None:
    """Documents of 7, 14 and 11 tokens, and of 20 and 12."""
    if not packed:
        return None
    lengths = ((7, 14, 11), (20, 12))
    return torch.stack([torch.cat([torch.arange(each) for each in of_row]) for of_row in lengths])


def loss_of(model: nn.Module, tokens: Tensor, targets: Tensor, positions: Tensor | None) -> Tensor:
    logits = model(input_ids=tokens, position_ids=positions, use_cache=False).logits
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="sum")


@cache
def whole(kind: str, packed: bool) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of whole sequences, by the model's own attention."""
    model = model_of(kind)
    loss = loss_of(model, *drawn(), positions_of(packed))
    loss.backward()
    grads = {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
    return float(loss.detach()), grads


def context_of(model: nn.Module, attention: str = "all_gather") -> Any:
    """What cuts the sequences of a model, which is changed in place, over all ranks."""
    ranks = dist.get_world_size()
    mesh = dzero.make_mesh("cpu", replicate=ranks)
    ledger = dzero.shard(nn.Linear(1, 1), stage=0, mesh=mesh).ledger  # another model's, which counts here too
    config = dzero.ParallelConfig(cp=ranks, cp_attention=attention)
    return dzero.parallelize(model, mesh, config).cut_sequences(ledger, exact=True)


def split(rank: int, ranks: int, cases: list[Case]) -> list[tuple[float, dict[str, Tensor]]]:
    """The same of sequences that the ranks share: sums over the ranks."""
    found = []
    for case in cases:
        model = model_of(case.kind)
        context = context_of(model, case.attention)
        tokens, targets = (context.part(each) for each in drawn())
        loss = loss_of(model, tokens, targets, positions_of(case.packed))
        loss.backward()
        grads = {name: param.grad.clone() for name, param in model.named_parameters() if param.grad is not None}
        for grad in grads.values():
            dist.all_reduce(grad)
        found.append((summed(loss), grads))
    return found


def summed(loss: Tensor) -> float:
    """Over the ranks."""
    total = loss.detach().clone()
    dist.all_reduce(total)
    return float(total)


def check(pool: Pool, ranks: int, cases: list[Case]) -> None:
    for of_rank in pool.run(split, ranks, cases, timeout_s=300):
        for case, (found, of_params) in zip(cases, of_rank, strict=True):
            loss, grads = whole(case.kind, case.packed)
            assert found == pytest.approx(loss, rel=LOSS), case
            assert of_params.keys() == grads.keys()
            for name, want in grads.items():
                assert (of_params[name] - want).norm() <= GRADS * want.norm() + 1e-9, (case, name)


def test_loss_and_gradients_are_those_of_whole_sequences(pool: Pool) -> None:
    check(pool, 2, FIRST)


@pytest.mark.full("tests/parallel/test_context_hf.py::test_loss_and_gradients_are_those_of_whole_sequences")
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_gradients_are_those_of_whole_sequences_for_every_attention(pool: Pool, kind: str, ranks: int) -> None:
    cases = [Case(kind=kind, attention="ring")] if kind in ("llama", "gpt2") else []
    for attention, packed in product(("all_gather", "ulysses"), (False, True)):
        if not (packed and kind in MIXES_DOCUMENTS):
            cases.append(Case(kind=kind, attention=attention, packed=packed))
    check(pool, ranks, cases)


def sharded(rank: int, ranks: int, stages: list[int]) -> list[float]:
    """Loss of packed sequences, summed over the ranks, by the model itself in a loop of one's own."""
    found = []
    for stage in stages:
        mesh = dzero.make_mesh("cpu", replicate=ranks if stage == 0 else 1)
        cut = dzero.parallelize(model_of("mistral"), mesh, dzero.ParallelConfig(cp=ranks))
        made = dzero.shard(cut, stage=stage, precision="fp32")
        assert made.context is not None
        tokens, targets = (made.context.part(each) for each in drawn())
        with made.microbatch(is_last=True):
            loss = loss_of(made.model, tokens, targets, positions_of(packed=True))
            loss.backward()
        found.append(summed(loss))
    return found


def test_a_loop_of_ones_own_gives_parts_and_whole_positions(pool: Pool) -> None:
    want, _ = whole("mistral", packed=True)
    assert pool.run(sharded, 2, [0, 3]) == [pytest.approx([want, want], rel=LOSS)] * 2


ROTARY = {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("bloom", {"hidden_size": 64, "n_layer": 2, "n_head": 4}, "does not leave its attention to kernels without masks"),
    ("mamba", {"hidden_size": 64, "num_hidden_layers": 2, "state_size": 8}, "does not leave its attention to kernels"),
    ("lfm2", {"layer_types": ["conv", "full_attention"]}, "has layers of kind conv"),
    ("llama", ROTARY, "has rotary positions of type dynamic"),
    ("nemotron", {}, "NemotronAttention does not hand the keywords"),
    ("qwen3_next", {"layer_types": ["linear_attention", "full_attention"]}, "does not leave its attention"),
    ("llama4_text", {"intermediate_size_mlp": 48, "num_local_experts": 2}, "does not leave its attention"),
]


def of_one_head_of_keys() -> None:
    model = model_of("llama", num_key_value_heads=1)
    tokens = context_of(model, "ulysses").part(drawn()[0])
    model(input_ids=tokens, use_cache=False)


@on_ranks(2)
def test_what_attention_over_cut_sequences_cannot_do_is_refused(rank: int, ranks: int) -> None:
    """Models with more than attention, those that compute something else from cut sequences, and what one way lacks."""

    def refused(message: str, attempt: Callable[..., object], *given: object) -> None:
        with pytest.raises(ValueError, match="cp") as told:
            attempt(*given)
        assert message in str(told.value)
        assert "\n" not in str(told.value)
        assert str(told.value).endswith("take mesh.cp=1") or "all_gather" in str(told.value)

    for kind, sizes, message in REFUSED:
        refused(message, context_of, model_of(kind, **sizes))
    for what in ("feed-forward", "positions"):
        with shifted(what):
            other = "LlamaForCausalLM computes something else from cut sequences ("
            refused(other, context_of, model_of("llama"))
    refused("ring: MistralForCausalLM has sliding_window=5", context_of, model_of("mistral"), "ring")
    refused("ring: it takes no masks", split, rank, ranks, [Case(kind="llama", attention="ring", packed=True)])
    refused("mesh.cp=2, which does not divide heads=8 and kv_heads=1", of_one_head_of_keys)


@contextmanager
def shifted(what: str) -> Iterator[None]:
    """A llama that sees the token before each: in its feed-forward, or in its positions."""
    from transformers.models.llama import modeling_llama

    cls = {"feed-forward": modeling_llama.LlamaMLP, "positions": modeling_llama.LlamaRotaryEmbedding}[what]
    forward: Any = cls.forward

    def of_tokens(self: Any, x: Tensor) -> Tensor:
        mixed: Tensor = forward(self, x) + 0.1 * x.roll(1, dims=1)
        return mixed

    def of_input(self: Any, x: Tensor, position_ids: Tensor) -> Any:
        return forward(self, x, torch.arange(x.shape[1]).expand_as(position_ids))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cls, "forward", {"feed-forward": of_tokens, "positions": of_input}[what])
        yield
