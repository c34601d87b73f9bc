"""Conversations in tokens: exactly the assistant's turns count, and a folder's files run no code and fail in a line."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import chat
import numpy as np
import pytest
from corpora import conversation, encoder

transformers = pytest.importorskip("transformers")

ROW = chat.turns("What is 你好?", "It is 🎉 Paris.\n", "hello again", "Hello 日本語 there!", system="Be brief.")
NO_SYSTEM = chat.turns("What is 你好?", "It is 🎉 Paris.", "hello again", "Hello 日本語 there!")
THOUGHT = chat.turns("What?", "<think>\nhm\n</think>\n\nParis", "and?", "<think>\nso\n</think>\n\nagain")
NO_TAGS = chat.without_tags(chat.CHATML)


def counted(maker: Any, sample: Any) -> list[str]:
    """Text of each run of tokens that count."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], sample.counts, [False]]).astype(np.int8)))
    return [maker.decode(sample.ids[start:end]) for start, end in edges.reshape(-1, 2)]


def encode(folder: Path, row: dict[str, Any], loss_on: str = "assistant", template: str | None = None) -> list[str]:
    maker = encoder(folder, loss_on, template)
    sample = maker.encode(conversation(row))
    maker.close()
    assert sample.ids.shape == sample.counts.shape
    return counted(maker, sample)


@pytest.mark.parametrize("template", [chat.CHATML, NO_TAGS], ids=["tags", "prefixes"])
def test_the_mask_is_that_of_transformers_with_tags_and_the_same_without(tmp_path: Path, template: str) -> None:
    folder = chat.write_model(tmp_path, template)
    expected = transformers.AutoTokenizer.from_pretrained(str(folder)).apply_chat_template(
        ROW["messages"], chat_template=chat.CHATML, return_assistant_tokens_mask=True, return_dict=True
    )
    maker = encoder(folder, "assistant")
    sample = maker.encode(conversation(ROW))
    assert sample.ids.tolist() == expected["input_ids"]
    assert sample.counts.astype(int).tolist() == expected["assistant_masks"]
    assert counted(maker, sample) == ["It is 🎉 Paris.\n<|im_end|>", "Hello 日本語 there!<|im_end|>"]
    assert (sample.ids.dtype, sample.counts.dtype, maker.dtype) == (np.int32, np.bool_, np.uint16)
    maker.close()


@pytest.mark.product(keep=1)
@pytest.mark.parametrize("loss_on", ["completion", "assistant"])
def test_turns_of_a_template_that_drops_thinking_count_in_tokens(tmp_path: Path, loss_on: str) -> None:
    first, last = "Paris<|im_end|>", "<think>\nso\n</think>\n\nagain<|im_end|>"
    found = encode(chat.write_model(tmp_path, chat.THINKING), THOUGHT, loss_on)
    assert found == ([first, last] if loss_on == "assistant" else [last])


@pytest.mark.full("tests/data/test_chat_template.py::test_turns_of_a_template_that_drops_thinking_count_in_tokens")
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
    maker = encoder(chat.write_model(tmp_path, template), loss_on)
    sample = maker.encode(conversation({"prompt": "What is it? 你", "completion": "好 it 🎉"}))
    assert maker.decode(sample.ids) == "What is it? 你好 it 🎉</s>"
    assert counted(maker, sample) == ["好 it 🎉</s>"]
    assert sample.ids[-1] == maker.eos_id


def test_a_token_across_the_border_counts_only_if_it_begins_in_the_completion(tmp_path: Path) -> None:
    maker = encoder(chat.write_model(tmp_path), "completion")
    whole = maker.encode(conversation({"prompt": "Paris", "completion": " is"}))
    assert counted(maker, whole) == [" is</s>"]
    straddling = maker.encode(conversation({"prompt": "Hello th", "completion": "ere!"}))
    assert "there" in [maker.decode(straddling.ids[i : i + 1]).strip() for i in range(len(straddling.ids))]
    assert counted(maker, straddling) == ["!</s>"]


def test_a_text_that_would_take_too_much_memory_is_refused(tmp_path: Path) -> None:
    maker = encoder(chat.write_model(tmp_path), "all")
    with pytest.raises(ValueError, match="have 16777217 characters, over 16777216"):
        maker.encode(conversation({"prompt": "a" * 2**24, "completion": "b"}))


def test_a_text_begins_with_bos_where_the_tokenizer_adds_it(tmp_path: Path) -> None:
    maker = encoder(chat.write_model(tmp_path, bos=True), "all")
    sample = maker.encode(conversation({"prompt": "Hello", "completion": " there</s>"}))
    assert maker.decode(sample.ids) == "<s>Hello there</s>"


def test_an_instruction_is_templated_where_there_is_a_template_and_laid_out_where_there_is_none(tmp_path: Path) -> None:
    row = {"instruction": "Add.", "input": "1 1", "output": "2"}
    maker = encoder(chat.write_model(tmp_path / "base"), "assistant")
    sample = maker.encode(conversation(row))
    assert maker.decode(sample.ids) == "### Instruction:\nAdd.\n\n### Input:\n1 1\n\n### Response:\n2</s>"
    assert counted(maker, sample) == ["2</s>"]
    assert encode(chat.write_model(tmp_path / "chat", NO_TAGS), row) == ["2<|im_end|>"]
    assert encode(tmp_path / "base", row, template=chat.LLAMA) == ["2<|eot|>"]
    (tmp_path / "own.jinja").write_text(chat.LLAMA)
    assert encode(tmp_path / "base", row, template=str(tmp_path / "own.jinja")) == ["2<|eot|>"]


def test_the_fingerprint_tells_what_the_encoding_depends_on(tmp_path: Path) -> None:
    folder = chat.write_model(tmp_path, chat.CHATML)
    prints = {encoder(folder, loss_on).fingerprint for loss_on in ("assistant", "completion", "all")}
    prints |= {encoder(folder, "all", chat.LLAMA).fingerprint, encoder(folder, "all").fingerprint}
    chat.write_model(tmp_path, chat.CHATML, eos_token="<|eot|>")
    prints.add(encoder(folder, "all").fingerprint)
    assert len(prints) == 5


# What cannot be encoded, and what a folder must not do

MESSAGES = chat.turns("Hi", "Hello", "and", "so")["messages"]


def test_an_error_of_syntax_or_no_template_ends_the_batch_and_is_not_skipped(tmp_path: Path) -> None:
    messages, text = conversation({"messages": MESSAGES}), conversation({"prompt": "a", "completion": "b"})
    maker = encoder(chat.write_model(tmp_path, "{{ bos_token }}\n{% if %}"), "assistant")
    with pytest.raises(ValueError, match=f"^{tmp_path}: line 2 of the chat template: TemplateSyntaxError: Expected"):
        maker.encode_batch([text, messages])
    maker.close()
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(ValueError, match=f"^{tmp_path} has no chat template"):
        encoder(tmp_path, "assistant").encode_batch([text, messages])


def test_turns_that_cannot_be_told_are_a_bad_row_and_all_tokens_are_not(tmp_path: Path) -> None:
    folder = chat.write_model(tmp_path, "{{ messages | length }} messages")
    row = conversation({"messages": MESSAGES})
    maker = encoder(folder, "assistant")
    (found,) = maker.encode_batch([row])
    assert "loss_on=completion or loss_on=all" in str(found)
    maker.close()
    maker = encoder(folder, "all")
    sample = maker.encode(row)
    assert sample.counts.tolist() == [False] + [True] * (len(sample.ids) - 1)
    maker.close()


def test_a_text_that_cannot_be_tokenized_is_a_bad_row_alone(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ '\\ud800' if m.content == 'odd' else m.content }}</s>{% endfor %}"
    maker = encoder(chat.write_model(tmp_path, template), "all")
    rows = [chat.turns("a", "b"), chat.turns("a", "odd"), chat.turns("c", "d")]
    results = maker.encode_batch([conversation(row) for row in rows])
    assert [isinstance(each, ValueError) for each in results] == [False, True, False]
    assert "cannot encode the text" in str(results[1])
    maker.close()


def test_what_a_conversation_or_template_lacks_is_said(tmp_path: Path) -> None:
    messages, text = conversation({"messages": MESSAGES}), conversation({"prompt": "a", "completion": "b"})
    maker = encoder(chat.write_model(tmp_path / "base"), "all")
    with pytest.raises(ValueError, match=r"base has no chat template.*give one as data.chat_template"):
        maker.encode(messages)
    maker = encoder(chat.write_model(tmp_path / "mistral", chat.MISTRAL), "all")
    with pytest.raises(ValueError, match=r"fails: TemplateError: roles must alternate$"):
        maker.encode(conversation({"messages": [{"role": "system", "content": "x"}, *MESSAGES]}))
    results = maker.encode_batch([text, conversation({"messages": MESSAGES[1:]}), messages])
    assert [isinstance(each, ValueError) for each in results] == [False, True, False]
    maker.close()
    with pytest.raises(ValueError, match=r"data.loss_on='user': choose one of \['assistant', 'completion', 'all'\]"):
        encoder(tmp_path / "base", "user")


class Canary:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (str(self.path),)


def spoil(folder: Path, how: str) -> None:
    """Write a good model and spoil it."""
    chat.write_model(folder, chat.CHATML)
    tokenizer, config, template = (
        folder / n for n in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
    )
    if how in ("link", "link config", "link template"):
        path = {"link": tokenizer, "link config": config, "link template": template}[how]
        path.rename(folder.parent / "elsewhere")
        path.symlink_to(folder.parent / "elsewhere")
    elif how == "link templates":
        (folder / "chat_templates").symlink_to(folder.parent)
    elif how == "fifo":
        template.unlink()
        os.mkfifo(template)
    elif how == "directory":
        tokenizer.unlink()
        tokenizer.mkdir()
    elif how == "missing":
        tokenizer.unlink()
    elif how == "pickle":
        tokenizer.write_bytes(pickle.dumps(Canary(folder.parent / "canary")))
    elif how == "remote code":
        (folder / "evil.py").write_text(f"import os; os.mkdir({str(folder.parent / 'canary')!r})\nclass T: pass\n")
        chat.write_model(folder, chat.CHATML, auto_map={"AutoTokenizer": ["evil.T", "evil.T"]}, tokenizer_class="T")
    else:
        path, content = {
            "empty": (tokenizer, b""),
            "deep": (tokenizer, b"[" * 100_000),
            "config garbage": (config, b"\0\xff"),
            "config template": (config, b'{"eos_token": "</s>", "chat_template": 3}'),
            "config templates": (config, b'{"eos_token": "</s>", "chat_template": [{"name": "rag", "template": "x"}]}'),
            "config eos": (config, b'{"eos_token": 3}'),
            "template bytes": (template, b"\xff\xfe\x00"),
        }[how]
        if how.startswith("config template"):
            template.unlink()
        path.write_bytes(content)


SPOILED = {
    "link": "tokenizer.json: a symbolic link",
    "link config": "tokenizer_config.json: a symbolic link",
    "link template": "chat_template.jinja: a symbolic link",
    "link templates": "chat_templates: a symbolic link",
    "fifo": "chat_template.jinja: a folder, a pipe or a device",
    "directory": "tokenizer.json: a folder, a pipe or a device",
    "missing": "has no tokenizer.json",
    "pickle": "cannot be read",
    "empty": "cannot be read",
    "deep": "cannot be read",
    "config garbage": "cannot be read",
    "config template": "its chat template is a int",
    "config templates": "none is the default",
    "config eos": "",
    "template bytes": "cannot be read",
}


@pytest.mark.parametrize("how", SPOILED)
def test_a_folder_that_cannot_be_used_is_refused_in_one_line(tmp_path: Path, how: str) -> None:
    spoil(tmp_path / "model", how)
    with pytest.raises((ValueError, OSError)) as error:
        encoder(tmp_path / "model", "all")
    assert SPOILED[how] in str(error.value)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 800
    assert not (tmp_path / "canary").exists()


def test_code_in_a_folder_is_not_run(tmp_path: Path) -> None:
    spoil(tmp_path / "model", "remote code")
    maker = encoder(tmp_path / "model", "all")
    assert len(maker.encode(conversation({"prompt": "a", "completion": "b"})).ids) == 3
    assert not (tmp_path / "canary").exists()


def test_a_template_that_is_no_file_and_no_template_is_refused(tmp_path: Path) -> None:
    folder = chat.write_model(tmp_path)
    with pytest.raises(FileNotFoundError, match="chatml: no such file, and no template"):
        encoder(folder, "all", "chatml")
    (tmp_path / "t.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="is no text in UTF-8"):
        encoder(folder, "all", str(tmp_path / "t.jinja"))
    with pytest.raises(FileNotFoundError, match="no such folder"):
        encoder(tmp_path / "nowhere", "all")
