"""Conversations in tokens: exactly the assistant's turns count, and a folder's files run no code and fail in a line."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import chat
import numpy as np
import pytest
from corpora import conversation, encoder

transformers = pytest.importorskip("transformers")

TEXT = {"prompt": "a", "completion": "b"}


def counted(maker: Any, row: dict[str, Any]) -> list[str]:
    """Text of each run of tokens that count."""
    sample = maker.encode(conversation(row))
    assert sample.ids.shape == sample.counts.shape
    edges = np.flatnonzero(np.diff(np.concatenate([[False], sample.counts, [False]]).astype(np.int8)))
    return [maker.decode(sample.ids[start:end]) for start, end in edges.reshape(-1, 2)]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Give encoders of the model in `tmp_path`, which is written with a template, or has none; they are closed."""
    made = []

    def of(template: str | None = None, loss_on: str = "assistant", own: str | None = None, **settings: Any) -> Any:
        made.append(encoder(chat.write_model(tmp_path, template, **settings), loss_on, own))
        return made[-1]

    yield of
    for each in made:
        each.close()


@pytest.mark.parametrize("template", [chat.CHATML, chat.NO_TAGS], ids=["tags", "prefixes"])
def test_the_mask_is_that_of_transformers_with_tags_and_the_same_without(
    make: Callable[..., Any], tmp_path: Path, template: str
) -> None:
    maker = make(template)
    expected = transformers.AutoTokenizer.from_pretrained(str(tmp_path)).apply_chat_template(
        chat.ROW["messages"], chat_template=chat.CHATML, return_assistant_tokens_mask=True, return_dict=True
    )
    sample = maker.encode(conversation(chat.ROW))
    assert sample.ids.tolist() == expected["input_ids"]
    assert sample.counts.astype(int).tolist() == expected["assistant_masks"]
    assert counted(maker, chat.ROW) == ["It is 🎉 Paris.\n<|im_end|>", "Hello 日本語 there!<|im_end|>"]
    assert (sample.ids.dtype, sample.counts.dtype, maker.dtype) == (np.int32, np.bool_, np.uint16)


@pytest.mark.product(keep=1)
@pytest.mark.parametrize("template", [chat.THINKING, chat.NO_TAGS, chat.CHATML], ids=["thinking", "prefixes", "tags"])
def test_completion_is_the_last_turn_and_all_is_every_token_but_the_first(
    make: Callable[..., Any], template: str
) -> None:
    """Also where a prompt and a completion are given apart, each of several messages."""
    messages, maker = chat.ROW["messages"], make(template, "completion")
    (last,) = counted(maker, chat.ROW)
    assert last.endswith("Hello 日本語 there!<|im_end|>")
    assert counted(maker, {"prompt": messages[:4], "completion": messages[4:]}) == [last]
    assert len(counted(maker, {"prompt": messages[:2], "completion": messages[2:]})) == 2
    (everything,) = counted(make(template, "all"), chat.ROW)
    assert everything.startswith("system\n")


@pytest.mark.parametrize("template", [None, chat.CHATML], ids=["none", "chatml"])
def test_a_prompt_and_a_completion_of_text_are_one_text_that_ends_with_eos(
    make: Callable[..., Any], template: str | None
) -> None:
    row = {"prompt": "What is it? 你", "completion": "好 it 🎉"}
    for loss_on in ("assistant", "completion"):
        maker = make(template, loss_on)
        sample = maker.encode(conversation(row))
        assert maker.decode(sample.ids) == "What is it? 你好 it 🎉</s>"
        assert counted(maker, row) == ["好 it 🎉</s>"]
        assert sample.ids[-1] == maker.eos_id


def test_a_token_across_the_border_counts_only_if_it_begins_in_the_completion(make: Callable[..., Any]) -> None:
    maker = make(loss_on="completion")
    assert counted(maker, {"prompt": "Paris", "completion": " is"}) == [" is</s>"]
    straddling = {"prompt": "Hello th", "completion": "ere!"}
    ids = maker.encode(conversation(straddling)).ids
    assert "there" in [maker.decode(ids[i : i + 1]).strip() for i in range(len(ids))]
    assert counted(maker, straddling) == ["!</s>"]


def test_a_text_begins_with_bos_where_the_tokenizer_adds_it(make: Callable[..., Any]) -> None:
    maker = make(loss_on="all", bos=True)
    sample = maker.encode(conversation({"prompt": "Hello", "completion": " there</s>"}))
    assert maker.decode(sample.ids) == "<s>Hello there</s>"


def test_an_instruction_is_templated_where_there_is_a_template_and_laid_out_where_there_is_none(
    make: Callable[..., Any], tmp_path: Path
) -> None:
    row, maker = {"instruction": "Add.", "input": "1 1", "output": "2"}, make()
    text = maker.decode(maker.encode(conversation(row)).ids)
    assert text == "### Instruction:\nAdd.\n\n### Input:\n1 1\n\n### Response:\n2</s>"
    assert counted(maker, row) == ["2</s>"]
    assert counted(make(own=chat.LLAMA), row) == ["2<|eot|>"]
    (tmp_path / "own.jinja").write_text(chat.LLAMA)
    assert counted(make(own=str(tmp_path / "own.jinja")), row) == ["2<|eot|>"]


def test_the_fingerprint_tells_what_the_encoding_depends_on(make: Callable[..., Any]) -> None:
    prints = {make(chat.CHATML, loss_on).fingerprint for loss_on in ("assistant", "completion", "all")}
    prints |= {make(chat.CHATML, "all", own).fingerprint for own in (None, chat.LLAMA)}
    prints.add(make(chat.CHATML, "all", eos_token="<|eot|>").fingerprint)
    assert len(prints) == 5


# What cannot be encoded, and what a folder must not do


def test_an_error_of_syntax_or_no_template_ends_the_batch_and_is_not_skipped(
    make: Callable[..., Any], tmp_path: Path
) -> None:
    batch = [conversation(TEXT), conversation({"messages": chat.MESSAGES})]
    with pytest.raises(ValueError, match=f"^{tmp_path}: line 2 of the chat template: TemplateSyntaxError: Expected"):
        make("{{ bos_token }}\n{% if %}").encode_batch(batch)
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(ValueError, match=f"^{tmp_path} has no chat template.*give one as data.chat_template"):
        make().encode_batch(batch)


def test_what_a_template_cannot_tell_or_refuses_is_a_bad_row_alone(make: Callable[..., Any]) -> None:
    """Turns that cannot be told are none where all tokens count; some texts cannot be tokenized."""
    unclear = "{{ messages | length }} messages"
    (found,) = make(unclear).encode_batch([conversation({"messages": chat.MESSAGES})])
    assert "loss_on=completion or loss_on=all" in str(found)
    sample = make(unclear, "all").encode(conversation({"messages": chat.MESSAGES}))
    assert sample.counts.tolist() == [False] + [True] * (len(sample.ids) - 1)
    odd = "'\\ud800' if m.content == 'odd' else raise_exception('no') if m.content == 'no' else m.content"
    rows = [chat.turns("a", "b"), chat.turns("a", "no"), chat.turns("a", "odd"), TEXT]
    maker = make("{% for m in messages %}{{ " + odd + " }}</s>{% endfor %}", "all")
    results = [result for row in rows for result in maker.encode_batch([conversation(row)])]
    assert [isinstance(each, ValueError) for each in results] == [False, True, True, False]
    assert "fails: TemplateError: no" in str(results[1])
    assert "cannot encode the text" in str(results[2])


def test_a_text_that_would_take_too_much_memory_is_refused(make: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match="have 16777217 characters, over 16777216"):
        make(loss_on="all").encode(conversation({"prompt": "a" * 2**24, "completion": "b"}))


class Canary:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (str(self.path),)


def linked(path: Path) -> None:
    """Put a link to what it was in its place."""
    path.rename(path.parent.parent / "elsewhere")
    path.symlink_to(path.parent.parent / "elsewhere")


def replaced(path: Path, make: Callable[[Path], object]) -> None:
    path.unlink()
    make(path)


def configured(folder: Path, content: bytes) -> None:
    """Only the configuration may have a template."""
    (folder / TEMPLATE).unlink()
    (folder / CONFIG).write_bytes(content)


TOKENIZER, CONFIG, TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
NAMED = b'{"eos_token": "</s>", "chat_template": [{"name": "rag", "template": "x"}]}'
SPOILED: dict[str, tuple[Callable[[Path], object], str]] = {
    "link": (lambda f: linked(f / TOKENIZER), "tokenizer.json: a symbolic link"),
    "link config": (lambda f: linked(f / CONFIG), "tokenizer_config.json: a symbolic link"),
    "link template": (lambda f: linked(f / TEMPLATE), "chat_template.jinja: a symbolic link"),
    "link templates": (lambda f: (f / "chat_templates").symlink_to(f.parent), "chat_templates: a symbolic link"),
    "fifo": (lambda f: replaced(f / TEMPLATE, os.mkfifo), "chat_template.jinja: a folder, a pipe or a device"),
    "directory": (lambda f: replaced(f / TOKENIZER, Path.mkdir), "tokenizer.json: a folder, a pipe or a device"),
    "missing": (lambda f: (f / TOKENIZER).unlink(), "has no tokenizer.json"),
    "pickle": (lambda f: (f / TOKENIZER).write_bytes(pickle.dumps(Canary(f.parent / "canary"))), "cannot be read"),
    "empty": (lambda f: (f / TOKENIZER).write_bytes(b""), "cannot be read"),
    "deep": (lambda f: (f / TOKENIZER).write_bytes(b"[" * 100_000), "cannot be read"),
    "config garbage": (lambda f: (f / CONFIG).write_bytes(b"\0\xff"), "cannot be read"),
    "config template": (lambda f: configured(f, b'{"eos_token": "</s>", "chat_template": 3}'), "template is a int"),
    "config templates": (lambda f: configured(f, NAMED), "none is the default"),
    "config eos": (lambda f: (f / CONFIG).write_bytes(b'{"eos_token": 3}'), ""),
    "template bytes": (lambda f: (f / TEMPLATE).write_bytes(b"\xff\xfe\x00"), "cannot be read"),
}


@pytest.mark.parametrize("how", SPOILED)
def test_a_folder_that_cannot_be_used_is_refused_in_one_line(tmp_path: Path, how: str) -> None:
    spoil, says = SPOILED[how]
    spoil(chat.write_model(tmp_path / "model", chat.CHATML))
    with pytest.raises((ValueError, OSError)) as error:
        encoder(tmp_path / "model", "all")
    assert says in str(error.value)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 800
    assert not (tmp_path / "canary").exists()


def test_code_in_a_folder_is_not_run(make: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "evil.py").write_text(f"import os; os.mkdir({str(tmp_path / 'canary')!r})\nclass T: pass\n")
    maker = make(chat.CHATML, "all", auto_map={"AutoTokenizer": ["evil.T", "evil.T"]}, tokenizer_class="T")
    assert len(maker.encode(conversation(TEXT)).ids) == 3
    assert not (tmp_path / "canary").exists()


def test_settings_that_name_nothing_are_refused(make: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "t.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(FileNotFoundError, match="chatml: no such file, and no template"):
        make(own="chatml")
    with pytest.raises(ValueError, match="is no text in UTF-8"):
        make(own=str(tmp_path / "t.jinja"))
    with pytest.raises(FileNotFoundError, match="no such folder"):
        encoder(tmp_path / "nowhere", "all")
    with pytest.raises(ValueError, match=r"data.loss_on='user': choose one of \['assistant', 'completion', 'all'\]"):
        make(loss_on="user")
