"""Templates of chats: in any of them the assistant's turns are found, and none runs code or takes what it likes.

They look inside, because templates are rendered in a process of their own with limits that a test has to lower.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import chat
import pytest

from dzero.data.assistant_spans import TemplateError, TemplateTooSlow, assistant_spans
from dzero.data.chat_template import ChatEncoder
from dzero.data.conversations import conversation_of
from dzero.data.template_process import TemplateProcess, TemplateSettings

templates = pytest.importorskip("transformers.utils.chat_template_utils")

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
    "{% extends '/etc/passwd' %}": "no loader",
    "{% do messages.append(1) %}": "unknown tag 'do'",
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
    "{{ 10 ** (10 ** 9) }}": "took more than 1 s",
}
TEMPLATES = UNSAFE | BROKEN | GREEDY
SLOW = "{% for i in range(99999) %}{% for j in range(4) %}{% endfor %}{% endfor %}"
GOOD = "{% for m in messages %}{{ m.content }}</s>{% endfor %}"


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[TemplateProcess, Path]]:
    canary = tmp_path_factory.mktemp("canary") / "canary"
    names = {str(number): template for number, template in enumerate(TEMPLATES)}
    settings = TemplateSettings(
        names | {"good": GOOD, "slow": SLOW},
        {"canary": str(canary)},
        ["</s>"],
        seconds=1,
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
        assert renderer.render(str(number), chat.MESSAGES, None, None) == (*says, [])
    else:
        with pytest.raises(TemplateError, match=re.escape(says)) as error:
            renderer.render(str(number), chat.MESSAGES, None, None)
        assert "\n" not in str(error.value)
        assert len(str(error.value)) < 500
    assert renderer.render("good", chat.MESSAGES, None, 0)[0] == "Hi</s>Hello</s>and</s>so</s>"
    assert not canary.exists()


def test_the_time_is_limited_for_each_conversation_not_for_all(process: tuple[TemplateProcess, Path]) -> None:
    renderer, _ = process
    for _ in range(12):
        assert renderer.render("slow", chat.MESSAGES, None, None) == ("", [])


@pytest.mark.full(
    "tests/data/inside/test_inside_templates.py::test_a_few_slow_conversations_among_many_are_skipped_each"
)
def test_a_template_that_is_too_slow_for_every_conversation_ends_the_whole(tmp_path: Path) -> None:
    """Of a thousand conversations, one is tried if the first bad one ends the run, and three if they are skipped."""
    endless = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    conversations = [conversation_of({"messages": chat.MESSAGES})] * 1000
    encoder = ChatEncoder(chat.write_model(tmp_path, endless), "assistant")
    object.__setattr__(encoder._process.settings, "seconds", 1)
    (found,) = encoder.encode_batch(conversations, stop=True)
    assert "took more than 1 s of processor time on one conversation" in str(found)
    with pytest.raises(ValueError, match="took 3 s of its 3 s on 3 slow conversations; correct the template"):
        encoder.encode_batch(conversations[:2]) + encoder.encode_batch(conversations)
    encoder.close()


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
        renderer.render("good", chat.MESSAGES, None, None)
        signal.setitimer(signal.ITIMER_REAL, 0.01)
        with pytest.raises(KeyboardInterrupt):
            renderer.render("slow", chat.MESSAGES, None, None)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
    assert renderer.render("good", chat.MESSAGES, None, None)[0] == "Hi</s>Hello</s>and</s>so</s>"
    renderer.close()


# The turns of the assistant

NO_SYSTEM = chat.turns("What is 你好?", "It is 🎉 Paris.", "hello again", "Hello 日本語 there!")
SAME = chat.turns("a", "b", "c", "b", "b<|im_end|>", "b")
CALL = {"type": "function", "function": {"name": "look", "arguments": '{"at": "clock"}'}}
CALLING = {
    "messages": [
        {"role": "user", "content": "What time is it?"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "noon", "tool_call_id": "1"},
        {"role": "assistant", "content": "It is noon."},
    ],
    "tools": '[{"type": "function", "function": {"name": "look"}}]',
}
WITH_TOOLS = (
    "{% for tool in tools or [] %}tool {{ tool | tojson }}\n{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content }}{% for call in m.tool_calls or [] %}call {{ call.function.arguments | tojson }}{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
PLAIN_PROMPT = PLAIN + "{% if add_generation_prompt %}assistant:{% endif %}"
PHI = (
    "{% for m in messages %}<|header|>{{ m.role }}\n{{ m.content }}<|eot|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|header|>assistant\n{% else %}{{ eos_token }}{% endif %}"
)
THINKING_PROMPT = chat.THINKING.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
THOUGHT = "<think>\nso\n</think>\n\nagain<|im_end|>"
NOON = "<think>\n\n</think>\n\nIt is noon.<|im_end|>"
TURNS: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "llama": (chat.LLAMA, chat.ROW, ["It is 🎉 Paris.<|eot|>", "Hello 日本語 there!<|eot|>"]),
    "mistral": (chat.MISTRAL, NO_SYSTEM, [" It is 🎉 Paris.</s>", " Hello 日本語 there!</s>"]),
    "thinking": (chat.THINKING, chat.THOUGHT, ["Paris<|im_end|>", THOUGHT]),
    "repeats": (chat.THINKING, SAME, ["b<|im_end|>", "b<|im_end|>", "<think>\n\n</think>\n\nb<|im_end|>"]),
    "thinking-prompt": (THINKING_PROMPT, chat.THOUGHT, ["Paris<|im_end|>", THOUGHT.removeprefix("<think>\n")]),
    "thinking-tools": (chat.THINKING, CALLING, ['call {"at": "clock"}<|im_end|>', NOON]),
    "header": (PLAIN, NO_SYSTEM, ["It is 🎉 Paris.\n", "Hello 日本語 there!\n"]),
    "plain": (PLAIN_PROMPT, NO_SYSTEM, [" It is 🎉 Paris.\n", " Hello 日本語 there!\n"]),
    "ends": (chat.NO_TAGS + "</s>", chat.ROW, ["It is 🎉 Paris.\n<|im_end|>", "Hello 日本語 there!<|im_end|>"]),
    "phi": (PHI, chat.ROW, ["It is 🎉 Paris.\n<|eot|>", "Hello 日本語 there!<|eot|>"]),
    "tools": (WITH_TOOLS, CALLING, ['call {"at": "clock"}<|im_end|>', "It is noon.<|im_end|>"]),
}


def spans_of(template: str, row: dict[str, Any]) -> list[str]:
    """The assistant's turns, in what transformers renders."""
    conversation = conversation_of(row)

    def render(messages: Sequence[dict[str, Any]], prompt: bool) -> str:
        try:
            texts, _ = templates.render_jinja_template(
                conversations=[[*messages]],
                tools=conversation.tools and [*conversation.tools],
                chat_template=template,
                add_generation_prompt=prompt,
                bos_token="<s>",
                eos_token="</s>",
            )
        except Exception as error:
            raise TemplateError(str(error)) from error
        return str(texts[0])

    full, spans = assistant_spans(render, conversation.messages, 0, chat.SPECIAL)
    return [full[start:end] for start, end in spans]


@pytest.mark.parametrize(("template", "row", "spans"), TURNS.values(), ids=TURNS)
def test_turns_are_found_by_prefixes_and_markers(template: str, row: dict[str, Any], spans: list[str]) -> None:
    assert spans_of(template, row) == spans


UNCLEAR = {
    "{% for m in messages | reverse %}{{ m.content }}{% endfor %}": "message 3 (assistant) begins and ends",
    "{{ messages | length }}": "message 1 (assistant) begins and ends",
    "{% for m in messages %}{{ m.content | upper }}{% if loop.last %}{{ m.content }}{% endif %}{% endfor %}": "1 (a",
    "{% if messages | length < 4 %}{{ raise_exception('few') }}{% endif %}{% for m in messages %}{{ m.content }} "
    "{% endfor %}": "message 1 (assistant) begins and ends",
}


@pytest.mark.parametrize(("template", "says"), UNCLEAR.items(), ids=range(len(UNCLEAR)))
def test_turns_that_cannot_be_told_are_refused(template: str, says: str) -> None:
    with pytest.raises(TemplateError, match=re.escape(says)):
        spans_of(template, {"messages": chat.MESSAGES})
