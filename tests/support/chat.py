"""A tiny byte-level tokenizer in a folder, and small chat templates of the usual kinds."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|header|>", "<|/header|>", "<|eot|>", "[INST]", "[/INST]"]
SENTENCES = [
    "What is the capital of France? It is Paris.",
    "assistant\nuser\nsystem\n",
    "Hello there, hello again!",
] * 8

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{{ '\\n' }}"
    "{% else %}{{ m.content }}<|im_end|>{{ '\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA = (
    "{{ bos_token }}{% for m in messages %}<|header|>{{ m.role }}<|/header|>\n\n{{ m.content | trim }}<|eot|>"
    "{% endfor %}{% if add_generation_prompt %}<|header|>assistant<|/header|>\n\n{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% else %} {{ m.content }}{{ eos_token }}{% endif %}"
    "{% endfor %}"
)
THINKING = (
    "{% set ns = namespace(last=0) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% set said = m.content %}{% set thought = '' %}"
    "{% if '</think>' in said %}{% set thought = said.split('</think>')[0].split('<think>')[-1] | trim %}"
    "{% set said = said.split('</think>')[-1] | trim %}{% endif %}"
    "{% if m.role == 'assistant' and loop.index0 > ns.last and (loop.last or thought) %}"
    "<think>\n{{ thought }}\n</think>\n\n{% endif %}"
    "{{ said }}{% for call in m.tool_calls or [] %}{% if said %}{{ '\\n' }}{% endif %}"
    "call {{ call.function.arguments | tojson }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def without_tags(template: str) -> str:
    return template.replace("{% generation %}", "").replace("{% endgeneration %}", "")


@cache
def tokenizer_json(bos: bool) -> str:
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    if bos:
        tokenizer.post_processor = tokenizers.processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.enable_truncation(4)  # which no sample may suffer, nor padding
    tokenizer.enable_padding(length=64)
    return str(tokenizer.to_str())


def write_model(folder: Path, template: str | None = None, *, bos: bool = False, **config: Any) -> Path:
    """Write tokenizer.json, tokenizer_config.json and, if given, chat_template.jinja."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(tokenizer_json(bos))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>", **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


def turns(*contents: str, system: str | None = None) -> dict[str, Any]:
    """A row of `messages` in which user and assistant alternate."""
    first = [] if system is None else [{"role": "system", "content": system}]
    roles = ("user", "assistant")
    return {"messages": first + [{"role": roles[i % 2], "content": each} for i, each in enumerate(contents)]}


NO_TAGS = without_tags(CHATML)
MESSAGES = turns("Hi", "Hello", "and", "so")["messages"]
ROW = turns("What is 你好?", "It is 🎉 Paris.\n", "hello again", "Hello 日本語 there!", system="Be brief.")
THOUGHT = turns("What?", "<think>\nhm\n</think>\n\nParis", "and?", "<think>\nso\n</think>\n\nagain")
