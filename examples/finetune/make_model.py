"""Write a tiny Llama with random weights, a tokenizer and a chat template, in the layout of a published model.

    python make_model.py FOLDER

It stands in for a published model, so that fine-tuning can be tried without a download.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

CHATS = Path(__file__).with_name("chats.jsonl")
TURN_ENDS, SPECIAL = "<|im_end|>", ["<|im_start|>", "<|im_end|>", "<|pad|>"]
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}\n"
    "{% else %}{{ message.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make(folder: Path) -> None:
    """Write the model into `folder`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=512, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CHATS.read_text().splitlines(), trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=TURN_ENDS, pad_token="<|pad|>")
    fast.chat_template = TEMPLATE
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(fast),
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=2048,
            bos_token_id=None,
            eos_token_id=fast.eos_token_id,
        )
    )
    model.save_pretrained(folder)
    fast.save_pretrained(folder)
    print(f"{folder}: {model.num_parameters():,} parameters, {len(fast)} tokens")


if __name__ == "__main__":
    make(Path(sys.argv[1]))
