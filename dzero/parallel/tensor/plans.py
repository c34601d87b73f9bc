"""Tensor-parallel plans of known models (the table is in parallel/tensor/parallelize.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)
from torch.distributed.tensor.parallel.style import ParallelStyle

from dzero.models.hf import class_name
from dzero.parallel.divisibility import Sizes
from dzero.parallel.expert.styles import OwnTokens, Routing
from dzero.parallel.tensor.conv1d import ColumnwiseConv1D, FusedColumnwiseConv1D, FusedInput, RowwiseConv1D

SEQUENCE, WHOLE, VOCABULARY, TOKENS = Shard(1), Replicate(), Shard(-1), Shard(0)


def plan_for(model: nn.Module, ranks: int, axis: str) -> tuple[dict[str, ParallelStyle], list[str]]:
    """Return the plan of a model of a known kind, or of a module around one.

    Returns:
        Style of each module by name, and names of the parameters that all ranks have and use on the same inputs.

    Raises:
        ValueError: If the kind is unknown, or `ranks` does not divide a size.
    """
    for prefix, module in model.named_modules():
        known = PLANS.get(type(module).__name__)
        if known is not None:
            sizes, plan = known(module)
            sizes.check(ranks, axis)
            alike = [f"{prefix}.{name}".removeprefix(".") for name in ALIKE.get(type(module).__name__, ())]
            return {f"{prefix}.{name}".removeprefix("."): style for name, style in plan.items()}, alike
    raise ValueError(
        f"{axis}={ranks}: no plan is known for {class_name(model)}, only for {sorted(PLANS)}; take {axis}=1, or in "
        "your own loop give parallelize() a plan of torch's, a ParallelStyle for each module by its name"
    )


def _llama(model: Any) -> tuple[Sizes, dict[str, ParallelStyle]]:
    sizes = _sizes_of(model.shape, model.shape.ffn_size)
    return sizes, _around_ffn() | _swiglu("layers.*.ffn", SEQUENCE)


def _moe(model: Any) -> tuple[Sizes, dict[str, ParallelStyle]]:
    """Return sizes and plan: those of Llama, except that a rank sends its own part of the sequence to experts.

    Shared experts are split as a dense feed-forward part, and gather the tokens as rows.
    """
    shape, mixture = model.shape, "layers.*.ffn"
    shared = shape.shared_experts * shape.ffn_size
    styles = {mixture: OwnTokens(SEQUENCE), f"{mixture}.router": Routing()}
    plan = _around_ffn() | styles | (_swiglu(f"{mixture}.shared", TOKENS) if shared else {})
    return _sizes_of(shape, shared), plan


def _sizes_of(shape: Any, ffn_size: int) -> Sizes:
    return Sizes(shape.heads, shape.kv_heads, ffn_size, shape.vocab_size)


def _around_ffn() -> dict[str, ParallelStyle]:
    """Return the styles of the project's decoders except those of the feed-forward parts."""
    block = "layers.*"
    return {
        "embedding": RowwiseParallel(input_layouts=WHOLE, output_layouts=SEQUENCE),
        f"{block}.attention_norm": SequenceParallel(),
        f"{block}.attention": _gathered(SEQUENCE, None, None),
        **{f"{block}.attention.{name}": ColwiseParallel() for name in ("query", "key", "value")},
        f"{block}.attention.out": RowwiseParallel(output_layouts=SEQUENCE),
        f"{block}.ffn_norm": SequenceParallel(),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=SEQUENCE, output_layouts=VOCABULARY, use_local_output=False),
    }


def _swiglu(name: str, layout: Shard) -> dict[str, ParallelStyle]:
    """Return the styles of a SwiGLU with split features; its input and output are split by tokens as `layout`."""
    return {
        name: _gathered(layout),
        **{f"{name}.{each}": ColwiseParallel() for each in ("gate", "up")},
        f"{name}.down": RowwiseParallel(output_layouts=layout),
    }


def _hf_llama(model: Any) -> tuple[Sizes, dict[str, ParallelStyle]]:
    """Return sizes and plan for Llama in transformers.

    transformers derives positions from the output of the embedding, so sequences are split only at the first block.
    """
    config, block = model.config, "model.layers.*"
    heads = config.num_attention_heads
    sizes = Sizes(heads, config.num_key_value_heads or heads, config.intermediate_size, config.vocab_size)
    return sizes, {
        "model.embed_tokens": RowwiseParallel(input_layouts=WHOLE, output_layouts=WHOLE),
        "model.layers.0": PrepareModuleInput(
            input_layouts=(WHOLE,), desired_input_layouts=(SEQUENCE,), use_local_output=True
        ),
        f"{block}.input_layernorm": SequenceParallel(),
        f"{block}.self_attn": PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": SEQUENCE},
            desired_input_kwarg_layouts={"hidden_states": WHOLE},
        ),
        **{f"{block}.self_attn.{name}_proj": ColwiseParallel() for name in ("q", "k", "v")},
        f"{block}.self_attn.o_proj": RowwiseParallel(output_layouts=SEQUENCE),
        f"{block}.post_attention_layernorm": SequenceParallel(),
        f"{block}.mlp": _gathered(SEQUENCE),
        **{f"{block}.mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")},
        f"{block}.mlp.down_proj": RowwiseParallel(output_layouts=SEQUENCE),
        "model.norm": SequenceParallel(),
        "lm_head": ColwiseParallel(input_layouts=SEQUENCE, output_layouts=VOCABULARY, use_local_output=False),
    }


def _hf_qwen3(model: Any) -> tuple[Sizes, dict[str, ParallelStyle]]:
    """Return sizes and plan of Llama, with norms of queries and keys [batch, time, heads, head_dim] split by heads."""
    sizes, plan = _hf_llama(model)
    of_heads = SequenceParallel(sequence_dim=2, use_local_output=True)
    return sizes, plan | {f"model.layers.*.self_attn.{name}_norm": of_heads for name in ("q", "k")}


def _hf_gpt2(model: Any) -> tuple[Sizes, dict[str, ParallelStyle]]:
    """Return sizes and plan; positions are added to whole sequences, which are split at the first block."""
    config, block = model.config, "transformer.h.*"
    sizes = Sizes(config.n_head, config.n_head, config.n_inner or 4 * config.n_embd, config.vocab_size)
    return sizes, {
        "transformer.wte": RowwiseParallel(input_layouts=WHOLE, output_layouts=WHOLE),
        "transformer.h.0": PrepareModuleInput(
            input_layouts=(WHOLE, None, None, None),
            desired_input_layouts=(SEQUENCE, None, None, None),
            use_local_output=True,
        ),
        **{f"{block}.{name}": SequenceParallel() for name in ("ln_1", "ln_2")},
        f"{block}.attn": FusedInput(input_layouts=(SEQUENCE,), desired_input_layouts=(WHOLE,)),
        f"{block}.attn.c_attn": FusedColumnwiseConv1D(3),
        f"{block}.attn.c_proj": RowwiseConv1D(),
        f"{block}.mlp": _gathered(SEQUENCE),
        f"{block}.mlp.c_fc": ColumnwiseConv1D(),
        f"{block}.mlp.c_proj": RowwiseConv1D(),
        "transformer.ln_f": SequenceParallel(),
        "lm_head": ColwiseParallel(input_layouts=SEQUENCE, output_layouts=VOCABULARY, use_local_output=False),
    }


def _gathered(*layouts: Shard | None) -> PrepareModuleInput:
    """Return a style that gathers inputs, in this order; None marks an input that is not a tensor of the sequence.

    Inputs stay DTensors, so that backward adds the gradients of all their uses before one reduce-scatter.
    """
    whole = tuple(None if each is None else WHOLE for each in layouts)
    return PrepareModuleInput(input_layouts=layouts, desired_input_layouts=whole)


PLANS: dict[str, Callable[[Any], tuple[Sizes, dict[str, ParallelStyle]]]] = {
    "Llama": _llama,
    "MoE": _moe,
    "LlamaForCausalLM": _hf_llama,
    "MistralForCausalLM": _hf_llama,
    "Qwen2ForCausalLM": _hf_llama,
    "Qwen3ForCausalLM": _hf_qwen3,
    "GPT2LMHeadModel": _hf_gpt2,
}
"""Function that returns the sizes that must be divisible, and the plan, by class name."""
ALIKE = {"GPT2LMHeadModel": ("transformer.wpe.weight",)}
"""Parameters that the plan leaves whole, by class name."""
