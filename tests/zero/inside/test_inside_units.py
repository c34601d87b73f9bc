"""Ends of the decoders that dzero itself builds, and of what it wraps, as `find_units` chooses them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from dzero.models.config import LlamaShape
from dzero.models.hf import HFDecoder
from dzero.models.llama import Llama
from dzero.zero.units import find_units

WORDS = (1 << 23) // 64
BLOCKS = ["layers.0", "layers.1"]


@pytest.fixture(autouse=True)
def on_meta() -> Iterator[None]:
    with torch.device("meta"):
        yield


def names(model: nn.Module) -> list[str]:
    return [name for name, _ in find_units(model)]


def llama(vocab: int, *, tied: bool = False) -> Llama:
    sizes = {"hidden_size": 64, "layers": 2, "heads": 4, "kv_heads": 2, "ffn_size": 64}
    return Llama(LlamaShape(vocab_size=vocab, **sizes, tied=tied))


def test_ends_of_dzeros_decoder_are_units_if_they_are_large_and_not_tied() -> None:
    assert names(llama(WORDS)) == ["embedding", *BLOCKS, "head"]
    assert names(llama(WORDS - 1)) == names(llama(WORDS, tied=True)) == BLOCKS


def test_a_wrapped_model_has_its_ends_where_transformers_declares_them() -> None:
    transformers = pytest.importorskip("transformers")
    widths = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
    config = transformers.AutoConfig.for_model("llama", vocab_size=WORDS, **widths, tie_word_embeddings=False)
    model = transformers.AutoModelForCausalLM.from_config(config)
    assert names(HFDecoder(model))[::3] == ["model.model.embed_tokens", "model.lm_head"]
    cls = type(model)
    model.__class__ = type(cls.__name__, (cls,), {"forward": lambda self, tokens: self.lm_head.weight[tokens]})
    assert len(names(HFDecoder(model))) == 2, "a forward of someone else may read a weight outside of its module"
