"""Small models of transformers, with the values of seed 0 and without dropout."""

from __future__ import annotations

from typing import Any

import torch
import transformers

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
DECODER = {**SIZES, "vocab_size": 64, "num_key_value_heads": 1, "max_position_embeddings": 64}
IMAGE = 63
"""The word that stands for a part of a picture, of which one of 8 x 8 has four."""


def llama(**more: Any) -> Any:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**DECODER, **more}))


def mixtral() -> Any:
    torch.manual_seed(0)
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**DECODER, num_local_experts=4))


def llava() -> Any:
    torch.manual_seed(0)
    vision = transformers.CLIPVisionConfig(**SIZES, image_size=8, patch_size=4)
    parts = {"vision_config": vision, "text_config": transformers.LlamaConfig(**DECODER), "image_token_index": IMAGE}
    return transformers.LlavaForConditionalGeneration(transformers.LlavaConfig(**parts, vision_feature_layer=-1))


def t5() -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "d_model": 32, "d_kv": 16, "d_ff": 48, "num_layers": 1, "num_heads": 2}
    config = transformers.T5Config(**sizes, dropout_rate=0.0, pad_token_id=0, decoder_start_token_id=0)
    return transformers.T5ForConditionalGeneration(config)


def bert() -> Any:
    torch.manual_seed(0)
    without = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = transformers.BertConfig(vocab_size=64, num_labels=3, **SIZES, **without)
    return transformers.BertForSequenceClassification(config)


def adapted(model: Any) -> Any:
    """Of which LoRA's matrices are trained alone."""
    import peft

    return peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj"]))
