"""What the tests of context parallelism run for models of transformers: one forward and backward, split and whole."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import dzero
from dzero import make_mesh
from dzero.comm.ledger import Ledger
from dzero.mesh import context_group
from dzero.parallel.context.parallelize import ContextParallel

TIME, SEQUENCES, VOCAB, WINDOW = 32, 2, 96, 5
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
KINDS_OF_LAYERS = ["full_attention", "sliding_attention"]
KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": WINDOW},
    "qwen2": {"sliding_window": WINDOW, "use_sliding_window": True, "max_window_layers": 1},
    "qwen3": {},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "gemma2": {"sliding_window": WINDOW, "attn_logit_softcapping": 0.5, "layer_types": KINDS_OF_LAYERS},
    "gemma3_text": {"sliding_window": WINDOW, "layer_types": KINDS_OF_LAYERS},
    "gpt_oss": {
        "sliding_window": WINDOW,
        "layer_types": KINDS_OF_LAYERS,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "gpt2": {
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 8,
        "n_positions": TIME,
        **dict.fromkeys(("embd_pdrop", "resid_pdrop", "attn_pdrop"), 0.0),
    },
    "deepseek_v3": {
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 8,
        "v_head_dim": 6,
        "head_dim": 4,
        "num_key_value_heads": 8,
        "first_k_dense_replace": 2,
    },
}


@dataclass(frozen=True, kw_only=True)
class Case:
    kind: str
    attention: str = "all_gather"
    ranks: int = 2
    packed: bool = False


def model_of(kind: str) -> Any:
    """A small model in fp32 with seeded weights, large enough that attention is far from uniform."""
    import transformers

    sizes = {} if kind == "gpt2" else SIZES
    config = transformers.AutoConfig.for_model(kind, **{**sizes, "vocab_size": VOCAB, **KINDS[kind]})
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
    return float(loss.detach()), {
        name: param.grad for name, param in model.named_parameters() if param.grad is not None
    }


def split(rank: int, ranks: int, case: Case) -> tuple[float, dict[str, Tensor]]:
    """The same of sequences that the ranks share: sums over the ranks."""
    model = model_of(case.kind)
    group = context_group(make_mesh("cpu"), ranks)
    context = ContextParallel(model, group, Ledger(), attention=case.attention, exact=True)
    tokens, targets = (context.part(each) for each in drawn())
    loss = loss_of(model, tokens, targets, positions_of(case.packed))
    loss.backward()
    total, grads = loss.detach().clone(), {}
    dist.all_reduce(total)
    for name, param in model.named_parameters():
        if param.grad is not None:
            grads[name] = copy.copy(param.grad)
            dist.all_reduce(grads[name])
    return float(total), grads


def sharded(rank: int, ranks: int, case: Case, stage: int) -> float:
    """Loss of packed sequences, summed over the ranks, by the model itself in a loop of one's own."""
    mesh = dzero.make_mesh("cpu", replicate=ranks if stage == 0 else 1)
    cut = dzero.parallelize(model_of(case.kind), mesh, dzero.ParallelConfig(cp=ranks, cp_attention=case.attention))
    made = dzero.shard(cut, stage=stage, precision="fp32")
    assert made.context is not None
    tokens, targets = (made.context.part(each) for each in drawn())
    with made.microbatch(is_last=True):
        loss = loss_of(made.model, tokens, targets, positions_of(case.packed))
        loss.backward()
    total = loss.detach().clone()
    dist.all_reduce(total)
    return float(total)
