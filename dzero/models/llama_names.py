"""Names of modules in the project's llamas and mixtures, and in those that Hugging Face publishes."""

from __future__ import annotations

OUTER = {"embedding": "model.embed_tokens", "layers": "model.layers", "norm": "model.norm", "head": "lm_head"}
"""Published names of the modules of a llama, by the project's names."""
INNER = {
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attention": "self_attn",
    "query": "q_proj",
    "key": "k_proj",
    "value": "v_proj",
    "out": "o_proj",
    "ffn": "mlp",
    "gate": "gate_proj",
    "up": "up_proj",
    "down": "down_proj",
}
"""Published names of the modules of a block."""
PUBLISHED = INNER | {name: published.rpartition(".")[2] for name, published in OUTER.items()}
"""Last parts of published names, by the project's."""
OURS = {published: name for name, published in PUBLISHED.items()}
"""The project's names, by the last parts of published ones."""
