"""Promises towards what comes with a model: a template or a tokenizer runs no code, and fails in one line."""

from __future__ import annotations

import os
import pickle
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import chat
import pytest

from dzero.data.assistant_spans import TemplateError, TemplateTooSlow
from dzero.data.chat_template import ChatEncoder
from dzero.data.conversations import conversation_of
from dzero.data.template_process import MOST_LOST, TemplateProcess, TemplateSettings
from dzero.data.template_process import SLOW as SLOW_PART

pytest.importorskip("transformers")

MESSAGES = chat.turns("Hi", "Hello", "and", "so")["messages"]
OS = "['os'].system('touch ' + canary)"
UNSAFE: dict[str, str | tuple[str]] = {
    "{{ ''.__class__.__mro__ }}": "'__class__' of 'str' object is unsafe",
    "{{ ''['__class__'] }}": ("",),
    "{{ '' | attr('__class__') }}": ("",),
    "{{ (1).__class__.__base__.__subclasses__() }}": "unsafe",
    "{{ messages | map(attribute='__class__') | list }}": ("[Undefined, Undefined, Undefined, Undefined]",),
    "{{ '{0.__class__.__mro__}'.format('') }}": "unsafe",
    "{{ '{0.__class__}' | format('') }}": "TypeError",
    "{{ cycler.__init__.__globals__" + OS + " }}": "unsafe",
    "{{ joiner.__init__.__globals__" + OS + " }}": "unsafe",
    "{{ namespace.__init__.__globals__" + OS + " }}": "unsafe",
    "{{ lipsum.__globals__" + OS + " }}": "unsafe",
    "{{ raise_exception.__globals__" + OS + " }}": "unsafe",
    "{{ strftime_now.__globals__" + OS + " }}": "unsafe",
    "{{ dict.__class__ }}": ("",),
    "{{ self.__init__.__globals__ }}": "unsafe",
    "{{ self._TemplateReference__context }}": ("",),
    "{{ messages.__len__() }}": "unsafe",
    "{{ messages.append.__self__ }}": "unsafe",
    "{{ messages.append(1) }}": "of '",
    "{{ messages.clear() }}": "of '",
    "{{ messages[0].update({'role': 'assistant'}) }}": "of '",
    "{{ messages[0].pop('role') }}": "of '",
    "{% set messages[0].role = 'x' %}": "Syntax",
    "{% set messages.x = 1 %}": "cannot assign attribute",
    "{{ namespace(__class__=1) }}": "underscore",
    "{% set ns = namespace() %}{% set ns.__class__ = 1 %}": "underscore",
    "{% include '/etc/passwd' %}": "no loader",
    "{% import 'os' as os %}": "no loader",
    "{% from 'os' import system %}": "no loader",
    "{% extends '/etc/passwd' %}": "no loader",
    "{% do messages.append(1) %}": "unknown tag 'do'",
    "{% debug %}": "unknown tag 'debug'",
    "{{ open('/etc/passwd') }}": "'open' is undefined",
    "{{ __import__('os') }}": "'__import__' is undefined",
    "{{ eval('1') }}": "'eval' is undefined",
}
BROKEN = {
    "{{": "Syntax",
    "{% if %}": "Syntax",
    "{% for m in messages %}": "end of template",
    "{% generation %}a": "end of template",
    "{% endgeneration %}": "unknown tag",
    "{{ messages | nofilter }}": "nofilter",
    "{{ messages is notest }}": "notest",
    "{{ nothing.attribute }}": "'nothing' is undefined",
    "{{ messages[9].role }}": "no element 9",
    "{{ messages[0].content.x.y }}": "has no attribute",
    "{{ messages + 1 }}": "TypeError",
    "{{ 1 / 0 }}": "ZeroDivisionError",
    "{{ raise_exception('roles\nmust\nalternate') }}": "roles must alternate",
    "{{ raise_exception('x' * 100000) }}": "...",
    "{{ messages | tojson(indent='x' * 3, foo=1) }}": "TypeError",
    "{{ strftime_now(1) }}": "TypeError",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}": "RecursionError",
    "{{ " + "(" * 20_000 + " }}": "RecursionError",
    "{{ " + "1+" * 20_000 + "1 }}": "RecursionError",
}
GREEDY = {
    "{{ range(10 ** 9) }}": "Range too big",
    "{% for i in range(10 ** 9) %}a{% endfor %}": "Range too big",
    "{{ 'x' * 10 ** 12 }}": "MemoryError",
    "{{ 'x' * 10 ** 9 }}": "MemoryError",
    "{{ 'x' * (10 ** 400) }}": "OverflowError",
    "{{ [0] * 10 ** 10 }}": "MemoryError",
    "{{ 'a'.center(10 ** 12) }}": "MemoryError",
    "{{ 'a' | center(10 ** 10) }}": "MemoryError",
    "{{ '%1000000000000d' % 1 }}": "MemoryError",
    "{{ '{:1000000000000}'.format(1) }}": "MemoryError",
    "{{ 'xx' * 5000000 }}": "more than 1000000 characters",
    "{% set n = namespace(s='aa') %}{% for i in range(99) %}{% set n.s = n.s + n.s %}{% endfor %}": "MemoryError",
    "{% set n = namespace(s=['a']) %}{% for i in range(99) %}{% set n.s = n.s + n.s %}{% endfor %}": "MemoryError",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}": "took more than 2 s",
    "{{ 10 ** (10 ** 9) }}": "took more than 2 s",
}
TEMPLATES = UNSAFE | BROKEN | GREEDY
SLOW = "{% for i in range(99999) %}{% for j in range(8) %}{% endfor %}{% endfor %}"
GOOD = "{% for m in messages %}{{ m.content }}</s>{% endfor %}"


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[TemplateProcess, Path]]:
    canary = tmp_path_factory.mktemp("canary") / "canary"
    names = {str(number): template for number, template in enumerate(TEMPLATES)}
    settings = TemplateSettings(
        names | {"good": GOOD, "slow": SLOW},
        {"canary": str(canary)},
        ["</s>"],
        seconds=2,
        memory_bytes=256 * 2**20,
        characters=1_000_000,
    )
    found = TemplateProcess(settings)
    with mock.patch.object(found, "_count"):  # most of these templates are slow, and none may end the others
        yield found, canary
    found.close()


@pytest.mark.parametrize("number", range(len(TEMPLATES)))
def test_a_hostile_template_fails_in_one_line_and_runs_nothing(
    process: tuple[TemplateProcess, Path], number: int
) -> None:
    renderer, canary = process
    says = [*TEMPLATES.values()][number]
    if isinstance(says, tuple):  # nothing fails: what is asked for is not there
        assert renderer.render(str(number), MESSAGES, None, None) == (*says, [])
    else:
        with pytest.raises(TemplateError, match=re.escape(says)) as error:
            renderer.render(str(number), MESSAGES, None, None)
        assert "\n" not in str(error.value)
        assert len(str(error.value)) < 500
    assert renderer.render("good", MESSAGES, None, 0)[0] == "Hi</s>Hello</s>and</s>so</s>"
    assert not canary.exists()


def test_the_time_is_limited_for_each_conversation_not_for_all(process: tuple[TemplateProcess, Path]) -> None:
    renderer, _ = process
    for _ in range(20):
        assert renderer.render("slow", MESSAGES, None, None) == ("", [])


ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


def test_a_template_that_is_too_slow_for_every_conversation_ends_the_whole(tmp_path: Path) -> None:
    """Of a thousand conversations, one is tried if the first bad one ends the run, and three if they are skipped."""
    folder, conversations = chat.write_model(tmp_path, ENDLESS), [conversation_of({"messages": MESSAGES})] * 1000
    encoder = ChatEncoder(folder, "assistant")
    object.__setattr__(encoder._process.settings, "seconds", 1)
    (found,) = encoder.encode_batch(conversations, stop=True)
    assert "took more than 1 s of processor time on one conversation" in str(found)
    with pytest.raises(ValueError, match="took 3 s of its 3 s on 3 slow conversations; correct the template"):
        encoder.encode_batch(conversations[:2]) + encoder.encode_batch(conversations)
    encoder.close()


def slow_template(seconds: float) -> str:
    """Return a template that takes `seconds` of processor time on the machine at hand, or up to half as much again."""
    loops = "{% for i in range(99999) %}{% for j in range(SIZE) %}{% endfor %}{% endfor %}"
    templates = {str(at): loops.replace("SIZE", str(int(8 * 1.5**at))) for at in range(16)}
    renderer = TemplateProcess(TemplateSettings(templates, {}, []))
    with mock.patch.object(renderer, "_count") as counted:
        for name, template in templates.items():
            renderer.render(name, MESSAGES, None, None)
            if counted.call_args.args[0] > seconds:
                renderer.close()
                return template
    raise AssertionError("no template is slow enough")


def test_quick_conversations_in_between_do_not_make_up_for_slow_ones() -> None:
    """Two of three are slow: within the limit, but over a quarter of it on the machine at hand."""
    slow = slow_template(1.5 * SLOW_PART * 2)
    renderer = TemplateProcess(TemplateSettings({"slow": slow, "quick": GOOD}, {}, [], seconds=2))
    told: list[Exception | None] = []
    while len(told) < 2 * MOST_LOST / SLOW_PART:
        try:
            renderer.render("quick" if len(told) % 3 == 2 else "slow", MESSAGES, None, None)
            told.append(None)
        except TemplateError as error:
            told.append(error)
            if isinstance(error, TemplateTooSlow):
                break
    assert re.search(r"of its \d+ s on \d+ slow conversations; correct the template", str(told[-1]))
    renderer.close()


def test_a_few_slow_conversations_among_many_are_skipped_each() -> None:
    """Those that take as long as all others together are not most of the time."""
    renderer = TemplateProcess(TemplateSettings({}, {}, [], seconds=1))
    for _ in range(10):
        for _ in range(64):
            renderer._count(1 / 64, is_slow=False)
        renderer._count(1.0, is_slow=True)
    with pytest.raises(TemplateTooSlow, match="11 s of its 21 s on 11 slow conversations"):
        renderer._count(1.0, is_slow=True)


def test_after_an_interrupt_a_reply_is_that_of_its_own_request() -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    renderer = TemplateProcess(TemplateSettings({"good": GOOD, "slow": SLOW}, {}, ["</s>"]))
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        renderer.render("good", MESSAGES, None, None)
        signal.setitimer(signal.ITIMER_REAL, 0.01)
        with pytest.raises(KeyboardInterrupt):
            renderer.render("slow", MESSAGES, None, None)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
    assert renderer.render("good", MESSAGES, None, None)[0] == "Hi</s>Hello</s>and</s>so</s>"
    renderer.close()


def test_an_error_of_syntax_or_no_template_ends_the_batch_and_is_not_skipped(tmp_path: Path) -> None:
    messages, text = conversation_of({"messages": MESSAGES}), conversation_of({"prompt": "a", "completion": "b"})
    encoder = ChatEncoder(chat.write_model(tmp_path, "{{ bos_token }}\n{% if %}"), "assistant")
    with pytest.raises(ValueError, match=f"^{tmp_path}: line 2 of the chat template: TemplateSyntaxError: Expected"):
        encoder.encode_batch([text, messages])
    encoder.close()
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(ValueError, match=f"^{tmp_path} has no chat template"):
        ChatEncoder(tmp_path, "assistant").encode_batch([text, messages])


def test_turns_that_cannot_be_told_are_a_bad_row_and_all_tokens_are_not(tmp_path: Path) -> None:
    folder = chat.write_model(tmp_path, "{{ messages | length }} messages")
    conversation = conversation_of({"messages": MESSAGES})
    encoder = ChatEncoder(folder, "assistant")
    (found,) = encoder.encode_batch([conversation])
    assert "loss_on=completion or loss_on=all" in str(found)
    encoder.close()
    encoder = ChatEncoder(folder, "all")
    sample = encoder.encode(conversation)
    assert sample.counts.tolist() == [False] + [True] * (len(sample.ids) - 1)
    encoder.close()


def test_a_text_that_cannot_be_tokenized_is_a_bad_row_alone(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ '\\ud800' if m.content == 'odd' else m.content }}</s>{% endfor %}"
    encoder = ChatEncoder(chat.write_model(tmp_path, template), "all")
    rows = [chat.turns("a", "b"), chat.turns("a", "odd"), chat.turns("c", "d")]
    results = encoder.encode_batch([conversation_of(row) for row in rows])
    assert [isinstance(each, ValueError) for each in results] == [False, True, False]
    assert "cannot encode the text" in str(results[1])
    encoder.close()


def test_what_a_conversation_or_template_lacks_is_said(tmp_path: Path) -> None:
    messages, text = conversation_of({"messages": MESSAGES}), conversation_of({"prompt": "a", "completion": "b"})
    encoder = ChatEncoder(chat.write_model(tmp_path / "base"), "all")
    with pytest.raises(ValueError, match=r"base has no chat template.*give one as data.chat_template"):
        encoder.encode(messages)
    encoder = ChatEncoder(chat.write_model(tmp_path / "mistral", chat.MISTRAL), "all")
    with pytest.raises(ValueError, match=r"fails: TemplateError: roles must alternate$"):
        encoder.encode(conversation_of({"messages": [{"role": "system", "content": "x"}, *MESSAGES]}))
    results = encoder.encode_batch([text, conversation_of({"messages": MESSAGES[1:]}), messages])
    assert [isinstance(each, ValueError) for each in results] == [False, True, False]
    encoder.close()
    with pytest.raises(ValueError, match=r"data.loss_on='user': choose one of \['assistant', 'completion', 'all'\]"):
        ChatEncoder(tmp_path / "base", "user")


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
            "garbage": (tokenizer, b"\0\xff" * 100),
            "no tokenizer": (tokenizer, b"{}"),
            "list": (tokenizer, b"[]"),
            "deep": (tokenizer, b"[" * 100_000),
            "config garbage": (config, b"\0\xff"),
            "config list": (config, b"[]"),
            "config deep": (config, b'{"a":' * 100_000),
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
    "garbage": "cannot be read",
    "no tokenizer": "cannot be read",
    "list": "cannot be read",
    "deep": "cannot be read",
    "config garbage": "cannot be read",
    "config list": "cannot be read",
    "config deep": "cannot be read",
    "config template": "its chat template is a int",
    "config templates": "none is the default",
    "config eos": "",
    "template bytes": "cannot be read",
}


@pytest.mark.parametrize("how", SPOILED)
def test_a_folder_that_cannot_be_used_is_refused_in_one_line(tmp_path: Path, how: str) -> None:
    spoil(tmp_path / "model", how)
    with pytest.raises((ValueError, OSError)) as error:
        ChatEncoder(tmp_path / "model", "all")
    assert SPOILED[how] in str(error.value)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 800
    assert not (tmp_path / "canary").exists()


def test_code_in_a_folder_is_not_run(tmp_path: Path) -> None:
    spoil(tmp_path / "model", "remote code")
    encoder = ChatEncoder(tmp_path / "model", "all")
    assert len(encoder.encode(conversation_of({"prompt": "a", "completion": "b"})).ids) == 3
    assert not (tmp_path / "canary").exists()


def test_a_template_that_is_no_file_and_no_template_is_refused(tmp_path: Path) -> None:
    folder = chat.write_model(tmp_path)
    with pytest.raises(FileNotFoundError, match="chatml: no such file, and no template"):
        ChatEncoder(folder, "all", "chatml")
    (tmp_path / "t.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="is no text in UTF-8"):
        ChatEncoder(folder, "all", str(tmp_path / "t.jinja"))
    with pytest.raises(FileNotFoundError, match="no such folder"):
        ChatEncoder(tmp_path / "nowhere", "all")
