"""Promises of the mask: exactly the assistant's turns count, whatever the template."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import chat
import numpy as np
import pytest

from dzero.data.chat_template import ChatEncoder, EncodedSample
from dzero.data.conversations import conversation_of

transformers = pytest.importorskip("transformers")

ROW = chat.turns("What is 你好?", "It is 🎉 Paris.\n", "hello again", "Hello 日本語 there!", system="Be brief.")
NO_SYSTEM = chat.turns("What is 你好?", "It is 🎉 Paris.", "hello again", "Hello 日本語 there!")
THOUGHT = chat.turns("What?", "<think>\nhm\n</think>\n\nParis", "and?", "<think>\nso\n</think>\n\nagain")
NO_TAGS = chat.without_tags(chat.CHATML)


def counted(encoder: ChatEncoder, sample: EncodedSample) -> list[str]:
    """Text of each run of tokens that count."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], sample.counts, [False]]).astype(np.int8)))
    return [encoder.decode(sample.ids[start:end]) for start, end in edges.reshape(-1, 2)]


def encode(folder: Path, row: dict[str, Any], loss_on: str = "assistant", template: str | None = None) -> list[str]:
    encoder = ChatEncoder(folder, loss_on, template)
    sample = encoder.encode(conversation_of(row))
    encoder.close()
    assert sample.ids.shape == sample.counts.shape
    return counted(encoder, sample)


@pytest.mark.parametrize("template", [chat.CHATML, NO_TAGS], ids=["tags", "prefixes"])
def test_the_mask_is_that_of_transformers_with_tags_and_the_same_without(tmp_path: Path, template: str) -> None:
    folder = chat.write_model(tmp_path, template)
    expected = transformers.AutoTokenizer.from_pretrained(str(folder)).apply_chat_template(
        ROW["messages"], chat_template=chat.CHATML, return_assistant_tokens_mask=True, return_dict=True
    )
    encoder = ChatEncoder(folder, "assistant")
    sample = encoder.encode(conversation_of(ROW))
    assert sample.ids.tolist() == expected["input_ids"]
    assert sample.counts.astype(int).tolist() == expected["assistant_masks"]
    assert counted(encoder, sample) == ["It is 🎉 Paris.\n<|im_end|>", "Hello 日本語 there!<|im_end|>"]
    assert (sample.ids.dtype, sample.counts.dtype, encoder.dtype) == (np.int32, np.bool_, np.uint16)
    encoder.close()


@pytest.mark.parametrize("loss_on", ["assistant", "completion"])
def test_turns_of_a_template_that_drops_thinking_count_in_tokens(tmp_path: Path, loss_on: str) -> None:
    first, last = "Paris<|im_end|>", "<think>\nso\n</think>\n\nagain<|im_end|>"
    found = encode(chat.write_model(tmp_path, chat.THINKING), THOUGHT, loss_on)
    assert found == ([first, last] if loss_on == "assistant" else [last])


@pytest.mark.product(keep=2)
@pytest.mark.parametrize("template", [chat.CHATML, NO_TAGS, chat.THINKING], ids=["tags", "prefixes", "thinking"])
def test_completion_is_the_last_turn_and_all_is_every_token_but_the_first(tmp_path: Path, template: str) -> None:
    folder = chat.write_model(tmp_path, template)
    (last,) = encode(folder, ROW, "completion")
    assert last.endswith("Hello 日本語 there!<|im_end|>")
    (everything,) = encode(folder, ROW, "all")
    assert everything.startswith("system\n")
    split = {"prompt": ROW["messages"][:2], "completion": ROW["messages"][2:]}
    (answer,) = encode(
        folder, {**split, "prompt": ROW["messages"][:4], "completion": ROW["messages"][4:]}, "completion"
    )
    assert answer == last
    assert len(encode(folder, split, "completion")) == 2


@pytest.mark.parametrize("loss_on", ["assistant", "completion"])
@pytest.mark.parametrize("template", [None, chat.CHATML], ids=["none", "chatml"])
def test_a_prompt_and_a_completion_of_text_are_one_text_that_ends_with_eos(
    tmp_path: Path, template: str | None, loss_on: str
) -> None:
    encoder = ChatEncoder(chat.write_model(tmp_path, template), loss_on)
    sample = encoder.encode(conversation_of({"prompt": "What is it? 你", "completion": "好 it 🎉"}))
    assert encoder.decode(sample.ids) == "What is it? 你好 it 🎉</s>"
    assert counted(encoder, sample) == ["好 it 🎉</s>"]
    assert sample.ids[-1] == encoder.eos_id


def test_a_token_across_the_border_counts_only_if_it_begins_in_the_completion(tmp_path: Path) -> None:
    encoder = ChatEncoder(chat.write_model(tmp_path), "completion")
    whole = encoder.encode(conversation_of({"prompt": "Paris", "completion": " is"}))
    assert counted(encoder, whole) == [" is</s>"]
    straddling = encoder.encode(conversation_of({"prompt": "Hello th", "completion": "ere!"}))
    assert "there" in [encoder.decode(straddling.ids[i : i + 1]).strip() for i in range(len(straddling.ids))]
    assert counted(encoder, straddling) == ["!</s>"]


def test_a_text_that_would_take_too_much_memory_is_refused(tmp_path: Path) -> None:
    encoder = ChatEncoder(chat.write_model(tmp_path), "all")
    with pytest.raises(ValueError, match="have 16777217 characters, over 16777216"):
        encoder.encode(conversation_of({"prompt": "a" * 2**24, "completion": "b"}))


def test_a_text_begins_with_bos_where_the_tokenizer_adds_it(tmp_path: Path) -> None:
    encoder = ChatEncoder(chat.write_model(tmp_path, bos=True), "all")
    sample = encoder.encode(conversation_of({"prompt": "Hello", "completion": " there</s>"}))
    assert encoder.decode(sample.ids) == "<s>Hello there</s>"


def test_an_instruction_is_templated_where_there_is_a_template_and_laid_out_where_there_is_none(tmp_path: Path) -> None:
    row = {"instruction": "Add.", "input": "1 1", "output": "2"}
    encoder = ChatEncoder(chat.write_model(tmp_path / "base"), "assistant")
    sample = encoder.encode(conversation_of(row))
    assert encoder.decode(sample.ids) == "### Instruction:\nAdd.\n\n### Input:\n1 1\n\n### Response:\n2</s>"
    assert counted(encoder, sample) == ["2</s>"]
    assert encode(chat.write_model(tmp_path / "chat", NO_TAGS), row) == ["2<|im_end|>"]
    assert encode(tmp_path / "base", row, template=chat.LLAMA) == ["2<|eot|>"]
    (tmp_path / "own.jinja").write_text(chat.LLAMA)
    assert encode(tmp_path / "base", row, template=str(tmp_path / "own.jinja")) == ["2<|eot|>"]


def test_the_fingerprint_tells_what_the_encoding_depends_on(tmp_path: Path) -> None:
    folder = chat.write_model(tmp_path, chat.CHATML)
    prints = {ChatEncoder(folder, loss_on).fingerprint for loss_on in ("assistant", "completion", "all")}
    prints |= {ChatEncoder(folder, "all", chat.LLAMA).fingerprint, ChatEncoder(folder, "all").fingerprint}
    chat.write_model(tmp_path, chat.CHATML, eos_token="<|eot|>")
    prints.add(ChatEncoder(folder, "all").fingerprint)
    assert len(prints) == 5
